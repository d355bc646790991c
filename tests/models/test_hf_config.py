# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig
from levanter.models.lm_model import LmConfig
from packaging.version import Version

from marin_rl.models.conversion import levanter_config, to_hf_config
from marin_rl.models.hf_config import PolicyModelError, read_hf_config
from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.utils.levanter_line import IS_NEW, ONLY_NEW
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from tests.models.hf_checkpoint import cases, record, write_config
from tests.models.hf_oracle.make_oracle import CASES, LINEAR, LLAMA3, YARN


def read(folder: Path, config: dict[str, Any]) -> Any:
    checkpoint = write_config(folder, config)
    return levanter_config(read_hf_config(checkpoint), checkpoint)


@pytest.mark.parametrize("case", cases(CASES))
def test_a_config_of_transformers_5_describes_the_same_model(tmp_path: Path, case: str):
    written_by_4, written_by_5 = record(case)["config"], record(case)["config_version5"]
    if case != "gpt2":
        assert "rope_theta" not in written_by_5
    assert read(tmp_path, written_by_5) == read(tmp_path, written_by_4)


def test_the_rotary_settings_of_transformers_5_are_read(tmp_path: Path):
    llama = read(tmp_path, record("llama_llama3")["config_version5"])
    assert llama.rope == Llama3RotaryEmbeddingsConfig(500000.0, 8.0, 1.0, 4.0, 16)
    assert read(tmp_path, record("qwen3")["config_version5"]).rope == DefaultRotaryEmbeddingsConfig(1000000.0)
    linear = read(tmp_path, record("llama_linear")["config_version5"])
    assert linear.rope == LinearRotaryConfig(10000.0, 4.0)
    yarn = read(tmp_path, record("qwen2_yarn")["config_version5"]).rope
    assert isinstance(yarn, YarnRotaryConfig)
    assert (yarn.theta, yarn.factor, yarn.beta_fast, yarn.beta_slow) == (1000000.0, 4.0, 8.0, 1.0)
    assert yarn.original_max_position_embeddings == 16


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"partial_rotary_factor": 0.5}, r"sets partial_rotary_factor to 0.5; only 1.0 is supported"),
        ({"rope_theta": None}, "it must hold a number rope_theta"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling of type 'dynamic' is not supported"),
        ({"attention_bias": 3}, r"rope_scaling of type 'llama3' has settings that are not supported"),
    ],
)
def test_rotary_settings_of_transformers_5_that_cannot_be_translated(tmp_path: Path, change, problem: str):
    config = record("llama_llama3")["config_version5"]
    with pytest.raises(PolicyModelError, match=problem):
        read(tmp_path, {**config, "rope_parameters": {**config["rope_parameters"], **change}})


def test_rotary_settings_per_layer_type_are_rejected(tmp_path: Path):
    parameters = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
    with pytest.raises(PolicyModelError, match="it must hold a number rope_theta for all layers"):
        read(tmp_path, {**record("qwen3")["config_version5"], "rope_parameters": parameters})


@pytest.mark.parametrize(("name", "value"), [("rope_theta", 10000.0), ("rope_scaling", LINEAR)])
def test_contradicting_rotary_settings_are_rejected(tmp_path: Path, name: str, value: object):
    with pytest.raises(PolicyModelError, match=rf"contradicts {name} .*; remove one of the two"):
        read(tmp_path, {**record("qwen3")["config_version5"], name: value})


