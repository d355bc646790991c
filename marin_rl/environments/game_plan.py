# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Optimal plans for games with a transition table."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Outcome = tuple[float, int, float, bool]
"""Probability, next state, reward, whether the game ends: an entry of gymnasium's transition tables."""
Table = Mapping[int, Mapping[int, Sequence[Outcome]]]
"""Possible outcomes by state and action."""
Wins = Callable[[int, float], bool]
"""Returns whether a finished game was won, given its last state and reward."""

DISCOUNT = 0.99
"""Discount of a win for each step; small enough that shorter ways are better."""
_TOLERANCE = 1e-10


@dataclasses.dataclass(frozen=True)
class Plan:
    """Values and actions for every reachable state."""

    values: Mapping[int, float]
    """Maximum expected `DISCOUNT`^(steps to a win), by state; 0 if no win is reachable."""
    best: Mapping[int, tuple[int, ...]]
    """Optimal actions by state, in ascending order; in a deterministic game, the first steps of the shortest ways."""
    safe: Mapping[int, tuple[int, ...]]
    """Actions by state that cannot lose the game immediately, in ascending order."""


def read_table(table: Mapping[Any, Mapping[Any, Sequence[Any]]]) -> Table:
    """Convert a game's transition table (`env.unwrapped.P`) to Python numbers; games mix them with numpy scalars."""
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
    """Return the states reachable from `starts`, inclusive, in ascending order; the game ends at terminal outcomes."""
    visited = set(starts)
    pending = list(visited)
    while pending:
        outcomes = [outcome for action in table[pending.pop()].values() for outcome in action]
        for chance, state, _, over in outcomes:
            if chance > 0 and not over and state not in visited:
                visited.add(state)
                pending.append(state)
    return sorted(visited)


def make_plan(table: Table, starts: Iterable[int], wins: Wins) -> Plan:
    """Compute the fastest plan by value iteration: V(s) = max_a Σ p·(1 if won, 0 if lost, else DISCOUNT·V(s')).

    Args:
        table: transition table of the game.
        starts: initial states of the game.
        wins: returns whether a terminal transition wins.
    """
    states = reachable(table, starts)
    values = dict.fromkeys(states, 0.0)

    def action_value(state: int, action: int) -> float:
        total = 0.0
        for chance, following, reward, over in table[state][action]:
            total += chance * (float(wins(following, reward)) if over else DISCOUNT * values[following])
        return total

    change = 1.0
    while change > _TOLERANCE:
        change = 0.0
        for state in states:
            value = max(action_value(state, action) for action in table[state])
            change = max(change, abs(value - values[state]))
            values[state] = value
    best = {
        state: tuple(action for action in table[state] if action_value(state, action) >= values[state] - 1e-6)
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
