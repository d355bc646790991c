# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Export a checkpoint in Hugging Face format: `python -m marin_rl.export --run runs/rloo --output weights`."""

import dataclasses
import sys
from collections.abc import Sequence

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.learner.config import ExportConfig
from marin_rl.runs.run_directory import check_output, open_with_checkpoint
from marin_rl.utils.errors import UserError
from marin_rl.utils.output import escape_line
from marin_rl.utils.settings.fields import STORAGE_PATH, check_paths
from marin_rl.utils.storage import storage_path

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


def run_export(config: ExportRunConfig, *, adapter: bool = False, merged: bool = False) -> int:
    """Export a checkpoint, on any machine.

    Args:
        config: run, checkpoint and output.
        adapter: whether to write the adapter alone, in the format of PEFT; otherwise a whole model is written.
        merged: whether the run must have an adapter, which is merged into the whole model.

    Returns:
        The step of the checkpoint.

    Raises:
        RunDirectoryError: if the run does not exist, or the output cannot be written.
        OutputExistsError: if the output exists, or is a path that runs write.
        UserError: if both are asked for, or one of them and the run has no adapter.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
    """
    if adapter and merged:
        raise UserError(
            "--adapter and --merged exclude each other: write the adapter alone or the whole model; give one"
        )
    output = storage_path(config.output, "output")
    check_output(output, "output")
    open_with_checkpoint(config.run, config.step)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.sessions.run_export import export_run

    return export_run(config.run, output, step=config.step, export=config.export, adapter=adapter, merged=merged)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program name; None for `sys.argv`.

    Returns:
        Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    parsed = parse_config(ExportRunConfig, arguments, FLAGS)
    config = parsed.config
    import jax

    # Also on a machine whose accelerators are in use.
    jax.config.update("jax_platforms", "cpu")
    step = run_export(config, adapter="adapter" in parsed.flags, merged="merged" in parsed.flags)
    print(f"step {step} of {escape_line(config.run)} is exported to {escape_line(config.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
