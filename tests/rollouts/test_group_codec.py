# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The encoding of groups is exact or refused."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marin_rl.rollouts.group_codec import OtherFormatError, decode_group, decode_task, encode_group, encode_task
from marin_rl.types import (
    Generation,
    Observation,
    RewardResult,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
    TurnReward,
)
from tests.rollouts.rollout_cases import group_of, rich_rollout, rollout_of, with_experts

TEXTS = st.text(st.characters(exclude_categories=()), max_size=4)  # also lone surrogates
OPTIONAL_TEXTS = st.none() | TEXTS
TOKEN = st.integers(-(2**31), 2**31 - 1)
TOKENS = st.lists(TOKEN, max_size=4).map(tuple)
LOGPROBS = st.floats(max_value=0.0, allow_infinity=False, allow_nan=False)
FINITE = st.floats(-1e30, 1e30)
REWARDS = st.dictionaries(TEXTS, FINITE, max_size=2)
METRICS = st.dictionaries(TEXTS, st.floats(), max_size=2)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON_VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2), max_leaves=4
)
INFOS = st.dictionaries(TEXTS, JSON_VALUES, max_size=2)
MESSAGE = st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}, optional={"tool_calls": JSON_VALUES})
MESSAGES = st.tuples(MESSAGE) | st.tuples(MESSAGE, MESSAGE)
EXPERTS = arrays(st.sampled_from([np.uint8, np.uint16]), st.tuples(*[st.integers(0, 3)] * 3))


