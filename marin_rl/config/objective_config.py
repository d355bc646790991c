# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The objective: sections of `TrainConfig` that define the loss, and the checks that they can be combined."""

import dataclasses

from marin_rl.config.sections import RolloutConfig
from marin_rl.config_fields import check_at_least
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.importance import OffPolicyCorrectionConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig
from marin_rl.objectives.shaping import OverlongConfig
from marin_rl.rollouts.filters import FilterConfig
from marin_rl.sampling.config import SamplingConfig


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """Number of optimizer updates per step."""

    epochs: int = 1
    """Epochs over the rollouts of a step. At least 1."""
    minibatches: int = 1
    """Updates per epoch, at least 1. Each rollout is in exactly one minibatch; they are shuffled in each epoch."""

    def __post_init__(self) -> None:
        check_at_least(self, "updates", epochs=1, minibatches=1)

    @property
    def per_step(self) -> int:
        """Number of updates per step."""
        return self.epochs * self.minibatches


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """Sections of a `TrainConfig` that restrict one another. Raises a `ValueError` for invalid combinations."""

    rollouts: RolloutConfig
    sampling: SamplingConfig
    advantage: AdvantageConfig
    policy_loss: PolicyLossConfig
    critic: CriticConfig | None
    updates: UpdateConfig
    off_policy_correction: OffPolicyCorrectionConfig
    overlong: OverlongConfig
    filter: FilterConfig

    def __post_init__(self) -> None:
        self._check_groups()
        self._check_critic_and_turns()
        self._check_policy_loss()
        self._check_sizes()

    def _check_groups(self) -> None:
        if self.rollouts.group_size < self.advantage.minimum_group_size:
            raise ValueError(
                f"rollouts.group_size is {self.rollouts.group_size}, but advantage {self.advantage_name!r} compares "
                f"the rollouts of a prompt and needs at least {self.advantage.minimum_group_size}; "
                "raise it, or use advantage: {type: reinforce}"
            )
        if self.filter.drops and self.rollouts.group_size < 2:
            raise ValueError(
                f"filter {FilterConfig.get_choice_name(type(self.filter))!r} drops groups with equal rewards, "
                "which is every group if rollouts.group_size is 1; raise it, or use filter: {type: keep}"
            )

    def _check_critic_and_turns(self) -> None:
        if self.advantage.needs_critic and self.critic is None:
            raise ValueError(
                f"advantage {self.advantage_name!r} needs a critic; add critic: {{shared_trunk: true}}, or use an "
                "advantage that compares the rollouts of a prompt, such as advantage: {type: rloo}"
            )
        if self.critic is not None and not self.advantage.needs_critic:
            raise ValueError(
                f"critic is set, but advantage {self.advantage_name!r} does not use it; set advantage: {{type: gae}}, "
                "or critic: null"
            )
        if self.advantage.needs_turns and self.rollouts.max_turns < 2:
            raise ValueError(
                f"advantage {self.advantage_name!r} compares the turns of a rollout, but rollouts.max_turns is "
                f"{self.rollouts.max_turns}; raise it and use an environment with several turns, or use "
                "advantage: {type: rloo}"
            )

    def _check_policy_loss(self) -> None:
        loss_name = PolicyLossConfig.get_choice_name(type(self.policy_loss))
        if self.updates.per_step > 1 and not self.policy_loss.uses_ratio:
            raise ValueError(
                f"updates sets {self.updates.per_step} updates per step, but policy_loss {loss_name!r} does not "
                "correct for changes of the policy since sampling; use policy_loss: {type: ppo_clip}, or one update"
            )
        if self.off_policy_correction.is_token_level and self.policy_loss.is_sequence_level:
            name = OffPolicyCorrectionConfig.get_choice_name(type(self.off_policy_correction))
            raise ValueError(
                f"off_policy_correction {name!r} weights single tokens, but policy_loss {loss_name!r} has one ratio "
                "per rollout; use off_policy_correction: {type: mask}, which drops whole rollouts"
            )
        if self.advantage.is_token_level and self.policy_loss.is_sequence_level:
            raise ValueError(
                f"advantage {self.advantage_name!r} differs between the tokens of a rollout, but policy_loss "
                f"{loss_name!r} has one ratio per rollout and would average it; set policy_loss: {{type: ppo_clip}}"
            )

    def _check_sizes(self) -> None:
        if self.updates.minibatches > self.rollouts.rollouts_per_step:
            raise ValueError(
                f"updates.minibatches is {self.updates.minibatches}, but a step has only "
                f"{self.rollouts.rollouts_per_step} rollouts; lower it or raise rollouts.prompts_per_step"
            )
        if self.overlong.buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"overlong.buffer is {self.overlong.buffer}, but an answer has at most sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens} tokens; lower overlong.buffer or raise sampling.max_new_tokens"
            )

    @property
    def advantage_name(self) -> str:
        """Name of the advantage estimator in YAML."""
        return AdvantageConfig.get_choice_name(type(self.advantage))
