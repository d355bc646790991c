# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics of a batch of rollouts, in total and per environment, and messages about its failed rollouts."""

import collections
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence

from marin_rl.types import RewardResult, Rollout, RolloutGroup, RolloutStatus, StopReason, WeightVersion

logger = logging.getLogger(__name__)


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Compute metrics of sampled rollouts. Failed rollouts count only in the status counts and shares.

    At least one rollout must be graded.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    graded = [rollout for rollout in rollouts if rollout.rewards]
    scores = [rollout.total_reward or 0.0 for rollout in graded]
    generations = [turn.generation for rollout in graded for turn in rollout.turns]
    return {
        "objective/scores": _mean(scores),
        "train/rewards": _mean(scores),
        **_components(graded),
        **_groups(groups),
        "train/output_length": _mean([rollout.num_generated_tokens for rollout in graded]),
        "val/num_eos_tokens": _count(generation.stop_reason is StopReason.STOP for generation in generations),
        "rollouts/turns": _mean([len(rollout.turns) for rollout in graded]),
        "rollouts/truncated_share": _share(rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts),
        "rollouts/failed": _count(rollout.status is RolloutStatus.FAILED for rollout in rollouts),
        "rollouts/timed_out": _count(rollout.status is RolloutStatus.TIMED_OUT for rollout in rollouts),
        "rollouts/aborted": _count(rollout.status is RolloutStatus.ABORTED for rollout in rollouts),
    }


def staleness_metrics(groups: Sequence[RolloutGroup], version: WeightVersion) -> dict[str, float]:
    """Compute the age of a step's rollouts in weight versions, over the generations of graded rollouts.

    The groups are those to train on; `version` is that of the weights before the update. Returns `staleness/*`; empty
    if no rollout is graded.
    """
    graded = [rollout for group in groups for rollout in group.rollouts if rollout.rewards]
    generations = [turn.generation for rollout in graded for turn in rollout.turns]
    if not generations:
        return {}
    ages = [version - generation.first_version for generation in generations]
    return {
        "staleness/min": float(min(ages)),
        "staleness/mean": _mean(ages),
        "staleness/max": float(max(ages)),
        "staleness/mixed_share": _share(item.first_version != item.last_version for item in generations),
    }


def reward_metrics(results: Iterable[RewardResult]) -> dict[str, float]:
    """Return the metrics of components: `rewards/<component>/score` and `rewards/<component>/<metric>`.

    Scores are averaged over the rollouts that have one; metrics of a step are averaged over steps. Rollouts without a
    score are counted by cause, as `rewards/<component>/failed_<cause>`.
    """
    values: dict[str, list[float]] = collections.defaultdict(list)
    failures: collections.Counter[str] = collections.Counter()
    for result in results:
        prefix = f"rewards/{result.component}/"
        for part in (result.metrics, *(step.metrics for step in result.steps)):
            # A user's metric must not replace the component's own metrics.
            for name, value in part.items():
                if name != "score" and not name.startswith("failed_"):
                    values[prefix + name].append(value)
        if result.score is None:
            failures[f"{prefix}failed_{result.failure}"] += 1
        else:
            values[f"{prefix}score"].append(result.score)
    means = {name: sum(of_name) / len(of_name) for name, of_name in values.items()}
    return means | {name: float(count) for name, count in failures.items()}


