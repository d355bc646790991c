# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import numpy as np
import pytest
from levanter.models.qwen import Qwen3Config  # noqa: F401  before marin_rl: see tests/tiny_run.py

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.config.reference_config import (
    CheckpointReferenceConfig,
)
from marin_rl.objectives import DistillationConfig, TisConfig
from marin_rl.training.loop import TrainingRun
from marin_rl.training.replay import FakeShape, make_groups
from marin_rl.utils.timing import PhaseTimer
from tests.tiny_run import TinyRun
from tests.training.reopened_run import reopen

GROUPS = make_groups(FakeShape((3, 5), (1, 6), 1), 2, 4, 264, 0)
ROLLOUTS = [rollout for group in GROUPS for rollout in group.rollouts]
BATCH = batch_rollouts(ROLLOUTS, max_length=12)


def reference_logprobs(run: TrainingRun) -> np.ndarray:
    score = run.batch_builder.score_reference
    assert score is not None
    return score(BATCH, ROLLOUTS, run.trainer_state.model, None)


def distilled(run: TinyRun, path: object, **changes: Any) -> TrainingRun:
    """Reopen a run with a teacher."""
    reference = CheckpointReferenceConfig(str(path))
    return reopen(run, accept_changes=True, reference=reference, **{"distillation": DistillationConfig(), **changes})


@pytest.fixture(scope="module")
def finished(finished_run: TinyRun) -> TinyRun:
    return finished_run


def test_a_teacher_equal_to_the_policy_gives_exactly_zero(finished: TinyRun):
    run = distilled(
        finished,
        finished.path,
        distillation=DistillationConfig(alone=True),
        off_policy_correction=TisConfig(),
    )
    batch = run.batch_builder.build(GROUPS, run.trainer_state.model, 7, PhaseTimer())
    assert batch.rollouts.importance_weights.any()
    assert not batch.rollouts.advantages.any()
    assert batch.metrics["distillation/teacher_kl"] == 0.0
    assert batch.metrics["advantage/zero_share"] == 1.0
