# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import enum
import inspect
import subprocess
import sys
import typing
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.config.train_config import TrainConfig
from marin_rl.enum_fields import convert_enum_fields
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.objectives.gigpo import GigpoNormalization
from marin_rl.rewards.component import RewardScope
from marin_rl.rewards.judge import LlmJudgeConfig
from tests.config_classes import config_classes, type_arguments

REQUIRED: dict[str, dict[str, Any]] = {
    "FunctionRewardConfig": {"path": "rewards.py", "function": "score"},
    "LlmJudgeConfig": {
        "base_url": "http://localhost",
        "model": "judge",
        "prompt": "{conversation} {conversations}",
        "scope": RewardScope.GROUP,
    },
    "LossKlConfig": {"beta": 0.1},
    "SharedFilesConfig": {"folder": "weights"},
    "TextGameConfig": {"id": "FrozenLake-v1"},
    "ToolUseConfig": {"questions": ArithmeticConfig()},
    "TrainConfig": {"environment": ArithmeticConfig(), "run_dir": "run", "initialize_from": "model"},
}
"""Fields without a default, by class; a new class with an enum field and such fields needs an entry."""


def enum_fields() -> list[Any]:
    """Class, name and enum type of every enum field of the concrete config classes."""
    fields = [
        (cls, name, kind)
        for cls in config_classes()
        if not inspect.isabstract(cls)
        for name, annotation in typing.get_type_hints(cls).items()
        for kind in type_arguments(annotation)
        if isinstance(kind, type) and issubclass(kind, enum.Enum)
    ]
    by_name = sorted(fields, key=lambda entry: (entry[0].__qualname__, entry[1]))
    return [pytest.param(*entry, id=f"{entry[0].__qualname__}.{entry[1]}") for entry in by_name]


def build(cls: type, name: str, value: Any) -> Any:
    """Build an instance in which one field has the value when `__post_init__` runs.

    The type checks of the tests would refuse the value in the constructor.
    """
    config = cls(**REQUIRED.get(cls.__qualname__, {}))
    object.__setattr__(config, name, value)
    config.__post_init__()
    return config


@pytest.mark.parametrize(("cls", "name", "kind"), enum_fields())
def test_a_value_is_converted_to_the_member(cls: type, name: str, kind: type[enum.Enum]) -> None:
    for member in kind:
        if (cls, member.value) in ((TrainConfig, "async"), (LlmJudgeConfig, "batch")):
            continue  # refused by other checks of the class; the other members show the conversion
        assert getattr(build(cls, name, member.value), name) is member
        assert getattr(build(cls, name, member), name) is member


@pytest.mark.parametrize(("cls", "name", "kind"), enum_fields())
@pytest.mark.parametrize("value", ["sdt", 7, ["none"]])
def test_another_value_is_refused(cls: type, name: str, kind: type[enum.Enum], value: Any) -> None:
    choices = ", ".join(member.value for member in kind)
    with pytest.raises(ValueError, match="takes one of") as refused:
        build(cls, name, value)
    assert str(refused.value) == f"{cls.__name__}.{name} is {value!r}; it takes one of {choices}"


def test_enum_fields_are_found() -> None:
    assert len(enum_fields()) > 12


def test_a_string_has_the_same_effect_as_the_member() -> None:
    """Runs in a subprocess, without the type checks of the tests."""
    code = (
        "from marin_rl.objectives.gigpo import GigpoConfig, GigpoNormalization\n"
        "assert GigpoConfig(normalize='std').normalize is GigpoNormalization.STD\n"
        "GigpoConfig(normalize='sdt')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1] == "ValueError: GigpoConfig.normalize is 'sdt'; it takes one of none, std"


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = "std"
    normalize: GigpoNormalization | None = None

    def __post_init__(self) -> None:
        convert_enum_fields(self)


def test_fields_of_other_types_are_unchanged() -> None:
    assert Config() == Config("std", None)
    assert build(Config, "normalize", "std").normalize is GigpoNormalization.STD
