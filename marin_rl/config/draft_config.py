# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A draft of `TrainConfig` for checks without levanter, which takes seconds to import.

Levanter's sections have the keys of their [descriptions][marin_rl.config.levanter_description]. The few settings that
only levanter's own classes can judge remain unchecked.
"""

import ast
import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marin_rl.config.base_config import MODEL_METADATA, TRAINER_METADATA, AbstractTrainConfig
from marin_rl.config.combinations import CHECKS
from marin_rl.config.levanter_description import described_sections
from marin_rl.tokenization.config import BYTES, PLAIN
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.errors import explain, nearest_file
from marin_rl.utils.hub import HubError, check_source
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.fields import input_files, may_change_by_name
from marin_rl.utils.settings.section_types import UnknownType
from marin_rl.utils.storage import user_path


@functools.cache
def draft_class(*, reads_files: bool = True) -> type[AbstractTrainConfig]:
    """`TrainConfig` with descriptions of levanter's sections in place of levanter's classes.

    Args:
        reads_files: whether the run will read its input files on this machine, so that they must exist.
    """
    sections = described_sections()
    model, optimizer, tracker = (sections[name] for name in ("LmConfig", "OptimizerConfig", "TrackerConfig"))
    trainer: Any = dataclasses.make_dataclass(
        "DraftTrainer",
        [("tracker", tracker | tuple[tracker, ...], dataclasses.field(default=()))],
        bases=(AbstractTrainerConfig,),
        frozen=True,
    )
    fields: list[tuple[str, Any, Any]] = [
        ("model", model | None, dataclasses.field(default=None, metadata=MODEL_METADATA)),
        (
            "optimizer",
            optimizer,
            dataclasses.field(default_factory=lambda: decode(optimizer, {}), metadata=may_change_by_name()),
        ),
        ("trainer", trainer, dataclasses.field(default_factory=trainer, metadata=TRAINER_METADATA)),
    ]
    namespace = {"checks": (*CHECKS, _check_files) if reads_files else CHECKS}
    return dataclasses.make_dataclass(
        "DraftConfig", fields, bases=(AbstractTrainConfig,), frozen=True, namespace=namespace
    )


def _check_files(config: AbstractTrainConfig) -> Iterator[str]:
    """Check that the files and folders that a run reads exist and can be read."""
    for key, text in input_files(config):
        if text != PLAIN and (problem := _file_problem(user_path(text, key))):
            yield f"{key} is {text!r}, {problem}"
    # A run that resumes does not read initialize_from again.
    is_new = "://" in config.run_dir or not user_path(config.run_dir, "run_dir").exists()
    folders = {"tokenizer.path": config.tokenizer.path, "initialize_from": config.initialize_from if is_new else None}
    for key, text in folders.items():
        if text is not None and text != BYTES and "://" not in text:
            try:
                check_source(text, key)
            except HubError as error:
                yield str(error)


def _file_problem(path: Path) -> str:
    """Description of the reason why a file cannot be read; empty if it can."""
    if path.is_dir():
        return "which is a folder; set it to a file in that folder"
    if not path.exists():
        return f"which does not exist; {nearest_file(path, {path.suffix})}"
    if not os.access(path, os.R_OK):
        return "which this user may not read; change its permissions"
    return _syntax_problem(path) if path.suffix == ".py" and path.is_file() else ""


def _syntax_problem(path: Path) -> str:
    try:
        with warnings.catch_warnings():
            # Repeated when the file is imported.
            warnings.simplefilter("ignore")
            ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        return f"which Python cannot read: {explain(error)}"
    return ""


def left_to_levanter(problem: str, *, is_imported: bool) -> bool:
    """Return whether only the complete check can judge a problem, because code of the user may register a `type`.

    Code that registers models or optimizers imports levanter. Its other types are known to the draft, too.

    Args:
        problem: a problem of the draft.
        is_imported: whether all of `imports` could be imported.
    """
    may_register = not is_imported or "levanter" in sys.modules
    return may_register and isinstance(problem, UnknownType)
