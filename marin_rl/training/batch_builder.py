# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Advantages and training batches from the rewards of a step's rollout groups."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int32, Shaped

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.places import join
from marin_rl.batching.processed_rollout import ProcessedRollout, join_arrays, process_rollouts, without_loss
from marin_rl.batching.rl_example import OwnRows, PackedBatch, pack_batch
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.scoring import Scores
from marin_rl.objectives.advantage_inputs import (
    AdvantageInputs,
    TokenAdvantages,
    sample_variance,
    split,
)
from marin_rl.objectives.importance import OffPolicyCorrectionConfig, log_weight_statistics, mismatch_metrics
from marin_rl.objectives.kl import MAX_LOG_RATIO
from marin_rl.objectives.value_loss import explained_variance
from marin_rl.rollouts.stored_rollout import StoredAdvantages
from marin_rl.seeds import derive_seed
from marin_rl.timing import PhaseTimer
from marin_rl.types import Rollout, RolloutGroup, RolloutStatus, WeightVersion, make_unchecked

logger = logging.getLogger(__name__)

Tokens = Float64[np.ndarray, " _tokens"]


class TrainingBatch(NamedTuple):
    """The training data of a step; the sequences have one entry per rollout."""

    rollouts: Sequence[ProcessedRollout]
    """Rollouts as arrays, without failed rollouts."""
    token_advantages: Sequence[TokenAdvantages]
    """Advantages and value targets of the action tokens."""
    importance_weights: Sequence[Tokens]
    """Off-policy correction of the policy term per action token; 1 without a correction."""
    stored: Mapping[str, StoredAdvantages]
    """Data for the rollout store, by rollout id."""
    metrics: Mapping[str, float]
    """Metrics of scores, KL penalty, advantages and critic."""
    mismatch: Mapping[str, float] | None = None
    """`mismatch/*` metrics of the raw importance weights of the off-policy correction; None without a correction."""


ScoreFunction = Callable[[Any, Sequence[ProcessedRollout]], Sequence[Scores]]
"""Computes log-probs and values of rollouts under the weights of a model."""


