# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exports of earlier runs in Hugging Face format, on any machine, without levanter until they start."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from marin_rl.learner.config import ExportConfig
from marin_rl.runs.run_directory import check_output, open_with_checkpoint
from marin_rl.utils.errors import UserError
from marin_rl.utils.output import escape_line
from marin_rl.utils.settings.fields import STORAGE_PATH, check_paths
from marin_rl.utils.storage import StoragePath, open_atomically, read_small, storage_path, writing

_SOURCE = "exported_run.json"


FLAGS = {
    "adapter": "Write the adapter of a run with lora alone, in the format of PEFT, instead of the whole model.",
    "merged": "Write the whole model with the adapter merged into it, which is also the default.",
}


@dataclasses.dataclass(frozen=True)
class ExportRunConfig:
    """Export of a checkpoint."""

    run: str = dataclasses.field(metadata=STORAGE_PATH)
    """Run directory, a path or an address such as `gs://bucket/run`; the export changes no file in it."""
    output: str = dataclasses.field(metadata=STORAGE_PATH)
    """Folder of the export, a path or an address; it must not exist, or be empty."""
    step: int | None = None
    """Step of the checkpoint; the newest valid checkpoint by default."""
    export: ExportConfig | None = None
    """Type of the exported weights; that of the run by default."""

    def __post_init__(self) -> None:
        check_paths(self)


def export(config: ExportRunConfig, *, adapter: bool, merged: bool) -> None:
    """Export a checkpoint on the CPU, also if the accelerators of the machine are in use; see `export_run`."""
    if adapter and merged:
        raise UserError(
            "--adapter and --merged exclude each other: write the adapter alone or the whole model; give one"
        )
    output = storage_path(config.output, "output")
    check_output(output, "output")
    open_with_checkpoint(config.run, config.step)
    import jax

    jax.config.update("jax_platforms", "cpu")
    step = export_run(config.run, output, step=config.step, export=config.export, adapter=adapter, merged=merged)
    print(f"step {step} of {escape_line(config.run)} is exported to {escape_line(config.output)}")


def export_run(
    run: str,
    output: StoragePath,
    *,
    step: int | None = None,
    export: ExportConfig | None = None,
    adapter: bool = False,
    merged: bool = False,
) -> int:
    """Export a checkpoint of a run, whose directory is not changed.

    Args:
        run: run directory, a path or an address.
        output: folder of the export; a former one is replaced.
        step: step of the checkpoint; None for the newest valid one.
        export: type of the exported weights; None for that of the run.
        adapter: whether to write the adapter alone, in the format of PEFT; otherwise a whole model is written.
        merged: whether the run must have an adapter, which is merged into the whole model.

    Returns:
        The step of the checkpoint.

    Raises:
        RunDirectoryError: if the run does not exist, or the output cannot be written.
        UserError: if `adapter` or `merged`, and the run has no adapter.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
    """
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.config.input_files import digest_inputs
    from marin_rl.learner.hf_export import DeviceWeights, SavedWeights
    from marin_rl.learner.policy_model import save_adapter_folder
    from marin_rl.learner.policy_spec import PolicySpec
    from marin_rl.learner.starting_weights import hf_location
    from marin_rl.runs.saved_checkpoint import Checkpoint
    from marin_rl.sessions.earlier_run import export_folder, load_run, replace_export, restore_checkpoint
    from marin_rl.sessions.served_policy import open_parts
    from marin_rl.training.open_run import restore_policy

    config, checkpoints = load_run(run, step)
    model, dtype = config.model, (export or config.export).numeric_dtype
    assert model is not None
    if (adapter or merged) and config.lora is None:
        flag = "adapter" if adapter else "merged"
        raise UserError(f"--{flag}: the run {run!r} trains no adapter (lora is null); leave it out")

    def restore(checkpoint: Checkpoint) -> Any:
        if config.lora is None:
            spec = PolicySpec(model, checkpoint.vocab_size, config.trainer, config.trained_critic)
            return SavedWeights(spec.policy, checkpoint.part(spec.policy, spec.policy_path), dtype)
        parts = open_parts(config)
        if not adapter:
            return DeviceWeights(restore_policy(parts, checkpoint), parts.trainer, dtype)
        spec = parts.policy_spec(checkpoint.vocab_size)
        trained: Any = spec.restore_policy(checkpoint)
        return functools.partial(
            save_adapter_folder, spec.policy, trained, hf_location(str(config.initialize_from)), dtype
        )

    step, restored = restore_checkpoint(checkpoints, step, digest_inputs(config, ("tokenizer",)), restore)
    tokenizer = config.tokenizer.build()
    with writing(output, "output"):
        if adapter:
            replace_export(output, step, functools.partial(restored, tokenizer))
        else:
            export_folder(restored, tokenizer, output, step, config.stop_texts)
    return step


def export_once(run: str, step: int | None, output: Path) -> int:
    """Export the policy of a run as `export_run`, unless the folder has it.

    So what was made from the export stays valid while the run goes on, or after it was deleted.

    Args:
        run: run directory, a path or an address.
        step: step of the checkpoint; None for that of the export, or the newest valid one.
        output: folder of the export.

    Returns:
        The step of the export.

    Raises:
        UserError: if the folder has the policy of another run or of another step.
        OutputExistsError: if there is no export, and the folder has other files.
        RunDirectoryError: if there is no export, and the run does not exist, or the output cannot be written.
        CheckpointError: if there is no export, and the run has no checkpoint of this step, or no valid checkpoint.
    """
    directory, source = storage_path(run, "run"), output / _SOURCE
    address = str(directory.resolve() if isinstance(directory, Path) else directory)
    if not source.exists():
        check_output(output, "the folder of the export")
        step = export_run(run, output, step=step)
        with writing(output, "output"), open_atomically(source) as file:
            file.write(json.dumps({"run": address, "step": step}).encode())
        return step
    found = json.loads(read_small(source))
    if found["run"] != address or step not in (None, found["step"]):
        wanted = address if step is None else f"step {step} of {address}"
        raise UserError(
            f"{str(output)!r} has step {found['step']} of the run {found['run']}, not {wanted}; choose another folder"
        )
    return found["step"]
