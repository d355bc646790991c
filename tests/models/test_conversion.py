# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, YarnRotaryEmbeddingsConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config, QwenConfig

from marin_rl.models.attention_windows import layer_windows
from marin_rl.models.conversion import (
    attention_windows,
    check_implemented,
    check_model,
    check_same_function,
    levanter_config,
    to_hf_config,
)
from marin_rl.models.hf_config import PolicyModelError, read_hf_config
from marin_rl.models.model_settings import MODEL_TYPES
from marin_rl.models.olmo3 import Olmo3Config
from marin_rl.models.qwen2 import Qwen2Config
from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig
from marin_rl.utils.levanter_line import seq_len
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, to_yaml
from tests.models.hf_checkpoint import cases, record, write_config
from tests.models.hf_oracle.make_oracle import CASES
from tests.sampling.families import mixtures

SIZES: dict[str, Any] = {
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
GEMMA2 = Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=None)
MODELS: dict[str, LmConfig] = {
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma2": GEMMA2,
    "gpt2": Gpt2Config(hidden_dim=32, num_layers=2, num_heads=4),
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    **mixtures(),
}


def read(folder: Path, config: dict[str, Any]) -> Any:
    checkpoint = write_config(folder, config)
    return levanter_config(read_hf_config(checkpoint), checkpoint)


def test_every_supported_architecture_is_listed():
    assert tuple(MODELS) == MODEL_TYPES


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_accepted(name: str):
    check_model(MODELS[name], max_length=1024)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (QwenConfig(**SIZES), r"'qwen' is not supported; use qwen2; supported are gemma"),
        (Gemma3Config(**SIZES), r"'gemma3' is not supported; supported are gemma"),
        (LlamaConfig(**{**SIZES, "num_layers": -1}), r"^model\.num_layers is -1; it must be at least 1$"),
        (LlamaConfig(**SIZES, **seq_len(0)), r"^model\.seq_len is 0; it must be at least 1$"),
        (Qwen3Config(**{**SIZES, "intermediate_dim": 0}), r"^model\.intermediate_dim is 0; it must be at least 1$"),
    ],
)
def test_error_names_an_unsupported_architecture(config: LmConfig, problem: str):
    with pytest.raises(PolicyModelError, match=problem):
        check_model(config, max_length=16)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (LlamaConfig(**SIZES, use_bias=True), r"model.use_bias: True \(Hugging Face: False\)"),
        (LlamaConfig(**SIZES, head_dim=16), r"model.head_dim: 16 \(Hugging Face: 8\)"),
        (LlamaConfig(**SIZES, use_layer_norm_weight=False), r"model.use_layer_norm_weight: False \(Hugging Face: True"),
        (LlamaConfig(**SIZES, use_qk_norm=True), "cannot be exported .* use_qk_norm"),
        (MixtralConfig(**SIZES, n_shared_experts=1), r"model.n_shared_experts: 1 \(Hugging Face: 0\)"),
        (MistralConfig(**SIZES, rope=YarnRotaryConfig(factor=2.0)), r"model.rope: .*Hugging Face: \(10000.0, None"),
        (Gpt2Config(hidden_dim=32, num_heads=4, mlp_scale=2), r"model.mlp_scale: 2 \(Hugging Face: 4\)"),
        (Gemma2Config(**SIZES, head_dim=8), "model.final_logit_softcapping is 30.0, but .* set it to null"),
        (GemmaConfig(**SIZES), "model.head_dim is 256, but levanter computes .* set it to 8"),
        (Gpt2Config(hidden_dim=32, num_heads=4, resid_pdrop=0.1), r"dropout is not applied.*model.resid_pdrop to 0"),
        (Olmo2Config(**SIZES, attention_dropout=0.1), r"Set model.attention_dropout to 0 \(it is 0.1\)"),
        (Qwen3Config(**SIZES, use_bias=True), "attention_bias is True, implemented is False"),
        (LlamaConfig(**SIZES, rope=DefaultRotaryEmbeddingsConfig(factor=4.0)), r"use model.rope.type: hf_linear"),
        (LlamaConfig(**SIZES, rope=None), r"model.rope is null, .*; leave it out, or set model.rope.type"),
        (LlamaConfig(**SIZES, rope=YarnRotaryEmbeddingsConfig(factor=4.0)), r"unlike transformers; use hf_yarn"),
    ],
)
def test_error_names_a_setting_without_a_hugging_face_form(config: LmConfig, problem: str):
    with pytest.raises(PolicyModelError, match=problem):
        check_model(config, max_length=16)


