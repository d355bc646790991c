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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> None:
    parsed = parse_config(ExportRunConfig, arguments, FLAGS)
    config, flags = parsed.config, parsed.flags
    if {"adapter", "merged"} <= flags:
        raise UserError(
            "--adapter and --merged exclude each other: write the adapter alone or the whole model; give one"
        )
    output = storage_path(config.output, "output")
    check_output(output, "output")
    open_with_checkpoint(config.run, config.step)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    import jax

    from marin_rl.sessions.run_export import export_run

    # Also on a machine whose accelerators are in use.
    jax.config.update("jax_platforms", "cpu")
    adapter, merged = "adapter" in flags, "merged" in flags
    step = export_run(config.run, output, step=config.step, export=config.export, adapter=adapter, merged=merged)
    print(f"step {step} of {escape_line(config.run)} is exported to {escape_line(config.output)}")


if __name__ == "__main__":
    sys.exit(main())
