# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Valid configs; `mistakes.py` has the refused ones."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from levanter.layers.attention import AttentionBackend

from marin_rl.batching.attention_kernel import attention_kernel
from marin_rl.config.command_line import parse_config
from marin_rl.config.reference_config import ReferenceConfig
from marin_rl.config.sections import RolloutConfig, UpdateConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives import AdvantageConfig, GaeConfig, GrpoConfig
from marin_rl.objectives.aggregation import AggregationConfig
from marin_rl.objectives.importance import OffPolicyCorrectionConfig
from marin_rl.objectives.kl import KlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig
from marin_rl.objectives.shaping import TruncationConfig
from marin_rl.rollouts.config import FilterConfig
from marin_rl.runs.run_directory import config_differences
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.fields import changeable_keys
from marin_rl.utils.settings.section_types import ConfigError, field_types
from marin_rl.utils.settings.yaml_text import from_yaml, parse_yaml, to_yaml
from marin_rl.utils.storage import user_cache
from tests.config.mistakes import BASE, SERVER
from tests.config.small_config import MODEL, config, from_lines


def test_defaults_need_no_accelerator_tracker_or_cluster():
    trainer = config().trainer
    assert trainer == TrainerConfig()
    assert not trainer.require_accelerator
    assert not trainer.distributed.initialize_jax_distributed
    assert trainer.tracker == ()


def test_compiled_programs_are_kept_in_the_folder_of_jax_or_of_the_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://cache/jax")
    assert config().trainer.jax_compilation_cache_dir == "gs://cache/jax"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert config().trainer.jax_compilation_cache_dir == str(user_cache("jax"))


def test_name_of_the_run_in_trackers():
    assert config().run_name == "test"
    assert config(run_dir="gs://runs/rloo/").run_name == "rloo"
    assert config(trainer=TrainerConfig(id="mine")).run_name == "mine"


def test_base_class_has_the_settings_of_the_config():
    base, complete = dataclasses.fields(TrainConfig), dataclasses.fields(TrainConfig)
    assert [(field.name, field.metadata) for field in base] == [(field.name, field.metadata) for field in complete]


def test_keys_without_effect_are_refused_with_a_remedy_unless_they_are_null():
    assert not TrainerConfig.keys_without_effect.keys() & field_types(TrainerConfig).keys()
    for key, remedy in TrainerConfig.keys_without_effect.items():
        with pytest.raises(ConfigError, match=rf"^trainer\.{key} is 7, but this setting has no effect: ") as raised:
            decode(TrainerConfig, {key: 7}, ("trainer",))
        assert raised.value.problems[0].endswith(remedy)
        assert decode(TrainerConfig, {key: None}) == TrainerConfig()


def test_null_of_keys_without_effect_in_older_configs_is_no_difference():
    built = config()
    text = to_yaml(built)
    older = parse_yaml(text, "test")
    older["trainer"] |= {"wandb": None, "quantization": None}
    assert from_yaml(TrainConfig, yaml.safe_dump(older), "test") == built
    assert len(config_differences(yaml.safe_dump(older), text, ())) > 1
    assert config_differences(yaml.safe_dump(older), text, changeable_keys(TrainConfig)) == []


