# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Advantages and training batches from the rewards of a step's rollout groups."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, batch_rollouts
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.scoring import Scores
from marin_rl.models.mixture import mixture_shape
from marin_rl.objectives.advantage_inputs import AdvantageInputs, TokenAdvantages, sample_variance
from marin_rl.objectives.distillation import DistillationConfig, distillation_advantages
from marin_rl.objectives.importance import OffPolicyCorrectionConfig, log_weight_statistics, mismatch_metrics
from marin_rl.objectives.kl import MAX_LOG_RATIO, LossKlConfig
from marin_rl.objectives.value_loss import explained_variance
from marin_rl.parts.rl import RunParts
from marin_rl.runs.stored_rollout import StoredAdvantages
from marin_rl.types import Rollout, RolloutGroup, RolloutStatus, make_unchecked
from marin_rl.utils.devices.setup import own_rows
from marin_rl.utils.timing import PhaseTimer

logger = logging.getLogger(__name__)

ActionTokens = Float64[np.ndarray, " _tokens"]
"""Values of the action tokens of one rollout."""


class TrainingBatch(NamedTuple):
    """The training data of a step."""

    rollouts: RolloutBatch
    """Rollouts with advantages, without failed rollouts."""
    stored: Mapping[str, StoredAdvantages]
    """Data for the rollout store, by rollout id."""
    metrics: Mapping[str, float]
    """Metrics of scores, KL penalty, advantages and critic."""
    mismatch: Mapping[str, float] | None = None
    """`mismatch/*` metrics of the raw importance weights of the off-policy correction; None without a correction."""


class StepToScore(NamedTuple):
    """The rollouts of a step, and the weights with which a reference may score them."""

    batch: RolloutBatch
    """Arrays of the rollouts."""
    rollouts: Sequence[Rollout]
    """The same rollouts."""
    newest: Any
    """The learner's weights before the step."""
    average: Any = None
    """The average of the learner's weights; None if the run keeps none."""

    def take(self, rollouts: Int64[np.ndarray, " some"]) -> "StepToScore":
        """Return some rollouts, which are given by their indices."""
        taken = [self.rollouts[index] for index in rollouts.tolist()]
        return self._replace(batch=self.batch.take(rollouts), rollouts=taken)


ScoreReference = Callable[[StepToScore], np.ndarray]
"""Computes log-probs of rollouts under the reference policy, float32 and 0 off the loss mask."""
ScoreFunction = Callable[[Any, RolloutBatch], Scores]
"""Computes log-probs and values of rollouts under the weights of a model."""


