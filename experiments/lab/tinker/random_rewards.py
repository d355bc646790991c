# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""`math_rl env=arithmetic` with the rewards of a coin, a control: the metric `correct` must not rise.

Takes the arguments of `tinker_cookbook.recipes.math_rl.train`, and runs in the environment of tinker-cookbook.
"""

import asyncio
import dataclasses
import random
from typing import Any

import chz
from tinker_cookbook.recipes.math_rl import train
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.rl.types import StepResult

coin = random.Random(0)
scored_step = ArithmeticEnv.step


async def step(self: ArithmeticEnv, *arguments: Any, **options: Any) -> StepResult:
    """Score a reply, and replace its reward."""
    result = await scored_step(self, *arguments, **options)
    return dataclasses.replace(result, reward=float(coin.random() < 0.5))


if __name__ == "__main__":
    ArithmeticEnv.step = step
    asyncio.run(train.cli_main(chz.entrypoint(train.CLIConfig)))
