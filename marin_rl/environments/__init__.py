# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments. Importing this package registers all of them, without importing jax."""

from marin_rl.environments.agent import AgentConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import (
    AbstractEnvironment,
    AgentConnection,
    AgentEpisode,
    AgentResult,
    EnvironmentConfig,
    Episode,
    Split,
    Step,
    TaskStream,
)
from marin_rl.environments.dataset import HuggingFaceConfig, JsonlConfig
from marin_rl.environments.file import FileConfig
from marin_rl.environments.in_process import InProcessConfig
from marin_rl.environments.openenv import OpenEnvConfig
from marin_rl.environments.random_reward import RandomRewardConfig
from marin_rl.environments.reasoning_gym import ReasoningGymConfig
from marin_rl.environments.streams import MixtureConfig
from marin_rl.environments.text_game import TextGameConfig
from marin_rl.environments.textarena import TextArenaConfig
from marin_rl.environments.textworld import TextWorldConfig
from marin_rl.environments.tool_use import ToolUseConfig
from marin_rl.environments.verifiers import VerifiersConfig

__all__ = [
    "AbstractEnvironment",
    "AgentConfig",
    "AgentConnection",
    "AgentEpisode",
    "AgentResult",
    "ArithmeticConfig",
    "EnvironmentConfig",
    "Episode",
    "FileConfig",
    "HuggingFaceConfig",
    "InProcessConfig",
    "JsonlConfig",
    "MixtureConfig",
    "OpenEnvConfig",
    "RandomRewardConfig",
    "ReasoningGymConfig",
    "Split",
    "Step",
    "TaskStream",
    "TextArenaConfig",
    "TextGameConfig",
    "TextWorldConfig",
    "ToolUseConfig",
    "VerifiersConfig",
]
