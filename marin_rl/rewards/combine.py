# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Combination of component results into the rewards of a rollout."""

from collections.abc import Iterable, Sequence

from marin_rl.metrics import Metric, mean, merge_all, total
from marin_rl.types import RewardResult


def failure(results: Sequence[RewardResult]) -> str | None:
    """Return the reason for which a rollout has no reward, or None if every component has a score for it.

    A missing score does not count as 0: the rollout is excluded from its group's baseline and from training.
    """
    failed = [result for result in results if result.score is None]
    return "; ".join(f"reward {result.component!r}: {result.error}" for result in failed) or None


def weighted_rewards(results: Sequence[RewardResult]) -> dict[str, float]:
    """Return the rewards of a rollout by component: weight times score.

    Raises:
        ValueError: if a component has no score for the rollout.

    >>> results = [RewardResult("correct", weight=2.0, score=1.0), RewardResult("short", weight=0.5, score=0.5)]
    >>> weighted_rewards(results)
    {'correct': 2.0, 'short': 0.25}
    """
    missing = failure(results)
    if missing is not None:
        raise ValueError(f"the rollout has no reward: {missing}")
    return {result.component: result.weight * result.score for result in results if result.score is not None}


def turn_rewards(results: Sequence[RewardResult], turns: int) -> list[dict[str, float]]:
    """Return the rewards of each turn by component: weight times base reward; empty for turns without step rewards.

    Args:
        results: results of the components for the rollout.
        turns: number of turns of the rollout.

    Raises:
        IndexError: if a result refers to a turn that does not exist.
    """
    rewards: list[dict[str, float]] = [{} for _ in range(turns)]
    for result in results:
        for step in result.steps:
            rewards[step.turn][result.component] = result.weight * step.base_reward
    return rewards


def evaluation_metrics(results: Iterable[RewardResult]) -> dict[str, Metric]:
    """Return the metrics of components: `rewards/<component>/score` and `rewards/<component>/<metric>`.

    Scores are averaged over the rollouts that have one; metrics of a step are averaged over steps. Rollouts without a
    score are counted by cause, as `rewards/<component>/failed_<cause>`.
    """
    return merge_all(record for result in results for record in _records(result))


def _records(result: RewardResult) -> Iterable[dict[str, Metric]]:
    measured = [result.metrics, *(step.metrics for step in result.steps)]
    scores = {f"failed_{result.failure}": total([1])} if result.score is None else {"score": mean([result.score])}
    for record in (
        *({name: mean([value]) for name, value in part.items() if not _is_reserved(name)} for part in measured),
        scores,
    ):
        yield {f"rewards/{result.component}/{name}": metric for name, metric in record.items()}


def _is_reserved(name: str) -> bool:
    # A user's metric must not replace the component's own metrics.
    return name == "score" or name.startswith("failed_")
