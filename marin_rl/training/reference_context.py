# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Self-distillation: the tokens of rollouts behind prompts with more context than the policy had."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from marin_rl.batching.rollout_batch import NO_TURN, RolloutBatch, make_batch
from marin_rl.config.reference_config import ContextConfig
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Message, Rollout, Task
from marin_rl.utils.errors import UserError
from marin_rl.utils.seeds import derive_seed

CHECKED_TASKS = 100
"""Number of training tasks whose context is measured before the first step."""

ContextPrompt = Callable[[Rollout], tuple[int, ...]]
"""Returns the tokens of the prompt, with more context, behind which a rollout is scored."""


@dataclasses.dataclass(frozen=True)
class ContextPrompts:
    """Builds the prompts with context of a run's rollouts.

    Raises:
        UserError: if an environment has too few worked answers, or the context of one of the first tasks has too many
            tokens.
    """

    context: ContextConfig
    """The content."""
    environment: AbstractEnvironment
    """Has the worked answers."""
    tokenizer: ChatTokenizer
    """Chat tokenizer of the policy."""
    seed: int
    """Seed of the run, which determines the demonstrations of each task."""
    only: str | None = None
    """Name of the environment whose rollouts have this context; None for all."""

    def __post_init__(self) -> None:
        count, worked = self.context.demonstrations, self.worked_tasks
        tasks = [task for task in self.environment.tasks(Split.TRAIN) if self.only in (None, task.environment)]
        for name in dict.fromkeys(task.environment for task in tasks) if count else ():
            if (found := len(worked.get(name, ()))) <= count:
                raise UserError(
                    f"reference.context.demonstrations is {count}, but only {found} training tasks of the environment "
                    f"{name!r} have a worked answer, and a task needs those of others; add worked answers "
                    "(rows.worked_answer), or use reference.context.answer"
                )
        for task in tasks[:CHECKED_TASKS]:
            self._prompt(task, self.tokenizer.prompt_tokens(task.messages), "")

    @functools.cached_property
    def worked_tasks(self) -> dict[str, list[Task]]:
        """Training tasks with a worked answer, by environment."""
        worked: dict[str, list[Task]] = {}
        for task in self.environment.tasks(Split.TRAIN):
            if self.environment.can_demonstrate(task):
                worked.setdefault(task.environment, []).append(task)
        return worked

    def __call__(self, rollout: Rollout) -> tuple[int, ...]:
        """Return the tokens of the prompt of a rollout.

        Raises:
            UserError: if it has too many tokens, or the task has no answer; names the task.
        """
        return self._prompt(rollout.task, rollout.turns[0].observation_tokens, feedback(rollout))

    def _prompt(self, task: Task, plain: Sequence[int], shown: str) -> tuple[int, ...]:
        """Return the tokens of the prompt of a task, given those of the prompt without context."""
        context = self.context
        where = f"task {task.id!r} of environment {task.environment!r}"
        texts = [task.messages[-1]["content"]]
        if context.answer:
            if not (answer := task.worked_answer or task.answer):
                raise UserError(f"{where} has no answer; set reference.context.answer: false")
            texts.append(f"The right answer is:\n{answer}")
        if context.feedback:
            texts.append(f"Feedback on a reply:\n{shown}")
        question: Message = {**task.messages[-1], "content": "\n\n".join(texts)}
        first = [*itertools.takewhile(lambda message: message["role"] == "system", task.messages[:-1])]
        rest = [*task.messages[len(first) : -1], question]
        prompt = self.tokenizer.prompt_tokens([*first, *self._demonstrations(task), *rest])
        if (more := len(prompt) - len(plain)) > context.max_tokens:
            raise UserError(
                f"{where}: its context for the reference has {more} tokens, but reference.context.max_tokens allows "
                f"{context.max_tokens}; raise it{', or use fewer demonstrations' if context.demonstrations else ''}"
            )
        return prompt

    def _demonstrations(self, task: Task) -> list[Message]:
        """Return worked answers of other tasks as turns, without their system messages."""
        if not self.context.demonstrations:
            return []
        others = [other for other in self.worked_tasks[task.environment] if other.id != task.id]
        random = np.random.default_rng(derive_seed(self.seed, "demonstrations", task.environment, task.id))
        drawn = random.choice(len(others), self.context.demonstrations, replace=False).tolist()
        messages = itertools.chain.from_iterable(self.environment.demonstrate(others[index]) for index in drawn)
        return [message for message in messages if message["role"] != "system"]


def feedback(rollout: Rollout) -> str:
    """Return the environment's feedback for a finished rollout: rewards, reasons and the last observation.

    The reasons are those of reward functions, and the text `reason` of the environment.
    """
    lines = [f"{name}: {reward:g}" for name, reward in rollout.rewards.items()]
    reasons = [*(result.reason for result in rollout.evaluations), rollout.info.get("reason")]
    observed = () if rollout.last_observation is None else rollout.last_observation.messages
    return "\n".join(
        [*lines, *(reason for reason in reasons if isinstance(reason, str)), *(m["content"] for m in observed)]
    )


def with_context(batch: RolloutBatch, rollouts: Sequence[Rollout], prompt_of: ContextPrompt) -> RolloutBatch:
    """Replace the prompt at the start of every sequence. `batch` has the arrays of `rollouts`.

    Returns:
        A batch with the same action tokens in the same order, without their scores and advantages.

    Raises:
        UserError: if a sequence does not begin with the prompt of its rollout; names the task.
    """
    ids, turn_ids = batch.split(batch.input_ids), batch.split(batch.turn_ids)
    parts, lengths = [], []
    for rollout, tokens, turns, of_rollout in zip(rollouts, ids, turn_ids, batch.lengths, strict=True):
        old, new = np.array(rollout.turns[0].observation_tokens, np.int32), np.array(prompt_of(rollout), np.int32)
        for start, end in itertools.pairwise(itertools.accumulate(of_rollout, initial=0)):
            if not np.array_equal(tokens[start : start + old.size], old):
                raise UserError(
                    f"task {rollout.task.id!r} of environment {rollout.task.environment!r}: its chat template rewrites "
                    "the prompt in a later turn, so reference.context cannot replace it; use a template that does not"
                )
            kept = slice(start + old.size, end)
            parts.append((new, np.full(new.shape, NO_TURN, np.int32)))
            parts.append((tokens[kept], turns[kept]))
        lengths.append([length - old.size + new.size for length in of_rollout])
    input_ids, turns = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return make_batch(batch.ids, lengths, input_ids=input_ids, turn_ids=turns)
