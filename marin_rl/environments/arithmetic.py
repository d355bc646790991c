# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Built-in addition and subtraction problems, generated without dependencies or downloads."""

import dataclasses
import random
from typing import Annotated

from annotated_types import Ge

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, SplitConfig
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Problem
from marin_rl.rewards.grading import FormatConfig
from marin_rl.types import Message, Task


@EnvironmentConfig.register_subclass("arithmetic")
@dataclasses.dataclass(frozen=True)
class ArithmeticConfig(SplitConfig):
    """Distinct addition and subtraction problems such as `12+34=`; the reply must be the exact number.

    There are (10^digits)^terms · len(operations)^(terms−1) distinct problems: 20,000 by default.
    """

    terms: Annotated[int, Ge(2)] = 2
    """Numbers in a problem."""
    digits: Annotated[int, Ge(1)] = 2
    """Maximum number of digits; each number is uniform between 0 and 10^digits − 1."""
    operations: str = "+-"
    """Allowed operations: `+`, `-` or `+-`."""
    size: int = 10_000
    """Number of distinct problems to draw, over all splits."""
    seed: int = 0
    """Seed for the choice of problems and their order. The split of a problem does not depend on it."""
    reverse_answer: bool = False
    """Whether the reply must be the answer in reverse (`64` for 46, `7-` for −7). Carries then run in the direction of
    generation, which is far easier for a small model."""
    format: FormatConfig | None = None
    """Optional reward for the format of the reply."""
    name: str = "arithmetic"
    """Name for metrics."""

    def __post_init__(self) -> None:
        SplitConfig.__post_init__(self)
        if self.operations not in ("+", "-", "+-"):
            raise ValueError(f"operations is {self.operations!r}; choose '+', '-' or '+-'")
        if not 1 <= self.size <= self.num_distinct:
            raise ValueError(
                f"size is {self.size}; with {self.terms} terms of up to {self.digits} digits and operations "
                f"{self.operations!r} there are 1 to {self.num_distinct} distinct problems to draw"
            )

    @property
    def num_distinct(self) -> int:
        """Number of distinct problems."""
        return 10 ** (self.digits * self.terms) * len(self.operations) ** (self.terms - 1)

    def build(self) -> AbstractEnvironment:
        """Draw the problems."""
        problems = [self._problem(index) for index in self._draw()]
        return SingleTurnEnvironment(
            name=self.name,
            splits=self.divide(problems, f"environment {self.name!r}"),
            score=lambda task, reply: float(reply == task.answer),
            format=self.format,
        )

    def _draw(self) -> list[int]:
        generator = random.Random(self.seed)
        if 2 * self.size > self.num_distinct:
            return generator.sample(range(self.num_distinct), self.size)
        # sample() rejects a range longer than a machine word; here at most half of the draws are repetitions.
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
        text, answer = f"{text}=", str(result)[:: -1 if self.reverse_answer else 1]
        task = Task(text, self.name, (Message(role="user", content=text),), answer, worked_answer=answer)
        return Problem(text, task, where=text)
