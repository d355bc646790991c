# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Conversion of model configs between Hugging Face and levanter, verified to be lossless.

A config may hold settings that the other side does not implement or does not read. Such a model would load, train and
export without an error, but compute another function. Every conversion is therefore reversed and compared, and settings
that survive the conversion but have no effect in levanter's model are rejected by name.
"""

import copy
import dataclasses
import importlib
from typing import Any, cast

from levanter.compat.hf_checkpoints import HFCompatConfig
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
from levanter.models.lm_model import LmConfig
from levanter.models.qwen import Qwen3Config
from transformers import PretrainedConfig

# Registers the architectures.
import marin_rl.models.olmo3
import marin_rl.models.qwen2  # noqa: F401
from marin_rl.models.attention_windows import Windows, layer_windows
from marin_rl.models.hf_config import ACTIVATIONS, INVALID_CONFIG, PolicyModelError, declared_settings, first_line
from marin_rl.models.hf_rope import canonical_scaling, rope_settings
from marin_rl.models.model_settings import model_problems, rope_problems, window_problem
from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig
from marin_rl.utils.levanter_line import ONLY_NEW, architectures

for _name in architectures(ONLY_NEW):
    importlib.import_module(f"marin_rl.models.{_name}")


def levanter_config(hf_config: PretrainedConfig, checkpoint: str) -> LmConfig:
    """Convert a Hugging Face config to levanter's model config.

    Raises:
        PolicyModelError: if levanter's model lacks a setting; the message names each one.
    """
    try:
        config = _convert(hf_config)
    except INVALID_CONFIG as error:
        raise PolicyModelError(f"the model in {checkpoint!r} is not supported: {first_line(error)}") from error
    check_same_function(
        hf_config,
        config,
        f"the model in {checkpoint!r} has settings that are not implemented for {hf_config.model_type} "
        "(config.json, then the implementation)",
    )
    return config


def _convert(hf_config: PretrainedConfig) -> LmConfig:
    plain = copy.deepcopy(hf_config)
    theta, scaling = _rope(hf_config)
    # Levanter ignores or misreads `rope_scaling`, depending on the architecture; it is added below. In transformers 5
    # this also removes the base.
    plain.rope_scaling = None
    if theta is not None:
        plain.rope_theta = theta
    if hf_config.model_type == "gemma":
        # Levanter requires the attribute but does not use its value; the config class of transformers 5 lacks it.
        plain.hidden_activation = None
    fields = _settings_not_read(hf_config)
    if scaling is not None:
        fields["rope"] = _ROPE_CONFIGS[scaling["rope_type"]].make_from_hf_config(theta, scaling)
    choice = cast(type[HFCompatConfig], LmConfig.get_choice_class(hf_config.model_type))
    return dataclasses.replace(cast(HFCompatConfig, choice.from_hf_config(plain)), **fields)


def check_same_function(hf_config: PretrainedConfig, config: LmConfig, problem: str) -> None:
    """Raise an error if a levanter config computes another function than a Hugging Face config.

    The levanter config is converted back and compared on every declared setting that affects the logits. `problem` is
    the first part of the error message.

    Raises:
        PolicyModelError: if settings differ; the message names each one with both values.
    """
    back = to_hf_config(config, hf_config.vocab_size)
    if type(back) is not type(hf_config):
        raise PolicyModelError(f"{problem}: model_type: {hf_config.model_type}, {back.model_type}")
    expected, found = _function_settings(hf_config), _function_settings(back)
    differences = [f"{name}: {expected[name]!r}, {found[name]!r}" for name in expected if expected[name] != found[name]]
    if differences:
        raise PolicyModelError(f"{problem}: {'; '.join(differences)}")
    check_implemented(back)


def check_implemented(hf_config: PretrainedConfig) -> None:
    """Raise a PolicyModelError for settings that levanter's configs accept but its models ignore."""
    model_type, values = hf_config.model_type, hf_config.to_dict()
    head_size = values.get("hidden_size", 0) // (values.get("num_attention_heads") or 1)
    implemented: dict[str, object] = {}
    if model_type in ("gemma", "gemma2"):
        implemented |= {"head_dim": head_size, "attention_bias": False}
    if model_type == "gemma2":
        implemented |= {"final_logit_softcapping": None, "query_pre_attn_scalar": head_size}
    if model_type in ("qwen3", "qwen3_moe"):
        implemented |= {"attention_bias": False}
    differing = [name for name, value in implemented.items() if values[name] != value]
    wrong = [f"{name} is {values[name]!r}, implemented is {implemented[name]!r}" for name in differing]
    if wrong:
        raise PolicyModelError(f"{model_type} models are not supported with these settings: {'; '.join(wrong)}")


