# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Config classes of the project that a YAML file can contain."""

import dataclasses
import typing
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
from draccus.utils import is_choice_type

from marin_rl.config.reference_config import InitialReferenceConfig, PolicyWeights
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.data.config import DataConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.evaluate import EvaluateConfig
from marin_rl.pods.config import LaunchConfig
from marin_rl.rewards.component import RewardScope
from marin_rl.sampling.config import ReloadConfig
from marin_rl.serving.options import ChatConfig, ServeConfig, TinkerConfig
from marin_rl.utils.settings.section_types import field_types, is_section

REQUIRED: dict[str, dict[str, Any]] = {
    "ChatConfig": {"run": "run"},
    "CheckpointReferenceConfig": {"path": "model"},
    "ConstantConfig": {"length": 1},
    "ContextConfig": {"answer": True},
    "AgentConfig": {"tasks": ArithmeticConfig(), "command": ("agent",)},
    "DpoConfig": {"preferences": DataConfig("pairs.jsonl"), "run_dir": "run", "initialize_from": "model"},
    "EvaluateConfig": {"run": "run"},
    "ExactKlConfig": {"beta": 0.1},
    "FormatConfig": {"regex": "x"},
    "InProcessConfig": {"name": "guess"},
    "InProcessRewardConfig": {"name": "score"},
    "FunctionRewardConfig": {"path": "rewards.py", "function": "score"},
    "HuggingFaceConfig": {"path": "openai/gsm8k"},
    "JsonlConfig": {"path": "rows.jsonl"},
    "JudgeCriterion": {"name": "short", "description": "1 if short"},
    "LlmJudgeConfig": {
        "base_url": "http://localhost",
        "model": "judge",
        "prompt": "{conversations}",
        "scope": RewardScope.GROUP,
    },
    "LossKlConfig": {"beta": 0.1},
    "MixturePartConfig": {"environment": ArithmeticConfig()},
    "OpenEnvConfig": {"base_url": "http://localhost"},
    "OpenAiSamplerConfig": {
        "base_url": "http://localhost",
        "model": "policy",
        "reload": ReloadConfig("weights", "hook.py", "reload"),
    },
    "RandomRewardConfig": {"environment": ArithmeticConfig()},
    "ReasoningGymConfig": {"task": "chain_sum"},
    "DataConfig": {"path": "rows.jsonl"},
    "ReloadConfig": {"folder": "weights", "path": "hook.py", "function": "reload"},
    "RewardKlConfig": {"beta": 0.1},
    "ServeConfig": {"run": "run"},
    "TinkerConfig": {"model": "model"},
    "PolicyReferenceConfig": {"weights": PolicyWeights.AVERAGE},
    "ReferencesByEnvironmentConfig": {"references": {"arithmetic": InitialReferenceConfig()}},
    "ServerReferenceConfig": {"base_url": "http://localhost", "model": "teacher"},
    "TextArenaConfig": {"id": "Nim-v0"},
    "TextGameConfig": {"id": "FrozenLake-v1"},
    "ToolUseConfig": {"questions": ArithmeticConfig()},
    "VerifiersConfig": {"taskset": "x"},
    "SftConfig": {"data": DataConfig("rows.jsonl"), "run_dir": "run", "initialize_from": "model"},
    "TrainConfig": {"environment": ArithmeticConfig(), "run_dir": "run", "initialize_from": "model"},
}
"""Fields without a default, by class. A new class with such fields, and with an enum or a range, needs an entry."""


def config_classes() -> set[type]:
    """All dataclasses of marin_rl in the configs of the commands, including the options of choices."""
    classes: set[type] = set()
    commands = (EvaluateConfig, ChatConfig, ServeConfig, TinkerConfig, LaunchConfig)
    for root in (TrainConfig, SftConfig, DpoConfig, *commands):
        _collect(root, classes)
    return classes


def type_arguments(annotation: Any) -> list[Any]:
    """An annotation and its type arguments, at any depth.

    >>> type_arguments(tuple[int, ...] | None)
    [tuple[int, ...] | None, tuple[int, ...], <class 'int'>, Ellipsis, <class 'NoneType'>]
    """
    return [annotation, *(inner for part in typing.get_args(annotation) for inner in type_arguments(part))]


def _collect(cls: Any, classes: set[type]) -> None:
    if cls in classes or not cls.__module__.startswith("marin_rl"):
        return
    if is_choice_type(cls):
        for choice in cls.get_known_choices().values():
            if choice is not cls:
                _collect(choice, classes)
    if not dataclasses.is_dataclass(cls):
        return
    classes.add(cls)
    for annotation in field_types(cls).values():
        for part in type_arguments(annotation):
            if is_section(part):
                _collect(part, classes)


def build(cls: type, name: str, value: Any) -> Any:
    """Build an instance in which one field has the value when `__post_init__` runs.

    The type checks of the tests would refuse the value in the constructor.
    """
    config = cls(**REQUIRED.get(cls.__qualname__, {}))
    object.__setattr__(config, name, value)
    config.__post_init__()
    return config
