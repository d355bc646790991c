# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout signals for the tests of the advantage estimators."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from marin_rl.objectives.advantage_inputs import AdvantageInputs, TokenAdvantages


def make_signal(
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
    """A rollout; by default one turn that earned the score, and one token in each turn.

    `tokens` counts the action tokens of each turn.
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


def advantages(token_advantages_list: Sequence[Sequence[TokenAdvantages]]) -> list[list[list[float]]]:
    return [[token_advantages.advantages.tolist() for token_advantages in group] for group in token_advantages_list]


def per_rollout(token_advantages_list: Sequence[Sequence[TokenAdvantages]]) -> list[list[float]]:
    """The one advantage of each rollout, checked to be on all of its tokens."""
    for group in token_advantages_list:
        for token_advantages in group:
            assert len(set(token_advantages.advantages.tolist())) == 1
    return [[float(token_advantages.advantages[0]) for token_advantages in group] for group in token_advantages_list]


number = st.floats(-8, 8).map(lambda x: round(x, 3))


class Drawn(NamedTuple):
    """A ragged rollout as hypothesis draws it; its signal is made in the test, where shapes are checked."""

    score: float | None
    turns: list[tuple[float, int, str, bool]]
    """Reward, number of tokens, anchor, and whether the environment gave no reward."""
    tokens: list[tuple[float, float]]
    """Penalty and value, for as many tokens as there may be."""

    def signal(self) -> AdvantageInputs:
        rewards, counts, anchors, missing = zip(*self.turns, strict=True)
        penalties, values = zip(*self.tokens[: sum(counts)], strict=True) if sum(counts) else ((), ())
        return make_signal(
            self.score,
            rewards,
            anchors=anchors,
            tokens=counts,
            penalties=penalties,
            values=values,
            unrewarded=[turn for turn, given in enumerate(missing) if given],
        )


MAX_TURNS, MAX_TOKENS = 4, 3
# In quarters: nearly equal returns, divided by their spread, would magnify rounding differences.
number = st.integers(-24, 24).map(lambda quarters: quarters / 4)
turn = st.tuples(number, st.integers(0, MAX_TOKENS), st.sampled_from("abc"), st.booleans())
most = MAX_TURNS * MAX_TOKENS
rollout = st.builds(
    Drawn,
    score=number | number | st.none(),
    turns=st.lists(turn, min_size=1, max_size=MAX_TURNS),
    tokens=st.lists(st.tuples(number, number), min_size=most, max_size=most),
)
batches = st.lists(st.lists(rollout, min_size=1, max_size=5), min_size=1, max_size=3)
"""Groups of one rollout and more; some have failed, some are masked."""


def signals(groups: Sequence[Sequence[Drawn]]) -> list[list[AdvantageInputs]]:
    return [[drawn.signal() for drawn in group] for group in groups]


def shuffled(
    groups: Sequence[Sequence[AdvantageInputs]], seed: int
) -> tuple[list[list[AdvantageInputs]], list[list[int]]]:
    """The same groups with their members in another order, and where each came from."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(group)).tolist() for group in groups]
    return [[group[i] for i in order] for group, order in zip(groups, orders, strict=True)], orders
