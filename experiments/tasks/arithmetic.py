# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Add two numbers, for `arithmetic.yaml`: the task of `math_rl env=arithmetic` of tinker-cookbook.

Question, worked example and grading are those of `tinker_cookbook/recipes/math_rl/arithmetic_env.py`. Its README:
"Reward should go from 0.66 to 1 in the first few steps", for Llama-3.2-1B and 100 groups of 4.
"""

import random
import re

from marin_rl.environments.base import Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.types import Task

NAME = "arithmetic"
EXAMPLE = ({"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"})


def make() -> SingleTurnEnvironment:
    """Return sums of two numbers from 0 to 100 after one worked example; the last integer of a reply is scored."""
    pairs = [(a, b) for a in range(101) for b in range(101)]
    random.Random(0).shuffle(pairs)
    return SingleTurnEnvironment(
        NAME,
        {
            Split.TRAIN: [_task(*pair) for pair in pairs[200:]],
            Split.VALIDATION: [_task(*pair) for pair in pairs[100:200]],
            Split.HELD_OUT: [_task(*pair) for pair in pairs[:100]],
        },
        _score,
    )


def _task(a: int, b: int) -> Task:
    question = {"role": "user", "content": f"What is {a} + {b}?"}
    return Task(f"{a}+{b}", NAME, (*EXAMPLE, question), str(a + b))


def _score(task: Task, reply: str) -> float:
    numbers = re.findall("-?[0-9]+", reply.replace(",", ""))
    return float(bool(numbers) and re.fullmatch(f"0*{task.answer}", numbers[-1]) is not None)
