# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math
import re
from pathlib import Path

import jmp
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
import yaml
from levanter.layers.attention import AttentionBackend
from levanter.models.gemma import Gemma3Config
from levanter.models.gpt2 import Gpt2Config
from levanter.models.mixtral import MixtralConfig
from levanter.optim.config import AdamConfig
from levanter.optim.mars import MarsConfig
from levanter.optim.scion import ScionConfig

from marin_rl.config.command_line import parse_config
from marin_rl.config.sections import Mode, RolloutConfig
from marin_rl.config.train_config import TrainConfig, TrainerConfig
from marin_rl.config.weights_config import WeightTransferConfig
from marin_rl.objectives import (
    GrpoConfig,
    ReinforceConfig,
)
from marin_rl.runs.run_directory import config_differences
from marin_rl.utils.levanter_line import IS_NEW, seq_len
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.fields import changeable_keys
from marin_rl.utils.settings.section_types import ConfigError, field_types
from marin_rl.utils.settings.yaml_text import from_yaml, parse_yaml, to_yaml
from marin_rl.utils.storage import user_cache
from tests.config.from_lines import from_lines
from tests.config.small_config import MODEL, SIZES, config


def test_defaults_need_no_accelerator_tracker_or_cluster():
    trainer = config().trainer
    assert trainer == TrainerConfig()
    assert not trainer.require_accelerator
    assert not trainer.distributed.initialize_jax_distributed
    assert trainer.tracker == ()
    assert trainer.jax_compilation_cache_dir == str(user_cache("jax"))


def test_name_of_the_run_in_trackers():
    assert config().run_name == "test"
    assert config(trainer=TrainerConfig(id="mine")).run_name == "mine"


def test_config_round_trips_through_yaml():
    built = config(advantage=GrpoConfig(), seed=5)
    assert from_yaml(TrainConfig, to_yaml(built), "test") == built


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


def test_command_line_and_code_build_the_same_config(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "run_dir: runs/test\nenvironment: {type: arithmetic}\n"
        "model: {type: llama, seq_len: 64, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, "
        "num_kv_heads: 2}\n"
        "rollouts: {prompts_per_step: 4, group_size: 2, max_length: 32}\n"
    )
    parsed = parse_config(TrainConfig, ["--config", str(file), "--rollouts.group_size", "8"])
    assert parsed.config == config()


