# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Count a letter in a word ("how many r in strawberry"), for `letter_count.yaml`: the task of verl's char_count.

Prompt, random words and the boxed answer are those of volcengine/verl (`recipe/char_count`), whose published
accuracies for SmolLM2-135M are 0.12 after SFT and 0.36 after GRPO. Its demonstrations compare every letter in a line;
those here write every letter with the count so far (`s0t0r1…`), then the boxed count.
"""

import itertools
import random
import re
import string

from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Problem, split_problems
from marin_rl.types import Message, Task

NAME = "letter_count"
LENGTHS = (3, 10)
LARGEST = 6
"""Largest count."""


def make(size: int = 20_000) -> SingleTurnEnvironment:
    """Return random words; lengths are uniform, and so are the counts of each length."""
    numbers = random.Random(0)
    drawn = dict.fromkeys(_draw(numbers) for _ in range(size))
    problems = [Problem(task.id, task, where=task.id) for task in (_task(*each) for each in drawn)]
    return SingleTurnEnvironment(NAME, split_problems(problems, 0.1, 0.05, NAME), score)


def score(task: Task, reply: str) -> float:
    r"""Return 1 if the last `\boxed{…}` of the reply has the count, 0 otherwise."""
    boxed = re.findall(r"\\boxed\{([0-9]+)\}", reply)
    return float(bool(boxed) and boxed[-1] == task.answer)


def _draw(numbers: random.Random) -> tuple[str, str]:
    letter, length = numbers.choice(string.ascii_lowercase), numbers.randint(*LENGTHS)
    count = numbers.randint(0, min(length, LARGEST))
    others = string.ascii_lowercase.replace(letter, "")
    letters = [letter] * count + numbers.choices(others, k=length - count)
    numbers.shuffle(letters)
    return letter, "".join(letters)


def _task(letter: str, word: str) -> Task:
    question = f"How many {letter} are there in {'-'.join(word)}?"
    counts = itertools.accumulate(int(other == letter) for other in word)
    steps = "".join(f"{other}{count}" for other, count in zip(word, counts, strict=True))
    worked = f"{steps} \\boxed{{{steps[-1]}}}"
    return Task(question, NAME, (Message(role="user", content=question),), steps[-1], worked_answer=worked)