def to_hf_config(config: LmConfig, vocab_size: int) -> PretrainedConfig:
    """Convert a levanter model config to the Hugging Face config of its export.

    Raises:
        PolicyModelError: if the model has no Hugging Face form.
    """
    name = LmConfig.get_choice_name(type(config))
    if not isinstance(config, HFCompatConfig):
        raise PolicyModelError(f"model.type {name!r} has no Hugging Face form and cannot be exported")
    if problem := next(rope_problems(getattr(config, "rope", None)), None):
        raise PolicyModelError(f"model: this {name!r} model cannot be exported in Hugging Face format: {problem}")
    try:
        return dataclasses.replace(config, **_filled_in(config)).to_hf_config(vocab_size)
    except INVALID_CONFIG as error:
        raise PolicyModelError(
            f"model: this {name!r} model cannot be exported in Hugging Face format: {first_line(error)}"
        ) from error


def _filled_in(config: LmConfig) -> dict[str, Any]:
    """Return fields of a mixture that may be null in levanter's config, and are numbers in those of transformers 5."""
    fields: dict[str, Any] = {}
    for name in ("lbl_coef", "router_aux_loss_coef"):
        if getattr(config, name, 0.0) is None:
            fields[name] = 0.0
    if LmConfig.get_choice_name(type(config)) == "qwen3_moe":
        fields["head_dim"] = cast(Any, config).actual_head_size
    return fields


def _check_export(config: LmConfig) -> PretrainedConfig:
    """Return the Hugging Face config of a model's export, or raise an error if it would compute another function."""
    name = LmConfig.get_choice_name(type(config))
    hf_config = to_hf_config(config, vocab_size=256)
    check_implemented(hf_config)
    if (ours := layer_windows(config)) != (theirs := attention_windows(hf_config)):
        raise PolicyModelError(
            f"model: this {name!r} model is exported with other attention windows (model.sliding_window) than it is "
            f"trained with: {theirs}, {ours}"
        )
    try:
        exported = _exported_fields(_convert(hf_config))
    except INVALID_CONFIG as error:
        raise PolicyModelError(f"model: the export of this {name!r} model is not valid: {first_line(error)}") from error
    lost = [
        f"model.{field}: {value!r} (Hugging Face: {exported[field]!r})"
        for field, value in _exported_fields(config).items()
        if value != exported[field]
    ]
    if lost:
        raise PolicyModelError(
            f"these settings have no form in Hugging Face's {name!r}, so an export would compute something else than "
            f"the trained model: {'; '.join(lost)}"
        )
    return hf_config


_NOT_EXPORTED = frozenset(
    {
        *("upcast_attn", "attn_backend", "use_flash_attention", "flash_attention_block_size"),
        *("gradient_checkpointing", "scan_layers", "reference_checkpoint", "tokenizer", "vocab_size"),
        *(
            "lbl_coef",
            "rzl_coef",
            "router_aux_loss_coef",
            "router_z_loss_coef",
            "embed_pdrop",
            "resid_pdrop",
            "attn_pdrop",
            "attention_dropout",
        ),
        *("sliding_window", "layer_types", "query_pre_attn_scalar"),
    }
)
"""Fields of levanter's configs that do not change the logits, or that are checked by other means."""


def _rope(hf_config: PretrainedConfig) -> tuple[float | None, dict[str, Any] | None]:
    """Return the base of rotary embeddings, None without them, and the canonical form of their scaling."""
    theta, scaling = rope_settings(hf_config)
    return theta, canonical_scaling(scaling, hf_config.model_type, getattr(hf_config, "max_position_embeddings", 0))


def _exported_fields(config: LmConfig) -> dict[str, Any]:
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(cast(Any, config))
        if field.name not in _NOT_EXPORTED
    }
    if "head_dim" in fields:
        fields["head_dim"] = fields["head_dim"] or fields["hidden_dim"] // fields["num_heads"]
    if "rope" in fields:
        fields["rope"] = fields["rope"].to_hf_config()
    return fields