def test_reinforce_accepts_groups_of_one():
    alone = RolloutConfig(group_size=1)
    assert config(rollouts=alone, advantage=ReinforceConfig(), model=None, initialize_from="x").rollouts is alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts": RolloutConfig(group_size=1, max_length=8)}, r"rollouts\.group_size is 1, but advantage 'rloo'"),
        (
            {"rollouts": RolloutConfig(group_size=1, max_length=8), "advantage": GrpoConfig()},
            "advantage 'grpo' compares the rollouts .* needs at least 2; raise it, or use advantage: {type: reinforce}",
        ),
        ({"model": None}, "neither model nor initialize_from is set"),
        ({"optimizer": AdamConfig(learning_rate=-1e-3)}, r"optimizer\.learning_rate is -0\.001; it must be a finite"),
        ({"optimizer": AdamConfig(learning_rate=math.inf)}, r"optimizer\.learning_rate is inf; it must be a finite"),
        ({"optimizer": ScionConfig()}, r"optimizer\.type is 'scion', .* use one of adam, .*adopt, "),
        ({"optimizer": MarsConfig()}, r"optimizer\.max_grad_norm is 1\.0, .* set optimizer\.max_grad_norm: null"),
        *(
            (
                {"num_steps": 5, "optimizer": AdamConfig(**schedule)},
                rf"optimizer\.{key} is {re.escape(str(value))}, but the run has 5 updates .*learning-rate schedule",
            )
            # The new line of levanter ends the warmup or begins the cooldown early.
            for schedule in ({"cycle_length": 0}, *(() if IS_NEW else ({"warmup": 10}, {"cooldown": 100})))
            for key, value in schedule.items()
        ),
        ({"ray_address": "ray://head:10001"}, r"ray_address is 'ray://head:10001'; it must be `auto`, or `host:port`"),
        ({"ray_address": "head"}, "ray_address is 'head'; it must be `auto`, or `host:port`"),
        (
            {"mode": Mode.ASYNC, "ray_address": "10.0.0.1:6379"},
            r"weights\.host is 127\.0\.0\.1, which only this machine .* at ray_address '10\.0\.0\.1:6379'; set "
            r"weights\.host to an address",
        ),
        (
            {"mode": Mode.ASYNC, "ray_address": "auto", "weights": WeightTransferConfig(host="localhost")},
            r"weights\.host is localhost, .* at ray_address 'auto'; .* set ray_address: 127\.0\.0\.1:PORT",
        ),
        (
            {"rollouts": RolloutConfig(max_length=65)},
            r"rollouts\.max_length is 65, but the model's context has 64 tokens \(model\.seq_len\)",
        ),
        (
            {"model": Gemma3Config(**SIZES)},
            r"model\.type 'gemma3' is not supported; supported are gemma, gemma2, gpt2, llama, mistral, mixtral, olmo2",
        ),
        ({"model": dataclasses.replace(MODEL, use_bias=True)}, r"model\.use_bias: True \(Hugging Face: False\)"),
        *(
            (
                {
                    "model": MixtralConfig(**SIZES, n_routed_experts=4),
                    "trainer": dataclasses.replace(TrainerConfig(), **{key: value}),
                },
                rf"trainer\.{key} has 'experts', but levanter cannot shard the experts",
            )
            for key, value in (("tensor_parallel_axes", ["mlp", "experts"]), ("axis_resources", {"experts": "model"}))
        ),
        *(
            (
                {"trainer": dataclasses.replace(TrainerConfig(), **changes)},
                r"'position' can be split over .* only alone",
            )
            for changes in ({"tensor_parallel_axes": ["position", "mlp"]}, {"axis_resources": {"position": "model"}})
        ),
        (
            {
                "model": Gpt2Config(**seq_len(512)),
                "trainer": dataclasses.replace(TrainerConfig(), tensor_parallel_axes=["position"]),
            },
            "the positions of a gpt2 model cannot be split over devices",
        ),
        ({"model": dataclasses.replace(MODEL, scan_layers=False)}, r"model\.scan_layers is false"),
        *(
            ({"trainer": TrainerConfig(**{key: value})}, message)
            for key, value, message in (
                ("per_device_parallelism", 0, r"trainer\.per_device_parallelism is 0; it must be at least 1, or -1"),
                ("per_device_parallelism", -2, r"trainer\.per_device_parallelism is -2"),
                ("jax_config", {"jax_enable_x46": True}, r"trainer\.jax_config has 'jax_enable_x46', .*jax_enable_x64"),
                (
                    "axis_resources",
                    {"mlp": "modle"},
                    r"trainer\.axis_resources\.mlp is 'modle'; .* replica, data",
                ),
                ("axis_resources", {"mlp": ["data", "data"]}, r"trainer\.axis_resources\.mlp is \['data', 'data'\]"),
                ("parameter_axis_resources", {"embed": ["data", "x"]}, r"trainer\.parameter_axis_resources\.embed is"),
            )
        ),
        *(
            (
                {"trainer": dataclasses.replace(TrainerConfig(), mp=jmp.get_policy(precision))},
                rf"trainer\.mp is '{text},o=f16', .* use bfloat16, such as p=f32,c=bf16",
            )
            for precision, text in (("p=f32,c=f16", "p=full,c=f16"), ("p=f16,c=f32,o=f16", "p=f16,c=full"))
        ),
    ],
)
def test_invalid_settings_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("sections", "problem", "remedy"),
    [
        (
            {"replay": "{keep_sampling_weights: true}"},
            r"replay.keep_sampling_weights is true, but off_policy_correction: \{type: none\} does not use them",
            r"set off_policy_correction: \{type: tis\}, or keep_sampling_weights: false",
        ),
        (
            {
                "replay": "{keep_sampling_weights: true}",
                "off_policy_correction": "{type: tis}",
                "policy_loss": "{type: ppo_clip}",
                "workers": "{refresh: in_flight}",
            },
            "replay.keep_sampling_weights is true and workers.refresh is in_flight, but an answer sampled with ",
            "set workers.refresh: between_groups, or keep_sampling_weights: false",
        ),
        (
            {"rollouts": "{max_length: 32, row_length: 31}"},
            "rollouts.row_length is 31, but a sequence may have rollouts.max_length = 32 tokens",
            "raise row_length or lower max_length",
        ),
    ],
)
def test_invalid_combinations_are_refused_with_a_remedy(sections: dict[str, str], problem: str, remedy: str):
    with pytest.raises(ConfigError, match=f"(?s){problem}.*{remedy}"):
        from_lines(**sections)


OPENAI_SAMPLER = (
    "{type: openai, base_url: http://localhost:8000/v1, model: policy, "
    "reload: {folder: served, path: hook.py, function: reload}}"
)