def test_yaml_command_line_and_code_build_the_same_config(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text(BASE)
    parsed = parse_config(TrainConfig, ["--config", str(file), "--advantage.type", "grpo", "--seed", "5"])
    code = config(advantage=GrpoConfig(), seed=5, sampling=dataclasses.replace(config().sampling, max_new_tokens=8))
    assert parsed.config == code == from_yaml(TrainConfig, to_yaml(code), "test")


# Choices.

SEVERAL_TURNS = {"rollouts": {"max_length": 32, "max_turns": 3}}
CHOICES: dict[str, tuple[type, dict[str, dict[str, Any]]]] = {
    "advantage": (
        AdvantageConfig,
        {
            **{name: {} for name in ("rloo", "grpo", "dr_grpo", "maxrl", "reinforce")},
            "gae": {"critic": {}},
            "gigpo": SEVERAL_TURNS,
        },
    ),
    "policy_loss": (
        PolicyLossConfig,
        {name: {} for name in ("reinforce", "importance", "ppo_clip", "gspo", "rloo_sequence", "cispo")},
    ),
    "kl": (
        KlConfig,
        {"none": {}, **{name: {"": {"beta": 0.1}} for name in ("in_reward", "in_loss", "exact")}},
    ),
    "reference": (
        ReferenceConfig,
        {
            "initial": {},
            "checkpoint": {"": {"path": "runs/teacher"}, "distillation": {}},
            "server": {"": {"base_url": "http://localhost:8000/v1", "model": "teacher"}, "distillation": {}},
            "policy": {"": {"weights": "average", "context": {"feedback": True, "max_tokens": 8}}, "distillation": {}},
            "by_environment": {
                "": {"references": {"arithmetic": {"type": "initial"}}},
                "distillation": {"alone": True},
            },
        },
    ),
    "aggregation": (
        AggregationConfig,
        {"token_mean": {}, "sequence_mean": {}, "sequence_sum": {}, "constant": {"": {"length": 64}}},
    ),
    "off_policy_correction": (OffPolicyCorrectionConfig, {name: {} for name in ("none", "tis", "mask", "icepop")}),
    "truncation": (TruncationConfig, {name: {} for name in ("keep", "mask", "reward")}),
    "filter": (FilterConfig, {name: {} for name in ("keep", "drop", "resample")}),
}
"""Registry and choices by section. Each choice has the other sections that it needs; its own keys are under ""."""


@pytest.mark.parametrize("section", CHOICES)
def test_every_choice_can_be_selected_by_name(section: str):
    registry, choices = CHOICES[section]
    assert set(registry.get_known_choices()) == set(choices)
    for name, more in choices.items():
        sections = {**more, section: {"type": name, **more.get("", {})}}
        built = from_lines(**{key: json.dumps(value) for key, value in sections.items() if key})
        assert type(getattr(built, section)) is registry.get_choice_class(name)
        assert from_yaml(TrainConfig, to_yaml(built), "again") == built


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("kl: {type: in_loss, beta: 0.1, ", "estimator", ["k1", "k2", "k3", "k3_plus"]),
        ("kl: {type: exact, beta: 0.1, ", "divergence", ["forward", "reverse", "jensen_shannon"]),
        ("advantage: {type: rloo, ", "normalize", ["none", "group", "batch"]),
        ("advantage: {type: dr_grpo, ", "normalize", ["none", "group", "batch"]),
        ("advantage: {type: gigpo, ", "normalize", ["none", "std"]),
        ("workers: {", "refresh", ["between_groups", "in_flight"]),
        ("weights: {", "dtype", ["parameter", "bfloat16"]),
    ],
)
def test_every_value_of_an_enum_can_be_selected_by_name(section: str, key: str, values: list[str]):
    name, _, start = section.partition(": ")
    rollouts = json.dumps(SEVERAL_TURNS["rollouts"])
    for value in values:
        built = getattr(from_lines(**{name: f"{start}{key}: {value}}}", "rollouts": rollouts}), name)
        assert getattr(built, key) == value
        assert {member.value for member in type(getattr(built, key))} == set(values)


def test_ppo_with_all_of_its_sections():
    built = from_lines(
        advantage="{type: gae, gamma: 0.99, lam: 0.9, whiten: false}",
        critic="{shared_trunk: false, coefficient: 0.25, clip: null}",
        policy_loss="{type: ppo_clip, clip_low: 0.1, clip_high: 0.3, dual_clip: 3.0}",
        kl="{type: in_reward, beta: 0.05}",
        updates="{epochs: 4, minibatches: 2}",
        overlong="{buffer: 4, factor: 0.5}",
        off_policy_correction="{type: tis, cap: 3.0}",
        rollouts="{prompts_per_step: 4, group_size: 1, max_length: 32}",
    )
    assert built.critic == CriticConfig(shared_trunk=False, coefficient=0.25, clip=None)
    assert built.advantage == GaeConfig(gamma=0.99, lam=0.9, whiten=False)
    assert (built.num_updates, built.overlong.buffer) == (200 * 8, 4)


