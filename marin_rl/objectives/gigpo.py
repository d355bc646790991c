# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""GiGPO: group advantages of rollouts plus group advantages of turns that share an anchor state."""

import dataclasses
import enum
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le
from jaxtyping import Float64

from marin_rl.objectives.advantage_inputs import (
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    TurnAdvantages,
    centered,
    returns_of_turns,
    split,
    standardized,
    uniform_advantages,
)


class GigpoNormalization(enum.StrEnum):
    """Divisor F of both components of a GiGPO advantage."""

    NONE = "none"
    """F = 1."""
    STD = "std"
    """Standard deviation of the compared returns (ddof = 1), + 1e-6."""


def step_advantages(
    returns: Sequence[Float64[np.ndarray, " _turns"]], anchors: Sequence[Sequence[str]], normalize: GigpoNormalization
) -> list[Float64[np.ndarray, " _turns"]]:
    """Compare each turn with all turns of the group that share its anchor state, `A_S(i,t) = (G_t - mean G)/F`.

    Args:
        returns: per rollout of the group, `[turns]`, G of each turn.
        anchors: per rollout of the group, `[turns]`, the anchor state of each turn; repeated visits count.
        normalize: the divisor F.

    Returns:
        Per rollout, `[turns]`, A_S of each turn; 0 for a state with a single visit.

    >>> [a.tolist() for a in step_advantages([np.array([3.0, 5.0]), np.array([1.0])], [["s", "t"], ["s"]],
    ...                                      GigpoNormalization.NONE)]
    [[1.0, 0.0], [-1.0]]

    Source: Feng et al. 2025, arXiv 2505.10978, equations 6 and 7.
    """
    visits: dict[str, list[int]] = defaultdict(list)
    for index, anchor in enumerate(itertools.chain.from_iterable(anchors)):
        visits[anchor].append(index)
    pooled = np.concatenate([np.zeros(0), *returns])
    advantages = np.zeros(pooled.size)
    for indices in visits.values():
        advantages[indices] = _relative(pooled[indices], normalize)
    return split(advantages, [turns.size for turns in returns])


@AdvantageConfig.register_subclass("gigpo")
@dataclasses.dataclass(frozen=True)
class GigpoConfig(AdvantageConfig):
    """Turn-level advantages without a critic: `A(i,t) = A_E(i) + ω·A_S(i,t)` on the action tokens of turn t."""

    needs_turns: ClassVar[bool] = True
    is_token_level: ClassVar[bool] = True

    omega: Annotated[float, Ge(0)] = 1.0
    """ω: weight of the turn-level advantage; with 0 this is `dr_grpo` (`grpo` with `normalize: std`)."""
    gamma: Annotated[float, Ge(0), Le(1)] = 0.95
    """γ: discount per turn."""
    normalize: GigpoNormalization = GigpoNormalization.NONE
    """Divisor of both components: none | std."""
    default_step_reward: float = 0.0
    """Reward of a turn in which the environment gave none."""

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`step_advantages`][marin_rl.objectives.gigpo.step_advantages].

        `A_E = (R_i - mean R)/F` over the rollouts of the group. The KL penalty is part of R but not of the turn
        rewards. The part of the score that is not a turn reward is added to the reward of the last turn. All advantages
        of a group of one rollout are 0, even if the rollout visits a state twice.

        Raises:
            ValueError: if a turn has no anchor state; the message names the rollout.
        """
        return [self._group(group) for group in groups]

    def _group(self, group: Sequence[AdvantageInputs]) -> list[TokenAdvantages]:
        results = [uniform_advantages(inputs, 0.0) for inputs in group]
        graded = [index for index, inputs in enumerate(group) if inputs.score is not None]
        if len(graded) < self.minimum_group_size:
            return results
        totals = np.array([group[index].total_return for index in graded], np.float64)
        episodes = _relative(totals, self.normalize)
        returns = [self._returns(group[index]) for index in graded]
        steps = step_advantages(returns, [_anchors(group[index]) for index in graded], self.normalize)
        for index, episode, turn_returns, turns in zip(graded, episodes, returns, steps, strict=True):
            advantages = (episode + self.omega * turns)[group[index].turn_ids]
            components = TurnAdvantages(float(episode), turn_returns, turns)
            results[index] = TokenAdvantages(advantages, np.zeros(advantages.size), components)
        return results

    def _returns(self, inputs: AdvantageInputs) -> Float64[np.ndarray, " turns"]:
        rewards = inputs.turn_rewards.copy()
        rewards[list(inputs.unrewarded_turns)] = self.default_step_reward
        return returns_of_turns(rewards, inputs.rest_of_score, self.gamma)


def _relative(values: Float64[np.ndarray, " count"], normalize: GigpoNormalization) -> Float64[np.ndarray, " count"]:
    return standardized(values) if normalize is GigpoNormalization.STD else centered(values)


def _anchors(inputs: AdvantageInputs) -> tuple[str, ...]:
    for turn, anchor in enumerate(inputs.anchors):
        if not anchor:
            raise ValueError(
                f"rollout {inputs.id}: turn {turn} has no anchor state, which GiGPO requires; "
                "set it to a hash of the turn's observation (see marin_rl.rollouts.attempt.anchor_of)"
            )
    return inputs.anchors
