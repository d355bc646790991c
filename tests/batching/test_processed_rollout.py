# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import itertools
import re

import jaxtyping
import numpy as np
import pytest

from marin_rl.batching.processed_rollout import process_rollout
from marin_rl.batching.rollout_batch import RolloutBatch, batch_rollouts, join_batches
from marin_rl.types import Generation, Observation, Rollout, RolloutStatus, StopReason, Task, Turn
from tests.rollouts.rollout_cases import with_experts

PAD = 99
TASK = Task("2+3", "sums", ({"role": "user", "content": "2+3="},), "5")
# The example of marin_rl/types.py, with one token per word.
USER, END, ASSISTANT, WRONG = 1, 2, 3, 4
FIRST = (USER, 12, 10, 13, 11, END, ASSISTANT)
SECOND = (USER, WRONG, END, ASSISTANT)


def turn(observation: tuple[int, ...], sampled: dict[int, float], *, starts: bool = False) -> Turn:
    generation = Generation(tuple(sampled), tuple(sampled.values()), StopReason.STOP, 0, 0)
    return Turn(observation, generation, (), starts_sequence=starts)


def rollout(*turns: Turn, rewards: dict[str, float] | None = None) -> Rollout:
    rewards = {"correct": 1.0, "format": 0.5} if rewards is None else rewards
    return Rollout("step-1/group-0/2", "group-0", TASK, turns, RolloutStatus.COMPLETED, rewards)


TWO_TURNS = rollout(
    turn(FIRST, {16: -0.5, END: -0.25}, starts=True),
    turn(SECOND, {15: -1.5, END: -0.75}),
)


def test_two_turns_with_an_observation_between() -> None:
    processed = process_rollout(TWO_TURNS, length=18, pad_token_id=PAD)
    observed = len(FIRST)
    assert processed.input_ids.tolist() == [[*FIRST, 16, END, *SECOND, 15, END, PAD, PAD, PAD]]
    loss = [False] * observed + [True] * 2 + [False] * len(SECOND) + [True] * 2 + [False] * 3
    assert processed.loss_mask.tolist() == [loss]
    assert processed.segment_ids.tolist() == [[1] * 15 + [0] * 3]
    assert processed.policy_logprobs.tolist() == [
        [0.0] * observed + [-0.5, -0.25] + [0.0] * len(SECOND) + [-1.5, -0.75] + [0.0] * 3
    ]
    assert not processed.reference_logprobs.any()
    assert processed.turn_ids.tolist() == [[-1] * observed + [0] * 2 + [-1] * len(SECOND) + [1] * 2 + [-1] * 3]
    assert not processed.values.any()
    assert (processed.source, processed.id) == ("sums", "step-1/group-0/2")


def test_a_rewritten_history_adds_a_row_to_the_rollout() -> None:
    split = rollout(
        turn(FIRST, {16: -0.5, END: -0.25}, starts=True),
        turn((*FIRST, 17, END, *SECOND), {15: -1.5}, starts=True),
        turn((END, USER), {14: -2.0}),
    )
    processed = process_rollout(split, length=20, pad_token_id=PAD)
    assert processed.input_ids.shape == (2, 20)
    assert processed.input_ids[0].tolist() == [*FIRST, 16, END] + [PAD] * 11
    assert processed.input_ids[1].tolist() == [*FIRST, 17, END, *SECOND, 15, END, USER, 14] + [PAD] * 3
    # 17 is part of the observation and was not sampled: no loss.
    assert np.flatnonzero(processed.loss_mask[0]).tolist() == [7, 8]
    assert np.flatnonzero(processed.loss_mask[1]).tolist() == [13, 16]
    assert processed.policy_logprobs[1, [13, 16]].tolist() == [-1.5, -2.0]
    # Turn ids count the turns of the rollout, not of the row.
    assert processed.turn_ids[processed.loss_mask].tolist() == [0, 0, 1, 2]
    assert (processed.turn_ids[~processed.loss_mask] == -1).all()
    batch = processed.to_batch()
    assert (batch.lengths, batch.num_loss_tokens.tolist()) == (((9, 17),), [4])


def test_the_last_observation_is_excluded() -> None:
    observed = dataclasses.replace(TWO_TURNS, last_observation=Observation(({"role": "tool", "content": "5"},), SECOND))
    plain, same = (process_rollout(one, length=15, pad_token_id=PAD) for one in (TWO_TURNS, observed))
    for field in dataclasses.fields(plain):
        np.testing.assert_array_equal(getattr(same, field.name), getattr(plain, field.name))


