# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exports of policies to folders and object stores, which are complete or absent."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from marin_rl import multihost
from marin_rl.config.train_config import TrainConfig
from marin_rl.errors import writing
from marin_rl.learner.array_files import DamagedArraysError
from marin_rl.learner.checkpoint import Checkpoints
from marin_rl.learner.hf_export import SavedWeights, WeightParts
from marin_rl.learner.policy_model import save_hf_folder
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.saved_checkpoint import STATE, Checkpoint, DamagedCheckpointError
from marin_rl.storage import StoragePath, replace_folder, upload_folder
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.training.run_directory import EXPORTED_STEP
from marin_rl.training.run_files import warn_of_changed_inputs


def export_folder(
    weights: WeightParts, tokenizer: ChatTokenizer, output: StoragePath, step: int, stop: Sequence[str] = ()
) -> None:
    """Write a policy in Hugging Face format, in place of a former export; collective over all processes.

    Args:
        weights: weights of the policy.
        tokenizer: its tokenizer.
        output: the folder. One in an object store is written to a temporary folder of the main host and uploaded.
        step: step of the weights, stored in `training_step.json`.
        stop: texts that end a generation.

    Raises:
        OSError: if it cannot be written.
    """
    with tempfile.TemporaryDirectory() as temporary:
        partial = output.with_name(f".{output.name}.partial") if isinstance(output, Path) else Path(temporary)
        if multihost.is_main():
            shutil.rmtree(partial, ignore_errors=True)
        save_hf_folder(weights, tokenizer, partial, stop)
        multihost.on_main(lambda: _publish(output, partial, step))


def _publish(output: StoragePath, partial: Path, step: int) -> None:
    (partial / EXPORTED_STEP).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    if isinstance(output, Path):
        replace_folder(output, partial)
    else:
        upload_folder(output, partial, marker="config.json")


def export_checkpoint(config: TrainConfig, checkpoints: Checkpoints, step: int | None, output: StoragePath) -> int:
    """Export the policy of a checkpoint without loading it as a whole, in one process.

    Args:
        config: training config of the run, with the type of the exported weights.
        checkpoints: checkpoints of the run.
        step: step of the checkpoint; None for the newest one that is not damaged.
        output: the folder.

    Returns:
        The step.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        RunDirectoryError: if the folder cannot be written.
    """

    def load(checkpoint: Checkpoint) -> tuple[int, SavedWeights]:
        warn_of_changed_inputs(checkpoint, config, ("tokenizer",))
        return checkpoint.step, _saved_weights(config, checkpoint)

    loaded = checkpoints.restore_newest(load) if step is None else load(checkpoints.open(step))
    assert loaded is not None
    with writing(output, "output"):
        export_folder(loaded[1], config.tokenizer.build(), output, loaded[0], config.sampling.stop)
    return loaded[0]


def _saved_weights(config: TrainConfig, checkpoint: Checkpoint) -> SavedWeights:
    assert config.model is not None
    spec = PolicySpec(config.model, int(checkpoint.progress["vocab_size"]), config.trainer, config.critic)
    saved = checkpoint.arrays_of(spec.policy, spec.policy_path)
    try:
        return SavedWeights(spec.policy, saved, checkpoint.path / STATE, config.export.numeric_dtype)
    except DamagedArraysError as error:
        raise DamagedCheckpointError(f"checkpoint {checkpoint.path} is damaged: {error}") from error
