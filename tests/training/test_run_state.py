# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from typing import Any

import pytest

from marin_rl.config.sections import Mode, ReplayConfig
from marin_rl.distributed.scheduler import RequestNumber, StalenessLimits
from marin_rl.objectives.importance import MaskMismatchConfig
from marin_rl.rollouts.config import ResampleGroupsConfig
from marin_rl.training.run_state import Progress
from tests.rollouts.rollout_cases import group_of
from tests.training.bare_run import make_config, make_state

REPLAY = ReplayConfig(max_staleness=2, max_uses=3)
RESAMPLE = ResampleGroupsConfig(max_batches=3)


def test_progress_is_json():
    progress = Progress(
        step=3,
        updates=6,
        tasks_drawn=12,
        task_stream={"drawn": 12, "parts": {"ones": {"drawn": 12}}},
        episodes=48,
        sampled_tokens=100,
        trained_tokens=90,
        vocab_size=264,
        evaluations={"before RL": {"eval/ones/accuracy_sampled": 0.5}},
    )
    assert Progress(**json.loads(json.dumps(dataclasses.asdict(progress)))) == progress


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": Mode.SYNC}, StalenessLimits(4, 0, 1, 0, last_step=9)),
        ({"mode": Mode.SYNC, "filter": RESAMPLE}, StalenessLimits(4, 0, 1, 8, last_step=9)),
        ({"mode": Mode.ASYNC}, StalenessLimits(4, 2, 3, 0, last_step=9)),
        ({"mode": Mode.ASYNC, "filter": RESAMPLE}, StalenessLimits(4, 2, 3, 8, last_step=9)),
    ],
)
def test_sampling_runs_ahead_only_in_async_mode(changes: dict[str, Any], expected: StalenessLimits) -> None:
    state = make_state(make_config(**{"num_steps": 9, "replay": REPLAY, **changes}), Progress())
    assert state.scheduler.limits == expected


@pytest.mark.parametrize(("mode", "uses", "ages"), [(Mode.SYNC, 1, []), (Mode.ASYNC, 3, [2])])
def test_groups_wait_only_in_async_mode(mode: Mode, uses: int, ages: list[int]) -> None:
    replay = make_state(make_config(mode=mode, replay=REPLAY), Progress()).replay
    replay.add(RequestNumber(4, 0), group_of("train-4-0", 1.0, 0.0))  # sampled from weights of version 3
    assert replay.uses_left == uses
    replay.expire(5)
    assert replay.ages(5) == ages


@pytest.mark.parametrize("mode", Mode)
def test_old_weights_are_kept_only_in_async_mode(mode: Mode) -> None:
    replay = dataclasses.replace(REPLAY, keep_sampling_weights=True)
    config = make_config(mode=mode, replay=replay, off_policy_correction=MaskMismatchConfig())
    assert config.effective_replay.keep_sampling_weights == (mode is Mode.ASYNC)