def test_a_sequence_may_fill_its_row_but_not_exceed_it() -> None:
    full = process_rollout(TWO_TURNS, length=15, pad_token_id=PAD)
    assert full.segment_ids.all()
    with pytest.raises(ValueError, match=r"step-1/group-0/2: a sequence of 15 tokens .* rows of 14 positions"):
        process_rollout(TWO_TURNS, length=14, pad_token_id=PAD)


def test_a_failed_rollout_keeps_its_turns() -> None:
    failed = dataclasses.replace(TWO_TURNS, status=RolloutStatus.FAILED, rewards={}, error="boom")
    processed = process_rollout(failed, length=15, pad_token_id=PAD)
    assert processed.loss_mask.sum() == 4


def test_a_rollout_that_failed_before_its_first_turn_has_no_rows() -> None:
    failed = Rollout("r", "group-0", TASK, (), RolloutStatus.FAILED, {}, "boom")
    processed = process_rollout(failed, length=8, pad_token_id=PAD)
    assert processed.input_ids.shape == (0, 8)
    batch = processed.to_batch()
    assert (batch.lengths, batch.num_loss_tokens.tolist(), batch.input_ids.size) == (((),), [0], 0)


def test_an_empty_observation_raises_an_error() -> None:
    with pytest.raises(ValueError, match="includes the first token"):
        process_rollout(rollout(turn((), {5: -1.0}, starts=True)), length=4, pad_token_id=PAD)


SPLIT = dataclasses.replace(rollout(*TWO_TURNS.turns, turn((*FIRST, 17), {15: -1.5}, starts=True)), id="split")
UNBEGUN = Rollout("unbegun", "group-0", TASK, (), RolloutStatus.FAILED, {}, "boom")


def assert_equal(one: RolloutBatch, other: RolloutBatch) -> None:
    for field in dataclasses.fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        assert ours == theirs if isinstance(ours, tuple) else np.array_equal(ours, theirs), field.name
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None), field.name


SEVERAL = [SPLIT, UNBEGUN, TWO_TURNS, rollout(turn((USER,), {5: -1.0}, starts=True)), SPLIT]


def test_rollouts_are_converted_together_as_alone() -> None:
    together = batch_rollouts(SEVERAL, max_length=20)
    alone = [process_rollout(one, length=20, pad_token_id=PAD).to_batch() for one in SEVERAL]
    assert_equal(together, join_batches(alone))
    assert together.lengths == ((15, 9), (), (15,), (2,), (15, 9))
    assert together.num_loss_tokens.tolist() == [5, 0, 4, 1, 5]


@pytest.mark.parametrize("some", [[0, 1, 2, 3, 4], [4, 1, 2], [1], [], [2, 2]])
def test_a_part_of_a_batch_is_the_batch_of_its_rollouts(some: list[int]) -> None:
    batch = batch_rollouts(SEVERAL, max_length=20)
    part = batch.take(np.array(some, np.int64))
    assert_equal(part, batch_rollouts([SEVERAL[index] for index in some], max_length=20))
    assert part.input_ids.tolist() == batch.input_ids[batch.tokens_of(np.array(some, np.int64))].tolist()


