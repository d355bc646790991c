# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""tests/test_export.py exports checkpoints, and tests/training/test_session.py the weights of a run."""

import dataclasses
from pathlib import Path

import pytest

from marin_rl.learner.checkpoint import Checkpoints
from marin_rl.learner.checkpoint_folders import CheckpointError
from marin_rl.training.export import export_checkpoint
from tests.tiny_run import TinyRun, copy_of
from tests.training.reopened_run import config_of


def test_a_damaged_checkpoint_is_skipped_or_named(finished_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "run")
    config = dataclasses.replace(config_of(run), run_dir=str(run.path))
    state = run.checkpoints / "step-00000006" / "state"
    for file in state.iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    checkpoints = Checkpoints(run.checkpoints, config.checkpoint)
    with pytest.raises(CheckpointError, match=r"step-00000006 is damaged: state/.* differs from what was written"):
        export_checkpoint(config, checkpoints, 6, tmp_path / "six")
    assert not (tmp_path / "six").exists()
    assert export_checkpoint(config, checkpoints, None, tmp_path / "five") == 5
    assert (tmp_path / "five" / "model.safetensors").exists()
