# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.config_parsing import from_yaml
from marin_rl.runtime.training_batch import build_batch
from marin_rl.runtime.training_run import TrainingRun, open_run
from marin_rl.timing import PhaseTimer
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from tests.tiny_run import copy_of

TASK = Task("t", "ones", ({"role": "user", "content": "2x3"},), "1")


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory) -> TrainingRun:
    copied = copy_of(finished_run, tmp_path_factory.mktemp("batch"))
    config = from_yaml(TrainConfig, (copied.path / "config.yaml").read_text(), "config.yaml")
    return open_run(config, copied.path, lambda line: None)


def rollout(name: str, reward: float | None) -> Rollout:
    generation = Generation((49, 257), (-0.5, -0.25), StopReason.STOP, 0, 0)
    turn = Turn((259, 50, 257, 260), generation, TASK.messages, reward or 0.0, True)
    if reward is None:
        return Rollout(name, "g", TASK, (turn,), RolloutStatus.FAILED, {}, "it broke")
    return Rollout(name, "g", TASK, (turn,), RolloutStatus.COMPLETED, {"correct": reward})


def test_worked_example_of_rloo_reaches_the_tokens_with_loss_and_no_others(run):
    group = RolloutGroup("g", [rollout(f"g-{i}", reward) for i, reward in enumerate([1.0, 2.0, 5.0, 8.0])])
    batch = build_batch(run, [group], PhaseTimer())
    np.testing.assert_allclose(list(batch.advantages.values()), [-4, -8 / 3, 4 / 3, 16 / 3], rtol=1e-12)
    arrays = np.asarray(batch.example.advantages.array)
    np.testing.assert_allclose(arrays[:4, 4], [-4, -8 / 3, 4 / 3, 16 / 3], rtol=1e-6)
    assert not arrays[:, :4].any()
    assert not arrays[:, 6:].any()
    assert not arrays[4:].any()
    assert batch.metrics["objective/rlhf_reward"] == 4.0
    assert batch.metrics["objective/non_score_reward"] == 0.0


def test_a_failed_rollout_leaves_the_baseline_and_the_arrays(run):
    rollouts = [rollout("g-0", 1.0), rollout("g-1", None), rollout("g-2", 0.0)]
    batch = build_batch(run, [RolloutGroup("g", rollouts)], PhaseTimer())
    assert batch.advantages == {"g-0": 1.0, "g-1": 0.0, "g-2": -1.0}
    rows_with_loss = np.asarray(batch.example.loss_mask.array).any(axis=1)
    assert rows_with_loss.tolist() == [True, True] + [False] * (rows_with_loss.size - 2)
    # sequence_sum over the two rollouts that count
    assert np.unique(np.asarray(batch.example.loss_weights.array)).tolist() == [0.0, 0.5]
