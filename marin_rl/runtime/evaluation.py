# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Held-out accuracy; changes no parameter."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from marin_rl.batching.processed_rollout import ProcessedRollout, process_demonstration
from marin_rl.environments.base import Split, can_demonstrate, demonstration
from marin_rl.learner.scoring import Scores
from marin_rl.metrics import mean
from marin_rl.objectives.pass_at_k import pass_at_k
from marin_rl.rollouts.rollout_metrics import is_correct
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_groups
from marin_rl.types import RolloutGroup, Task


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How held-out accuracy is measured."""

    every: int = 50
    """Evaluate after every so many steps, and before and after RL. 0: only before and after."""
    tasks: int = 512
    """Held-out tasks to evaluate on, of each environment: the first so many, always the same. 0: never evaluate."""
    samples: int = 1
    """Attempts at each task at the sampling temperature; pass@k needs at least k."""
    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k."""
    greedy: bool = True
    """Also make one attempt at each task at temperature 0."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("tasks", 0), ("samples", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"evaluation.{name} is {getattr(self, name)}; it must be at least {least}")
        for k in self.pass_at:
            if not 1 <= k <= self.samples:
                raise ValueError(
                    f"evaluation.pass_at asks for k = {k} with evaluation.samples = {self.samples}; "
                    "k must be between 1 and the number of samples"
                )

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after this step, the last one being number `num_steps`.

        >>> [step for step in range(1, 6) if EvaluationConfig(every=2).is_due(step, 5)]
        [2, 4, 5]
        """
        return self.tasks > 0 and (step == num_steps or (self.every > 0 and step % self.every == 0))


Keep = Callable[[Sequence[RolloutGroup]], None]
"""Takes all groups that an evaluation played."""


def forget(groups: Sequence[RolloutGroup]) -> None:
    """Nobody wants the rollouts, only what they come to."""


def evaluate(
    runner: RolloutRunner,
    config: EvaluationConfig,
    *,
    temperature: float,
    seed: int,
    split: Split = Split.HELD_OUT,
    keep: Keep = forget,
) -> dict[str, float]:
    """Accuracy on held-out tasks, per environment.

    The same tasks and sampling seeds every time, so that two evaluations differ by the weights alone.
    A rollout that fails counts as wrong.

    Args:
        runner: plays the tasks; its sampler holds the weights that are evaluated.
        config: how many tasks and samples.
        temperature: of the sampled attempts; above 0.
        seed: the run's seed.
        split: which tasks.
        keep: is given the rollouts, sampled ones first.

    Returns:
        `eval/<environment>/accuracy_sampled`, `…/accuracy_greedy`, `…/pass@k` for each k, and the number
        of tasks as `…/tasks`.

    Raises:
        ValueError: if the split has no tasks, or none of them are asked for.
    """
    if config.tasks == 0:
        raise ValueError("evaluation.tasks is 0, so that nothing is evaluated; say how many, as --evaluation.tasks 512")
    tasks = first_of_each(runner.environment.tasks(split), config.tasks, runner)
    if not tasks:
        raise ValueError(
            f"environment {runner.environment.name!r} has no {split.value} tasks to evaluate on; "
            f"give it some (environment.{split.value})"
        )
    name = f"evaluate-{split.value}"
    sampled = run_groups(
        runner, tasks, group_size=config.samples, temperature=temperature, seed_parts=(seed, name, "sampled")
    )
    greedy: list[RolloutGroup] = []
    metrics: dict[str, float] = {}
    for environment, groups in _by_environment(sampled).items():
        prefix = f"eval/{environment}"
        metrics[f"{prefix}/tasks"] = float(len(groups))
        metrics[f"{prefix}/accuracy_sampled"] = _accuracy(groups)
        for k in config.pass_at:
            correct = [sum(map(is_correct, group.rollouts)) for group in groups]
            metrics[f"{prefix}/pass@{k}"] = mean(pass_at_k(config.samples, number, k) for number in correct).value
    if config.greedy:
        greedy = run_groups(runner, tasks, group_size=1, temperature=0.0, seed_parts=(seed, name, "greedy"))
        for environment, groups in _by_environment(greedy).items():
            metrics[f"eval/{environment}/accuracy_greedy"] = _accuracy(groups)
    keep([*sampled, *greedy])
    return metrics


def reference_loss(
    runner: RolloutRunner, tasks: Sequence[Task], score: Callable[[Sequence[ProcessedRollout]], Sequence[Scores]]
) -> dict[str, float]:
    """Negative log-likelihood of reference answers, per environment: `-Σ log π(token) / number of tokens`.

    A reference answer is a task's worked answer or the environment's demonstration, whose replies count and whose
    observations do not. Its tokens are those of an episode in which the policy gives these replies, each reply's end
    included, so the chat template needs no generation blocks. Sums run over the tokens of all tasks.

    Args:
        runner: names environment, tokenizer and the longest sequence.
        tasks: any; those without a reference answer, or with one that does not fit, are left out.
        score: log-probabilities (nats) at temperature 1 under the weights that are evaluated.

    Returns:
        `eval/<environment>/loss` (nats per token) and `eval/<environment>/loss_tokens`; nothing for an environment
        without reference answers.
    """
    examples: dict[str, list[ProcessedRollout]] = {}
    for task in tasks:
        if not can_demonstrate(runner.environment, task):
            continue
        example = process_demonstration(
            demonstration(runner.environment, task), task, length=runner.limits.max_length, tokenizer=runner.tokenizer
        )
        if example is not None:
            examples.setdefault(task.environment, []).append(example)
    metrics: dict[str, float] = {}
    for environment, given in examples.items():
        total = math.fsum(float(scores.logprobs.sum(dtype=np.float64)) for scores in score(given))
        tokens = sum(example.num_loss_tokens for example in given)
        metrics[f"eval/{environment}/loss"] = -total / tokens
        metrics[f"eval/{environment}/loss_tokens"] = float(tokens)
    return metrics


def describe_accuracy(evaluation: Mapping[str, float]) -> str:
    """One line about what `evaluate` measured.

    >>> describe_accuracy({"eval/sums/tasks": 8.0, "eval/sums/accuracy_sampled": 0.25})
    'held-out sums/accuracy_sampled 0.250'
    """
    parts = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in evaluation.items() if "accuracy" in name]
    return "held-out " + ", ".join(parts)


def first_of_each(tasks: Sequence[Task], count: int, runner: RolloutRunner) -> list[Task]:
    """The first tasks of every environment, in their order, without those whose long prompts are to be skipped.

    Args:
        tasks: of one environment or several.
        count: most tasks of each.
        runner: its limits and tokenizer decide which prompts are too long.
    """
    taken: dict[str, int] = {}
    found = []
    for task in tasks:
        if taken.get(task.environment, 0) < count and not runner.limits.leave_out(task, runner.tokenizer):
            taken[task.environment] = taken.get(task.environment, 0) + 1
            found.append(task)
    return found


def _by_environment(groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
    found: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        found.setdefault(group.rollouts[0].task.environment, []).append(group)
    return found


def _accuracy(groups: Sequence[RolloutGroup]) -> float:
    return mean(float(is_correct(rollout)) for group in groups for rollout in group.rollouts).value
