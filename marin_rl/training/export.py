# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exports of policies to folders and object stores, which are complete or absent."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from marin_rl.learner.hf_export import SavedWeights, WeightParts
from marin_rl.learner.policy_model import save_hf_folder
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.runs.run_directory import EXPORTED_STEP
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils import multihost
from marin_rl.utils.storage import StoragePath, replace_folder, upload_folder


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


def saved_weights(checkpoint: Checkpoint, spec: PolicySpec, dtype: jnp.dtype | None) -> SavedWeights:
    """Open the weights of the policy in a checkpoint, which are read one after another.

    Args:
        checkpoint: checkpoint of the run.
        spec: shapes of the weights.
        dtype: type of the exported weights; None for that of the parameters.

    Raises:
        CheckpointError: if the checkpoint is damaged, or holds another model.
    """
    return SavedWeights(spec.policy, checkpoint.part(spec.policy, spec.policy_path), dtype)
