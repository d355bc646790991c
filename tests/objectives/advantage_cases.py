# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Inputs for the tests of the advantage estimators."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from marin_rl.objectives.advantage_inputs import AdvantageInputs, TokenAdvantages


def make_inputs(
    score: float | None,
    turn_rewards: Sequence[float] | None = None,
    *,
    id: str = "r",
    anchors: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    penalties: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
    unrewarded: Sequence[int] = (),
) -> AdvantageInputs:
    """Build the inputs of one rollout.

    By default it has one turn with the score as its reward, and one action token per turn (`tokens`).
    """
    rewards = [score or 0.0] if turn_rewards is None else list(turn_rewards)
    counts = [1] * len(rewards) if tokens is None else tokens
    turn_ids = np.repeat(np.arange(len(rewards)), counts).astype(np.int32)
    zeros = [0.0] * turn_ids.size
    return AdvantageInputs(
        id=id,
        score=score,
        turn_rewards=np.array(rewards, np.float64),
        anchors=tuple(anchors if anchors is not None else [f"s{k}" for k in range(len(rewards))]),
        turn_ids=turn_ids,
        penalties=np.array(zeros if penalties is None else penalties, np.float64),
        values=np.array(zeros if values is None else values, np.float64),
        unrewarded_turns=tuple(unrewarded),
    )


def advantages(groups: Sequence[Sequence[TokenAdvantages]]) -> list[list[list[float]]]:
    return [[result.advantages.tolist() for result in group] for group in groups]


def per_rollout(groups: Sequence[Sequence[TokenAdvantages]]) -> list[list[float]]:
    """Return the advantage of each rollout, and check that all its tokens have it."""
    for group in groups:
        for result in group:
            assert len(set(result.advantages.tolist())) == 1
    return [[float(result.advantages[0]) for result in group] for group in groups]


class Drawn(NamedTuple):
    """A ragged rollout drawn by hypothesis; the test converts it to inputs, so that the conversion is type-checked."""

    score: float | None
    turns: list[tuple[float, int, str, bool]]
    """Reward, number of tokens, anchor, and whether the environment gave no reward."""
    tokens: list[tuple[float, float]]
    """Penalty and value, for the maximum number of tokens."""

    def inputs(self) -> AdvantageInputs:
        rewards, counts, anchors, missing = zip(*self.turns, strict=True)
        penalties, values = zip(*self.tokens[: sum(counts)], strict=True) if sum(counts) else ((), ())
        return make_inputs(
            self.score,
            rewards,
            anchors=anchors,
            tokens=counts,
            penalties=penalties,
            values=values,
            unrewarded=[turn for turn, unrewarded in enumerate(missing) if unrewarded],
        )


MAX_TURNS, MAX_TOKENS = 4, 3
# Multiples of 1/4: dividing nearly equal returns by their standard deviation would amplify rounding differences.
number = st.integers(-24, 24).map(lambda quarters: quarters / 4)
turn = st.tuples(number, st.integers(0, MAX_TOKENS), st.sampled_from("abc"), st.booleans())
max_tokens = MAX_TURNS * MAX_TOKENS
rollout = st.builds(
    Drawn,
    score=number | number | st.none(),
    turns=st.lists(turn, min_size=1, max_size=MAX_TURNS),
    tokens=st.lists(st.tuples(number, number), min_size=max_tokens, max_size=max_tokens),
)
batches = st.lists(st.lists(rollout, min_size=1, max_size=5), min_size=1, max_size=3)
"""Groups of one or more rollouts, some of which have failed or have no tokens."""


def to_inputs(groups: Sequence[Sequence[Drawn]]) -> list[list[AdvantageInputs]]:
    return [[drawn.inputs() for drawn in group] for group in groups]


def shuffled(
    groups: Sequence[Sequence[AdvantageInputs]], seed: int
) -> tuple[list[list[AdvantageInputs]], list[list[int]]]:
    """Shuffle the rollouts of each group, and return the permutations."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(group)).tolist() for group in groups]
    return [[group[i] for i in order] for group, order in zip(groups, orders, strict=True)], orders