@pytest.mark.parametrize("rope", [LinearRotaryConfig(factor=4.0), YarnRotaryConfig(factor=4.0)])
@pytest.mark.parametrize("choice", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_scaled_rotary_embeddings_can_be_exported(choice: type, rope):
    check_model(choice(**SIZES, rope=rope), max_length=16)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    cases(
        [
            ("mixtral", {"lbl_coef": -0.1}, r"^model.lbl_coef is -0.1; it must be at least 0 and finite, or null$"),
            ("mixtral", {"rzl_coef": math.inf}, r"^model.rzl_coef is inf; it must be at least 0 and finite, or null$"),
            ("mixtral", {"n_routed_experts": 65_535}, r"^model.n_routed_experts is 65535; it must be at most 65534$"),
            ("qwen3_moe", {"router_aux_loss_coef": math.nan}, r"^model.router_aux_loss_coef is nan; it must be at"),
            ("qwen3_moe", {"router_z_loss_coef": -1.0}, r"^model.router_z_loss_coef is -1.0; it must be at least 0"),
            ("qwen3_moe", {"dense_router_gradient": True}, "model.dense_router_gradient is true, .* set it to false"),
            ("qwen3_moe", {"num_experts": 65_535}, r"^model.num_experts is 65535; it must be at most 65534$"),
            ("qwen3_moe", {"num_experts": 0}, r"^model.num_experts is 0; it must be at least 1$"),
            ("qwen3_moe", {"moe_intermediate_dim": 0}, r"^model.moe_intermediate_dim is 0; it must be at least 1$"),
            ("qwen3_moe", {"num_experts_per_tok": 9}, "is 9, but there are only model.num_experts = 8 experts; lower"),
            ("qwen3_moe", {"use_bias": True}, "attention_bias is True, implemented is False"),
            ("qwen3_moe", {"use_qk_norm": False}, r"model.use_qk_norm: False \(Hugging Face: True\)"),
        ]
    ),
)
def test_error_names_a_setting_of_a_mixture(name: str, changes: dict[str, Any], problem: str):
    with pytest.raises(PolicyModelError, match=problem):
        check_model(dataclasses.replace(cast(Any, MODELS[name]), **changes), max_length=16)


