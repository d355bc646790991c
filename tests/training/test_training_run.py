# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import jax
import numpy as np
import pytest

from marin_rl.errors import RunDirectoryError
from tests.rollouts.rollout_cases import group_of
from tests.tiny_run import TinyRun, copy_of
from tests.training.reopened_run import reopen


def test_failed_rollout_write_prevents_checkpoint(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    copied = copy_of(finished_run, tmp_path / "copy")
    run = reopen(copied)
    run.state.progress.step = 7
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        run.recorder.record_step(7, [group_of("g", 1.0)], {})
        with pytest.raises(RunDirectoryError, match=r"rollouts': the disk is full; free some space and rerun"):
            run.save()
    assert copied.steps()[-1] == 6


def test_saved_state_is_restored_exactly(finished_run: TinyRun, tmp_path: Path):
    copied = copy_of(finished_run, tmp_path / "copy")
    first = reopen(copied)
    first.state.progress.step = 7
    first.save()
    second = reopen(copied)
    assert second.state.progress == first.state.progress
    saved, restored = jax.tree.leaves(first.trainer_state), jax.tree.leaves(second.trainer_state)
    assert len(saved) == len(restored)
    assert all(np.array_equal(a, b) for a, b in zip(saved, restored, strict=True))
