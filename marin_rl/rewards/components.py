# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The built-in reward components.

Configs import `RewardComponentConfig` from here, so that all types are registered.
"""

from marin_rl.rewards.code import CodeRewardConfig
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.function_component import FunctionRewardConfig
from marin_rl.rewards.judge import LlmJudgeConfig

__all__ = ["CodeRewardConfig", "FunctionRewardConfig", "LlmJudgeConfig", "RewardComponentConfig"]