@dataclasses.dataclass(frozen=True)
class BatchBuilder:
    """Computes the advantages and batches of a step."""

    parts: RunParts
    """Config, layout, tokenizer and mesh."""
    score: ScoreFunction
    """Scores rollouts with the learner's weights."""
    score_reference: ScoreReference | None
    """Scores rollouts with the reference policy; None if nothing needs it."""

    @property
    def config(self) -> TrainConfig:
        """Config of the run."""
        return self.parts.config

    @property
    def has_critic(self) -> bool:
        """Whether the learner has a critic, which computes values."""
        return self.config.critic is not None

    @property
    def learns_without_advantages(self) -> bool:
        """Whether all loss tokens teach something: those of an exact divergence, or of such a policy term."""
        return self.config.kl.needs_teacher or not self.config.policy_loss.needs_advantage

    @property
    def updates_without_signal(self) -> bool:
        """Whether loss tokens that teach nothing have a gradient: that of a critic or a KL penalty in the loss."""
        return self.has_critic or (isinstance(self.config.kl, LossKlConfig) and self.config.kl.beta > 0)

    def build(
        self, groups: Sequence[RolloutGroup], model: Any, step: int, timer: PhaseTimer, average: Any = None
    ) -> TrainingBatch:
        """Score the rollouts and compute their advantages.

        Args:
            groups: groups to train on; may be empty.
            model: the learner's current weights, of version `step - 1`.
            step: step that trains on the groups.
            timer: accumulates seconds of the phases `batch` and `reference`.
            average: the average of the learner's weights; None if the run keeps none.
        """
        graded = [rollout for group in groups for rollout in group.rollouts if rollout.rewards]
        if not graded:
            nothing = batch_rollouts([], max_length=self.config.rollouts.max_length)
            return TrainingBatch(nothing, {}, {"groups/no_signal": float(len(groups))})
        with timer.phase("batch"):
            sampled = self._sampled(graded)
        with timer.phase("reference"):
            scored, learner_logprobs = self._score(StepToScore(sampled, graded, model, average), step)
            corrected, mismatch = self._correct(scored, learner_logprobs)
        with timer.phase("batch"):
            k1 = None
            if self.score_reference is not None:
                k1 = corrected.policy_logprobs.astype(np.float64) - corrected.reference_logprobs
                k1 = k1.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            metrics = self._reward_metrics(graded, None if k1 is None else corrected.actions(k1))
            masked = [self.config.truncation.masks and rollout.status is RolloutStatus.TRUNCATED for rollout in graded]
            batch = corrected.without_loss(np.flatnonzero(masked))
            self._warn_if_all_masked(batch, step)
            penalties = np.zeros(batch.input_ids.shape) if k1 is None else self.config.kl.reward_penalty(k1)
            computed = self.config.advantage.compute(_advantage_inputs(groups, batch, corrected.actions(penalties)))
            advantages = [
                of_rollout
                for group, of_group in zip(groups, computed, strict=True)
                for rollout, of_rollout in zip(group.rollouts, of_group, strict=True)
                if rollout.rewards
            ]
            if self.config.distillation is not None:
                advantages, measured = self._distill(self.config.distillation, batch, advantages)
                metrics |= measured
            per_token, value_targets, _ = zip(*advantages, strict=True)
            batch = batch.with_advantages(per_token, value_targets)
            if logger.isEnabledFor(logging.DEBUG):
                _log_advantages(graded, scored, advantages, has_critic=self.has_critic)
            metrics |= _advantage_metrics(batch, has_critic=self.has_critic)
            numbers = [number for number, group in enumerate(groups) for one in group.rollouts if one.rewards]
            learning = np.unique(np.array(numbers)[self.have_signal(batch)]).size
            metrics["groups/no_signal"] = float(len(groups) - learning)
            stored = self._stored_advantages(scored, learner_logprobs, advantages)
        return TrainingBatch(batch, stored, metrics, mismatch)

    def _sampled(self, rollouts: Sequence[Rollout]) -> RolloutBatch:
        """Return the tokens of rollouts, with their experts if the updates use these.

        Raises:
            ValueError: if a rollout has none, or those of another model.
        """
        max_length, mixture = self.config.rollouts.max_length, mixture_shape(self.parts.model)
        if not self.config.samples_experts or mixture is None:
            return batch_rollouts(rollouts, max_length=max_length)
        for rollout in rollouts:
            for found in (turn.generation.experts for turn in rollout.turns if turn.generation.experts is not None):
                if (found.dtype, *found.shape[1:]) != (mixture.dtype, mixture.layers, mixture.per_token):
                    raise ValueError(
                        f"rollout {rollout.id}: {found.shape[2]} experts of a token in {found.shape[1]} layers, as "
                        f"{found.dtype}, but the model uses {mixture.per_token} in {mixture.layers}, as {mixture.dtype}"
                    )
        batch = batch_rollouts(rollouts, max_length=max_length, experts=True)
        batch.check_experts(mixture.experts)
        return batch

    def minibatches(self, batch: RolloutBatch, step: int) -> Iterator[PackedBatch]:
        """Yield the batches of a step's updates; every epoch contains each rollout once, in a different order.

        With several training processes, the microbatches contain the rows that this process feeds.

        The loss denominator is computed over each minibatch, which is the whole batch of one update. A minibatch
        without a gradient is left out: an update would let the moments of the optimizer decay, and the next gradient
        would take a step that is several times too large. `batch` has advantages. The run's seed and `step` determine
        the assignment of rollouts to minibatches.
        """
        updates = self.config.updates
        for epoch in range(updates.epochs):
            for part in self.parts.minibatches(len(batch.ids), step, epoch):
                minibatch = batch if updates.minibatches == 1 else batch.take(part)
                if self.have_signal(minibatch).any() or (self.updates_without_signal and minibatch.loss_mask.any()):
                    yield pack_batch(
                        minibatch,
                        self.config.aggregation,
                        self.parts.layout,
                        pad_token_id=self.parts.tokenizer.pad_token_id,
                        own_rows=own_rows(self.parts.trainer),
                        ce_mask=minibatch.observation_mask if self.config.observation_loss is not None else None,
                        ref_kl_mask=minibatch.loss_mask if self.config.kl.needs_teacher else None,
                        has_router=self.parts.has_router,
                    )

    def have_signal(self, batch: RolloutBatch) -> Bool[np.ndarray, " rollouts"]:
        """Return which rollouts teach something: with an advantage that counts, or a token of another such loss."""
        gains = batch.loss_mask
        if not self.learns_without_advantages:
            # In the precision of the update.
            gains = batch.advantages.astype(np.float32) * batch.importance_weights.astype(np.float32) != 0
        if self.config.observation_loss is not None:
            gains = gains | batch.observation_mask
        return np.diff(np.append(0, np.cumsum(gains))[batch.token_offsets]) > 0

    def _score(self, inputs: StepToScore, step: int) -> tuple[RolloutBatch, Float32[np.ndarray, " tokens"] | None]:
        """Fill in reference log-probs and values; also return the learner's log-probs if they are needed."""
        batch = inputs.batch
        if self.score_reference is not None:
            # A reference chooses its own experts.
            by_reference = inputs._replace(batch=dataclasses.replace(batch, experts=None))
            batch = dataclasses.replace(batch, reference_logprobs=self.score_reference(by_reference))
        corrects = self.config.off_policy_correction.needs_sampling_logprobs
        scores_experts = self.parts.scores_experts
        if not (self.has_critic or corrects or scores_experts or self.config.rollout_store.scores_learner(step)):
            return batch, None
        scores = self.score(inputs.newest, batch)
        if scores_experts:
            batch = dataclasses.replace(batch, experts=scores.experts)
        if self.has_critic:
            batch = dataclasses.replace(batch, values=scores.values)
        return batch, scores.logprobs

    def _correct(
        self, batch: RolloutBatch, learner_logprobs: Float32[np.ndarray, " tokens"] | None
    ) -> tuple[RolloutBatch, dict[str, float] | None]:
        """Apply the off-policy correction: ratios use the learner's log-probs, and importance weights the sampler's."""
        if learner_logprobs is None or not self.config.off_policy_correction.needs_sampling_logprobs:
            return batch, None
        log_weights = (learner_logprobs.astype(np.float64) - batch.policy_logprobs)[batch.loss_mask]
        weights = self.config.off_policy_correction.weights(log_weights, batch.num_loss_tokens.tolist())
        metrics = mismatch_metrics(log_weight_statistics(log_weights), log_weights)
        metrics["mismatch/zero_share"] = float(np.mean(weights == 0))
        importance_weights = np.zeros(batch.input_ids.shape)
        importance_weights[batch.loss_mask] = weights
        corrected = dataclasses.replace(batch, policy_logprobs=learner_logprobs, importance_weights=importance_weights)
        return corrected, metrics

    def _reward_metrics(self, graded: Sequence[Rollout], k1: Sequence[ActionTokens] | None) -> dict[str, float]:
        metrics = {"objective/non_score_reward": 0.0}
        if k1 is not None:
            kl = float(np.mean([of_rollout.sum() for of_rollout in k1]))
            metrics |= {"objective/kl": kl, "objective/non_score_reward": self.config.kl.beta * kl}
        mean_score = float(np.mean([rollout.total_reward or 0.0 for rollout in graded]))
        metrics["objective/rlhf_reward"] = mean_score - metrics["objective/non_score_reward"]
        return metrics

    def _distill(
        self, distillation: DistillationConfig, batch: RolloutBatch, advantages: Sequence[TokenAdvantages]
    ) -> tuple[list[TokenAdvantages], dict[str, float]]:
        """Add the advantages of distillation to those of the task, or replace them."""
        own = distillation_advantages(batch.policy_logprobs, batch.reference_logprobs, distillation.coefficient)
        of_task = 0.0 if distillation.alone else 1.0
        distilled = [
            of_rollout._replace(advantages=of_task * of_rollout.advantages + of_tokens)
            for of_rollout, of_tokens in zip(advantages, batch.actions(own), strict=True)
        ]
        kl = -own[batch.loss_mask] / distillation.coefficient
        return distilled, {"distillation/teacher_kl": float(kl.mean())} if kl.size else {}

    def _stored_advantages(
        self,
        scored: RolloutBatch,
        learner_logprobs: Float32[np.ndarray, " tokens"] | None,
        computed: Sequence[TokenAdvantages],
    ) -> dict[str, StoredAdvantages]:
        """Build the stored data by rollout id; `scored` are the rollouts before truncated ones lost their loss mask."""
        computed_scores = {
            "learner_logprobs": learner_logprobs,
            "reference_logprobs": None if self.score_reference is None else scored.reference_logprobs,
            "values": scored.values if self.has_critic else None,
        }
        scores = {name: scored.actions(array) for name, array in computed_scores.items() if array is not None}
        stored = {}
        for index, (id, (advantages, value_targets, turn_advantages)) in enumerate(
            zip(scored.ids, computed, strict=True)
        ):
            has_loss = bool(advantages.size)
            stored[id] = StoredAdvantages(
                advantages=advantages if has_loss else None,
                value_targets=value_targets if self.has_critic and has_loss else None,
                turn_advantages=turn_advantages,
                **{name: per_rollout[index] for name, per_rollout in scores.items()},
            )
        return stored

    def _warn_if_all_masked(self, batch: RolloutBatch, step: int) -> None:
        """Log a warning with the cause and the remedy if the policy learns nothing in a step because all is masked."""
        if not batch.loss_mask.any():
            logger.warning(
                "step %d makes no update: a limit cut off all %d rollouts, and truncation: {type: mask} masks them. "
                "Raise sampling.max_new_tokens, rollouts.max_length, rollouts.max_tokens or rollouts.max_turns, or use "
                "truncation: {type: keep}, which teaches the policy to stop",
                step,
                len(batch.ids),
            )
        elif not batch.importance_weights.any():
            logger.warning(
                "step %d has no policy gradient: off_policy_correction: {type: %s} masks all %d rollouts, because "
                "learner and sampler give their tokens different probabilities (mismatch/weight_max). Find the cause, "
                "such as the precision of the sampler or old weights, or widen the bounds of off_policy_correction",
                step,
                OffPolicyCorrectionConfig.get_choice_name(type(self.config.off_policy_correction)),
                len(batch.ids),
            )