@dataclasses.dataclass(frozen=True)
class BatchBuilder:
    """Computes the advantages and batches of a step."""

    config: TrainConfig
    """Training config."""
    layout: RowLayout
    """Shape of a microbatch."""
    pad_token_id: int
    """Token id of padding."""
    score: ScoreFunction
    """Scores rollouts with the learner's current or former weights."""
    score_reference: Callable[[Sequence[ProcessedRollout]], Sequence[Scores]] | None = None
    """Scores rollouts with the frozen reference policy; None if `kl` does not need it."""
    sampling_weights: Callable[[WeightVersion], Any] | None = None
    """Returns the former weights of a version; None if they are not kept."""
    own_rows: OwnRows | None = None
    """Returns the rows of a microbatch that this process feeds; None for all."""

    def build(self, groups: Sequence[RolloutGroup], model: Any, step: int, timer: PhaseTimer) -> TrainingBatch:
        """Compute advantages and convert rollouts to arrays.

        Args:
            groups: groups to train on; may be empty.
            model: the learner's current weights, of version `step - 1`.
            step: step that trains on the groups.
            timer: accumulates seconds of the phases `batch` and `reference`.
        """
        config = self.config
        graded = [rollout for group in groups for rollout in group.rollouts if rollout.rewards]
        if not graded:
            return TrainingBatch((), (), (), {}, {})
        with timer.phase("batch"):
            rollouts = process_rollouts(graded, max_length=config.rollouts.max_length, pad_token_id=self.pad_token_id)
        with timer.phase("reference"):
            versions = [_sampling_version(rollout, default=step - 1) for rollout in graded]
            scored, own = self._score(rollouts, model, step, versions)
            rollouts, weights, mismatch = _correct(config, scored, own)
        with timer.phase("batch"):
            k1 = None if self.score_reference is None else _k1(rollouts)
            metrics = self._reward_metrics(graded, k1)
            penalties = _constant(rollouts, 0.0) if k1 is None else [config.kl.reward_penalty(own) for own in k1]
            rollouts, weights = _mask_truncated(config, graded, rollouts, weights)
            _warn_if_all_masked(config, step, rollouts, weights)
            inputs = _advantage_inputs(graded, rollouts, penalties)
            of_graded = iter(inputs)
            grouped = [
                [next(of_graded) if r.rewards else _failed_inputs(r) for r in group.rollouts] for group in groups
            ]
            computed = itertools.chain.from_iterable(config.advantage.compute(grouped))
            attempts = (rollout for group in groups for rollout in group.rollouts)
            kept = [own for rollout, own in zip(attempts, computed, strict=True) if rollout.rewards]
            if logger.isEnabledFor(logging.DEBUG):
                for rollout, processed, token_advantages in zip(graded, scored, kept, strict=True):
                    _log_advantages(rollout, processed, token_advantages, has_critic=config.critic is not None)
            if config.critic is not None:
                metrics |= _critic_metrics(inputs, kept)
            metrics |= _advantage_metrics(kept)
            stored = self._stored_advantages(scored, own, kept)
        return TrainingBatch(rollouts, kept, weights, stored, metrics, mismatch)

    def minibatches(self, batch: TrainingBatch, step: int) -> Iterator[PackedBatch]:
        """Yield the batches of a step's updates; every epoch contains each rollout once, in a different order.

        With several training processes, the microbatches contain the rows that this process feeds.

        The loss denominator is computed over each minibatch, which is the whole batch of one update.

        Args:
            batch: training data of the step.
            step: together with the run's seed, determines the assignment of rollouts to minibatches.
        """
        updates, count = self.config.updates, len(batch.rollouts)
        for epoch in range(updates.epochs):
            order = np.arange(count)
            if updates.per_step > 1:
                seed = derive_seed(self.config.seed, "minibatches", step, epoch)
                order = np.random.default_rng(seed).permutation(count)
            for part in np.array_split(order, updates.minibatches):
                indices = sorted(part.tolist())
                if any(batch.rollouts[index].num_loss_tokens for index in indices):
                    yield pack_batch(
                        [batch.rollouts[index] for index in indices],
                        [batch.token_advantages[index] for index in indices],
                        self.config.aggregation,
                        self.layout,
                        pad_token_id=self.pad_token_id,
                        importance_weights=[batch.importance_weights[index] for index in indices],
                        own_rows=self.own_rows,
                    )

    def _score(
        self, rollouts: Sequence[ProcessedRollout], model: Any, step: int, versions: Sequence[WeightVersion]
    ) -> tuple[list[ProcessedRollout], list[Scores] | None]:
        """Fill in reference log-probs and values; also return the learner's scores if they are needed."""
        config, scored = self.config, list(rollouts)
        if self.score_reference is not None:
            scored = [
                dataclasses.replace(rollout, reference_logprobs=scores.logprobs)
                for rollout, scores in zip(scored, self.score_reference(scored), strict=True)
            ]
        stored = config.rollout_store.scores_learner(step)
        if config.critic is None and not config.off_policy_correction.needs_sampling_logprobs and not stored:
            return scored, None
        own = self._own_scores(scored, model, step, versions)
        if config.critic is not None:
            valued = self._newest_scores(scored, own, model, step, versions)
            scored = [
                dataclasses.replace(rollout, values=scores.values)
                for rollout, scores in zip(scored, valued, strict=True)
            ]
        return scored, own

    def _own_scores(
        self, rollouts: Sequence[ProcessedRollout], model: Any, step: int, versions: Sequence[WeightVersion]
    ) -> list[Scores]:
        """Score each rollout with the weights that sampled it if they are kept, otherwise with the newest weights."""
        if self.sampling_weights is None:
            return list(self.score(model, rollouts))
        own: dict[int, Scores] = {}
        for version in sorted(set(versions)):
            indices = [index for index, sampled_by in enumerate(versions) if sampled_by == version]
            weights = model if version == step - 1 else self.sampling_weights(version)
            own |= zip(indices, self.score(weights, [rollouts[index] for index in indices]), strict=True)
        return [own[index] for index in range(len(rollouts))]

    def _newest_scores(
        self,
        rollouts: Sequence[ProcessedRollout],
        own: Sequence[Scores],
        model: Any,
        step: int,
        versions: Sequence[WeightVersion],
    ) -> list[Scores]:
        """Score with the newest weights the rollouts that `own` has scored with former ones."""
        former = [index for index, version in enumerate(versions) if version != step - 1]
        if self.sampling_weights is None or not former:
            return list(own)
        newest = dict(enumerate(own))
        newest |= zip(former, self.score(model, [rollouts[index] for index in former]), strict=True)
        return list(newest.values())

    def _reward_metrics(self, graded: Sequence[Rollout], k1: Sequence[Tokens] | None) -> dict[str, float]:
        metrics = {"objective/non_score_reward": 0.0}
        if k1 is not None:
            kl = float(np.mean([own.sum() for own in k1]))
            metrics |= {"objective/kl": kl, "objective/non_score_reward": self.config.kl.beta * kl}
        mean_score = float(np.mean([rollout.total_reward or 0.0 for rollout in graded]))
        metrics["objective/rlhf_reward"] = mean_score - metrics["objective/non_score_reward"]
        return metrics

    def _stored_advantages(
        self, scored: Sequence[ProcessedRollout], own: Sequence[Scores] | None, kept: Sequence[TokenAdvantages]
    ) -> dict[str, StoredAdvantages]:
        """Build the stored data by rollout id; `scored` are the rollouts before truncated ones lost their loss mask."""
        has_critic = self.config.critic is not None
        not_computed: list[None] = [None] * len(scored)
        scores = zip(
            not_computed if own is None else _split_actions(scored, _learner_logprobs(own)),
            not_computed if self.score_reference is None else _actions(scored, "reference_logprobs"),
            _actions(scored, "values") if has_critic else not_computed,
            strict=True,
        )
        stored = {}
        for rollout, (learner, reference, values), token_advantages in zip(scored, scores, kept, strict=True):
            has_loss = bool(token_advantages.advantages.size)
            stored[rollout.id] = StoredAdvantages(
                advantages=token_advantages.advantages if has_loss else None,
                learner_logprobs=learner,
                reference_logprobs=reference,
                values=values,
                value_targets=token_advantages.value_targets if has_critic and has_loss else None,
                turn_advantages=token_advantages.turn_advantages,
            )
        return stored


