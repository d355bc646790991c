# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""All fields of the config classes with a range: values at its bounds are accepted, values beyond it refused."""

import math
import typing
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le

from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.settings.checks import ConfigSection
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import (
    ConfigError,
    describe,
    describe_range,
    field_types,
    is_annotated,
    members,
    range_problem,
)
from tests.config_classes import build, config_classes

RANGES = {
    "at least 1": """
        ArithmeticConfig.digits BatchConfig.size ConstantConfig.length ContextConfig.max_tokens EvaluationConfig.samples
        IcepopConfig.high LlmJudgeConfig.max_concurrency LlmJudgeConfig.max_tokens LaunchConfig.disk_gb
        LoraConfig.rank MixturePartConfig.window OpenEnvConfig.max_characters
        OpenEnvConfig.num_tasks PairBatchConfig.size ReasoningGymConfig.size ReloadConfig.keep RolloutConfig.group_size
        RolloutConfig.max_length RolloutConfig.max_turns RolloutConfig.prompts_per_step SamplingConfig.max_new_tokens
        SamplingConfig.max_seqs SandboxConfig.file_mb SandboxConfig.output_kb SandboxConfig.threads
        SandboxConfig.workers ServeConfig.max_body_bytes ServeConfig.max_choices ServeConfig.max_sequences
        TextArenaConfig.max_characters TextArenaConfig.num_players TextArenaConfig.num_tasks
        TinkerConfig.max_seqs
        TextGameConfig.max_characters TextGameConfig.num_tasks TextWorldConfig.max_characters TextWorldConfig.num_tasks
        ToolLimits.max_calls ToolLimits.max_output TrainerConfig.model_axis_size TrainerConfig.profiler_num_steps
        TrainerConfig.profiler_start_step TrainerConfig.replica_dcn_axis_size TrainerConfig.replica_ici_axis_size
        UpdateConfig.epochs UpdateConfig.minibatches WarmStartConfig.batch_size WarmStartConfig.check_every
        WarmStartConfig.check_tasks WorkerMeshConfig.model_axis_size WorkersConfig.decode_steps_per_weight_poll
    """,
    "at least 0": """
        ChatConfig.seed CheckpointConfig.every CheckpointConfig.keep_every CispoLossConfig.clip_high
        ContextConfig.demonstrations
        DpoConfig.num_steps EvaluationConfig.every EvaluationConfig.tasks GigpoConfig.omega GspoLossConfig.clip_high
        LlmJudgeConfig.backoff_seconds LaunchConfig.max_retries LlmJudgeConfig.retries LlmJudgeConfig.temperature
        LossEvaluationConfig.every LossKlConfig.beta OverlongConfig.buffer PpoClipLossConfig.clip_high
        ReasoningGymConfig.seed ReplayConfig.max_staleness RetryConfig.give_up_seconds RewardKlConfig.beta
        RlooSequenceLossConfig.clip_high RolloutStoreConfig.every SandboxConfig.processes SftConfig.num_steps
        TrainConfig.num_steps WarmStartConfig.max_steps
    """,
    "at least 0 and below 1": """
        ArithmeticConfig.held_out ArithmeticConfig.validation DataConfig.held_out GspoLossConfig.clip_low
        HuggingFaceConfig.validation InProcessConfig.held_out InProcessConfig.validation JsonlConfig.validation
        OpenEnvConfig.held_out OpenEnvConfig.validation
        PolicyReferenceConfig.decay PpoClipLossConfig.clip_low ReasoningGymConfig.held_out ReasoningGymConfig.validation
        RlooSequenceLossConfig.clip_low TextArenaConfig.held_out TextArenaConfig.validation TextGameConfig.detours
        TextGameConfig.held_out TextGameConfig.validation TextWorldConfig.detours TextWorldConfig.held_out
        TextWorldConfig.validation VerifiersConfig.held_out VerifiersConfig.validation
    """,
    "above 0": """
        CriticConfig.coefficient DistillationConfig.coefficient DpoConfig.epochs ExactKlConfig.beta
        JudgeCriterion.weight LlmJudgeConfig.timeout_seconds MaskMismatchConfig.cap
        MathGraderConfig.timeout ObservationLossConfig.coefficient OpenAiSamplerConfig.timeout PreferenceLossConfig.beta
        RetryConfig.first_seconds RolloutStoreConfig.max_mb SandboxConfig.cpu_seconds SandboxConfig.start_seconds
        SandboxConfig.wall_seconds ServerReferenceConfig.timeout SftConfig.epochs TisConfig.cap ToolLimits.max_seconds
        WarmStartConfig.learning_rate WorkersConfig.heartbeat_timeout WorkersConfig.no_progress_timeout
    """,
    "at least 1, or null": """
        BatchConfig.row_length ChatConfig.max_tokens DpoConfig.logprob_block_size LaunchConfig.memory_gb
        OpenEnvConfig.max_steps PairBatchConfig.row_length
        RolloutConfig.max_prompt_length RolloutConfig.max_tokens RolloutConfig.row_length ServeConfig.max_new_tokens
        ServeConfig.max_seqs SftConfig.logprob_block_size TextArenaConfig.max_steps TextGameConfig.max_steps
        TextWorldConfig.max_steps TrainConfig.logprob_block_size VerifiersConfig.num_tasks
    """,
    "from 0 to 1": """
        CispoLossConfig.clip_low GaeConfig.gamma GaeConfig.lam GigpoConfig.gamma RandomRewardConfig.probability
    """,
    "at most 0, or replies without an action pay": """
        OpenEnvConfig.invalid_reward TextArenaConfig.invalid_reward TextGameConfig.invalid_reward
        TextWorldConfig.invalid_reward
    """,
    "above 0 and at most 1": """
        IcepopConfig.low WarmStartConfig.target_accuracy
    """,
    "above 0 and below 1": """
        ExactKlConfig.mixture
    """,
    "above 0 and below 1000000": """
        LoraConfig.alpha ServeConfig.client_seconds ServeConfig.drain_seconds TinkerConfig.client_seconds
    """,
    "above 0, or null": """
        CriticConfig.clip LaunchConfig.cpu SamplingConfig.max_cache_gib
    """,
    "at least 0, or null": """
        ChatConfig.temperature
    """,
    "at least 0 and below 1, or null": """
        HuggingFaceConfig.held_out JsonlConfig.held_out
    """,
    "from 0 to 65535": """
        ServeConfig.port WeightTransferConfig.port TinkerConfig.port
    """,
    "above 0 and at most 1000000000": """
        RolloutConfig.max_seconds
    """,
    "above 0, or remove the part to exclude it": """
        MixturePartConfig.weight
    """,
    "above 0, or set overlong.buffer: 0 to disable the penalty": """
        OverlongConfig.factor
    """,
    "at least 0 and below 0.5": """
        PreferenceLossConfig.label_smoothing
    """,
    "above 1, or null": """
        PpoClipLossConfig.dual_clip
    """,
    "at least 1, or mode: sync": """
        WorkersConfig.num_workers
    """,
    "at least 1e-30, or null, or use evaluation.greedy for attempts at temperature 0": """
        EvaluateConfig.temperature
    """,
    "at least 1e-30, or use evaluation.greedy for attempts at temperature 0": """
        SamplingConfig.temperature
    """,
    "at least 2": """
        ArithmeticConfig.terms BatchConfig.max_length PairBatchConfig.max_length
    """,
    "at least 2, one to fall back to": """
        CheckpointConfig.keep_last
    """,
    "at least 2, or null": """
        ChatConfig.max_context ServeConfig.max_context TinkerConfig.max_context
    """,
    "at least 2, or use filter: {type: drop}": """
        ResampleGroupsConfig.max_batches
    """,
    "at least 64": """
        SandboxConfig.memory_mb
    """,
    "at most 0, or failed calls pay": """
        ToolUseConfig.error_reward
    """,
    "from 0 to 1, or null": """
        ReinforceConfig.gamma
    """,
    "from 1 to 64": """
        WeightTransferConfig.streams
    """,
}
"""Fields by the words for their range."""
WORDS = {field: words for words, fields in RANGES.items() for field in fields.split()}


