# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From the rewards of a step's groups to the batch that the learner trains on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marin_rl.batching.processed_rollout import ProcessedRollout, process_rollout
from marin_rl.batching.rl_example import RlExample, make_batch
from marin_rl.objectives.kl import kl_per_rollout
from marin_rl.runtime.training_run import TrainingRun, batch_shape
from marin_rl.timing import PhaseTimer
from marin_rl.types import RolloutGroup


class TrainingBatch(NamedTuple):
    """A step's batch, and what it was made of."""

    example: RlExample
    """The arrays."""
    advantages: Mapping[str, float]
    """Advantage by rollout id; 0 for failed rollouts, which are not in the arrays."""
    metrics: Mapping[str, float]
    """The reward signal: scores, and what the KL penalty takes from them."""


def build_batch(run: TrainingRun, groups: Sequence[RolloutGroup], timer: PhaseTimer) -> TrainingBatch:
    """Rewards to advantages to arrays.

    Failed rollouts carry no signal and are left out of the arrays.

    Args:
        run: names reference, objective and shape.
        groups: all groups of the step.
        timer: counts the phases `batch` and `reference`.
    """
    config = run.config
    with timer.phase("batch"):
        shape = batch_shape(config)
        graded = [rollout for group in groups for rollout in group.rollouts if rollout.rewards]
        processed = [
            process_rollout(rollout, length=shape.positions, pad_token_id=run.tokenizer.pad_token_id)
            for rollout in graded
        ]
    signal: dict[str, float] = {}
    scores = {rollout.id: rollout.total_reward or 0.0 for rollout in graded}
    mean_score = float(np.mean(list(scores.values())))
    penalty = np.zeros(len(graded))
    if run.reference is not None:
        with timer.phase("reference"):
            processed = run.reference.score(processed)
        kl = np.array([_rollout_kl(rollout) for rollout in processed])
        penalty = config.kl.reward_penalty(kl)
        signal["objective/kl"] = float(kl.mean())
        signal["objective/non_score_reward"] = config.kl.coefficient * float(kl.mean())
    else:
        signal["objective/non_score_reward"] = 0.0
    signal["objective/rlhf_reward"] = mean_score - signal["objective/non_score_reward"]
    with timer.phase("batch"):
        returns = {rollout.id: scores[rollout.id] - float(cost) for rollout, cost in zip(graded, penalty, strict=True)}
        advantages = _advantages(run, groups, returns)
        example = make_batch(processed, [advantages[rollout.id] for rollout in graded], config.aggregation, shape)
    return TrainingBatch(example, advantages, signal)


def _advantages(run: TrainingRun, groups: Sequence[RolloutGroup], returns: dict[str, float]) -> dict[str, float]:
    advantages: dict[str, float] = {}
    for group in groups:
        values = run.config.advantage.compute([returns.get(rollout.id) for rollout in group.rollouts])
        advantages |= {rollout.id: float(value) for rollout, value in zip(group.rollouts, values, strict=True)}
    return advantages


def _rollout_kl(rollout: ProcessedRollout) -> float:
    ids = np.zeros(rollout.input_ids.shape, np.int32)
    return float(kl_per_rollout(rollout.policy_logprobs, rollout.reference_logprobs, rollout.loss_mask, ids, 1)[0])
