# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From the rewards of a step's groups to the batches that the learner trains on."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from marin_rl.batching.processed_rollout import ProcessedRollout, process_rollout, without_loss
from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.learner.scoring import Scores
from marin_rl.objectives.advantage_inputs import AdvantageInputs, TokenAdvantages
from marin_rl.objectives.dispersion import sample_variance
from marin_rl.objectives.importance import log_weight_statistics, mismatch_metrics
from marin_rl.objectives.kl import MAX_LOG_RATIO
from marin_rl.objectives.value_loss import explained_variance
from marin_rl.rollouts.stored_rollout import StoredAdvantages
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.seeds import derive_seed
from marin_rl.timing import PhaseTimer
from marin_rl.types import Rollout, RolloutGroup, RolloutStatus, WeightVersion

logger = logging.getLogger(__name__)

Tokens = Float64[np.ndarray, " _tokens"]


class TrainingBatch(NamedTuple):
    """Everything that a step trains on, rollout by rollout."""

    rollouts: Sequence[ProcessedRollout]
    """As arrays; failed rollouts carry no signal and are not among them."""
    token_advantages_list: Sequence[TokenAdvantages]
    """Advantages and value targets of their action tokens."""
    importance_weights: Sequence[Tokens]
    """What corrects the policy term of each action token for the sampler; 1 without a correction."""
    signals: Mapping[str, StoredAdvantages]
    """What is stored about each of them, by rollout id."""
    metrics: Mapping[str, float]
    """The reward signal: scores, what the KL penalty takes from them, advantages, and how good the critic was."""
    mismatch: Mapping[str, float] | None = None
    """`mismatch/*` of the raw importance weights that a correction uses; None without one."""


def build_batch(run: TrainingRun, groups: Sequence[RolloutGroup], timer: PhaseTimer) -> TrainingBatch:
    """Rewards to advantages to arrays.

    Args:
        run: names reference, critic and objective.
        groups: the groups to train on; none where the filter left none.
        timer: counts the phases `batch` and `reference`.
    """
    graded = [rollout for group in groups for rollout in group.rollouts if rollout.rewards]
    if not graded:
        return TrainingBatch((), (), (), {}, {})
    with timer.phase("batch"):
        rollouts = [_process(run, rollout) for rollout in graded]
    with timer.phase("reference"):
        scored, own = _score(run, rollouts, [_sampled_by(run, rollout) for rollout in graded])
        rollouts, weights, mismatch = _correct(run, (scored, own))
    with timer.phase("batch"):
        penalties = [run.config.kl.reward_penalty(_k1(rollout)) for rollout in rollouts]
        metrics = _reward_metrics(run, graded, rollouts)
        rollouts, weights = _mask_truncated(run, graded, rollouts, weights)
        signals = {
            rollout.id: _signal(rollout, processed, penalty)
            for rollout, processed, penalty in zip(graded, rollouts, penalties, strict=True)
        }
        grouped = [[signals[r.id] if r.rewards else _failed(r) for r in group.rollouts] for group in groups]
        computed = run.config.advantage.compute(grouped)
        token_advantages_list = {
            signal.id: token_advantages
            for members, given in zip(grouped, computed, strict=True)
            for signal, token_advantages in zip(members, given, strict=True)
        }
        if logger.isEnabledFor(logging.DEBUG):
            for rollout, own_scores in zip(graded, scored, strict=True):
                _log_advantages(
                    rollout, own_scores, token_advantages_list[rollout.id], has_critic=run.config.critic is not None
                )
        metrics |= _critic_metrics(run, list(signals.values()), [token_advantages_list[r.id] for r in graded])
        kept = [token_advantages_list[r.id] for r in graded]
        metrics |= _advantage_metrics(kept)
        stored = _stored_signals(run, scored, own, kept)
    return TrainingBatch(rollouts, kept, weights, stored, metrics, mismatch)


def minibatches(run: TrainingRun, batch: TrainingBatch, step: int) -> Iterator[PackedBatch]:
    """The batches of a step's updates: in every epoch each rollout once, in an order of its own.

    Denominators are counted over each minibatch, which is the whole batch of its update.

    Args:
        run: names epochs, minibatches, aggregation and the shape of a pass.
        batch: what the step trains on.
        step: with the run's seed, decides which rollout is in which minibatch.
    """
    updates, count = run.config.updates, len(batch.rollouts)
    for epoch in range(updates.epochs):
        order = np.arange(count)
        if updates.per_step > 1:
            order = np.random.default_rng(derive_seed(run.config.seed, "minibatches", step, epoch)).permutation(count)
        for part in np.array_split(order, updates.minibatches):
            chosen = sorted(part.tolist())
            if any(batch.rollouts[index].num_loss_tokens for index in chosen):
                yield pack_batch(
                    [batch.rollouts[index] for index in chosen],
                    [batch.token_advantages_list[index] for index in chosen],
                    run.config.aggregation,
                    run.config.row_layout(run.trainer),
                    pad_token_id=run.tokenizer.pad_token_id,
                    importance_weights=[batch.importance_weights[index] for index in chosen],
                )


