# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What rollouts say about each of the environments that they were played in."""

from collections.abc import Sequence

from marin_rl.metrics import Metric, mean
from marin_rl.rollouts.rollout_metrics import is_correct
from marin_rl.types import Rollout, RolloutGroup


def environment_metrics(groups: Sequence[RolloutGroup], parts: Sequence[str]) -> dict[str, Metric]:
    """Metrics per environment.

    Args:
        groups: all groups that were played.
        parts: names of the environments that are measured apart; none where there is one alone.

    Returns:
        `measured/<environment>/<metric>`, the mean of what the environment itself measured, over graded rollouts that
        have it; and for each part `environments/<part>/share` of all rollouts and, where one of its rollouts was
        graded, `…/reward`, `…/correct` (the share of right ones) and `…/turns`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_environment: dict[str, list[Rollout]] = {part: [] for part in parts}
    for rollout in rollouts:
        by_environment.setdefault(rollout.task.environment, []).append(rollout)
    metrics: dict[str, Metric] = {}
    for name, played in by_environment.items():
        graded = [rollout for rollout in played if rollout.rewards]
        for measure in sorted({measure for rollout in graded for measure in rollout.metrics}):
            values = [rollout.metrics[measure] for rollout in graded if measure in rollout.metrics]
            metrics[f"measured/{name}/{measure}"] = mean(values)
        if name in parts:
            metrics[f"environments/{name}/share"] = Metric(len(played) / max(len(rollouts), 1))
        if name in parts and graded:
            metrics[f"environments/{name}/reward"] = mean([rollout.total_reward or 0.0 for rollout in graded])
            metrics[f"environments/{name}/correct"] = mean([float(is_correct(rollout)) for rollout in graded])
            metrics[f"environments/{name}/turns"] = mean([float(len(rollout.turns)) for rollout in graded])
    return metrics
