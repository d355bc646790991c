# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write `cat` exactly N times: the task of Marin's CatCountCanary, for `catcount.yaml`.

Prompt, numbers and the main terms of the reward are those of marin-community/marin
(`experiments/post_training/cat_count_canary.py`): 64 prompts of 8 samples a step, training on 1 to 20 without 3, 5, 13
and 16, which are held out, as are 24 and 28. Its gate for Qwen2.5-0.5B-Instruct is a mean reward of 0.65 on training
numbers within 30 steps, from 0.10 to 0.45; it has no threshold for held-out numbers.
"""

from marin_rl.environments.base import Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.types import Message, Task

NAME = "catcount"
PROMPT = "Reply with the word {word} exactly {count} times, separated by single spaces. Nothing else."
HELD_OUT = (3, 5, 13, 16, 24, 28)
TRAIN = tuple(count for count in range(1, 21) if count not in HELD_OUT)
NGRAM_WEIGHTS = {1: 0.5, 2: 0.3, 3: 0.2}
"""Weights of the numbers of runs of one, two and three cats in the reward."""


def make() -> SingleTurnEnvironment:
    """Return the prompts; there are no validation prompts, because each number is a prompt of its own."""
    return SingleTurnEnvironment(
        NAME,
        {
            Split.TRAIN: [_task(count) for count in TRAIN],
            Split.VALIDATION: [],
            Split.HELD_OUT: [_task(count) for count in HELD_OUT],
        },
        score,
    )


def score(task: Task, reply: str) -> float:
    """Return 1 for the exact text, and less for another number of cats; 0 if the reply has any other word.

    `0.7 * Σ w_k · max(0, 1 − |m_k − n_k| / n_k) / Σ w_k`, with m_k runs of k cats in the reply and n_k in the answer,
    for k from 1 to 3 with n_k > 0. The original subtracts penalties for other words, surplus cats and truncation.
    """
    if reply.strip() == task.answer:
        return 1.0
    words, count = reply.split(), task.answer.count("cat")
    if set(words) != {"cat"}:
        return 0.0
    runs = {k: count - k + 1 for k in NGRAM_WEIGHTS if k <= count}
    close = {k: max(0.0, 1 - abs(max(len(words) - k + 1, 0) - number) / number) for k, number in runs.items()}
    return 0.7 * sum(NGRAM_WEIGHTS[k] * close[k] for k in runs) / sum(NGRAM_WEIGHTS[k] for k in runs)


def _task(count: int) -> Task:
    prompt = Message(role="user", content=PROMPT.format(word="cat", count=count))
    return Task(str(count), NAME, (prompt,), " ".join(["cat"] * count))