def _process(run: TrainingRun, rollout: Rollout) -> ProcessedRollout:
    return process_rollout(rollout, length=run.config.rollouts.max_length, pad_token_id=run.tokenizer.pad_token_id)


def _score(
    run: TrainingRun, rollouts: Sequence[ProcessedRollout], versions: Sequence[WeightVersion]
) -> tuple[list[ProcessedRollout], list[Scores] | None]:
    """Reference log-probs and values filled in; what the learner itself says, where anybody asks."""
    scored = list(rollouts)
    if run.reference is not None:
        reference = run.scorer.score(run.reference, scored)
        scored = [
            dataclasses.replace(rollout, reference_logprobs=scores.logprobs)
            for rollout, scores in zip(scored, reference, strict=True)
        ]
    stored = run.config.rollout_store.scores_learner(run.progress.step + 1)
    if run.config.critic is None and not run.config.off_policy_correction.needs_sampling_logprobs and not stored:
        return scored, None
    own = _own_scores(run, scored, versions)
    if run.config.critic is not None:
        valued = own if run.history is None else run.scorer.score(run.state.model, scored)
        scored = [
            dataclasses.replace(rollout, values=scores.values) for rollout, scores in zip(scored, valued, strict=True)
        ]
    return scored, own


def _own_scores(
    run: TrainingRun, rollouts: Sequence[ProcessedRollout], versions: Sequence[WeightVersion]
) -> list[Scores]:
    """What the learner says of each rollout: with the weights that sampled it where they are kept, or the newest."""
    if run.history is None:
        return run.scorer.score(run.state.model, rollouts)
    own: dict[int, Scores] = {}
    for version in sorted(set(versions)):
        chosen = [index for index, sampled_by in enumerate(versions) if sampled_by == version]
        model = run.state.model if version == run.progress.step else run.history.get(version)
        own |= zip(chosen, run.scorer.score(model, [rollouts[index] for index in chosen]), strict=True)
    return [own[index] for index in range(len(rollouts))]


def _sampled_by(run: TrainingRun, rollout: Rollout) -> WeightVersion:
    """The weights behind a rollout; a worker keeps the same ones until all that it began is whole."""
    return rollout.turns[0].generation.first_version if rollout.turns else run.progress.step


def _correct(
    run: TrainingRun, scored: tuple[list[ProcessedRollout], list[Scores] | None]
) -> tuple[list[ProcessedRollout], list[Tokens], dict[str, float] | None]:
    """With a mismatch correction, ratios start from the learner's own log-probs, and weights make up for the rest."""
    rollouts, own = scored
    if own is None or not run.config.off_policy_correction.needs_sampling_logprobs:
        return rollouts, [np.ones(rollout.num_loss_tokens) for rollout in rollouts], None
    log_weights = [
        (scores.logprobs.astype(np.float64) - rollout.policy_logprobs)[rollout.loss_mask]
        for rollout, scores in zip(rollouts, own, strict=True)
    ]
    weights = run.config.off_policy_correction.weights(log_weights)
    metrics = mismatch_metrics(log_weight_statistics(log_weights), log_weights)
    corrected = [
        dataclasses.replace(rollout, policy_logprobs=scores.logprobs)
        for rollout, scores in zip(rollouts, own, strict=True)
    ]
    return corrected, weights, metrics


def _mask_truncated(
    run: TrainingRun, graded: Sequence[Rollout], rollouts: Sequence[ProcessedRollout], weights: Sequence[Tokens]
) -> tuple[list[ProcessedRollout], list[Tokens]]:
    """Without loss on truncated rollouts, where the config says so; after scoring, because their KL counts anyway."""
    cut_off = [run.config.truncation.masks and rollout.status is RolloutStatus.TRUNCATED for rollout in graded]
    return (
        [without_loss(rollout) if cut else rollout for rollout, cut in zip(rollouts, cut_off, strict=True)],
        [np.zeros(0) if cut else own for own, cut in zip(weights, cut_off, strict=True)],
    )


def _stored_signals(
    run: TrainingRun,
    scored: Sequence[ProcessedRollout],
    own: Sequence[Scores] | None,
    token_advantages_list: Sequence[TokenAdvantages],
) -> dict[str, StoredAdvantages]:
    """By rollout id, what the store keeps; the scored rollouts still have all their loss."""
    learner = [None] * len(scored) if own is None else [scores.logprobs for scores in own]
    return {
        rollout.id: StoredAdvantages(
            advantages=token_advantages.advantages if token_advantages.advantages.size else None,
            learner_logprobs=None if logprobs is None else logprobs[rollout.loss_mask],
            reference_logprobs=None if run.reference is None else rollout.reference_logprobs[rollout.loss_mask],
            values=None if run.config.critic is None else rollout.values[rollout.loss_mask],
            value_targets=None
            if run.config.critic is None or not token_advantages.advantages.size
            else token_advantages.value_targets,
            of_turns=token_advantages.of_turns,
        )
        for rollout, logprobs, token_advantages in zip(scored, learner, token_advantages_list, strict=True)
    }