def _advantage_inputs(
    groups: Sequence[RolloutGroup], batch: RolloutBatch, penalties: Sequence[ActionTokens]
) -> list[list[AdvantageInputs]]:
    """Return the inputs of the estimator; the penalties include those of tokens that were removed from the loss."""
    values = batch.actions(batch.values.astype(np.float64))
    of_graded = zip(batch.actions(batch.turn_ids), penalties, values, strict=True)
    of_failed = np.zeros(0, np.int32), np.zeros(0), np.zeros(0)

    def inputs(rollout: Rollout) -> AdvantageInputs:
        turn_ids, penalties, values = next(of_graded) if rollout.rewards else of_failed
        # If its tokens have no loss, its return, including penalties, still counts in the baseline of the group.
        is_masked, rewards = not turn_ids.size, [turn.reward for turn in rollout.turns]
        # `Rollout` and `RolloutBatch` have checked these values, and penalties of clipped log-ratios are finite.
        return make_unchecked(
            AdvantageInputs,
            id=rollout.id,
            score=rollout.total_reward,
            turn_rewards=np.array([reward or 0.0 for reward in rewards], np.float64),
            anchors=tuple([turn.anchor_state for turn in rollout.turns]),
            turn_ids=turn_ids,
            penalties=np.zeros(0) if is_masked else penalties,
            masked_penalty=math.fsum(penalties) if is_masked else 0.0,
            values=values,
            unrewarded_turns=tuple([index for index, reward in enumerate(rewards) if reward is None]),
        )

    return [[inputs(rollout) for rollout in group.rollouts] for group in groups]


