# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math
from typing import Any

import pytest

from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.settings.checks import ConfigSection, describe_range
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError, describe, field_types, is_annotated, members
from tests.config_classes import build, config_classes

SHARES = {"held_out": (1.0, "at least 0 and below 1"), "validation": (-0.1, "at least 0 and below 1")}
GAME = {
    **SHARES,
    "num_tasks": (0, "at least 1"),
    "max_steps": (0, "at least 1, or null"),
    "max_characters": (0, "at least 1"),
    "invalid_reward": (0.5, "at most 0, or replies without an action pay"),
}
DETOURS = {"detours": (1.0, "at least 0 and below 1")}

REFUSED: dict[str, dict[str, tuple[float, str]]] = {
    "ArithmeticConfig": {**SHARES, "terms": (1, "at least 2"), "digits": (0, "at least 1")},
    "CheckpointConfig": {
        "every": (-1, "at least 0"),
        "keep_last": (1, "at least 2, one to fall back to"),
        "keep_every": (-1, "at least 0"),
    },
    "CispoLossConfig": {"clip_low": (1.1, "from 0 to 1"), "clip_high": (-0.1, "at least 0")},
    "ConstantConfig": {"length": (0, "at least 1")},
    "CriticConfig": {"coefficient": (0.0, "above 0"), "clip": (0.0, "above 0, or null")},
    "EvaluateConfig": {
        "temperature": (9e-31, "at least 1e-30, or null, or use evaluation.greedy for attempts at temperature 0")
    },
    "EvaluationConfig": {"every": (-1, "at least 0"), "tasks": (-1, "at least 0"), "samples": (0, "at least 1")},
    "GaeConfig": {"gamma": (-0.1, "from 0 to 1"), "lam": (1.5, "from 0 to 1")},
    "GigpoConfig": {"omega": (-1.0, "at least 0"), "gamma": (1.5, "from 0 to 1")},
    "GspoLossConfig": {"clip_low": (1.0, "at least 0 and below 1"), "clip_high": (-0.1, "at least 0")},
    "HuggingFaceConfig": {**SHARES, "held_out": (1.0, "at least 0 and below 1, or null")},
    "IcepopConfig": {"low": (0.0, "above 0 and at most 1"), "high": (0.9, "at least 1")},
    "JsonlConfig": {**SHARES, "held_out": (1.0, "at least 0 and below 1, or null")},
    "JudgeCriterion": {"weight": (0.0, "above 0")},
    "LlmJudgeConfig": {
        "timeout_seconds": (0.0, "above 0"),
        "retries": (-1, "at least 0"),
        "backoff_seconds": (-1.0, "at least 0"),
        "max_concurrency": (0, "at least 1"),
        "max_tokens": (0, "at least 1"),
        "temperature": (-0.1, "at least 0"),
    },
    "LocalConfig": {
        "num_processes": (0, "at least 1"),
        "devices_per_process": (0, "at least 1"),
        "stop_timeout": (-1.0, "at least 0"),
    },
    "LossKlConfig": {"beta": (-0.1, "at least 0")},
    "MaskMismatchConfig": {"cap": (-1.0, "above 0")},
    "MathVerifyConfig": {"timeout": (0.0, "above 0")},
    "MixturePartConfig": {"weight": (0.0, "above 0, or remove the part to exclude it"), "window": (0, "at least 1")},
    "OpenAiSamplerConfig": {"timeout": (0.0, "above 0")},
    "OpenEnvConfig": GAME,
    "OverlongConfig": {
        "buffer": (-1, "at least 0"),
        "factor": (0.0, "above 0, or set overlong.buffer: 0 to disable the penalty"),
    },
    "PpoClipLossConfig": {
        "clip_low": (-0.1, "at least 0 and below 1"),
        "clip_high": (-0.1, "at least 0"),
        "dual_clip": (1.0, "above 1, or null"),
    },
    "RandomRewardConfig": {"probability": (1.1, "from 0 to 1")},
    "ReasoningGymConfig": {**SHARES, "size": (0, "at least 1"), "seed": (-1, "at least 0")},
    "ReinforceConfig": {"gamma": (-0.5, "from 0 to 1, or null")},
    "ReloadConfig": {"keep": (0, "at least 1")},
    "ReplayConfig": {"max_staleness": (-1, "at least 0")},
    "ResampleGroupsConfig": {"max_batches": (1, "at least 2, or use filter: {type: drop}")},
    "RetryConfig": {"first_seconds": (0.0, "above 0"), "give_up_seconds": (-1.0, "at least 0")},
    "RewardKlConfig": {"beta": (-0.1, "at least 0")},
    "RlooSequenceLossConfig": {"clip_low": (1.0, "at least 0 and below 1"), "clip_high": (-0.1, "at least 0")},
    "RolloutConfig": {
        "prompts_per_step": (0, "at least 1"),
        "group_size": (0, "at least 1"),
        "max_length": (0, "at least 1"),
        "max_prompt_length": (0, "at least 1, or null"),
        "max_turns": (0, "at least 1"),
        "max_tokens": (0, "at least 1, or null"),
        "max_seconds": (0.0, "above 0 and at most 1000000000"),
        "row_length": (0, "at least 1, or null"),
    },
    "RolloutStoreConfig": {"every": (-1, "at least 0"), "max_mb": (0.0, "above 0")},
    "SamplingConfig": {
        "max_new_tokens": (0, "at least 1"),
        "temperature": (9e-31, "at least 1e-30, or use evaluation.greedy for attempts at temperature 0"),
        "max_seqs": (0, "at least 1"),
        "max_cache_gib": (0.0, "above 0, or null"),
    },
    "SandboxConfig": {
        "workers": (0, "at least 1"),
        "wall_seconds": (0.0, "above 0"),
        "cpu_seconds": (0.0, "above 0"),
        "memory_mb": (63, "at least 64"),
        "processes": (-1, "at least 0"),
        "threads": (0, "at least 1"),
        "file_mb": (0, "at least 1"),
        "output_kb": (0, "at least 1"),
        "start_seconds": (0.0, "above 0"),
    },
    "ServeConfig": {
        "port": (65536, "from 0 to 65535"),
        "max_seqs": (0, "at least 1, or null"),
        "max_context": (1, "at least 2, or null"),
        "max_new_tokens": (0, "at least 1, or null"),
        "max_choices": (0, "at least 1"),
        "max_sequences": (0, "at least 1"),
        "max_body_bytes": (0, "at least 1"),
        "client_seconds": (0.0, "above 0 and below 1000000"),
        "drain_seconds": (1e6, "above 0 and below 1000000"),
    },
    "SlicesConfig": {"num_slices": (0, "at least 1")},
    "TextArenaConfig": {**GAME, "num_players": (0, "at least 1")},
    "TextGameConfig": GAME | DETOURS,
    "TextWorldConfig": GAME | DETOURS,
    "TisConfig": {"cap": (0.0, "above 0")},
    "ToolLimits": {"max_calls": (0, "at least 1"), "max_seconds": (0.0, "above 0"), "max_output": (0, "at least 1")},
    "ToolUseConfig": {"error_reward": (0.5, "at most 0, or failed calls pay")},
    "TpuConfig": {"max_restarts": (-1, "at least 0"), "stop_timeout": (-1.0, "at least 0")},
    "TrainConfig": {"num_steps": (-1, "at least 0"), "logprob_block_size": (0, "at least 1, or null")},
    "TrainerConfig": {
        "profiler_start_step": (0, "at least 1"),
        "profiler_num_steps": (0, "at least 1"),
        "replica_ici_axis_size": (0, "at least 1"),
        "model_axis_size": (0, "at least 1"),
        "replica_dcn_axis_size": (0, "at least 1"),
    },
    "UpdateConfig": {"epochs": (0, "at least 1"), "minibatches": (0, "at least 1")},
    "VerifiersConfig": {**SHARES, "num_tasks": (0, "at least 1, or null")},
    "WarmStartConfig": {
        "max_steps": (-1, "at least 0"),
        "batch_size": (0, "at least 1"),
        "learning_rate": (0.0, "above 0"),
        "target_accuracy": (1.1, "above 0 and at most 1"),
        "check_every": (0, "at least 1"),
        "check_tasks": (0, "at least 1"),
    },
    "WorkerMeshConfig": {"model_axis_size": (0, "at least 1")},
    "WorkersConfig": {
        "num_workers": (0, "at least 1, or mode: sync"),
        "decode_steps_per_weight_poll": (0, "at least 1"),
        "heartbeat_timeout": (0.0, "above 0"),
        "no_progress_timeout": (0.0, "above 0"),
    },
}
"""A value out of the range of each field that has one, and the words of the message, by class and field."""