def test_values_of_action_tokens_are_taken_and_put_back() -> None:
    batch = batch_rollouts(SEVERAL, max_length=20)
    numbers = np.where(batch.loss_mask, np.arange(batch.loss_mask.size), 0)
    per_rollout = batch.actions(numbers)
    assert [values.size for values in per_rollout] == batch.num_loss_tokens.tolist()
    for values, tokens, mask in zip(per_rollout, batch.split(numbers), batch.split(batch.loss_mask), strict=True):
        assert values.tolist() == tokens[mask].tolist()
    assert batch.from_actions("numbers", per_rollout).tolist() == numbers.tolist()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (turn((USER,), {5: -1e39}, starts=True), "bad: policy_logprobs must be finite and <= 0"),
        (turn((), {5: -1.0}, starts=True), "bad: loss_mask includes the first token of a sequence"),
        (turn((USER,) * 20, {5: -1.0}, starts=True), "bad: a sequence of 21 tokens does not fit into rows of 20"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_bad_rollout_is_named_among_others(bad: Turn, message: str) -> None:
    named = dataclasses.replace(rollout(bad), id="bad")
    with pytest.raises(ValueError, match=message):
        batch_rollouts([SPLIT, named, TWO_TURNS], max_length=20)


def test_without_loss_keeps_only_the_tokens() -> None:
    batch = batch_rollouts([TWO_TURNS, SPLIT, TWO_TURNS], max_length=20)
    scored = dataclasses.replace(
        batch,
        values=batch.loss_mask.astype(np.float32),
        reference_logprobs=-batch.loss_mask.astype(np.float32),
        advantages=batch.loss_mask.astype(np.float64),
    )
    masked = scored.without_loss(np.array([1]))
    kept = np.array([0, 2])
    assert_equal(masked.take(kept), scored.take(kept))
    assert (masked.num_loss_tokens.tolist(), masked.lengths) == ([4, 0, 4], batch.lengths)
    assert masked.input_ids.tolist() == batch.input_ids.tolist()
    without = masked.take(np.array([1]))
    assert (without.turn_ids == -1).all()
    for name in ("policy_logprobs", "reference_logprobs", "values", "advantages", "importance_weights"):
        assert not getattr(without, name).any(), name


def test_experts_of_two_turns_and_a_rewritten_history_belong_to_their_tokens() -> None:
    # Two sequences: of the tokens 0 to 14 in two turns, and of 15 to 23; the choice of token `t` is [[t, t + 100]].
    rows = {0: range(0, 8), 1: range(8, 14), 2: range(15, 23)}

    def chosen(turn: Turn, index: int) -> Turn:
        experts = np.array([[[row, row + 100]] for row in rows[index]], np.uint8)
        return dataclasses.replace(turn, generation=dataclasses.replace(turn.generation, experts=experts))

    split = dataclasses.replace(SPLIT, turns=tuple(chosen(turn, index) for index, turn in enumerate(SPLIT.turns)))
    batch = batch_rollouts([split, UNBEGUN, split], max_length=20, experts=True)
    assert batch.lengths == ((15, 9), (), (15, 9))
    expected = [[[token, token + 100]] for token in range(24)]
    expected[14] = expected[23] = [[255, 255]]
    assert batch.experts is not None
    assert batch.experts.dtype == np.uint8
    assert batch.experts.tolist() == expected * 2
    # The choice for a turn's last token is the first of the next turn.
    assert [np.flatnonzero(batch.turn_ids == index)[-1] for index in (0, 1, 2)] == [24 + 8, 24 + 14, 24 + 23]
    assert batch_rollouts([split]).experts is None


def test_experts_are_kept_by_every_selection() -> None:
    rollouts = [with_experts(dataclasses.replace(one, id=f"r{index}")) for index, one in enumerate(SEVERAL)]
    batch = batch_rollouts(rollouts, experts=True)
    assert batch.experts is not None
    assert batch.experts.shape == (batch.input_ids.size, 2, 3)
    for some in ([4, 1, 2], [1], [], [2, 2]):
        part = batch.take(np.array(some, np.int64))
        assert part.experts is not None
        parts = [batch.split(batch.experts)[index] for index in some]
        assert part.experts.tolist() == [row for one in parts for row in one.tolist()]
    assert_equal(join_batches([batch_rollouts([one], experts=True) for one in rollouts]), batch)
    masked = batch.without_loss(np.array([0, 2])).with_advantages([1.0] * 5)
    assert masked.experts is batch.experts
    nothing = batch_rollouts([UNBEGUN], experts=True)
    assert nothing.experts is join_batches([nothing, nothing]).experts is None
    assert "experts" not in batch_rollouts(rollouts).arrays


def test_batches_with_different_experts_are_not_joined() -> None:
    made = {
        "absent": batch_rollouts([TWO_TURNS]),
        **{
            dtype: batch_rollouts([with_experts(TWO_TURNS, dtype=dtype)], experts=True) for dtype in ("uint16", "uint8")
        },
    }
    for one, other in itertools.permutations(made, 2):
        message = f"batches with different experts cannot be joined: {min(one, other)}, {max(one, other)}"
        with pytest.raises(ValueError, match=message):
            join_batches([made[one], made[other]])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            TWO_TURNS,
            r"turn 0 has no chosen experts\. .*set routing_replay to recompute or null.*rollout_store\.experts",
        ),
        (with_experts(TWO_TURNS, layers=3), r"the experts of turn 0 are uint8 of shape \(8, 3, 3\), .* \(8, 2, 3\)"),
        (with_experts(TWO_TURNS, dtype="uint16"), r"the experts of turn 0 are uint16 of shape .*, expected uint8"),
    ],
)
def test_experts_that_are_missing_or_differ_are_refused_by_name(bad: Rollout, message: str) -> None:
    named = dataclasses.replace(bad, id="bad")
    with pytest.raises(ValueError, match=f"rollout bad: {message}"):
        batch_rollouts([with_experts(SPLIT), named, with_experts(SPLIT)], experts=True)