def attention_windows(hf_config: PretrainedConfig) -> Windows:
    """Return the attention window of each layer, own position included; None for all positions."""
    if hf_config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return (hf_config.sliding_window,) * hf_config.num_hidden_layers
    types = getattr(hf_config, "layer_types", None) or [""] * hf_config.num_hidden_layers
    return tuple(hf_config.sliding_window if kind == "sliding_attention" else None for kind in types)


_NOT_THE_FUNCTION = frozenset(
    {
        # Checked against the tokenizer and the weights.
        *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"),
        # Dropout acts only in transformers' training mode; neither sampling nor the loss of RL uses it.
        *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
        # Settings of classification heads.
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        # Compared in a form that does not depend on the version of transformers.
        "rope_parameters",
        # Compared in a form that does not depend on the architecture (`attention_windows`).
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        # Longer rows are rejected elsewhere, and scaled rotary embeddings carry the original length.
        "max_position_embeddings",
        # Change rounding at most.
        *("use_cache", "pretraining_tp", "reorder_and_upcast_attn"),
    }
)
"""Declared settings that do not change the logits."""

_SAME_ACTIVATION = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}


def _function_settings(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings that affect the logits, normalized so that equal functions have equal settings."""
    declared = declared_settings(type(hf_config)) - _NOT_THE_FUNCTION
    settings = {name: getattr(hf_config, name) for name in sorted(declared) if hasattr(hf_config, name)}
    settings["tie_word_embeddings"] = hf_config.tie_word_embeddings
    theta, settings["rope_scaling"] = _rope(hf_config)
    if hf_config.model_type != "gpt2":
        settings["rope_theta"] = theta
    settings["partial_rotary_factor"] = getattr(hf_config, "partial_rotary_factor", 1.0)
    if "hidden_size" in declared:
        default = hf_config.hidden_size // hf_config.num_attention_heads
        settings["head_dim"] = getattr(hf_config, "head_dim", None) or default
    settings["sliding_window"] = next((window for window in attention_windows(hf_config) if window is not None), None)
    settings["layer_types"] = settings["sliding_window"] and getattr(hf_config, "layer_types", None)
    if hf_config.model_type == "gemma":
        # Transformers' Gemma reads only `hidden_act`.
        settings.pop("hidden_activation", None)
    if hf_config.model_type == "gpt2":
        settings["n_inner"] = hf_config.n_inner or 4 * hf_config.n_embd
    for name in ACTIVATIONS:
        if name in settings:
            # Levanter writes members of a string enumeration.
            value = getattr(settings[name], "value", settings[name])
            settings[name] = _SAME_ACTIVATION.get(value, value)
    return settings


def _settings_not_read(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return levanter fields that its conversion does not set, or sets to a dropout rate."""
    match hf_config.model_type:
        case "gemma2":
            names = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
            return {name: getattr(hf_config, name) for name in names}
        case "gpt2":
            return {"embed_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        case "mixtral":
            # Hugging Face's models have no z-loss.
            return {"rzl_coef": None}
        case "olmo2" | "olmo3":
            return {"attention_dropout": 0.0}
        case "qwen3" if hf_config.sliding_window is None:
            # The field is an integer even without a window, and a run's config.yaml must be readable.
            return {"sliding_window": Qwen3Config.sliding_window}
    return {}


_ROPE_CONFIGS: dict[str, Any] = {
    "linear": LinearRotaryConfig,
    "llama3": Llama3RotaryEmbeddingsConfig,
    "yarn": YarnRotaryConfig,
}


def check_model(config: LmConfig, *, max_length: int, section: str = "rollouts") -> None:
    """Raise an error for a model that the run cannot sample, train and export exactly.

    `max_length` is the longest sequence, in tokens, a setting of the section `section`.

    Raises:
        PolicyModelError: if a setting is unsupported; the message names the setting and the remedy.
    """
    if problems := list(model_problems(config)):
        raise PolicyModelError("\n".join(problems))
    _check_export(config)
    if problem := window_problem(config, max_length, section):
        raise PolicyModelError(problem)
