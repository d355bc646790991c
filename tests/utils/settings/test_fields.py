# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import enum
import inspect
import sys
import typing
from typing import Any

import pytest
from fsspec.registry import _registry

from marin_rl.config.reference_config import PolicyReferenceConfig
from marin_rl.config.supervised_config import PairBatchConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.objectives.gigpo import GigpoNormalization
from marin_rl.rewards.judge import LlmJudgeConfig
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.settings.checks import check_fields
from marin_rl.utils.settings.fields import changeable_keys, is_loopback
from marin_rl.utils.settings.help import all_keys
from tests.config_classes import REQUIRED, build, config_classes, type_arguments


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


@pytest.mark.parametrize(("cls", "name", "kind"), enum_fields())
def test_a_value_is_converted_to_the_member(cls: type, name: str, kind: type[enum.Enum]) -> None:
    for member in kind:
        if (cls, member.value) in (
            (TrainConfig, "async"),
            (LlmJudgeConfig, "batch"),
            (LlmJudgeConfig, "pointwise"),
            (PairBatchConfig, "truncate"),
            (PolicyReferenceConfig, "live"),
            (PolicyReferenceConfig, "initial"),
        ):
            continue  # refused by other checks of the class; the other members show the conversion
        assert getattr(build(cls, name, member.value), name) is member
        assert getattr(build(cls, name, member), name) is member


@pytest.mark.parametrize(("cls", "name", "kind"), enum_fields())
def test_another_value_is_refused(cls: type, name: str, kind: type[enum.Enum]) -> None:
    choices = ", ".join(member.value for member in kind)
    for value in ("sdt", 7, ["none"]):
        with pytest.raises(ValueError, match="takes one of") as refused:
            build(cls, name, value)
        given = f"{value!r} ({type(value).__name__}), but it takes one of {choices}"
        prefix = "" if cls.is_whole_config else f"{cls.__name__}."
        assert str(refused.value) in (f"{prefix}{name} is {given}", f"{prefix}{name} is {given} or null")


def test_enum_fields_are_found() -> None:
    assert len(enum_fields()) > 12


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = "std"
    normalize: GigpoNormalization | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_fields_of_other_types_are_unchanged() -> None:
    assert Config() == Config("std", None)
    assert build(Config, "normalize", "std").normalize is GigpoNormalization.STD


def test_missing_package_of_an_object_store_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(ValueError, match=r"run_dir is 's3://b/run', but .* pip install -e '\.\[s3\]'"):
        TrainConfig(**{**REQUIRED["TrainConfig"], "run_dir": "s3://b/run"})


@pytest.mark.medium
def test_keys_that_may_change_on_resume_exist_or_are_keys_without_effect():
    keys = set(changeable_keys(TrainConfig))
    assert {"ray_address", "rollout_store", "workers.num_workers", "trainer.tracker"} <= keys
    raw = {"sampler": {"type": "openai"}, "model": {"type": "llama"}}
    assert keys - set(all_keys(TrainConfig, raw)) == {f"trainer.{name}" for name in TrainerConfig.keys_without_effect}


def test_loopback_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