def number_fields() -> list[tuple[type, str, Any]]:
    """Class, name and type of the fields with numbers of the config classes."""
    return [
        (cls, name, annotation)
        for cls in sorted(config_classes(), key=lambda cls: cls.__name__)
        for name, annotation in field_types(cls).items()
        if issubclass(cls, ConfigSection)
        and any(is_annotated(option) or option is float for option in members(annotation))
    ]


RANGED = [
    pytest.param(cls, name, bound, id=f"{cls.__name__}.{name}-{type(bound).__name__}")
    for cls, name, annotation in number_fields()
    for option in filter(is_annotated, members(annotation))
    for bound in option.__metadata__
    if not isinstance(bound, str)
]


def test_every_range_is_in_the_table():
    assert {f"{case.values[0].__name__}.{case.values[1]}" for case in RANGED} == WORDS.keys()


def prefix(cls: Any) -> str:
    """The beginning of a problem of a config that was built in Python: a field of the whole config is a key."""
    return "" if cls.is_whole_config else f"{cls.__name__}."


@pytest.mark.parametrize(("cls", "name", "bound"), RANGED)
def test_value_beyond_a_bound_is_refused(cls: type, name: str, bound: Any):
    kind, limit = type(bound).__name__, getattr(bound, type(bound).__name__.lower())
    is_int = int in [getattr(option, "__origin__", option) for option in members(field_types(cls)[name])]
    step = 1 if is_int else max(abs(limit), 1.0) / 1024
    value = {"Ge": limit - step, "Gt": limit, "Le": limit + step, "Lt": limit}[kind]
    value = value if is_int else float(value)
    with pytest.raises(ValueError, match=rf"^{prefix(cls)}{name} is {value}; it must be ") as refused:
        build(cls, name, value)
    assert str(refused.value).endswith(f"it must be {WORDS[f'{cls.__name__}.{name}']}")
    with pytest.raises(ConfigError) as reported:
        decode(cls, {name: value})
    assert str(refused.value).removeprefix(prefix(cls)) in reported.value.problems
    ranged = next(option for option in members(field_types(cls)[name]) if is_annotated(option))
    assert describe_range(ranged) in describe(field_types(cls)[name])


