# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Procedural tasks of reasoning-gym, by name, graded by reasoning-gym."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, SplitConfig
from marin_rl.environments.single_turn import SingleTurnEnvironment, refuse_garbage_rewards
from marin_rl.environments.splits import Problem, problem_id, without_duplicates
from marin_rl.rewards.grading import FormatConfig
from marin_rl.rewards.grading_process import NoAnswerError, ask
from marin_rl.rewards.reasoning_gym_worker import DatasetError
from marin_rl.rewards.reply_text import check_pattern, extract_last
from marin_rl.types import Message, Task
from marin_rl.utils.settings.fields import NAMES_FILES

FULL_SCORE = 1.0
"""Score of a right answer in reasoning-gym."""
SCORE_SECONDS = 10.0
"""CPU time after which the scoring of a reply is given up. The first reply to a problem includes its creation."""
_ITEMS_PER_REQUEST = 100
_DRAW_SECONDS = 600.0
"""CPU time for the creation of so many problems."""


@EnvironmentConfig.register_subclass("reasoning_gym")
@dataclasses.dataclass(frozen=True)
class ReasoningGymConfig(SplitConfig):
    """A reasoning-gym task. Problems are drawn once, deduplicated by text and split by text.

    The number of distinct problems depends on the task and its options, and is logged. `chain_sum` with two terms of
    one or two digits has 16,400: 10,000 draws give 4,500 and 100,000 give 15,700, since half of the draws are among
    the 200 sums of one digit.

    reasoning-gym runs in other processes. A reply that its scorer cannot grade within the limits on time and memory
    scores 0.
    """

    task: str
    """Name of the task in reasoning-gym: `chain_sum`, `gcd`, `spell_backward`, …"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Options of the task, such as `{min_terms: 2, max_terms: 2}`; other options keep the task's defaults."""
    size: Annotated[int, Ge(1)] = 10_000
    """Number of problems to draw, over all splits, repetitions included."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the problems: problem i is drawn from seed + i, so two seeds closer than `size` share problems. The
    split of a problem does not depend on it; never split by seed."""
    system_prompt: str | None = None
    """Optional system message before the question."""
    prompt_regex: str | None = None
    """Optional regular expression whose group 1 in the question becomes the prompt: `: (.*=)$` extracts `12 + 34 =`
    from the sentence of chain_sum."""
    remove_whitespace: bool = False
    """Whether to remove white space from the prompt: `12 + 34 =` becomes `12+34=`."""
    reply_regex: str | None = None
    """Optional regular expression; group 1 of its last match in the reply is scored. A reply without a match scores 0.
    Example: `(?s)<answer>(.*?)</answer>`."""
    reverse_answer: bool = False
    """Whether to reverse the reply's characters before scoring (`64` for 46)."""
    exact_answer: bool = False
    """Whether the scored reply must also equal the task's answer exactly. Scorers of number tasks give the full score
    to `046` and `46.0`. Only for tasks with a single right answer."""
    partial_credit: bool = False
    """Whether to keep scores below the full score as rewards; many scorers give partial credit to an answer with extra
    text. Otherwise the reward is 1 for the full score and 0 for any other score."""
    format: FormatConfig | None = None
    """Optional reward for the format of the reply."""
    allow_garbage_rewards: bool = False
    """Whether to accept a task whose scorer rewards empty replies, `nan`, noise and the like."""
    name: str | None = None
    """Name for metrics; default: the task's name."""

    def __post_init__(self) -> None:
        SplitConfig.__post_init__(self)
        for field in ("seed", "size"):
            if field in self.options:
                raise ValueError(f"options has {field!r}; use the environment's `{field}` instead")
        if self.exact_answer and self.partial_credit:
            raise ValueError("exact_answer and partial_credit exclude each other; disable one")
        for field, pattern in (("prompt_regex", self.prompt_regex), ("reply_regex", self.reply_regex)):
            if pattern is not None:
                check_pattern(field, pattern, groups=1)

    def build(self) -> AbstractEnvironment:
        """Draw the problems and split them.

        Raises:
            ValueError: if reasoning-gym has no such task or option, rejects the values, or rewards garbage.
        """
        name = self.task if self.name is None else self.name
        source = f"reasoning-gym task {self.task!r}"
        items: dict[str, _Item] = {}
        problems = without_duplicates(self._problems(name, items), source)
        environment = SingleTurnEnvironment(
            name=name,
            splits=self.divide(problems, source),
            score=lambda task, reply: self._score(items[task.id], task.answer, reply),
            format=self.format,
            reply_regex=self.reply_regex,
            blocks=not self.exact_answer,
        )
        if not self.allow_garbage_rewards:
            refuse_garbage_rewards(environment, source)
        return environment

    def _problems(self, name: str, items: dict[str, "_Item"]) -> Iterator[Problem]:
        """Draw the problems, and add the item of each to `items` by problem id."""
        system = () if self.system_prompt is None else (Message(role="system", content=self.system_prompt),)
        for item in self._draw():
            text = self._prompt(item.question)
            kept = items.setdefault(problem_id(text), item)
            if kept.question != item.question and kept.answer != item.answer:
                raise ValueError(
                    f"prompt_regex {self.prompt_regex!r} and remove_whitespace {self.remove_whitespace} map two "
                    f"problems with the answers {kept.answer!r} and {item.answer!r} to the same prompt "
                    f"{text!r}; keep the difference in the prompt"
                )
            # Tasks with many right answers (rubiks_cube, …) have no answer.
            answer = self._in_order(item.answer or "")
            task = Task(
                id=problem_id(text),
                environment=name,
                messages=(*system, Message(role="user", content=text)),
                answer=answer,
                worked_answer=self._worked_answer(answer),
            )
            yield Problem(text, task, where=f"{self.task} item {item.index}")

    def _draw(self) -> "Iterator[_Item]":
        for start in range(0, self.size, _ITEMS_PER_REQUEST):
            stop = min(start + _ITEMS_PER_REQUEST, self.size)
            try:
                response = self._ask({"items": [start, stop], "score_answers": self.exact_answer}, _DRAW_SECONDS)
            except NoAnswerError as error:
                raise ValueError(
                    f"reasoning-gym task {self.task!r} with the options {self.options} cannot create the items "
                    f"{start} to {stop - 1}: {error}"
                ) from error
            for index, (question, answer, score) in enumerate(response["problems"], start):
                yield _Item(index, question, answer, score is not None and score >= FULL_SCORE)

    def _ask(self, request: Mapping[str, Any], cpu_seconds: float) -> Mapping[str, Any]:
        dataset = {"task": self.task, "options": self.options, "seed": self.seed, "size": self.size}
        response = ask(
            "marin_rl.rewards.reasoning_gym_worker:open_grader", {"dataset": dataset, **request}, cpu_seconds
        )
        if "error" in response:
            raise DatasetError(response["error"])
        return response

    def _prompt(self, question: str) -> str:
        prompt = question if self.prompt_regex is None else extract_last(self.prompt_regex, question)
        if prompt is None:
            raise ValueError(
                f"prompt_regex {self.prompt_regex!r} does not match the question {question!r} of {self.task!r}"
            )
        return re.sub(r"\s", "", prompt) if self.remove_whitespace else prompt

    def _worked_answer(self, answer: str) -> str | None:
        if self.reply_regex is not None and extract_last(self.reply_regex, answer) != answer:
            return None
        return answer or None

    def _in_order(self, answer: str) -> str:
        """Convert an answer of reasoning-gym to that of the task, and back."""
        return answer[::-1] if self.reverse_answer else answer

    def _score(self, item: "_Item", answer: str, reply: str) -> float:
        if self.exact_answer:
            # Without a process, which would take most of the time of grading a short reply.
            return float(reply == answer and item.accepts_answer)
        request = {"item": item.index, "question": item.question, "reply": self._in_order(reply)}
        score = self._ask(request, SCORE_SECONDS)["score"]
        if not self.partial_credit:
            return float(score >= FULL_SCORE)
        return min(score, FULL_SCORE) if math.isfinite(score) else 0.0


class _Item(NamedTuple):
    """A problem as reasoning-gym draws it."""

    index: int
    question: str
    answer: str | None
    accepts_answer: bool
    """Whether the scorer gives the answer the full score; only known for `exact_answer`."""
