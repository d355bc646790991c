# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Evaluation of a policy: accuracy, pass@k and the loss of reference answers on held-out tasks."""

import collections
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from marin_rl.batching.rollout_batch import RolloutBatch, join_batches
from marin_rl.config.sections import EvaluationConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.data.conversations import batch_demonstration
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.learner.scoring import Scores
from marin_rl.objectives.pass_at_k import pass_at_k
from marin_rl.rollouts.metrics import is_correct, is_judged
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_tasks
from marin_rl.sampling.sampler import PromptTooLongError
from marin_rl.types import RolloutGroup, Task

MAX_STANDARD_ERROR = 0.1
"""Standard error of an accuracy above which a split is too small, that of fewer than 25 tasks."""


def evaluate(
    runner: RolloutRunner,
    config: EvaluationConfig = EvaluationConfig(),
    *,
    temperature: float = 1.0,
    seed: int = 0,
    split: Split = Split.HELD_OUT,
) -> tuple[dict[str, float], list[RolloutGroup]]:
    """Measure accuracy on held-out tasks, per environment; the mean reward if right and wrong are not known.

    Tasks and sampling seeds are the same in every evaluation, so two evaluations differ by the weights alone.
    A failed rollout counts as wrong.

    Args:
        runner: runs the tasks; its sampler holds the evaluated weights.
        config: number of tasks and samples.
        temperature: sampling temperature, above 0.
        seed: seed of the run.
        split: split to draw tasks from.

    Returns:
        Metrics and groups. The metrics are `eval/<environment>/accuracy_sampled`, `…/accuracy_greedy`, `…/pass@k` for
        each k, and the number of tasks as `…/tasks`. An environment whose rewards do not tell right from wrong has
        `…/reward_sampled` and `…/reward_greedy` instead. The sampled groups come before the greedy ones.

    Raises:
        ValueError: if the split has no tasks, or `config.tasks` is 0.
    """
    if config.tasks == 0:
        raise ValueError("evaluation.tasks is 0; set the number of tasks to evaluate, e.g. --evaluation.tasks 512")
    tasks = first_of_each(runner.environment.tasks(split), config.tasks, runner)
    require_tasks(runner.environment, tasks, split)
    name = f"evaluate-{split.value}"
    sampled = run_tasks(
        runner, tasks, group_size=config.samples, temperature=temperature, seed_parts=(seed, name, "sampled")
    )
    greedy: list[RolloutGroup] = []
    metrics: dict[str, float] = {}
    for environment, groups in _by_environment(sampled).items():
        prefix = f"eval/{environment}"
        metrics[f"{prefix}/tasks"] = float(len(groups))
        metrics |= _quality(groups, prefix, "sampled")
        for k in config.pass_at if f"{prefix}/accuracy_sampled" in metrics else ():
            correct_counts = [sum(map(is_correct, group.rollouts)) for group in groups]
            metrics[f"{prefix}/pass@{k}"] = statistics.fmean(
                pass_at_k(config.samples, correct, k) for correct in correct_counts
            )
    if config.greedy:
        greedy = run_tasks(runner, tasks, group_size=1, temperature=0.0, seed_parts=(seed, name, "greedy"))
        for environment, groups in _by_environment(greedy).items():
            metrics |= _quality(groups, f"eval/{environment}", "greedy")
    return metrics, [*sampled, *greedy]


def reference_loss(
    runner: RolloutRunner, tasks: Sequence[Task], score: Callable[[RolloutBatch], Scores]
) -> dict[str, float]:
    """Compute the negative log-likelihood of reference answers: `-Σ log π(token) / number of tokens`.

    A reference answer is a task's worked answer or the environment's demonstration. The tokens are those of an episode
    in which the policy gives the demonstrated replies, including the end token of each reply; observations are
    excluded. The chat template therefore needs no generation blocks. Sums run over the tokens of all tasks.

    Args:
        runner: provides environment, tokenizer and the maximum sequence length.
        tasks: tasks; those without a reference answer, or with one that is too long, are skipped.
        score: computes log-probabilities (nats) at temperature 1 under the evaluated weights.

    Returns:
        `eval/<environment>/loss` (nats per token) and `eval/<environment>/loss_tokens` for each environment with
        reference answers.
    """
    examples: dict[str, list[RolloutBatch]] = {}
    for task in tasks:
        if not runner.environment.can_demonstrate(task):
            continue
        example = batch_demonstration(
            runner.environment.demonstrate(task), task, max_length=runner.limits.max_length, tokenizer=runner.tokenizer
        )
        if example is not None:
            examples.setdefault(task.environment, []).append(example)
    metrics: dict[str, float] = {}
    for environment, batches in examples.items():
        batch = join_batches(batches)
        total, num_tokens = math.fsum(score(batch).logprobs.tolist()), np.count_nonzero(batch.loss_mask)
        metrics[f"eval/{environment}/loss"] = -total / num_tokens
        metrics[f"eval/{environment}/loss_tokens"] = float(num_tokens)
    return metrics


