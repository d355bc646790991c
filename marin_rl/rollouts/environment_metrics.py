# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics of rollouts per environment."""

from collections.abc import Sequence

from marin_rl.metrics import Metric, mean
from marin_rl.rollouts.rollout_metrics import is_correct
from marin_rl.types import Rollout, RolloutGroup


def environment_metrics(groups: Sequence[RolloutGroup], parts: Sequence[str]) -> dict[str, Metric]:
    """Compute metrics per environment.

    Args:
        groups: all sampled groups.
        parts: names of the environments of a mixture; empty for a single environment.

    Returns:
        `measured/<environment>/<metric>`, the mean of the environment's own metric over the graded rollouts that have
        it. For each part, `environments/<part>/share` of all rollouts and, if a rollout of the part was graded,
        `…/reward`, `…/correct` (share of correct rollouts) and `…/turns`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_environment: dict[str, list[Rollout]] = {part: [] for part in parts}
    for rollout in rollouts:
        by_environment.setdefault(rollout.task.environment, []).append(rollout)
    metrics: dict[str, Metric] = {}
    for name, sampled in by_environment.items():
        graded = [rollout for rollout in sampled if rollout.rewards]
        for measure in sorted({measure for rollout in graded for measure in rollout.metrics}):
            values = [rollout.metrics[measure] for rollout in graded if measure in rollout.metrics]
            metrics[f"measured/{name}/{measure}"] = mean(values)
        if name in parts:
            metrics[f"environments/{name}/share"] = Metric(len(sampled) / max(len(rollouts), 1))
        if name in parts and graded:
            metrics[f"environments/{name}/reward"] = mean([rollout.total_reward or 0.0 for rollout in graded])
            metrics[f"environments/{name}/correct"] = mean([float(is_correct(rollout)) for rollout in graded])
            metrics[f"environments/{name}/turns"] = mean([float(len(rollout.turns)) for rollout in graded])
    return metrics
