# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sum the digits of several numbers, for `sum_digits.yaml`: the task of `sum_digits` of pytorch/torchtitan.

Question, numbers and the reward for the right answer are those of `torchtitan/experiments/rl/examples/sum_digits`; its
second reward, for the format alone, is left out. It publishes no figure. A demonstration here adds one
digit after another.
"""

import random
import re

from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Problem, split_problems
from marin_rl.types import Message, Task

NAME = "sum_digits"
INSTRUCTIONS = """\
Solve the problem step by step and state the final answer as [ANSWER] <number>.

Example:
User: What is the total digit sum of [12, 67]?
Assistant: 1+2=3+6=9+7=16 [ANSWER] 16"""


def make(size: int = 20_000, instructions: bool = True) -> SingleTurnEnvironment:
    """Return questions about two to four numbers of two digits; all orders of some numbers are in one split."""
    numbers = random.Random(0)
    drawn = dict.fromkeys(tuple(numbers.choices(range(10, 100), k=numbers.randint(2, 4))) for _ in range(size))
    problems = [Problem(str(sorted(each)), _task(each, instructions), where=str(each)) for each in drawn]
    return SingleTurnEnvironment(NAME, split_problems(problems, 0.1, 0.05, NAME), score)


def score(task: Task, reply: str) -> float:
    """Return 1 if the last number after `[ANSWER]` is right, 0 otherwise."""
    answers = re.findall(r"\[ANSWER\] ?(-?[0-9]+(?:\.[0-9]+)?)", reply)
    return float(bool(answers) and answers[-1] == task.answer)


def _task(numbers: tuple[int, ...], instructions: bool) -> Task:
    question = f"What is the total digit sum of {list(numbers)}?"
    first, *others = [int(digit) for number in numbers for digit in str(number)]
    worked, total = str(first), first
    for digit in others:
        total += digit
        worked += f"+{digit}={total}"
    system = (Message(role="system", content=INSTRUCTIONS),) if instructions else ()
    messages = (*system, Message(role="user", content=question))
    return Task(question, NAME, messages, str(total), worked_answer=f"{worked} [ANSWER] {total}")