NOT_IMPLEMENTED = [
    ("llama", {"attention_bias": True}, "attention_bias: True, False"),
    ("llama", {"mlp_bias": True}, "mlp_bias: True, False"),
    ("llama", {"head_dim": 16}, "head_dim: 16, 8"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5, 1.0"),
    ("llama", {"hidden_act": "relu6"}, "'relu6' is not a valid ActivationFunctionEnum"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic' is not supported; supported are"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}},
        "type 'longrope' is not supported",
    ),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "sliding_window: 16, None"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "sliding_window: 16, None"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True, implemented is False"),
    ("mistral", {"head_dim": 16}, "head_dim: 16, 8"),
    ("mistral", {"rope_scaling": YARN}, "rope_scaling: {'rope_type': 'yarn'.*}, None"),
    ("mistral", {"tie_word_embeddings": True}, "tie_word_embeddings: True, False"),
    ("mixtral", {"sliding_window": 16}, "sliding_window: 16, None"),
    ("mixtral", {"num_experts": 8}, "num_experts 8 contradicts num_local_experts 4; remove one of the two"),
    ("mixtral", {"router_aux_loss_coef": -1.0}, "sets router_aux_loss_coef to -1.0; it must be a number of at least 0"),
    ("qwen3_moe", {"num_local_experts": 8}, "num_experts 4 contradicts num_local_experts 8; remove one of the two"),
    ("qwen3_moe", {"num_experts": 0}, "sets num_experts to 0; it must be a positive integer"),
    ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 greater than num_experts=4"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "sets moe_intermediate_size to None; it must be a positive integer"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "sets decoder_sparse_step to 0; it must be a positive integer"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "mlp_only_layers leave no layer with experts; use type qwen3"),
    ("qwen3_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers has \[2\], but the 2 layers .* have the numbers 0 to 1"),
    ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "sets norm_topk_prob to 1; it must be true or false"),
    ("qwen3_moe", {"router_aux_loss_coef": float("inf")}, "router_aux_loss_coef to inf; it must be a number of at le"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias is True, implemented is False"),
    ("olmo2", {"rope_scaling": YARN}, "type 'yarn' is not supported for olmo2, because transformers 4 cannot read it"),
    ("olmo2", {"rope_scaling": LLAMA3}, "type 'llama3' is not supported for olmo2"),
    ("gemma", {"hidden_act": "gelu"}, "hidden_act: 'gelu', 'gelu_pytorch_tanh'"),
    ("gemma", {"head_dim": 16}, "head_dim is 16, implemented is 8"),
    ("gemma", {"rope_scaling": YARN}, "Only DefaultRotaryEmbeddingsConfig is supported"),
    ("gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, implemented is None"),
    ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16, implemented is 8"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings: False, True"),
    ("gpt2", {"n_inner": 100}, "n_inner: 100, 128"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: False, True"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, r"are quantized \(quantization_config"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "a.B"}}, r"names custom model code \(auto_map\)"),
    ("llama", {"model_type": "gemma3_text"}, "'gemma3_text' model, which is not supported; supported are"),
    ("llama", {"model_type": "bert"}, "'bert' model, which is not supported; supported are gemma, gemma2"),
    ("llama", {"model_type": None}, "has no model_type"),
    ("llama", {"model_type": ["llama"]}, r"holds a \['llama'\] model, which is not supported"),
    ("llama", {"hidden_size": "wide"}, "config.json of .* sets hidden_size to 'wide'; it must be a positive integer"),
    ("gemma", {"num_attention_heads": 0}, "sets num_attention_heads to 0; it must be a positive integer"),
    ("qwen3", {"head_dim": 2.5}, "sets head_dim to 2.5; it must be a positive integer"),
    ("mistral", {"sliding_window": "all"}, "sets sliding_window to 'all'; it must be a positive integer"),
    ("qwen2", {"rope_theta": None}, "sets rope_theta to None; it must be a positive number"),
    ("llama", {"rms_norm_eps": float("nan")}, "sets rms_norm_eps to nan; it must be a positive number"),
    ("olmo2", {"attention_bias": "no"}, "sets attention_bias to 'no'; it must be true or false"),
    ("gemma", {"hidden_act": ["gelu"]}, r"sets hidden_act to \['gelu'\]; it must be the name of an activation"),
    ("mixtral", {"rope_scaling": "yarn"}, "sets rope_scaling to 'yarn'; it must be an object or null"),
    ("mistral", {"rope_scaling": {"factor": 4.0}}, "rope_scaling is {'factor': 4.0}, without a rope_type"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "sets rope_scaling.factor to '4'; it must be a posi"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}}, "rope_scaling.truncate to 0; it must"),
    ("mistral", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "type 'llama3' lacks low_freq_factor; add it"),
]


@pytest.mark.parametrize(("case", "changes", "problem"), cases(NOT_IMPLEMENTED))
def test_error_names_an_unimplemented_setting(tmp_path: Path, case: str, changes, problem: str):
    with pytest.raises(PolicyModelError, match=problem):
        read(tmp_path, {**record(case)["config"], **changes})


@pytest.mark.parametrize(
    ("case", "changes"),
    cases(
        [
            ("llama", {"hidden_act": "swish"}),
            ("llama", {"attention_dropout": 0.1}),
            ("llama", {"rope_scaling": {"rope_type": "default"}}),
            ("llama", {"pretraining_tp": 2, "use_cache": False, "dtype": "bfloat16"}),
            ("llama", {"architectures": ["LlamaForCausalLM"], "auto_map": {}, "_name_or_path": "x"}),
            ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}),
            ("gpt2", {"attn_pdrop": 0.0, "n_inner": 128}),
            ("gpt2", {"rope_theta": 500000.0}),
            ("mixtral", {"router_aux_loss_coef": 0.001, "num_experts": 4}),
            ("qwen3_moe", {"num_local_experts": 4, "mlp_only_layers": None, "output_router_logits": True}),
            ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 16}),
        ]
    ),
)
def test_settings_that_change_nothing_are_accepted(tmp_path: Path, case: str, changes: dict[str, Any]):
    found = read(tmp_path, {**record(case)["config"], **changes})
    expected = read(tmp_path, record(case)["config"])
    # Two names of one activation are still accepted.
    assert dataclasses.replace(found, activation_function=expected.activation_function) == expected


