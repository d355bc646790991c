# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from marin_rl.types import (
    Generation,
    Message,
    Observation,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
)

TASK = Task(id="t", environment="sums", messages=(Message(role="user", content="2+3="),), answer="5")


def generation(length: int = 2, **changes) -> Generation:
    settings = {
        "token_ids": tuple(range(length)),
        "logprobs": (-0.5,) * length,
        "stop_reason": StopReason.STOP,
        "first_version": 3,
        "last_version": 3,
    }
    return Generation(**{**settings, **changes})


def turn(length: int = 2, **changes) -> Turn:
    settings = {"observation_tokens": (7, 8), "generation": generation(length), "messages": (), "starts_sequence": True}
    return Turn(**{**settings, **changes})


def rollout(**changes) -> Rollout:
    settings = {
        "id": "r",
        "group_id": "g",
        "task": TASK,
        "turns": (turn(),),
        "status": RolloutStatus.COMPLETED,
        "rewards": {"correct": 1.0},
    }
    return Rollout(**{**settings, **changes})


def test_importing_the_records_loads_no_jax():
    program = "import sys, marin_rl.types, json; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout)
    assert "marin_rl.types" in loaded
    assert not {"jax", "numpy", "haliax", "levanter"} & set(loaded)


def test_a_task_needs_a_message():
    with pytest.raises(ValueError, match="Task 't' has no messages"):
        dataclasses.replace(TASK, messages=())


def test_tokens_and_logprobs_have_one_length():
    with pytest.raises(ValueError, match=r"token_ids has length 2 but logprobs has length 1"):
        generation(logprobs=(-1.0,))


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 1e-9])
def test_logprobs_are_finite_and_at_most_zero(value: float):
    with pytest.raises(ValueError, match=r"logprobs\[1\] is"):
        generation(logprobs=(0.0, value))
    for position in range(3):
        logprobs = [-1.0, 0.0, -math.inf if value == math.inf else -2.0]
        logprobs[position] = value
        with pytest.raises(ValueError, match=rf"logprobs\[{position}\] is {value}"):
            generation(token_ids=(1, 2, 3), logprobs=tuple(logprobs))


def test_finite_logprobs_with_an_infinite_sum_are_valid():
    assert sum(generation(logprobs=(-1.7e308, -1.7e308)).logprobs) == -math.inf


def test_versions_do_not_decrease():
    with pytest.raises(ValueError, match="last_version 2 is older than first_version 3"):
        generation(last_version=2)
    assert generation(last_version=4).last_version == 4


@pytest.mark.parametrize(
    "experts",
    [
        np.zeros((3, 2), np.uint8),
        np.zeros((3, 2, 2), np.int8),
        np.zeros((3, 2, 2), np.int64),
        np.zeros((3, 2, 2), ">u2"),
        np.zeros((1, 3, 2, 2), np.uint16),
    ],
)
def test_experts_have_three_axes_and_a_small_type(experts: np.ndarray):
    message = (
        f"experts is {experts.dtype} of shape {experts.shape}, expected uint8 or uint16 of shape [positions, layers"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        generation(experts=experts)


def test_experts_do_not_distinguish_generations():
    one, other = (generation(experts=np.full((3, 2, 2), value, np.uint8)) for value in (0, 1))
    assert one == other == generation()
    assert hash(one) == hash(other)


@pytest.mark.parametrize("record", [TASK, generation(), turn(), rollout(), RolloutGroup("g", [])])
def test_records_are_frozen(record: object):
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, "other")


def test_the_return_is_the_sum_of_the_rewards():
    assert rollout(rewards={"correct": 1.0, "format": 0.25}).total_reward == 1.25
    assert rollout(rewards={"correct": 0.0}).total_reward == 0.0
    assert rollout(status=RolloutStatus.FAILED, rewards={}).total_reward is None


def test_generated_tokens_are_counted_over_all_turns():
    assert rollout(turns=(turn(2), turn(5, starts_sequence=False))).num_generated_tokens == 7


def test_a_turns_reward_is_the_sum_of_its_rewards():
    assert turn(rewards={"moves": 0.5, "style": -0.25}).reward == 0.25
    assert turn(rewards={"moves": 0.0}).reward == 0.0
    assert turn().reward is None


def test_a_nonfinite_turn_reward_names_rollout_and_turn():
    with pytest.raises(ValueError, match="Rollout r: reward 'moves' of turn 1 is nan"):
        rollout(turns=(turn(), turn(starts_sequence=False, rewards={"moves": math.nan})))


def test_tokens_are_counted():
    both = rollout(turns=(turn(2), turn(5, starts_sequence=False)))
    assert [turn.num_tokens for turn in both.turns] == [4, 7]
    assert (both.num_tokens, both.num_generated_tokens) == (11, 7)


GOOD_INFO = {"a": [1, 2.5, True, None, {"b": "\ud83d"}], "": {}}


def test_metadata_may_be_any_json():
    assert turn(info=GOOD_INFO).info == rollout(info=GOOD_INFO).info == GOOD_INFO


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "info",
    [{"x": {1}}, {"x": math.nan}, {"x": (1, 2)}, {"x": {1: 2}}, {"x": b"1"}, {"x": 10**5000}, {"x": DEEP}],
    ids=["set", "nan", "tuple", "key", "bytes", "digits", "deep"],
)
def test_metadata_that_json_would_change_is_refused(info: dict):
    for make in (turn, rollout):
        with pytest.raises(ValueError, match=r"info\[.*\] is not a JSON value"):
            make(info=info)


def test_an_observation_needs_a_message():
    with pytest.raises(ValueError, match="Observation has no messages"):
        Observation(())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_rollout_and_component(value: float):
    with pytest.raises(ValueError, match=f"Rollout r: reward 'style' is {value}"):
        rollout(rewards={"correct": 1.0, "style": value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": ()}, "status is completed but turns has length 0"),
        ({"turns": (turn(starts_sequence=False),)}, r"turns\[0\].starts_sequence is False"),
        ({"rewards": {}}, "status is completed but it has no reward"),
        ({"status": RolloutStatus.TRUNCATED, "rewards": {}}, "status is truncated but it has no reward"),
        ({"status": RolloutStatus.FAILED}, "status is failed but rewards has length 1"),
    ],
)
def test_a_rollout_with_contradicting_fields_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=f"Rollout r: {message}"):
        rollout(**changes)


def test_a_rollout_may_fail_before_its_first_turn():
    failed = rollout(status=RolloutStatus.FAILED, rewards={}, turns=(), error="ValueError: no")
    assert failed.num_generated_tokens == 0


def test_a_group_accepts_only_its_own_rollouts():
    assert RolloutGroup("g", [rollout(), rollout(id="s")]).rollouts[1].id == "s"
    with pytest.raises(ValueError, match="RolloutGroup g: rollout s belongs to group h"):
        RolloutGroup("g", [rollout(), rollout(id="s", group_id="h")])


def test_statuses_and_stop_reasons_are_words():
    assert [status.value for status in RolloutStatus] == ["completed", "truncated", "failed", "timed_out", "aborted"]
    assert [reason.value for reason in StopReason] == ["stop", "length", "abort"]
