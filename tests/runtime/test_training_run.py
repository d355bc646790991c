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


def test_failed_rollout_write_prevents_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    # The run has only a store, so `save` fails differently if it continues after the failed write.
    run = object.__new__(TrainingRun)
    run.store = RolloutStore(tmp_path, RolloutStoreConfig(), piece)
    monkeypatch.setattr("os.fsync", full)
    run.store_rollouts(1, [group_of("g", 1.0)], {})
    with pytest.raises(RunDirectoryError, match=r"the disk is full; free some space and rerun the same command"):
        run.save()
    run.store.close()


def test_saved_state_is_restored_exactly(finished_run: TinyRun, tmp_path: Path):
    copied = copy_of(finished_run, tmp_path / "copy")
    first = reopen(copied)
    first.progress.step = 7
    first.save()
    second = reopen(copied)
    assert second.progress == first.progress
    saved, restored = jax.tree.leaves(first.state), jax.tree.leaves(second.state)
    assert len(saved) == len(restored)
    assert all(np.array_equal(a, b) for a, b in zip(saved, restored, strict=True))
