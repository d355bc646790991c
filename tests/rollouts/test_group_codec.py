# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The encoding of groups is exact or refused."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rollouts.group_codec import decode_group, decode_task, encode_group, encode_task
from marin_rl.types import Generation, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from tests.rollouts.rollout_cases import group_of, rich_rollout, rollout_of


def test_all_fields_of_a_rollout_are_restored() -> None:
    group = RolloutGroup(
        "g", [rich_rollout(), rollout_of("g-1", reward=None, status=RolloutStatus.ABORTED), rollout_of("g-2")]
    )
    again = decode_group(encode_group(group))
    assert again == group
    assert [rollout.seconds for rollout in again.rollouts] == [rollout.seconds for rollout in group.rollouts]
    assert isinstance(again.rollouts[0].status, RolloutStatus)
    assert isinstance(again.rollouts[0].turns[0].generation.stop_reason, StopReason)


@given(st.lists(st.floats(max_value=0.0, allow_infinity=False, allow_nan=False)))
def test_log_probabilities_keep_every_bit(logprobs: list[float]) -> None:
    generation = Generation(tuple(range(len(logprobs))), tuple(logprobs), StopReason.LENGTH, 3, 5)
    turn = Turn((1,), generation, (), starts_sequence=True)
    group = RolloutGroup("g", [dataclasses.replace(rollout_of("g-0"), turns=(turn,))])
    (again,) = decode_group(encode_group(group)).rollouts[0].turns
    assert [math.copysign(1, value) for value in again.generation.logprobs] == [math.copysign(1, v) for v in logprobs]
    assert again == turn


def test_other_keys_of_a_message_are_kept() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    task = Task("t", "sums", (message,), "5", "2+3=5", {"cell": [1, 2]})
    assert decode_task(encode_task(task)) == task


def test_values_that_are_not_json_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="task 't' cannot be saved"):
        encode_task(Task("t", "sums", ({"role": "user", "content": ""},), "", anchor_state={1, 2}))
    with pytest.raises(ValueError, match="task 't' cannot be saved"):
        encode_task(Task("t", "sums", ({"role": "user", "content": ""},), "", anchor_state=math.nan))
    (rollout,) = group_of("g", 1.0).rollouts
    bad = dataclasses.replace(rollout, task=dataclasses.replace(rollout.task, anchor_state={1, 2}))
    with pytest.raises(ValueError, match="group 'g' cannot be saved"):
        encode_group(RolloutGroup("g", [bad]))


def test_metrics_may_be_nonfinite() -> None:
    (rollout,) = group_of("g", 1.0).rollouts
    metrics = {"speed": math.nan, "distance": math.inf, "height": -math.inf}
    (again,) = decode_group(encode_group(RolloutGroup("g", [dataclasses.replace(rollout, metrics=metrics)]))).rollouts
    assert math.isnan(again.metrics["speed"])
    assert (again.metrics["distance"], again.metrics["height"]) == (math.inf, -math.inf)