@pytest.mark.skipif("qwen3_moe" not in MODELS, reason="needs levanter's new line")
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"decoder_sparse_step": 0}, "^model: decoder_sparse_step is 0; it must be at least 1$"),
        ({"decoder_sparse_step": 3}, r"^model: decoder_sparse_step \(3\) and mlp_only_layers leave no layer"),
        ({"mlp_only_layers": [0, 1]}, "and mlp_only_layers leave no layer with experts; use type qwen3$"),
        ({"mlp_only_layers": [-1]}, r"^model: mlp_only_layers has \[-1\], but the 2 layers .* 0 to 1$"),
    ],
)
def test_error_names_a_setting_of_dense_layers(changes: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        decode(LmConfig, {"type": "qwen3_moe", "num_layers": 2, **changes}, ("model",))


def test_mixtral_has_no_window_of_its_own():
    check_model(MixtralConfig(**SIZES, sliding_window=64), max_length=64)
    with pytest.raises(PolicyModelError, match=r"sliding_window is 64 and rollouts.max_length 65, .* to null"):
        check_model(MixtralConfig(**SIZES, sliding_window=64), max_length=65)


def test_model_section_of_another_function_is_rejected(tmp_path: Path):
    checkpoint = write_config(tmp_path, record("llama")["config"])
    hf_config = read_hf_config(checkpoint)
    own = levanter_config(hf_config, checkpoint)
    check_same_function(hf_config, dataclasses.replace(own, **seq_len(32), gradient_checkpointing=False), "differs")
    default_base = dataclasses.replace(own, rope=DefaultRotaryEmbeddingsConfig())
    with pytest.raises(PolicyModelError, match=r"differs: rope_theta: 500000.0, 10000"):
        check_same_function(hf_config, default_base, "differs")
    with pytest.raises(PolicyModelError, match="differs: model_type: llama, qwen3"):
        check_same_function(hf_config, Qwen3Config(**SIZES), "differs")


@pytest.mark.parametrize("case", cases(CASES))
def test_config_round_trips_through_export(tmp_path: Path, case: str):
    config = read(tmp_path / "first", record(case)["config"])
    exported = to_hf_config(config, 264)
    (tmp_path / "second").mkdir()
    exported.save_pretrained(tmp_path / "second")
    assert read(tmp_path / "second", json.loads((tmp_path / "second" / "config.json").read_text())) == config


@dataclasses.dataclass(frozen=True)
class Section:
    """The `model` section of a run's config.yaml."""

    model: LmConfig


@pytest.mark.parametrize("case", cases(CASES))
def test_config_round_trips_through_the_text_form(tmp_path: Path, case: str):
    section = Section(read(tmp_path, record(case)["config"]))
    assert from_yaml(Section, to_yaml(section), "config.yaml") == section


@pytest.mark.parametrize("case", ["mistral"])
def test_a_model_without_a_window_round_trips_through_the_text_form(tmp_path: Path, case: str):
    section = Section(read(tmp_path, {**record(case)["config"], "sliding_window": None}))
    assert layer_windows(section.model) == (None, None)
    assert from_yaml(Section, to_yaml(section), "config.yaml") == section


@pytest.mark.parametrize(
    "case",
    cases(["mistral", "gemma2_window", "olmo3", "qwen2", "qwen3", "mixtral", "qwen3_moe_dense", "qwen3_moe_window"]),
)
def test_attention_windows_of_layers_are_those_of_transformers(tmp_path: Path, case: str):
    hf_config = read_hf_config(write_config(tmp_path, record(case)["config"]))
    windows = layer_windows(levanter_config(hf_config, "folder"))
    assert windows == attention_windows(hf_config)
    expected = {"mistral": (48, 48), "olmo3": (10, None), "gemma2_window": (10, None)}
    expected |= {"qwen3_moe_dense": (None,) * 4, "qwen3_moe_window": (10, 10)}
    assert windows == expected.get(case, (None, None))


def test_windows_of_default_sizes():
    assert layer_windows(MistralConfig(**SIZES)) == (4096, 4096)
    assert layer_windows(MistralConfig(**SIZES, sliding_window=None)) == (None, None)
    assert layer_windows(Olmo3Config(**{**SIZES, "num_layers": 5})) == (4096, 4096, 4096, None, 4096)
    qwen3 = Qwen3Config(**{**SIZES, "num_layers": 30}, use_sliding_window=True, sliding_window=8)
    assert layer_windows(qwen3) == (None,) * 28 + (8, 8)
    check_model(qwen3, max_length=16)


@pytest.mark.parametrize(
    ("types", "problem"),
    [
        (["full_attention"], "layer_types has 1 entries, but there are 2 layers"),
        (["a", "a"], r"layer_types has \['a'\]"),
    ],
)
def test_types_of_layers_are_validated(types: list[str], problem: str):
    with pytest.raises(ValueError, match=problem):
        Olmo3Config(**SIZES, layer_types=tuple(types))


def test_olmo3_needs_a_window(tmp_path: Path):
    with pytest.raises(PolicyModelError, match="sliding_window is null; set layer_types to full_attention"):
        read(tmp_path, {**record("olmo3")["config"], "sliding_window": None})


@pytest.mark.parametrize(("name", "changes"), [("qwen2", {"max_window_layers": 1}), ("mixtral", {})])
def test_windows_that_are_lost_in_the_export_are_rejected(tmp_path: Path, name: str, changes: dict[str, Any]):
    config = {**record(name)["config"], **changes, "use_sliding_window": True, "sliding_window": 10}
    with pytest.raises(PolicyModelError, match="sliding_window: 10, None"):
        read(tmp_path, config)


def test_settings_that_levanter_ignores_are_rejected(tmp_path: Path):
    capped = Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8)
    with pytest.raises(PolicyModelError, match=r"final_logit_softcapping is 30.0, implemented is None"):
        check_implemented(to_hf_config(capped, 264))
    check_implemented(to_hf_config(dataclasses.replace(capped, final_logit_softcapping=None), 264))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (LlamaConfig(**SIZES, use_qk_norm=True), "use_qk_norm"),
        (LlamaConfig(**SIZES, rope=DefaultRotaryEmbeddingsConfig(factor=4.0)), "use model.rope.type: hf_linear"),
    ],
)
def test_error_names_a_model_without_a_hugging_face_form(config: LmConfig, problem: str):
    with pytest.raises(PolicyModelError, match=f"model: this 'llama' model cannot be exported .*{problem}"):
        to_hf_config(config, 264)