class Values:
    """Draws values for the fields of records, from the body of a test."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def generation(self) -> Generation:
        sampled = self._draw(st.lists(st.tuples(TOKEN, LOGPROBS), max_size=4))
        tokens, logprobs = (tuple(column) for column in zip(*sampled, strict=True)) if sampled else ((), ())
        first, last = sorted(self._draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
        reason, experts = self._draw(st.tuples(st.sampled_from(StopReason), st.none() | EXPERTS))
        return Generation(tokens, logprobs, reason, first, last, experts)

    def turn(self, starts: bool) -> Turn:
        tokens, messages, rewards, anchor, action, info = self._draw(
            st.tuples(TOKENS, MESSAGES, REWARDS, TEXTS, OPTIONAL_TEXTS, INFOS)
        )
        return Turn(tokens, self.generation(), messages, rewards, anchor, starts, action, info)

    def result(self) -> RewardResult:
        name, weight, score, metrics, reason, base = self._draw(
            st.tuples(TEXTS, FINITE, st.none() | st.floats(), METRICS, OPTIONAL_TEXTS, st.floats())
        )
        if score is None:
            return RewardResult(name, weight, None, error=reason, failure=name)
        return RewardResult(name, weight, score, (TurnReward(0, base, reason, metrics),), metrics, reason)

    def rollout(self) -> Rollout:
        status = self._draw(st.sampled_from(RolloutStatus))
        id, environment, messages, state, metrics, info, error = self._draw(
            st.tuples(TEXTS, TEXTS, MESSAGES, JSON_VALUES, METRICS, INFOS, OPTIONAL_TEXTS)
        )
        turns = (self.turn(True), self.turn(False)) if status.is_graded or self._draw(st.booleans()) else ()
        return Rollout(
            id=id,
            group_id="g",
            task=Task(id, environment, messages, environment, error, state),
            turns=turns,
            status=status,
            rewards=self._draw(st.dictionaries(TEXTS, FINITE, min_size=1, max_size=2)) if status.is_graded else {},
            error=error,
            evaluations=(self.result(), self.result()),
            metrics=metrics,
            seconds=metrics,
            last_observation=Observation(messages, self._draw(TOKENS), True) if self._draw(st.booleans()) else None,
            info=info,
        )


@pytest.mark.medium
@settings(max_examples=50)
@given(st.data(), st.integers(0, 2))
def test_any_group_is_restored(data: st.DataObject, members: int) -> None:
    values = Values(data.draw)
    group = RolloutGroup("g", [values.rollout() for _ in range(members)])
    # The representation is exact for every type, and equal for NaN.
    assert repr(decode_group(encode_group(group))) == repr(group)


@given(st.lists(LOGPROBS))
def test_log_probabilities_keep_every_bit(logprobs: list[float]) -> None:
    generation = Generation(tuple(range(len(logprobs))), tuple(logprobs), StopReason.LENGTH, 3, 5)
    turn = Turn((1,), generation, (), starts_sequence=True)
    group = RolloutGroup("g", [dataclasses.replace(rollout_of("g-0"), turns=(turn,))])
    (again,) = decode_group(encode_group(group)).rollouts[0].turns
    assert [math.copysign(1, value) for value in again.generation.logprobs] == [math.copysign(1, v) for v in logprobs]
    assert again == turn


@given(EXPERTS)
@example(np.arange(2 * 40 * 8, dtype=np.uint16).reshape(2, 40, 8)[:, ::-1])
def test_chosen_experts_are_restored(experts: np.ndarray) -> None:
    generation = Generation((1,), (-1.0,), StopReason.STOP, 0, 0, experts)
    turn = Turn((1,), generation, (), starts_sequence=True)
    group = RolloutGroup("g", [dataclasses.replace(rollout_of("g-0"), turns=(turn, turn))])
    encoded = encode_group(group)
    for again in decode_group(encoded).rollouts[0].turns:
        found = again.generation.experts
        assert found is not None
        assert (found.dtype, found.shape, found.tolist()) == (experts.dtype.name, experts.shape, experts.tolist())
        # Independent of the message, and of the other turn.
        assert found.flags.owndata
    without = encode_group(RolloutGroup("g", [dataclasses.replace(rollout_of("g-0"), turns=(bare(turn),) * 2)]))
    described = len(json.dumps([experts.dtype.name, *experts.shape], separators=(",", ":"))) - len("null")
    assert len(encoded) == len(without) + 2 * (experts.nbytes + described)


def bare(turn: Turn) -> Turn:
    """The turn without chosen experts."""
    return dataclasses.replace(turn, generation=dataclasses.replace(turn.generation, experts=None))


def test_other_keys_of_a_message_are_kept() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    task = Task("t", "sums", (message,), "5", "2+3=5", {"cell": [1, 2]})
    assert decode_task(encode_task(task)) == task


@dataclasses.dataclass
class Cell:
    """Not a record."""

    row: int


@pytest.mark.parametrize("state", [{1, 2}, math.nan, Cell(1)])
def test_a_value_that_is_not_json_is_refused_by_name(state: object) -> None:
    task = Task("t", "sums", ({"role": "user", "content": ""},), "", anchor_state=state)
    with pytest.raises(ValueError, match="task 't' cannot be saved"):
        encode_task(task)
    if isinstance(state, float):
        return
    (rollout,) = group_of("g", 1.0).rollouts
    with pytest.raises(ValueError, match="group 'g' cannot be saved"):
        encode_group(RolloutGroup("g", [dataclasses.replace(rollout, task=task)]))


@pytest.mark.parametrize("token", [2**31, 1.5, "1"])
def test_a_token_that_is_not_an_integer_of_32_bits_is_refused_by_name(token: Any) -> None:
    (rollout,) = group_of("g", 1.0).rollouts
    # Type checks of the tests would refuse it first.
    object.__setattr__(rollout.turns[0], "observation_tokens", (token,))
    with pytest.raises(ValueError, match="group 'g' cannot be saved"):
        encode_group(RolloutGroup("g", [rollout]))


@given(st.data())
def test_a_damaged_group_is_refused(data: st.DataObject) -> None:
    encoded = encode_group(RolloutGroup("g", [with_experts(rich_rollout())]))
    cut = data.draw(st.integers(16, len(encoded) - 1))
    with pytest.raises(ValueError, match="an encoded group is damaged"):
        decode_group(encoded[:cut])
    with pytest.raises(ValueError, match="an encoded group is damaged"):
        decode_group(encoded + b"x")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"token_ids":3', b'"token_ids":2'),
        (b'"token_ids":3', b'"token_ids":9'),
        (b'"token_ids":3', b'"token_ids":[]'),
        (b'"turns":[{', b'"turns":[3,{'),
        (b'"status":"completed"', b'"status":"complete"'),
        (b'"seconds":', b'"minutes":'),
        (b'{"id":"g"', b'["id","g"'),
        (b'"experts":["uint8",', b'"experts":["uint16",'),
        (b'"experts":["uint8",', b'"experts":["int8",'),
        (b'"experts":["uint8",', b'"experts":[["uint8"],'),
        (b'"experts":["uint8",', b'"experts":["uint8",2,'),
        (b'"experts":["uint8",', b'"experts":["uint8",1,'),
        (b'"experts":["uint8",20,', b'"experts":["uint8",16,'),
        (b'"experts":["uint8",20,', b'"experts":["uint8",-20,'),
        (b'"experts":["uint8",20,2,', b'"experts":["uint8",-20,-2,'),
        (b'"experts":["uint8",20,', b'"experts":["uint8",20.0,'),
        (b'"experts":["uint8",20,', b'"experts":["uint8","20",'),
        (b'"experts":["uint8",20,', b'"experts":["uint8",1' + b"0" * 40 + b","),
        (b'"experts":["uint8",20,', b'"experts":["uint8",null,'),
        (b'"experts":["uint8",20,2,3]', b'"experts":["uint8",0,4611686018427387904,1' + b"0" * 30 + b"]"),
        (b'"experts":["uint8",20,2,3]', b'"experts":["uint8"]'),
        (b'"experts":["uint8",20,2,3]', b'"experts":120'),
        (b'"experts":["uint8",20,2,3]', b'"experts":null'),
    ],
)
def test_a_group_with_another_structure_is_refused(old: bytes, new: bytes) -> None:
    encoded = encode_group(RolloutGroup("g", [with_experts(rich_rollout())]))
    assert old in encoded
    head, size, rest = encoded[:16], int.from_bytes(encoded[16:24], "little"), encoded[24:]
    changed = head + (size + len(new) - len(old)).to_bytes(8, "little") + rest.replace(old, new, 1)
    with pytest.raises(ValueError, match="an encoded group is damaged"):
        decode_group(changed)


def test_another_format_is_named() -> None:
    with pytest.raises(OtherFormatError, match="not in the format 'rollout-group-3' of this version"):
        decode_group(json.dumps(dataclasses.asdict(RolloutGroup("g", []))).encode())