def _k1(rollout: ProcessedRollout) -> Tokens:
    difference = rollout.policy_logprobs.astype(np.float64) - rollout.reference_logprobs
    return np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)[rollout.loss_mask]


def _signal(rollout: Rollout, processed: ProcessedRollout, penalties: Tokens) -> AdvantageInputs:
    mask, score = processed.loss_mask, rollout.total_reward
    assert score is not None
    if not mask.any():
        # No token of it is trained on, but the others are compared with it: with its return, penalties included.
        score, penalties = score - math.fsum(penalties), np.zeros(0)
    return AdvantageInputs(
        id=rollout.id,
        score=score,
        turn_rewards=np.array([turn.reward or 0.0 for turn in rollout.turns], np.float64),
        anchors=tuple(turn.anchor_state for turn in rollout.turns),
        turn_ids=processed.turn_ids[mask],
        penalties=penalties,
        values=processed.values[mask].astype(np.float64),
        unrewarded_turns=tuple(index for index, turn in enumerate(rollout.turns) if turn.reward is None),
    )


def _log_advantages(
    rollout: Rollout, scored: ProcessedRollout, token_advantages: TokenAdvantages, *, has_critic: bool
) -> None:
    """The critic's values and the advantages of each turn, and the parts that GiGPO's advantages are made of."""
    tokens, values = scored.turn_ids[scored.loss_mask], scored.values[scored.loss_mask]
    for index, turn in enumerate(rollout.turns):
        own = tokens == index
        if has_critic:
            logger.debug("rollout %s turn %d: values [%s]", rollout.id, index, _listed(values[own]))
        # Without advantages no token of it is trained on.
        advantages = (
            token_advantages.advantages[own] if token_advantages.advantages.size else token_advantages.advantages
        )
        if token_advantages.of_turns is None:
            logger.debug("rollout %s turn %d: advantages [%s]", rollout.id, index, _listed(advantages))
            continue
        episode, returns, steps = token_advantages.of_turns
        logger.debug(
            "rollout %s turn %d: anchor hash %s, return %.6g, A_E %.6g, A_S %.6g, advantage [%s]",
            rollout.id,
            index,
            turn.anchor_state,
            returns[index],
            episode,
            steps[index],
            _listed(advantages[:1]),
        )


def _listed(values: np.ndarray) -> str:
    return ", ".join(f"{value:.6g}" for value in values.tolist())


def _failed(rollout: Rollout) -> AdvantageInputs:
    nothing = np.zeros(0)
    return AdvantageInputs(
        id=rollout.id,
        score=None,
        turn_rewards=np.zeros(len(rollout.turns)),
        anchors=tuple(turn.anchor_state for turn in rollout.turns),
        turn_ids=np.zeros(0, np.int32),
        penalties=nothing,
        values=nothing,
    )


def _reward_metrics(
    run: TrainingRun, graded: Sequence[Rollout], rollouts: Sequence[ProcessedRollout]
) -> dict[str, float]:
    metrics = {"objective/non_score_reward": 0.0}
    if run.reference is not None:
        kl = float(np.mean([_k1(rollout).sum() for rollout in rollouts]))
        metrics |= {"objective/kl": kl, "objective/non_score_reward": run.config.kl.coefficient * kl}
    mean_score = float(np.mean([rollout.total_reward or 0.0 for rollout in graded]))
    metrics["objective/rlhf_reward"] = mean_score - metrics["objective/non_score_reward"]
    return metrics


def _advantage_metrics(token_advantages_list: Sequence[TokenAdvantages]) -> dict[str, float]:
    """Mean, population standard deviation and share of exact zeros, over the loss tokens of the batch."""
    advantages = np.concatenate([token_advantages.advantages for token_advantages in token_advantages_list])
    if not advantages.size:
        return {}
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
        "advantage/zero_share": float(np.mean(advantages == 0)),
    }


def _critic_metrics(
    run: TrainingRun, signals: Sequence[AdvantageInputs], token_advantages_list: Sequence[TokenAdvantages]
) -> dict[str, float]:
    if run.config.critic is None:
        return {}
    values = np.concatenate([signal.values for signal in signals])
    targets = np.concatenate([token_advantages.value_targets for token_advantages in token_advantages_list])
    metrics = {"critic/explained_variance": explained_variance(values, targets)}
    if values.size:
        metrics["critic/value_mean"] = float(values.mean())
        metrics["critic/value_std"] = math.sqrt(sample_variance(values))
        metrics["critic/target_mean"] = float(targets.mean())
    return metrics