@pytest.mark.parametrize(
    "lines",
    [
        "policy_loss: {type: gspo}\noff_policy_correction: {type: mask}",
        "policy_loss: {type: rloo_sequence}\noff_policy_correction: {type: mask}\nupdates: {epochs: 2, minibatches: 4}",
        "policy_loss: {type: cispo}\noff_policy_correction: {type: icepop}\nupdates: {minibatches: 32}",
        "policy_loss: {type: importance}\nupdates: {epochs: 2}\nfilter: {type: drop}",
        "advantage: {type: gae}\ncritic: {}\nrollouts: {group_size: 1, max_length: 32}",
        "advantage: {type: reinforce}\nrollouts: {group_size: 1, max_length: 32}\nmodel: null\ninitialize_from: x",
        "sampling: {top_p: 1.0, top_k: null, stop: [</answer>, 'Question:']}",
        f"sampler: {SERVER}\nmode: sync\nworkers: {{num_workers: 2}}",
        f"sampler: {SERVER}\nmode: async\nsampling: {{stop: [x]}}",
        "mode: async",
        "mode: async\nray_address: 127.0.0.1:6379",
        "mode: async\nray_address: '[::1]:6379'",
        "mode: async\nray_address: 10.0.0.1:6379\nweights: {host: 0.0.0.0, port: 7000}",
        "mode: async\nray_address: auto\nweights: {host: 10.0.0.2}",
        "workers: {resources: {spot: 1.0}, precision: 'p=bf16,c=bf16', tpu_slice: 'v6e:2x2'}",
        "mode: async\nray_address: 10.0.0.1:6379\nweights: {host: 0.0.0.0, dtype: bfloat16}\n"
        "workers: {resources: {spot: 1.0}, precision: 'p=bf16,c=bf16', tpu_slice: 'v6e:2x2'}",
        "mode: async\nworkers: {engine: iris, tpu_slice: v5p-8, num_workers: 18}",
        "environment: {type: arithmetic, rewards: [{type: function, path: a.py, function: f, scope: batch}]}",
        "trainer: {jax_compilation_cache_dir: gs://cache/jax}\ninitialize_from: gs://runs/other",
        "log_level: DEBUG\nlogging: {marin_rl.rollouts.rollout_builder: warning}",
    ],
)
def test_valid_combinations_are_accepted(lines: str):
    sections = dict(line.split(": ", 1) for line in lines.split("\n"))
    built = from_lines(**sections)
    assert from_yaml(TrainConfig, to_yaml(built), "again") == built


def test_updates_per_step():
    assert UpdateConfig(epochs=3, minibatches=4).per_step == 12


# Rows of batches.


@pytest.mark.parametrize(
    ("settings", "positions", "rows"),
    [
        ({"max_length": 12}, 128, 6),
        ({"max_length": 512}, 512, 1),
        ({"max_length": 513}, 640, 1),
        ({"max_length": 1100, "packing": False}, 1280, 1),
        ({"max_length": 1100, "row_length": 1152}, 1152, 1),
        ({"max_length": 12, "packing": False}, 12, 64),
        ({"max_length": 12, "row_length": 32}, 32, 24),
        ({"max_length": 12, "packing": False, "prompts_per_step": 5, "group_size": 13}, 12, 33),
        ({"max_length": 12, "prompts_per_step": 2, "group_size": 2}, 128, 4),
    ],
)
def test_default_microbatch_on_a_cpu_has_at_most_768_tokens(settings: dict, positions: int, rows: int):
    built = RolloutConfig(**settings)
    assert (built.sizes.positions(attention_kernel(None, "cpu")), built.sizes.rows_per_device("cpu")) == (
        positions,
        rows,
    )


def test_default_microbatch_of_an_accelerator_is_larger_but_not_larger_than_a_step():
    built = RolloutConfig(max_length=512)
    assert [built.sizes.rows_per_device(platform) for platform in ("cpu", "gpu", "tpu")] == [1, 16, 16]
    # 512 rollouts on 64 devices: 8 rows on each.
    assert built.sizes.rows_per_device("tpu", devices=64) == 8


def test_row_length_must_be_one_that_an_attention_kernel_supports():
    rollouts = RolloutConfig(max_length=1100, row_length=1300)
    vanilla = dataclasses.replace(MODEL, **seq_len(2048), attn_backend=AttentionBackend.VANILLA)
    assert config(rollouts=rollouts, model=vanilla)
    with pytest.raises(ConfigError, match=re.escape("set rollouts.row_length: 1536, or null")):
        config(rollouts=rollouts, model=None, initialize_from="nowhere")
