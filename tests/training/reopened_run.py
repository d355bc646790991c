# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Open an already trained tiny run in this process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py

from marin_rl.config.train_config import TrainConfig
from marin_rl.parts.rl import RunParts
from marin_rl.training.loop import TrainingRun
from marin_rl.training.open_run import Start, open_run
from marin_rl.utils.settings.yaml_text import from_yaml
from tests.tiny_run import TinyRun, in_this_process


def config_of(run: TinyRun) -> TrainConfig:
    """Read the config of a run directory."""
    path = run.path / "config.yaml"
    return from_yaml(TrainConfig, path.read_text(), str(path))


def discard(message: str) -> None:
    """Discard a progress message."""


def reopen(
    run: TinyRun, report: Callable[[str], None] = discard, *, accept_changes: bool = False, **changes: Any
) -> TrainingRun:
    """Resume a run from its newest checkpoint, with some settings changed."""
    config = dataclasses.replace(config_of(run), **changes)
    with in_this_process():
        return open_run(RunParts, config, None, Start(run.path, report, accept_changes=accept_changes))
