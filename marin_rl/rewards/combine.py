# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From what the components said about a rollout to its rewards."""

from collections.abc import Iterable, Sequence

from marin_rl.metrics import Metric, mean, merge_all, total
from marin_rl.types import RewardResult


def failure(evaluations: Sequence[RewardResult]) -> str | None:
    """Why a rollout has no reward: a component that has no score for it; None where every one has.

    A missing score is no 0: the rollout leaves its group's baseline and carries no signal.
    """
    lost = [one for one in evaluations if one.score is None]
    return "; ".join(f"reward {one.component!r}: {one.error}" for one in lost) or None


def weighted_rewards(evaluations: Sequence[RewardResult]) -> dict[str, float]:
    """A rollout's reward by component: weight times score.

    Raises:
        ValueError: if a component has no score for it.

    >>> results = [RewardResult("correct", weight=2.0, score=1.0), RewardResult("short", weight=0.5, score=0.5)]
    >>> weighted_rewards(results)
    {'correct': 2.0, 'short': 0.25}
    """
    missing = failure(evaluations)
    if missing is not None:
        raise ValueError(f"the rollout has no reward: {missing}")
    return {one.component: one.weight * one.score for one in evaluations if one.score is not None}


def turn_rewards(evaluations: Sequence[RewardResult], turns: int) -> list[dict[str, float]]:
    """The rewards of every turn by component: weight times base reward; empty if no component gave one.

    Args:
        evaluations: what the components said about the rollout.
        turns: how many turns it has.

    Raises:
        IndexError: if a component speaks of a turn that there is not.
    """
    rewards: list[dict[str, float]] = [{} for _ in range(turns)]
    for one in evaluations:
        for step in one.steps:
            rewards[step.turn][one.component] = one.weight * step.base_reward
    return rewards


def evaluation_metrics(evaluations: Iterable[RewardResult]) -> dict[str, Metric]:
    """What components said, as metrics: `rewards/<component>/score`, and what they measured under its own name.

    The mean is over the rollouts that the component has a score for; a metric of a step counts once a step. Rollouts
    that it has none for are counted by cause, as `rewards/<component>/failed_<cause>`.
    """
    return merge_all(record for one in evaluations for record in _records(one))


def _records(one: RewardResult) -> Iterable[dict[str, Metric]]:
    measured = [one.metrics, *(step.metrics for step in one.steps)]
    scores = {f"failed_{one.lost}": total([1])} if one.score is None else {"score": mean([one.score])}
    for record in (
        *({name: mean([value]) for name, value in part.items() if not _is_reserved(name)} for part in measured),
        scores,
    ):
        yield {f"rewards/{one.component}/{name}": metric for name, metric in record.items()}


def _is_reserved(name: str) -> bool:
    # What a user measures may have any name; the component's own metrics stay what they are.
    return name == "score" or name.startswith("failed_")
