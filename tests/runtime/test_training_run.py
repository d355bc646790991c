# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import jax
import numpy as np
import pytest

from marin_rl.rollouts.store import RolloutStore, RolloutStoreConfig
from marin_rl.runtime.run_directory import RunDirectoryError
from marin_rl.runtime.training_run import TrainingRun
from tests.rollouts.rollout_cases import group_of, piece
from tests.runtime.reopened_run import reopen
from tests.tiny_run import TinyRun, copy_of


def test_rollouts_that_cannot_be_written_stop_the_run_before_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    # Of the run there is the store alone: a save that went further would fail otherwise.
    run = object.__new__(TrainingRun)
    run.store = RolloutStore(tmp_path, RolloutStoreConfig(), piece)
    monkeypatch.setattr("os.fsync", full)
    run.store_rollouts(1, [group_of("g", 1.0)], {})
    with pytest.raises(RunDirectoryError, match=r"the disk is full; free some space and rerun the same command"):
        run.save()
    run.store.close()


def test_what_is_saved_is_what_is_read_again(finished_run: TinyRun, tmp_path: Path):
    copied = copy_of(finished_run, tmp_path / "copy")
    first = reopen(copied)
    first.progress.step = 7
    first.save()
    second = reopen(copied)
    assert second.progress == first.progress
    one, other = jax.tree.leaves(first.state), jax.tree.leaves(second.state)
    assert len(one) == len(other)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