@pytest.mark.parametrize("case", cases(["mixtral", "qwen3_moe"]))
@pytest.mark.parametrize(("written", "expected"), [(0.02, 0.02), (0, 0.0), (None, 0.0)])
def test_the_coefficient_of_the_balancing_loss_is_kept(tmp_path: Path, case: str, written, expected: float):
    """It is no part of the function. Transformers 5 refuses an integer and null."""
    found = read(tmp_path / "first", {**record(case)["config"], "router_aux_loss_coef": written})
    name = "lbl_coef" if case == "mixtral" else "router_aux_loss_coef"
    assert getattr(found, name) == expected
    for config in (found, dataclasses.replace(found, **{name: expected or None})):
        exported = json.loads(json.dumps(to_hf_config(config, 264).to_diff_dict()))
        exported.setdefault("router_aux_loss_coef", type(to_hf_config(config, 264))().router_aux_loss_coef)
        assert read(tmp_path / "second", exported) == found


def test_unknown_setting_of_a_newer_transformers_is_rejected(tmp_path: Path, caplog):
    config = {**record("llama")["config"], "gated_attention": True, "not_set": None}
    installed = Version(transformers.__version__)
    for version in (f"{installed.major + 1}.0.0", f"{installed.major}.{installed.minor + 1}.0.dev0"):
        with pytest.raises(PolicyModelError, match=rf"written by transformers {version}, has .* gated_attention: True"):
            read(tmp_path, {**config, "transformers_version": version})
    for version in (str(installed), "4.40.0", "mine", None):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "marin_rl.models.hf_config"):
            read(tmp_path, {**config, "transformers_version": version})
        assert "does not use: gated_attention: True" in caplog.text
        assert "not_set" not in caplog.text


@pytest.mark.parametrize(
    ("name", "settings", "is_known"),
    cases(
        [
            ("qwen3", {"no_bias": True, "attention_bias": False}, True),
            ("qwen3", {"no_bias": False, "attention_bias": False}, False),
            ("qwen2", {"no_bias": False}, True),
            ("qwen2", {"no_bias": True}, False),
            ("gemma", {"hidden_activation": "gelu_pytorch_tanh"}, True),
            ("gemma", {"hidden_activation": "gelu"}, True),
            ("qwen3_moe", {"max_window_layers": 48}, True),
            ("qwen3", {"num_local_experts": 4}, False),
        ]
    ),
)
def test_unused_settings_in_levanters_files_are_known(
    tmp_path: Path, caplog, name: str, settings: dict[str, Any], is_known: bool
):
    with caplog.at_level(logging.WARNING, "marin_rl.models.hf_config"):
        read(tmp_path, {**record(name)["config"], **settings})
    assert ("does not use" not in caplog.text) is is_known


@pytest.mark.skipif(IS_NEW, reason="the installed line of levanter has all architectures")
@pytest.mark.parametrize("name", ONLY_NEW)
def test_an_architecture_of_the_other_line_is_refused_with_its_remedy(tmp_path: Path, name: str):
    remedy = f"{name} needs levanter's current line, marin-levanter, on Python 3.12 or later$"
    with pytest.raises(PolicyModelError, match=f"holds a '{name}' model: {remedy}"):
        read(tmp_path, record(name)["config"])
    with pytest.raises(ConfigError, match=f"^model.type: {remedy}"):
        decode(LmConfig, {"type": name}, ("model",))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["full_attention"] * 3}, r"layer_types"),
        ({"layer_types": 5}, r"layer_types|'int' object"),
        ({"id2label": [1]}, "id2label"),
    ],
)
def test_error_names_a_value_of_the_wrong_type(tmp_path: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(PolicyModelError, match=problem):
        read(tmp_path, {**record("olmo3")["config"], **changes})


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"', "\udce4", "[" * 100_000])
def test_error_names_an_unreadable_config(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PolicyModelError, match=r"no model in Hugging Face format at|is not a JSON object"):
        read_hf_config(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 10**9), ("hidden_size", 2**40), ("vocab_size", 10**400), ("max_position_embeddings", 2**62)],
)
def test_sizes_without_limit_are_rejected(tmp_path: Path, name: str, value: int):
    with pytest.raises(PolicyModelError, match=rf"sets {name} to {value}; it must be a positive integer"):
        read(tmp_path, {**record("llama")["config"], name: value})


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "chat_template.jinja"]
)
def test_a_description_that_fills_the_memory_is_rejected(tmp_path: Path, name: str):
    (tmp_path / "config.json").touch()
    with (tmp_path / name).open("wb") as file:
        file.truncate(20 * 2**30)
    for read_folder in (read_hf_config, lambda folder: TokenizerConfig(folder).build()):
        with pytest.raises(ValueError, match=rf"{name}' has 20,480 MiB, more than the 256 MiB"):
            read_folder(str(tmp_path))