def number_fields() -> list[tuple[type, str, Any]]:
    """Class, name and type of the fields with numbers of the config classes."""
    return [
        (cls, name, annotation)
        for cls in sorted(config_classes(), key=lambda cls: cls.__name__)
        for name, annotation in field_types(cls).items()
        if issubclass(cls, ConfigSection)
        and any(is_annotated(option) or option is float for option in members(annotation))
    ]


CASES = [
    pytest.param(cls, name, *REFUSED.get(cls.__name__, {}).get(name, (None, "")), id=f"{cls.__name__}.{name}")
    for cls, name, annotation in number_fields()
    if any(map(is_annotated, members(annotation)))
]


@pytest.mark.parametrize(("cls", "name", "value", "words"), CASES)
def test_value_out_of_range_is_refused(cls: type, name: str, value: Any, words: str):
    assert value is not None, f"add {cls.__name__}.{name} to the table"
    with pytest.raises(ValueError, match=name) as refused:
        build(cls, name, value)
    assert str(refused.value) == f"{cls.__name__}.{name} is {value}; it must be {words}"
    with pytest.raises(ConfigError) as reported:
        decode(cls, {name: value})
    assert f"{name} is {value}; it must be {words}" in reported.value.problems


def test_table_has_no_other_fields():
    ranged = {(case.values[0].__name__, case.values[1]) for case in CASES}
    assert {(cls, name) for cls, fields in REFUSED.items() for name in fields} <= ranged


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value: float):
    for cls, name, annotation in number_fields():
        if any(float in (option, getattr(option, "__origin__", None)) for option in members(annotation)):
            with pytest.raises(ValueError, match=rf"^{cls.__name__}\.{name} is {value}; it must be finite"):
                build(cls, name, value)
            with pytest.raises(ConfigError, match=rf"(?m)^{name} is {value} \(float\), .*must be finite"):
                decode(cls, {name: value})


