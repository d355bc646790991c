# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import enum
import inspect
import re
import subprocess
import sys
import typing
from typing import Any

import pytest
from fsspec.registry import _registry

from marin_rl.config.train_config import TrainConfig, TrainerConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.dataset import JsonlConfig
from marin_rl.environments.streams import MixtureConfig, MixturePartConfig
from marin_rl.objectives.gigpo import GigpoNormalization
from marin_rl.rewards.component import FunctionRewardConfig
from marin_rl.rewards.judge import LlmJudgeConfig
from marin_rl.sampling.config import OpenAiSamplerConfig, ReloadConfig
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.utils.settings.fields import changeable_keys, convert_enum_fields, is_loopback
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
        ):
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


def train_config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{**REQUIRED["TrainConfig"], **changes})


LOCAL = "must be a path on a mounted file system: {} is not supported here. Mount the bucket"
DATA = JsonlConfig(path="gs://data/train.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"run_dir": "gss://runs/rloo"},
            "run_dir is 'gss://runs/rloo', but the protocol gss:// is unknown; use a path",
        ),
        ({"run_dir": "gs://"}, "run_dir is 'gs://', which names no bucket and no folder; use gs://BUCKET/FOLDER"),
        ({"initialize_from": "s4://models/x"}, "initialize_from is 's4://models/x', but the protocol s4:// is unknown"),
        ({"environment": DATA}, "environment.path is 'gs://data/train.jsonl', but it " + LOCAL.format("gs://")),
        (
            {"environment": MixtureConfig(parts=(MixturePartConfig(JsonlConfig(path="a", held_out_path="b://c")),))},
            "environment.parts.0.environment.held_out_path is 'b://c'",
        ),
        (
            {
                "environment": ArithmeticConfig(
                    rewards=(FunctionRewardConfig(path="http://host/reward.py", function="f"),)
                )
            },
            "environment.rewards.0.path is 'http://host/reward.py'",
        ),
        ({"tokenizer": TokenizerConfig(path="s4://org/model")}, "tokenizer.path is 's4://org/model'"),
        (
            {"trainer": dataclasses.replace(TrainerConfig(), jax_compilation_cache_dir="memory://cache")},
            "trainer.jax_compilation_cache_dir is 'memory://cache', but jax supports only gs:// and s3:// addresses",
        ),
    ],
)
def test_address_instead_of_a_path_is_refused_by_key(changes: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        train_config(**changes)


def test_settings_that_accept_addresses():
    trainer = dataclasses.replace(TrainerConfig(), jax_compilation_cache_dir="gs://cache/jax")
    sampler = OpenAiSamplerConfig(base_url="http://host:8000/v1", model="m", reload=ReloadConfig("w", "f.py", "f"))
    config = train_config(
        trainer=trainer,
        sampler=sampler,
        run_dir="gs://runs/rloo/",
        initialize_from="gs://runs/other",
    )
    assert config.trainer is trainer
    assert config.run_name == "rloo"


def test_missing_package_of_an_object_store_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(ValueError, match=r"run_dir is 's3://b/run', but .* pip install 'marin_rl\[s3\]'"):
        train_config(run_dir="s3://b/run")


@pytest.mark.medium
def test_keys_that_may_change_on_resume_exist_or_are_keys_without_effect():
    keys = set(changeable_keys(TrainConfig))
    assert {"ray_address", "rollout_store", "workers.num_workers", "trainer.tracker"} <= keys
    raw = {"sampler": {"type": "openai"}, "model": {"type": "llama"}}
    assert keys - set(all_keys(TrainConfig, raw)) == {f"trainer.{name}" for name in TrainerConfig.keys_without_effect}


def test_loopback_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