def test_experts_of_a_whole_prompt_in_a_later_turn_are_refused() -> None:
    first, second = with_experts(TWO_TURNS).turns
    whole = dataclasses.replace(second.generation, experts=np.zeros((14, 2, 3), np.uint8))
    bad = dataclasses.replace(TWO_TURNS, turns=(first, dataclasses.replace(second, generation=whole)))
    with pytest.raises(
        ValueError, match=r"turn 1 are uint8 of shape \(14, 2, 3\), expected uint8 of shape \(6, 2, 3\)"
    ):
        batch_rollouts([bad], experts=True)


@pytest.mark.parametrize("experts", [np.zeros((14, 2, 3), np.uint8), np.zeros((15, 2, 3), np.int32)])
def test_experts_of_a_batch_have_its_tokens_and_a_small_type(monkeypatch, experts: np.ndarray) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    batch = batch_rollouts([TWO_TURNS])
    message = (
        f"RolloutBatch: experts is {experts.dtype} of shape {experts.shape}, expected uint8 or uint16 of shape (15,"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(batch, experts=experts)


def test_arrays_have_the_documented_dtypes() -> None:
    processed = process_rollout(TWO_TURNS, length=15, pad_token_id=PAD)
    dtypes = {name: str(value.dtype) for name, value in vars(processed).items() if isinstance(value, np.ndarray)}
    assert dtypes == {
        "input_ids": "int32",
        "loss_mask": "bool",
        "segment_ids": "int32",
        "policy_logprobs": "float32",
        "reference_logprobs": "float32",
        "turn_ids": "int32",
        "values": "float32",
    }


def set_at(array: np.ndarray, index: tuple[int, int], value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


VALID = process_rollout(TWO_TURNS, length=18, pad_token_id=PAD)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("input_ids", VALID.input_ids.astype(np.int64), "input_ids is int64, expected int32"),
        ("loss_mask", VALID.loss_mask.astype(np.int32), "loss_mask is int32, expected bool"),
        ("segment_ids", VALID.segment_ids.astype(np.int8), "segment_ids is int8, expected int32"),
        ("policy_logprobs", VALID.policy_logprobs.astype(np.float64), "policy_logprobs is float64, expected float32"),
        ("policy_logprobs", VALID.policy_logprobs[:, :-1], "policy_logprobs has shape (1, 17), input_ids has (1, 18)"),
        ("loss_mask", VALID.loss_mask[0], "loss_mask has shape (18,), input_ids has (1, 18)"),
        ("loss_mask", set_at(VALID.loss_mask, (0, 16), True), "loss_mask includes padding"),
        ("loss_mask", set_at(VALID.loss_mask, (0, 0), True), "loss_mask includes the first token"),
        ("policy_logprobs", set_at(VALID.policy_logprobs, (0, 7), np.nan), "policy_logprobs must be finite and <= 0"),
        ("policy_logprobs", set_at(VALID.policy_logprobs, (0, 7), -np.inf), "policy_logprobs must be finite and <= 0"),
        (
            "reference_logprobs",
            set_at(VALID.reference_logprobs, (0, 7), 0.5),
            "reference_logprobs must be finite",
        ),
        ("segment_ids", set_at(VALID.segment_ids, (0, 3), 0), "segment_ids must be 1 for the tokens of a row"),
        ("segment_ids", set_at(VALID.segment_ids, (0, 3), 2), "segment_ids must be 1 for the tokens of a row"),
        ("turn_ids", VALID.turn_ids.astype(np.int64), "turn_ids is int64, expected int32"),
        ("turn_ids", set_at(VALID.turn_ids, (0, 7), -1), "turn_ids must be >= 0 for loss tokens"),
        ("turn_ids", set_at(VALID.turn_ids, (0, 6), 0), "turn_ids must be >= 0 for loss tokens"),
        ("turn_ids", set_at(VALID.turn_ids, (0, 7), 1), "turn_ids must not decrease"),
        ("values", VALID.values[:, :-1], "values has shape (1, 17), input_ids has (1, 18)"),
        ("values", set_at(VALID.values, (0, 7), np.inf), "values must be finite"),
    ],
)
def test_invalid_arrays_raise_an_error_that_names_the_array(
    monkeypatch, field: str, value: np.ndarray, message: str
) -> None:
    # Disable the type checks of the tests, which would raise first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=re.escape(f"rollout step-1/group-0/2: {message}")):
        dataclasses.replace(VALID, **{field: value})