def _sampling_version(rollout: Rollout, default: WeightVersion) -> WeightVersion:
    """Return the weight version of a rollout; a worker does not change its weights while a rollout is running."""
    return rollout.turns[0].generation.first_version if rollout.turns else default


def _correct(
    config: TrainConfig, rollouts: list[ProcessedRollout], own: list[Scores] | None
) -> tuple[list[ProcessedRollout], list[Tokens], dict[str, float] | None]:
    """Apply the off-policy correction: ratios use the learner's log-probs, and importance weights the sampler's."""
    if own is None or not config.off_policy_correction.needs_sampling_logprobs:
        return rollouts, _constant(rollouts, 1.0), None
    difference = _learner_logprobs(own).astype(np.float64) - join_arrays(rollouts, "policy_logprobs")
    log_weights = _split_actions(rollouts, difference)
    weights = config.off_policy_correction.weights(log_weights)
    metrics = mismatch_metrics(log_weight_statistics(log_weights), log_weights)
    metrics["mismatch/zero_share"] = float(np.mean(np.concatenate(weights) == 0))
    corrected = [
        dataclasses.replace(rollout, policy_logprobs=scores.logprobs)
        for rollout, scores in zip(rollouts, own, strict=True)
    ]
    return corrected, weights, metrics


def _constant(rollouts: Sequence[ProcessedRollout], value: float) -> list[Tokens]:
    counts = [rollout.num_loss_tokens for rollout in rollouts]
    return split(np.full(sum(counts), value), counts)


def _learner_logprobs(own: Sequence[Scores]) -> Float32[np.ndarray, " positions"]:
    return join([scores.logprobs for scores in own], np.float32)


def _split_actions(
    rollouts: Sequence[ProcessedRollout], joined: Shaped[np.ndarray, " positions"]
) -> list[Shaped[np.ndarray, " _tokens"]]:
    """Return the action tokens of each rollout, from joined arrays of all."""
    return split(joined[join_arrays(rollouts, "loss_mask")], [rollout.num_loss_tokens for rollout in rollouts])


def _actions(rollouts: Sequence[ProcessedRollout], name: str) -> list[Shaped[np.ndarray, " _tokens"]]:
    """Return one array of each rollout at its action tokens."""
    return _split_actions(rollouts, join_arrays(rollouts, name))


def _mask_truncated(
    config: TrainConfig, graded: Sequence[Rollout], rollouts: Sequence[ProcessedRollout], weights: Sequence[Tokens]
) -> tuple[list[ProcessedRollout], list[Tokens]]:
    """Remove the loss of truncated rollouts if configured; called after scoring, because their KL is still measured."""
    cut_off = [config.truncation.masks and rollout.status is RolloutStatus.TRUNCATED for rollout in graded]
    return (
        [without_loss(rollout) if cut else rollout for rollout, cut in zip(rollouts, cut_off, strict=True)],
        [np.zeros(0) if cut else kept for kept, cut in zip(weights, cut_off, strict=True)],
    )


def _warn_if_all_masked(
    config: TrainConfig, step: int, rollouts: Sequence[ProcessedRollout], weights: Sequence[Tokens]
) -> None:
    """Log a warning with the cause and the remedy if the policy learns nothing in a step because all is masked."""
    if not any(rollout.num_loss_tokens for rollout in rollouts):
        logger.warning(
            "step %d makes no update: a limit cut off all %d rollouts, and truncation: {type: mask} masks them. Raise "
            "sampling.max_new_tokens, rollouts.max_length, rollouts.max_tokens or rollouts.max_turns, or use "
            "truncation: {type: keep}, which teaches the policy to stop",
            step,
            len(rollouts),
        )
    elif not any(own.any() for own in weights):
        logger.warning(
            "step %d has no policy gradient: off_policy_correction: {type: %s} masks all %d rollouts, because learner "
            "and sampler give their tokens different probabilities (mismatch/weight_max). Find the cause, such as the "
            "precision of the sampler or old weights, or widen the bounds of off_policy_correction",
            step,
            OffPolicyCorrectionConfig.get_choice_name(type(config.off_policy_correction)),
            len(rollouts),
        )


