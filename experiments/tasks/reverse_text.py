# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write a text backwards, for `reverse_text.yaml`: the task of `examples/reverse_text` of PrimeIntellect-ai/prime-rl.

The reward is that of its environment `reverse-text`: difflib's similarity ratio of the reply and the reversed text,
`2 M / T` with M matching characters of T in both. Published mean rewards: 0.05 for Qwen3-0.6B, 0.8 after SFT on 1,000
longer texts and 20 steps of 128 samples. The texts here are random words of a list in reasoning-gym.
"""

import dataclasses
import difflib
import random

from reasoning_gym.data import read_data_file

from marin_rl.environments.base import AbstractSplitEnvironment, Step
from marin_rl.environments.splits import Problem, split_problems
from marin_rl.types import Message, Task

NAME = "reverse_text"
INSTRUCTIONS = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


def make(words: int = 8, size: int = 20_000, instructions: bool = True) -> "ReverseText":
    """Return texts of `words` words; without instructions, the prompt is the text and a worked answer has no tags."""
    numbers, vocabulary = random.Random(0), read_data_file("words3to10.txt").split()
    texts = dict.fromkeys(" ".join(numbers.sample(vocabulary, words)) for _ in range(size))
    problems = [Problem(text, _task(text, instructions), where=text) for text in texts]
    return ReverseText(NAME, split_problems(problems, 0.1, 0.05, NAME))


def similarity(answer: str, reply: str) -> float:
    """Return the similarity of the tagged text, or of the whole reply without tags; 0 if it is over twice as long.

    The time of the ratio is the product of both lengths, so the bound makes it linear in that of the reply.
    """
    text = reply.split("<reversed_text>", 1)[-1].split("</reversed_text>", 1)[0].strip()
    return 0.0 if len(text) > 2 * len(answer) else difflib.SequenceMatcher(None, text, answer).ratio()


@dataclasses.dataclass(frozen=True)
class ReverseText(AbstractSplitEnvironment):
    """Texts to reverse."""

    waits = False

    async def start(self, task: Task, seed: int) -> "Attempt":
        """Start an attempt; the seed is unused because nothing is random."""
        self.require_own(task)
        return Attempt(task)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt, which ends after one reply."""

    task: Task

    async def step(self, reply: str) -> Step:
        """Return the similarity. Its reward is not called `correct`, so evaluations report its mean."""
        return Step(rewards={"similarity": similarity(self.task.answer, reply)})

    async def close(self) -> None:
        """Do nothing; there are no resources."""


def _task(text: str, instructions: bool) -> Task:
    answer = text[::-1]
    system = (Message(role="system", content=INSTRUCTIONS),) if instructions else ()
    worked = f"<reversed_text>{answer}</reversed_text>" if instructions else answer
    return Task(text, NAME, (*system, Message(role="user", content=text)), answer, worked_answer=worked)
