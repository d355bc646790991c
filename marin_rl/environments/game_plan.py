# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How to win a game whose transition table is known."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Outcome = tuple[float, int, float, bool]
"""Probability, next state, reward, whether the game is over: an entry of gymnasium's tables."""
Table = Mapping[int, Mapping[int, Sequence[Outcome]]]
"""What can follow each action in each state."""
Wins = Callable[[int, float], bool]
"""Whether a game that is over was won, by its last state and reward."""

DISCOUNT = 0.99
"""What a win is worth less for every step that it takes: enough that the shortest way is best."""
_TOLERANCE = 1e-10


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do in every state that a game can reach."""

    values: Mapping[int, float]
    """The best expected `DISCOUNT`^(steps to a win): 0 where no win can be reached."""
    best: Mapping[int, tuple[int, ...]]
    """The actions that attain it, in ascending order; in a game without chance, the first steps of shortest ways."""
    safe: Mapping[int, tuple[int, ...]]
    """The actions that cannot lose the game at once, in ascending order."""


def read_table(table: Mapping[Any, Mapping[Any, Sequence[Any]]]) -> Table:
    """A game's own table (`env.unwrapped.P`) in Python's numbers; games mix them with numpy's."""
    return {
        int(state): {
            int(action): [
                (float(chance), int(following), float(reward), bool(over))
                for chance, following, reward, over in outcomes
            ]
            for action, outcomes in actions.items()
        }
        for state, actions in table.items()
    }


def reachable(table: Table, starts: Iterable[int]) -> list[int]:
    """The states that can be reached from some, themselves included, in ascending order; what follows an end is not."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        outcomes = [outcome for action in table[waiting.pop()].values() for outcome in action]
        for chance, state, _, over in outcomes:
            if chance > 0 and not over and state not in found:
                found.add(state)
                waiting.append(state)
    return sorted(found)


def make_plan(table: Table, starts: Iterable[int], wins: Wins) -> Plan:
    """The plan that wins soonest, by value iteration: V(s) = max_a Σ p·(1 if won, 0 if lost, else DISCOUNT·V(s')).

    Args:
        table: the game's transition table.
        starts: states that the game can begin in.
        wins: tells a won end from a lost one.
    """
    states = reachable(table, starts)
    values = dict.fromkeys(states, 0.0)

    def worth(state: int, action: int) -> float:
        total = 0.0
        for chance, following, reward, over in table[state][action]:
            total += chance * (float(wins(following, reward)) if over else DISCOUNT * values[following])
        return total

    change = 1.0
    while change > _TOLERANCE:
        change = 0.0
        for state in states:
            value = max(worth(state, action) for action in table[state])
            change = max(change, abs(value - values[state]))
            values[state] = value
    best = {
        state: tuple(action for action in table[state] if worth(state, action) >= values[state] - 1e-6)
        for state in states
    }
    safe = {
        state: tuple(
            action
            for action, outcomes in table[state].items()
            if all(wins(following, reward) for _, following, reward, over in outcomes if over)
        )
        for state in states
    }
    return Plan(values, best, safe)