def _k1(rollouts: Sequence[ProcessedRollout]) -> list[Tokens]:
    policy = join_arrays(rollouts, "policy_logprobs").astype(np.float64)
    difference = policy - join_arrays(rollouts, "reference_logprobs")
    return _split_actions(rollouts, difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _advantage_inputs(
    graded: Sequence[Rollout], rollouts: Sequence[ProcessedRollout], penalties: Sequence[Tokens]
) -> list[AdvantageInputs]:
    values = _split_actions(rollouts, join_arrays(rollouts, "values").astype(np.float64))
    arrays = zip(_actions(rollouts, "turn_ids"), penalties, values, strict=True)
    return [_inputs(rollout, *own) for rollout, own in zip(graded, arrays, strict=True)]


def _inputs(
    rollout: Rollout, turn_ids: Int32[np.ndarray, " tokens"], penalties: Tokens, values: Tokens
) -> AdvantageInputs:
    score, rewards = rollout.total_reward, [turn.reward for turn in rollout.turns]
    assert score is not None
    # If its tokens have no loss, its return, including penalties, still counts in the baseline of the group.
    is_masked = not turn_ids.size
    # `Rollout` and `ProcessedRollout` have checked these values, and penalties of clipped log-ratios are finite.
    return make_unchecked(
        AdvantageInputs,
        id=rollout.id,
        score=score,
        turn_rewards=np.array([reward or 0.0 for reward in rewards], np.float64),
        anchors=tuple([turn.anchor_state for turn in rollout.turns]),
        turn_ids=turn_ids,
        penalties=np.zeros(0) if is_masked else penalties,
        masked_penalty=math.fsum(penalties) if is_masked else 0.0,
        values=values,
        unrewarded_turns=tuple([index for index, reward in enumerate(rewards) if reward is None]),
    )


def _log_advantages(
    rollout: Rollout, scored: ProcessedRollout, token_advantages: TokenAdvantages, *, has_critic: bool
) -> None:
    """Log the critic's values and the advantages of each turn, and the components of GiGPO advantages."""
    tokens, values = scored.turn_ids[scored.loss_mask], scored.values[scored.loss_mask]
    for index, turn in enumerate(rollout.turns):
        own = tokens == index
        if has_critic:
            logger.debug("rollout %s turn %d: values [%s]", rollout.id, index, _format(values[own]))
        # A rollout without loss has no advantages.
        advantages = (
            token_advantages.advantages[own] if token_advantages.advantages.size else token_advantages.advantages
        )
        if token_advantages.turn_advantages is None:
            logger.debug("rollout %s turn %d: advantages [%s]", rollout.id, index, _format(advantages))
            continue
        episode, returns, steps = token_advantages.turn_advantages
        logger.debug(
            "rollout %s turn %d: anchor hash %s, return %.6g, A_E %.6g, A_S %.6g, advantage [%s]",
            rollout.id,
            index,
            turn.anchor_state,
            returns[index],
            episode,
            steps[index],
            _format(advantages[:1]),
        )


def _format(values: np.ndarray) -> str:
    return ", ".join(f"{value:.6g}" for value in values.tolist())


def _failed_inputs(rollout: Rollout) -> AdvantageInputs:
    return AdvantageInputs(
        id=rollout.id,
        score=None,
        turn_rewards=np.zeros(len(rollout.turns)),
        anchors=tuple(turn.anchor_state for turn in rollout.turns),
        turn_ids=np.zeros(0, np.int32),
        penalties=np.zeros(0),
        values=np.zeros(0),
    )


def _advantage_metrics(kept: Sequence[TokenAdvantages]) -> dict[str, float]:
    """Compute mean, population standard deviation and share of exact zeros over the loss tokens of the batch."""
    advantages = np.concatenate([token_advantages.advantages for token_advantages in kept])
    if not advantages.size:
        return {}
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
        "advantage/zero_share": float(np.mean(advantages == 0)),
    }


def _critic_metrics(inputs: Sequence[AdvantageInputs], kept: Sequence[TokenAdvantages]) -> dict[str, float]:
    values = np.concatenate([rollout.values for rollout in inputs])
    targets = np.concatenate([token_advantages.value_targets for token_advantages in kept])
    metrics = {"critic/explained_variance": explained_variance(values, targets)}
    if values.size:
        metrics["critic/value_mean"] = float(values.mean())
        metrics["critic/value_std"] = math.sqrt(sample_variance(values))
        metrics["critic/target_mean"] = float(targets.mean())
    return metrics