def small_split_warnings(config: TrainConfig, runner: RolloutRunner) -> list[str]:
    """Return a sentence for each split of a new run whose tasks are too few to measure an accuracy."""
    held_out, check_tasks = config.evaluation, config.warm_start.check_tasks if config.warm_start.max_steps else 0
    samples = f" x {held_out.samples} samples" if held_out.samples > 1 else ""
    warnings = []
    for split, count, noun, decided in (
        (Split.VALIDATION, check_tasks, "validation tasks", "when the warm start stops (warm_start.check_tasks)"),
        (Split.HELD_OUT, held_out.tasks, f"held-out tasks{samples}", "the curves of the run (evaluation.tasks)"),
    ):
        tasks = first_of_each(runner.environment.tasks(split), count, runner) if count else []
        by_environment = collections.Counter(task.environment for task in tasks)
        size = min(by_environment.values(), default=0) if split is Split.HELD_OUT else len(tasks)
        warnings += small_sample_warning(size, noun, decided, f"environment.{split.value}")
    return warnings


def small_sample_warning(count: int, noun: str, decided: str, key: str) -> list[str]:
    """Warn if the accuracy of tasks or rows has a large standard error, that of attempts which are all alike."""
    # The standard deviation of an accuracy is largest at 0.5.
    error = 0.5 / math.sqrt(max(count, 1))
    if count == 0 or error <= MAX_STANDARD_ERROR:
        return []
    return [f"only {count} {noun} decide {decided}: an accuracy has a standard error of up to {error:.2f}; raise {key}"]


def describe_accuracy(evaluation: Mapping[str, float]) -> str:
    """Format the accuracies or rewards that `evaluate` returned as one line.

    >>> describe_accuracy({"eval/sums/tasks": 8.0, "eval/sums/accuracy_sampled": 0.25})
    'held-out sums/accuracy_sampled 0.250'
    """
    parts = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in evaluation.items() if is_quality(name)]
    return "held-out " + ", ".join(parts)


def is_quality(name: str) -> bool:
    """Return whether a metric is an accuracy, a mean reward or a loss of an evaluation."""
    kind = name.rpartition("/")[2]
    return name.startswith("eval/") and (
        kind.startswith(("accuracy_", "reward_")) or kind in ("loss", "token_accuracy", "dpo", "accuracies", "margins")
    )


def require_tasks(environment: AbstractEnvironment, tasks: Sequence[Task], split: Split) -> None:
    """Check that there are tasks to evaluate on.

    `environment` is the source of the tasks, for the error message.

    Raises:
        ValueError: if there are none.
    """
    if not tasks:
        raise ValueError(
            f"environment {environment.name!r} has no {split.value} tasks to evaluate on; set environment.{split.value}"
        )


def first_of_each(tasks: Sequence[Task], count: int, runner: RolloutRunner) -> list[Task]:
    """Select the first tasks of each environment, without tasks that are skipped for their long prompts.

    There are at most `count` tasks of each; limits and tokenizer of `runner` determine which prompts are too long.

    Returns:
        The selected tasks in their original order.

    Raises:
        PromptTooLongError: if there are tasks, and all of them are skipped.
    """
    counts: dict[str, int] = {}
    selected = []
    for task in tasks:
        if counts.get(task.environment, 0) < count and not runner.limits.should_skip(task, runner.tokenizer):
            counts[task.environment] = counts.get(task.environment, 0) + 1
            selected.append(task)
    if tasks and not selected:
        limits = runner.limits
        raise PromptTooLongError(
            f"environment {runner.environment.name!r}: the prompts of all {len(tasks)} tasks to evaluate on have more "
            f"than {limits.longest_prompt} tokens, and rollouts.long_prompts: skip skips them; raise "
            f"{limits.prompt_setting}"
        )
    return selected


def _by_environment(groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
    by_environment: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        by_environment.setdefault(group.rollouts[0].task.environment, []).append(group)
    return by_environment


def _quality(groups: Sequence[RolloutGroup], prefix: str, kind: str) -> dict[str, float]:
    """Return the accuracy of rollouts, or their mean reward if nothing tells whether the graded ones are right."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.total_reward for rollout in rollouts if rollout.total_reward is not None]
    if rewards and not any(map(is_judged, rollouts)):
        return {f"{prefix}/reward_{kind}": statistics.fmean(rewards)}
    return {f"{prefix}/accuracy_{kind}": statistics.fmean(map(is_correct, rollouts))}