def test_openai_sampler_needs_a_single_worker_and_no_in_flight_refresh():
    assert from_lines(sampler=OPENAI_SAMPLER, mode="sync", workers="{num_workers: 2}").workers.num_workers == 2
    assert from_lines(sampler=OPENAI_SAMPLER, mode="async").workers.num_workers == 1
    with pytest.raises(ConfigError, match=r"(?s)workers.num_workers is 2, .*set workers.num_workers: 1"):
        from_lines(sampler=OPENAI_SAMPLER, mode="async", workers="{num_workers: 2}")
    with pytest.raises(ConfigError, match=r"(?s)workers.refresh is in_flight, .*workers.refresh: between_groups"):
        from_lines(sampler=OPENAI_SAMPLER, mode="async", workers="{refresh: in_flight}")


@pytest.mark.parametrize("sampler", [{}, {"sampler": OPENAI_SAMPLER}])
def test_stop_texts(sampler: dict[str, str]):
    stop = "{stop: [</answer>, 'Question:']}"
    assert from_lines(sampling=stop, **sampler).sampling.stop == ("</answer>", "Question:")


@pytest.mark.parametrize(
    ("rewards", "nested", "key"),
    [
        ("[{type: code, weight: 2.0}, FUNCTION]", "ENVIRONMENT", "environment.rewards.1"),
        (
            "[FUNCTION]",
            "{type: mixture, parts: [{environment: ENVIRONMENT}]}",
            "environment.parts.0.environment.rewards.0",
        ),
    ],
)
def test_batch_scope_is_refused_in_async_mode(rewards: str, nested: str, key: str):
    rewards = rewards.replace("FUNCTION", "{type: function, path: a.py, function: share, scope: batch}")
    environment = nested.replace("ENVIRONMENT", f"{{type: arithmetic, rewards: {rewards}}}")
    assert from_lines(environment=environment).mode is Mode.SYNC
    with pytest.raises(ConfigError, match=rf"{key} has scope: batch, .* use scope: group, or mode: sync"):
        from_lines(environment=environment, mode="async")


def test_invalid_sampler_section_names_the_key():
    with pytest.raises(ConfigError, match=r"sampler.*reload"):
        from_lines(sampler="{type: openai, base_url: http://localhost:8000/v1, model: policy}")
    with pytest.raises(ConfigError, match=r"sampler.base_url is 'localhost'"):
        from_lines(sampler=OPENAI_SAMPLER.replace("http://localhost:8000/v1", "localhost"))


def test_row_length_that_no_attention_kernel_supports_is_refused():
    for settings in ({"model": MODEL}, {"model": None, "initialize_from": "nowhere"}):
        settings["model"] = settings["model"] and dataclasses.replace(settings["model"], **seq_len(2048))
        with pytest.raises(ValueError, match=r"rollouts.row_length is 1300, .*set rollouts.row_length: 1536, or null"):
            config(rollouts=RolloutConfig(max_length=1100, row_length=1300), **settings)
    vanilla = dataclasses.replace(MODEL, **seq_len(2048), attn_backend=AttentionBackend.VANILLA)
    assert config(rollouts=RolloutConfig(max_length=1100, row_length=1300), model=vanilla)


@pytest.mark.parametrize(
    ("ray_address", "weights"),
    [
        (None, WeightTransferConfig()),
        ("127.0.0.1:6379", WeightTransferConfig()),
        ("[::1]:6379", WeightTransferConfig()),
        ("10.0.0.1:6379", WeightTransferConfig(host="0.0.0.0")),
        ("auto", WeightTransferConfig(host="10.0.0.2")),
    ],
)
def test_reachable_weight_servers_are_accepted(ray_address: str | None, weights: WeightTransferConfig):
    assert config(mode=Mode.ASYNC, ray_address=ray_address, weights=weights).weights is weights


@pytest.mark.parametrize("advantage", ["{type: gigpo}", "{type: gae}", "{type: reinforce, gamma: 0.5}"])
@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("{type: agent, command: [x], tasks: {type: arithmetic}}", ""),
        ("{type: verifiers, taskset: x}", ""),
        ("{type: textarena, id: x, opponent: {type: self}}", r"\.opponent"),
    ],
)
def test_agents_refuse_advantages_that_need_the_order_of_turns(part: str, key: str, advantage: str):
    environment = f"{{type: mixture, parts: [{{environment: {part}}}]}}"
    sections = {"environment": environment, "rollouts": "{max_turns: 2, max_length: 12}", "advantage": advantage}
    if "gae" in advantage:
        sections["critic"] = "{shared_trunk: true}"
    with pytest.raises(ValueError, match=rf"environment\.parts\.0\.environment{key} runs agents"):
        from_lines(**sections)
