# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""GiGPO: rollouts compared with rollouts, and turns with other turns that stood at the same place.

Plain numpy in float64; importing this module loads no jax.

Source: Feng et al. 2025, arXiv 2505.10978.
"""

import dataclasses
import enum
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.objectives.advantage_inputs import (
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    TurnAdvantages,
    uniform_advantages,
)
from marin_rl.objectives.dispersion import centered, standardized
from marin_rl.objectives.returns import check_discount, discounted_returns


class GigpoNormalization(enum.StrEnum):
    """What both parts of a GiGPO advantage are divided by (F)."""

    NONE = "none"
    """Nothing: F = 1."""
    STD = "std"
    """The standard deviation of what is compared (ddof = 1), + 1e-6."""


def anchor_of(observation: object) -> str:
    """The anchor state of an observation: the SHA-256 of its canonical JSON (sorted keys, no blanks).

    Args:
        observation: anything that JSON can hold; dictionaries with string keys.

    Returns:
        A hash, equal for equal observations whatever the order of their keys.

    Raises:
        TypeError: if JSON cannot hold the observation.

    >>> anchor_of({"x": 1, "y": [2]}) == anchor_of({"y": [2], "x": 1})
    True
    >>> anchor_of("room 1") == anchor_of("room 2")
    False
    """
    try:
        text = json.dumps(observation, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"an observation of type {type(observation).__name__} has no canonical JSON ({error}); "
            "make it of strings, finite numbers, lists and dictionaries with string keys"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()


def step_advantages(
    returns: Sequence[Float64[np.ndarray, " _turns"]], anchors: Sequence[Sequence[str]], normalize: GigpoNormalization
) -> list[Float64[np.ndarray, " _turns"]]:
    """Each turn against all turns of the group at the same anchor state: `A_S(i,t) = (G_t - mean G)/F`.

    Repeated visits count each time, also those of one rollout.

    Args:
        returns: G of each turn, per rollout of the group.
        anchors: the anchor state of each turn, likewise.
        normalize: what F is.

    Returns:
        A_S of each turn, per rollout; 0 at a state that was visited once.

    >>> [a.tolist() for a in step_advantages([np.array([3.0, 5.0]), np.array([1.0])], [["s", "t"], ["s"]],
    ...                                      GigpoNormalization.NONE)]
    [[1.0, 0.0], [-1.0]]

    Source: Feng et al. 2025, arXiv 2505.10978, equations 6 and 7.
    """
    visits: dict[str, list[int]] = defaultdict(list)
    for index, anchor in enumerate(anchor for own in anchors for anchor in own):
        visits[anchor].append(index)
    together = np.concatenate([np.zeros(0), *returns])
    advantages = np.zeros(together.size)
    for indices in visits.values():
        advantages[indices] = _compared(together[indices], normalize)
    return np.split(advantages, np.cumsum([own.size for own in returns]))[: len(returns)]


@AdvantageConfig.register_subclass("gigpo")
@dataclasses.dataclass(frozen=True)
class GigpoConfig(AdvantageConfig):
    """`A(i,t) = A_E(i) + ω·A_S(i,t)`, on the action tokens of turn t: credit for single turns, without a critic."""

    omega: float = 1.0
    """ω, >= 0: weight of the comparison of turns; 0 leaves `dr_grpo` (or `grpo`, with `normalize: std`)."""
    gamma: float = 0.95
    """γ, in [0, 1]: discount per turn."""
    normalize: GigpoNormalization = GigpoNormalization.NONE
    """What both parts are divided by: none | std."""
    default_step_reward: float = 0.0
    """Reward of a turn in which the environment gave none."""
    add_score_at_end: bool = False
    """Whether the rollout's score is added to the reward of its last turn: true where the rewards of the turns do
    not already contain it."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if not (math.isfinite(self.omega) and self.omega >= 0):
            raise ValueError(f"advantage.omega is {self.omega}; it must be finite and >= 0")
        check_discount("advantage.gamma", self.gamma)
        if not math.isfinite(self.default_step_reward):
            raise ValueError(f"advantage.default_step_reward is {self.default_step_reward}; it must be finite")

    @property
    def minimum_group_size(self) -> int:
        """Two: one rollout leaves nothing to compare with."""
        return 2

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

    @property
    def needs_turns(self) -> bool:
        """Always: with one turn per rollout it is `dr_grpo`, twice."""
        return True

    @property
    def is_token_level(self) -> bool:
        """Always."""
        return True

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`step_advantages`][marin_rl.objectives.gigpo.step_advantages].

        `A_E = (R_i - mean R)/F` over the rollouts of the group. The KL penalty is part of R, and not of the turns'
        rewards. A group of one gets 0, even where its rollout came to a state twice.

        Raises:
            ValueError: if a turn has no anchor state; the message names the rollout.
        """
        return [self._group(group) for group in groups]

    def _group(self, group: Sequence[AdvantageInputs]) -> list[TokenAdvantages]:
        present = [index for index, signal in enumerate(group) if signal.score is not None]
        if len(present) < self.minimum_group_size:
            return [uniform_advantages(signal, 0.0) for signal in group]
        totals = np.array([group[index].total_return for index in present], np.float64)
        episode = _compared(totals, self.normalize)
        returns = [discounted_returns(self._rewards(group[index]), self.gamma) for index in present]
        steps = step_advantages(returns, [_anchors(group[index]) for index in present], self.normalize)
        token_advantages_list = [uniform_advantages(signal, 0.0) for signal in group]
        for index, of_episode, own_returns, of_turns in zip(present, episode, returns, steps, strict=True):
            advantages = (of_episode + self.omega * of_turns)[group[index].turn_ids]
            parts = TurnAdvantages(float(of_episode), own_returns, of_turns)
            token_advantages_list[index] = TokenAdvantages(advantages, np.zeros(advantages.size), parts)
        return token_advantages_list

    def _rewards(self, signal: AdvantageInputs) -> Float64[np.ndarray, " turns"]:
        rewards = signal.turn_rewards.copy()
        rewards[list(signal.unrewarded_turns)] = self.default_step_reward
        if self.add_score_at_end and signal.score is not None:
            rewards[-1:] += signal.score
        return rewards


def _compared(values: Float64[np.ndarray, " count"], normalize: GigpoNormalization) -> Float64[np.ndarray, " count"]:
    return standardized(values) if normalize is GigpoNormalization.STD else centered(values)


def _anchors(signal: AdvantageInputs) -> tuple[str, ...]:
    for turn, anchor in enumerate(signal.anchors):
        if not anchor:
            raise ValueError(
                f"rollout {signal.id}: turn {turn} has no anchor state, which GiGPO compares turns by; "
                "give each turn a hash of what was observed (see anchor_of)"
            )
    return signal.anchors