def environment_metrics(groups: Sequence[RolloutGroup], parts: Sequence[str]) -> dict[str, float]:
    """Compute metrics per environment.

    `parts` are the names of the environments of a mixture; empty for a single environment.

    Returns:
        `measured/<environment>/<metric>`, the mean of the environment's own metric over the graded rollouts that have
        it. For each part, `environments/<part>/share` of all rollouts and, if a rollout of the part was graded,
        `…/reward`, `…/correct` (share of correct rollouts) and `…/turns`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_environment: dict[str, list[Rollout]] = {part: [] for part in parts}
    for rollout in rollouts:
        by_environment.setdefault(rollout.task.environment, []).append(rollout)
    metrics: dict[str, float] = {}
    for name, sampled in by_environment.items():
        graded = [rollout for rollout in sampled if rollout.rewards]
        for measure in sorted({measure for rollout in graded for measure in rollout.metrics}):
            values = [rollout.metrics[measure] for rollout in graded if measure in rollout.metrics]
            metrics[f"measured/{name}/{measure}"] = _mean(values)
        if name in parts:
            metrics[f"environments/{name}/share"] = len(sampled) / max(len(rollouts), 1)
        if name in parts and graded:
            metrics[f"environments/{name}/reward"] = _mean([rollout.total_reward or 0.0 for rollout in graded])
            metrics[f"environments/{name}/correct"] = _share(map(is_correct, graded))
            metrics[f"environments/{name}/turns"] = _mean([len(rollout.turns) for rollout in graded])
    return metrics


def is_correct(rollout: Rollout) -> bool:
    """Whether the task was solved.

    That is a score of at least 1 in the component `correct`, not multiplied by a weight. Without this component it is
    the environment's metric `success`, and without this metric a total reward above 0.
    """
    score = rollout.score_of("correct")
    if score is not None:
        return score >= 1
    if "success" in rollout.metrics:
        return rollout.status.is_graded and rollout.metrics["success"] >= 1
    return (rollout.total_reward or 0.0) > 0


def is_judged(rollout: Rollout) -> bool:
    """Whether right and wrong are known, by the component `correct` or the environment's metric `success`."""
    return rollout.score_of("correct") is not None or "success" in rollout.metrics


def _components(graded: Sequence[Rollout]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in sorted({name for rollout in graded for name in rollout.rewards}):
        values = [rollout.rewards[name] for rollout in graded if name in rollout.rewards]
        metrics[f"reward/{name}/mean"] = _mean(values)
        metrics[f"reward/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        if name in ("correct", "format"):
            metrics[f"train/{name}_rewards"] = _mean(values)
    return metrics


def _groups(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    graded = [[rollout for rollout in group.rollouts if rollout.rewards] for group in groups]
    graded = [rollouts for rollouts in graded if rollouts]
    return {
        "groups/zero_spread_share": _share(len({r.total_reward for r in rollouts}) == 1 for rollouts in graded),
        "groups/all_good_share": _share(all(map(is_correct, rollouts)) for rollouts in graded),
        "groups/all_bad_share": _share(not any(map(is_correct, rollouts)) for rollouts in graded),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _count(flags: Iterable[bool]) -> float:
    return float(sum(flags))


def _share(flags: Iterable[bool]) -> float:
    return _mean(list(flags))


class FailureReports:
    """Reports each kind of failure once with an example, and again if most rollouts fail; logs the other numbers.

    Failures are of one kind if the same reward component failed for the same cause, or an environment with the same
    type of error.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        """Create it without any failure.

        `report` is called with each message for the user; the message has further lines for the user's own frames.
        """
        self._report = report
        self._known: set[tuple[str, bool]] = set()

    def add(self, when: str, groups: Sequence[RolloutGroup], consequence: str = "are not trained on") -> None:
        """Report the failed rollouts of a step or an evaluation; messages begin with `when`."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        kinds: dict[str, list[Rollout]] = collections.defaultdict(list)
        for rollout in rollouts:
            if not rollout.status.is_graded:
                kinds[_kind(rollout)].append(rollout)
        for kind, failed in kinds.items():
            numbers = f"{when}: {len(failed)} of {len(rollouts)} rollouts failed"
            key = kind, 2 * len(failed) > len(rollouts)
            if key in self._known:
                logger.info("%s (%s)", numbers, kind)
                continue
            self._known.add(key)
            first = failed[0]
            example = f"{first.id} of environment {first.task.environment!r}: {first.error}"
            self._report(f"{numbers} and {consequence}, such as {example}")


def _kind(rollout: Rollout) -> str:
    for result in rollout.evaluations:
        if result.failure is not None:
            return f"reward {result.component!r}: {result.failure}"
    # Errors of environments begin with their type.
    return f"environment {rollout.task.environment!r}: {(rollout.error or rollout.status.value).split(':')[0]:.100}"