def _log_advantages(
    graded: Sequence[Rollout], scored: RolloutBatch, computed: Sequence[TokenAdvantages], *, has_critic: bool
) -> None:
    """Log the critic's values and the advantages of each turn, and the components of GiGPO advantages."""

    def text(values: np.ndarray) -> str:
        return ", ".join(f"{value:.6g}" for value in values.tolist())

    arrays = zip(graded, scored.actions(scored.turn_ids), scored.actions(scored.values), computed, strict=True)
    for rollout, turn_ids, values, (advantages, _, turn_advantages) in arrays:
        for index, turn in enumerate(rollout.turns):
            in_turn = turn_ids == index
            if has_critic:
                logger.debug("rollout %s turn %d: values [%s]", rollout.id, index, text(values[in_turn]))
            # A rollout without loss has no advantages.
            of_turn = advantages[in_turn] if advantages.size else advantages
            if turn_advantages is None:
                logger.debug("rollout %s turn %d: advantages [%s]", rollout.id, index, text(of_turn))
                continue
            episode, returns, steps = turn_advantages
            logger.debug(
                "rollout %s turn %d: anchor hash %s, return %.6g, A_E %.6g, A_S %.6g, advantage [%s]",
                rollout.id,
                index,
                turn.anchor_state,
                returns[index],
                episode,
                steps[index],
                text(of_turn[:1]),
            )


def _advantage_metrics(batch: RolloutBatch, *, has_critic: bool) -> dict[str, float]:
    """Compute statistics over the loss tokens of the batch: share of exact zeros, and population deviation."""
    advantages, targets = batch.advantages[batch.loss_mask], batch.returns[batch.loss_mask]
    values = batch.values[batch.loss_mask].astype(np.float64)
    metrics = {"critic/explained_variance": explained_variance(values, targets)} if has_critic else {}
    if has_critic and values.size:
        metrics["critic/value_mean"] = float(values.mean())
        metrics["critic/value_std"] = math.sqrt(sample_variance(values))
        metrics["critic/target_mean"] = float(targets.mean())
    if advantages.size:
        metrics["advantage/mean"] = float(advantages.mean())
        metrics["advantage/std"] = float(advantages.std())
        metrics["advantage/zero_share"] = float(np.mean(advantages == 0))
    return metrics
