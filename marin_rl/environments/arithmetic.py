# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Built-in sums and differences: no dependency, no download, verified by construction."""

import dataclasses
import random

from marin_rl.environments.base import Environment, EnvironmentConfig
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Problem, check_shares, split_problems
from marin_rl.rewards.patterns import FormatConfig
from marin_rl.types import Message, Task


@EnvironmentConfig.register_subclass("arithmetic")
@dataclasses.dataclass(frozen=True)
class ArithmeticConfig(EnvironmentConfig):
    """Sums and differences such as `12+34=`, all distinct; the reply must be the exact number.

    There are (10^digits)^terms · len(operations)^(terms−1) distinct problems: 20,000 by default.
    """

    terms: int = 2
    """Numbers in a problem; at least 2."""
    digits: int = 2
    """Most digits of a number: numbers are drawn evenly from 0 to 10^digits − 1."""
    operations: str = "+-"
    """Which operations occur: `+`, `-` or `+-`."""
    size: int = 10_000
    """How many distinct problems to draw, over all splits."""
    seed: int = 0
    """Which problems are drawn, and their order. The split of a problem does not depend on it."""
    reverse_answer: bool = False
    """Whether the reply has the answer's characters in reverse (`64` for 46, `7-` for −7), so that
    carries run in the direction of writing: far easier for a small model."""
    held_out: float = 0.1
    """Share of problems held out, by hash of their text; at least 0, below 1."""
    validation: float = 0.05
    """Share of problems for validation, by hash of their text; at least 0, below 1."""
    format: FormatConfig | None = None
    """Optional reward for the reply's form."""
    name: str = "arithmetic"
    """Name under which metrics are logged."""

    def __post_init__(self) -> None:
        if self.terms < 2:
            raise ValueError(f"terms is {self.terms}; a sum has at least 2")
        if self.digits < 1:
            raise ValueError(f"digits is {self.digits}; a number has at least 1")
        if self.operations not in ("+", "-", "+-"):
            raise ValueError(f"operations is {self.operations!r}; choose '+', '-' or '+-'")
        if not 1 <= self.size <= self.num_distinct:
            raise ValueError(
                f"size is {self.size}; with {self.terms} terms of up to {self.digits} digits and operations "
                f"{self.operations!r} there are 1 to {self.num_distinct} distinct problems to draw"
            )
        check_shares(self.held_out, self.validation)

    @property
    def num_distinct(self) -> int:
        """How many distinct problems there are to draw from."""
        return 10 ** (self.digits * self.terms) * len(self.operations) ** (self.terms - 1)

    def build(self) -> Environment:
        """Draw the problems."""
        problems = [self._problem(index) for index in self._draw()]
        return SingleTurnEnvironment(
            name=self.name,
            splits=split_problems(problems, self.held_out, self.validation, f"environment {self.name!r}"),
            score=self._score,
            format=self.format,
        )

    def _draw(self) -> list[int]:
        generator = random.Random(self.seed)
        if 2 * self.size > self.num_distinct:
            return generator.sample(range(self.num_distinct), self.size)
        # sample() cannot take a range longer than a machine word counts; here a repetition is at most an even chance.
        drawn: dict[int, None] = {}
        while len(drawn) < self.size:
            drawn[generator.randrange(self.num_distinct)] = None
        return list(drawn)

    def _problem(self, index: int) -> Problem:
        index, number = divmod(index, 10**self.digits)
        text, result = str(number), number
        for _ in range(self.terms - 1):
            index, number = divmod(index, 10**self.digits)
            index, operation = divmod(index, len(self.operations))
            sign = self.operations[operation]
            text += f"{sign}{number}"
            result += number if sign == "+" else -number
        text += "="
        answer = str(result)
        task = Task(
            id=text,
            environment=self.name,
            messages=(Message(role="user", content=text),),
            answer=answer,
            worked_answer=answer[::-1] if self.reverse_answer else answer,
        )
        return Problem(text, task, where=text)

    def _score(self, task: Task, reply: str) -> float:
        return float((reply[::-1] if self.reverse_answer else reply) == task.answer)