def test_all_values_out_of_range_are_reported_together():
    problems = ["prompts_per_step is 0; it must be at least 1", "max_tokens is -1; it must be at least 1, or null"]
    with pytest.raises(ValueError, match="RolloutConfig") as refused:
        RolloutConfig(prompts_per_step=0, max_tokens=-1)
    assert str(refused.value).split("\n") == [f"RolloutConfig.{problem}" for problem in problems]
    with pytest.raises(ConfigError) as reported:
        decode(RolloutConfig, {"prompts_per_step": 0, "max_turns": "two", "max_tokens": -1})
    found = list(reported.value.problems)
    assert [found[0], found[2]] == problems
    assert found[1].startswith("max_turns is 'two' (str), but it takes an integer")


def test_a_nested_section_is_named_by_its_key():
    with pytest.raises(ConfigError) as reported:
        decode(TrainConfig, {"environment": {"type": "arithmetic"}, "run_dir": "run", "checkpoint": {"keep_last": 1}})
    assert "checkpoint.keep_last is 1; it must be at least 2, one to fall back to" in reported.value.problems


def test_help_and_type_errors_contain_the_range():
    for cls, name, annotation in number_fields():
        for option in filter(is_annotated, members(annotation)):
            assert describe_range(option) in describe(annotation), (cls, name)