@pytest.mark.parametrize(
    ("annotation", "accepted", "refused", "words"),
    [
        (typing.Annotated[int, Ge(1)], [1, 2], [0, -1], "at least 1"),
        (typing.Annotated[float, Gt(0), Le(1)] | None, [1e-9, 1.0, None], [0.0, 1.1], "above 0 and at most 1, or null"),
        (typing.Annotated[int, Ge(2), "two to compare"], [2], [1], "at least 2, two to compare"),
        (typing.Annotated[float, Ge(0), Le(1)], [0, 1], [-0.1, 1.5, math.nan], "from 0 to 1"),
        (float, [-1.0], [math.inf, -math.inf, math.nan], "finite"),
    ],
)
def test_words_of_a_range(annotation: Any, accepted: list, refused: list, words: str):
    assert not any(range_problem(annotation, value, "key") for value in accepted)
    for value in refused:
        finite = "" if math.isfinite(value) or words == "finite" else "finite and "
        assert range_problem(annotation, value, "key") == f"key is {value}; it must be {finite}{words}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value: float):
    for cls, name, annotation in number_fields():
        if any(float in (option, getattr(option, "__origin__", None)) for option in members(annotation)):
            with pytest.raises(ValueError, match=rf"^{prefix(cls)}{name} is {value}; it must be finite"):
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
