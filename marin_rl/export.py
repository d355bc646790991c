# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Export a checkpoint in Hugging Face format: `python -m marin_rl.export --run runs/rloo --output weights`."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.learner.config import ExportConfig
from marin_rl.runs.run_directory import open_with_checkpoint
from marin_rl.utils.errors import UserError, writing
from marin_rl.utils.output import escape_line
from marin_rl.utils.settings.fields import STORAGE_PATH, check_paths
from marin_rl.utils.storage import file_sizes, storage_path

if TYPE_CHECKING:
    from marin_rl.runs.saved_checkpoint import Checkpoint


class OutputExistsError(UserError):
    """The output folder exists; an export does not replace files."""


@dataclasses.dataclass(frozen=True)
class ExportRunConfig:
    """Export of a checkpoint."""

    run: str = dataclasses.field(metadata=STORAGE_PATH)
    """Run directory, a path or an address such as `gs://bucket/run`; the export changes no file in it."""
    output: str = dataclasses.field(metadata=STORAGE_PATH)
    """Folder of the export, a path or an address; it must not exist."""
    step: int | None = None
    """Step of the checkpoint; the newest valid checkpoint by default."""
    export: ExportConfig | None = None
    """Type of the exported weights; that of the run by default."""

    def __post_init__(self) -> None:
        check_paths(self)


def run_export(config: ExportRunConfig) -> int:
    """Export a checkpoint, on any machine.

    Args:
        config: run, checkpoint and output.

    Returns:
        The step of the checkpoint.

    Raises:
        RunDirectoryError: if the run does not exist, or the output cannot be written.
        OutputExistsError: if the output exists.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
    """
    output = storage_path(config.output, "output")
    if file_sizes(output):
        raise OutputExistsError(f"output {config.output!r} exists and is not replaced; name another folder")
    open_with_checkpoint(config.run, config.step)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.config.base_config import critic_of
    from marin_rl.config.input_files import digest_inputs
    from marin_rl.learner.hf_export import DeviceWeights, SavedWeights, WeightParts
    from marin_rl.learner.policy_spec import PolicySpec
    from marin_rl.training.earlier_run import export_folder, load_run, open_parts, restore_checkpoint

    run, checkpoints = load_run(config.run, config.step)
    model, dtype = run.model, (config.export or run.export).numeric_dtype
    assert model is not None

    def restore(checkpoint: "Checkpoint") -> WeightParts:
        if run.lora is not None:
            parts = open_parts(run)
            return DeviceWeights(parts.restore_policy(checkpoint), parts.trainer, dtype)
        spec = PolicySpec(model, int(checkpoint.progress["vocab_size"]), run.trainer, critic_of(run))
        return SavedWeights(spec.policy, checkpoint.part(spec.policy, spec.policy_path), dtype)

    step, weights = restore_checkpoint(checkpoints, config.step, digest_inputs(run, ("tokenizer",)), restore)
    with writing(output, "output"):
        export_folder(weights, run.tokenizer.build(), output, step, run.stop_texts)
    return step


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program name; None for `sys.argv`.

    Returns:
        Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    config = parse_config(ExportRunConfig, arguments).config
    import jax

    # Also on a machine whose accelerators are in use.
    jax.config.update("jax_platforms", "cpu")
    step = run_export(config)
    print(f"step {step} of {escape_line(config.run)} is exported to {escape_line(config.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
