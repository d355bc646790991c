# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Hugging Face configs: read them, convert them to levanter's, and verify that the conversion is lossless.

A config.json may hold settings that levanter's model does not implement or does not read. Such a model would load,
train and export without an error, but compute another function than the checkpoint. Every conversion is therefore
reversed and compared ([`check_same_function`][marin_rl.models.hf_config.check_same_function]). Settings that survive
the conversion but have no effect in levanter's model are rejected by name
([`check_implemented`][marin_rl.models.hf_config.check_implemented]).
"""

import copy
import dataclasses
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import transformers
from levanter.compat.hf_checkpoints import HFCompatConfig
from levanter.layers.rotary import (
    DefaultRotaryEmbeddingsConfig,
    Llama3RotaryEmbeddingsConfig,
    YarnRotaryEmbeddingsConfig,
)
from levanter.models.lm_model import LmConfig
from packaging.version import InvalidVersion, Version
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

# Registers the architecture.
import marin_rl.models.qwen2  # noqa: F401
from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig, yarn_attention_factor

logger = logging.getLogger(__name__)

MODEL_TYPES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
"""`model.type` in a run's config, by `model_type` in a Hugging Face `config.json`."""

_GEMMA3 = "its layers alternate between two rotary bases and between local and global attention"
_UNSUPPORTED = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3}
"""Reasons for unsupported values of `model_type` that are well known."""


class PolicyModelError(ValueError):
    """A model cannot be built, loaded or saved; the message names the setting and the remedy."""


def read_hf_config(checkpoint: str) -> PretrainedConfig:
    """Read the Hugging Face config of a checkpoint, in the form of the installed transformers.

    Configs written by transformers 5 keep the rotary settings in `rope_parameters`. Transformers 4 ignores that key
    and falls back to a base of 10000 without scaling, so it is translated to `rope_theta` and `rope_scaling`.

    Keys that the config class does not declare do not affect the forward pass of the installed transformers. Training
    tools leave many of them in checkpoints, so they are only logged. If a newer transformers wrote the file, such a key
    may be a new setting, and it is rejected.

    Args:
        checkpoint: a folder with `config.json`, or a hub name.

    Raises:
        PolicyModelError: if there is no readable config, its architecture is not supported, or a key in it cannot be
            translated.
    """
    raw = _read_json(checkpoint)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        reason = f": {_UNSUPPORTED[str(model_type)]}" if str(model_type) in _UNSUPPORTED else ""
        raise PolicyModelError(
            f"{checkpoint!r} holds a {model_type!r} model, which is not supported{reason}; supported are "
            + ", ".join(MODEL_TYPES)
        )
    if raw.get("quantization_config") is not None:
        raise PolicyModelError(
            f"the weights in {checkpoint!r} are quantized (quantization_config in config.json); use the checkpoint in "
            "bfloat16, float16 or float32 that it was made from"
        )
    if raw.get("auto_map"):
        raise PolicyModelError(
            f"config.json of {checkpoint!r} names custom model code (auto_map), which is never run; if the model "
            f"is a plain {model_type!r}, remove auto_map from a copy of the folder"
        )
    values = _translate_rope_parameters(raw, checkpoint)
    _check_values(values, checkpoint)
    hf_class = CONFIG_MAPPING[model_type]
    _check_undeclared(values, hf_class, checkpoint)
    try:
        return hf_class.from_dict(values)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise PolicyModelError(f"config.json of {checkpoint!r} is invalid: {_message(error)}") from error


def levanter_config(hf_config: PretrainedConfig, checkpoint: str) -> LmConfig:
    """Convert a Hugging Face config to levanter's model config.

    Raises:
        PolicyModelError: if levanter's model lacks a setting; the message names each one.
    """
    try:
        config = _convert(hf_config)
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError, ArithmeticError) as error:
        raise PolicyModelError(f"the model in {checkpoint!r} is not supported: {_message(error)}") from error
    check_same_function(
        hf_config,
        config,
        f"the model in {checkpoint!r} has settings that are not implemented for {hf_config.model_type} "
        "(config.json, then the implementation)",
    )
    return config


def _convert(hf_config: PretrainedConfig) -> LmConfig:
    plain = copy.deepcopy(hf_config)
    # Levanter ignores or misreads `rope_scaling`, depending on the architecture; it is added below.
    plain.rope_scaling = None
    scaling = canonical_rope_scaling(hf_config)
    fields = _settings_not_read(hf_config)
    if scaling is not None:
        fields["rope"] = _ROPE_CONFIGS[scaling["rope_type"]].make_from_hf_config(hf_config.rope_theta, scaling)
    choice = cast(type[HFCompatConfig], LmConfig.get_choice_class(MODEL_TYPES[hf_config.model_type]))
    return dataclasses.replace(cast(HFCompatConfig, choice.from_hf_config(plain)), **fields)


def check_same_function(hf_config: PretrainedConfig, config: LmConfig, problem: str) -> None:
    """Raise an error if a levanter config computes another function than a Hugging Face config.

    The levanter config is converted back, and the two are compared on every setting that the Hugging Face class
    declares, except those in `NOT_THE_FUNCTION`.

    Args:
        hf_config: config of the checkpoint.
        config: config of the model that loads the checkpoint's weights.
        problem: first part of the error message.

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
    """Raise an error for settings that levanter's configs accept but its models ignore.

    Raises:
        PolicyModelError: naming the setting, its value and the implemented value.
    """
    model_type, values = hf_config.model_type, hf_config.to_dict()
    head_size = values.get("hidden_size", 0) // (values.get("num_attention_heads") or 1)
    implemented: dict[str, object] = {}
    if model_type in ("gemma", "gemma2"):
        implemented |= {"head_dim": head_size, "attention_bias": False}
    if model_type == "gemma2":
        implemented |= {"final_logit_softcapping": None, "query_pre_attn_scalar": head_size}
    if model_type == "qwen3":
        implemented |= {"attention_bias": False}
    wrong = [
        f"{name} is {values[name]!r}, implemented is {value!r}"
        for name, value in implemented.items()
        if values[name] != value
    ]
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
    try:
        return config.to_hf_config(vocab_size)
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise PolicyModelError(
            f"model: this {name!r} model cannot be exported in Hugging Face format: {_message(error)}"
        ) from error


def check_export(config: LmConfig) -> PretrainedConfig:
    """Raise an error for a model whose Hugging Face export would fail or compute another function.

    Args:
        config: the `model` section of a run.

    Returns:
        The Hugging Face config of the export, with a placeholder for the vocabulary size.

    Raises:
        PolicyModelError: if settings have no Hugging Face form; the message names each one.
    """
    name = LmConfig.get_choice_name(type(config))
    rope = getattr(config, "rope", None)
    if type(rope) is YarnRotaryEmbeddingsConfig:
        raise PolicyModelError("model.rope.type is 'yarn', which levanter computes unlike transformers; use hf_yarn")
    if type(rope) is DefaultRotaryEmbeddingsConfig and rope.factor != 1.0:
        raise PolicyModelError(
            f"model.rope.factor is {rope.factor}, which levanter cannot export; use model.rope.type: hf_linear"
        )
    hf_config = to_hf_config(config, vocab_size=256)
    check_implemented(hf_config)
    try:
        exported = _exported_fields(_convert(hf_config))
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise PolicyModelError(f"model: the export of this {name!r} model is not valid: {_message(error)}") from error
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
        *("lbl_coef", "rzl_coef", "embed_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout"),
        *("sliding_window", "query_pre_attn_scalar"),
    }
)
"""Fields of levanter's configs that do not change the logits, or that are checked by other means."""


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


def attention_window(hf_config: PretrainedConfig) -> int | None:
    """Return the width of the narrowest attention window of any layer, own position included; None without windows."""
    if hf_config.model_type in ("mistral", "mixtral"):
        return hf_config.sliding_window
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        return hf_config.sliding_window
    return None


def canonical_rope_scaling(hf_config: PretrainedConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` with transformers' defaults filled in; None if there is no scaling.

    Raises:
        PolicyModelError: if its type, or a key in it, is not supported.
    """
    scaling = getattr(hf_config, "rope_scaling", None)
    if scaling is None:
        return None
    kind = scaling.get("rope_type") or scaling.get("type")
    given = {name: value for name, value in scaling.items() if name not in ("rope_type", "type")}
    canonical: dict[str, Any]
    match kind:
        case None | "":
            raise PolicyModelError(f"rope_scaling is {scaling!r}, without a rope_type; add it to a copy of config.json")
        case "default":
            return None
        case "linear":
            canonical = {"factor": float(_required(given, kind, "factor"))}
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            canonical = {name: _required(given, kind, name) for name in names}
        case "yarn":
            canonical = _canonical_yarn(given, hf_config.max_position_embeddings)
        case _:
            raise PolicyModelError(
                f"rope_scaling of type {kind!r} is not supported; supported are default, linear, llama3 and yarn"
            )
    # Both are resolved into the attention factor.
    if unknown := sorted(given.keys() - canonical.keys() - {"mscale", "mscale_all_dim"}):
        raise PolicyModelError(f"rope_scaling of type {kind!r} has settings that are not supported: {unknown}")
    return {"rope_type": kind, **canonical}


def _required(scaling: Mapping[str, Any], kind: str, name: str) -> Any:
    if scaling.get(name) is None:
        raise PolicyModelError(f"rope_scaling of type {kind!r} lacks {name}; add it to a copy of config.json")
    return scaling[name]


def _canonical_yarn(given: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    factor = float(_required(given, "yarn", "factor"))
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, given.get("mscale"), given.get("mscale_all_dim"))
    return {
        "factor": factor,
        "attention_factor": float(attention_factor),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "original_max_position_embeddings": given.get("original_max_position_embeddings") or max_position_embeddings,
        "truncate": given.get("truncate", True),
    }


_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
_TRAINING_ONLY = (
    "initializer_range",
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
)
_OTHER_HEADS = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
NOT_THE_FUNCTION = frozenset(
    {
        *_TOKENS,
        *_TRAINING_ONLY,
        *_OTHER_HEADS,
        *_WINDOWS,
        # Longer rows are rejected elsewhere, and scaled rotary embeddings carry the original length.
        "max_position_embeddings",
        "use_cache",
        "output_router_logits",
        # Splits a matrix product; rounding aside, the result is the same.
        "pretraining_tp",
        "reorder_and_upcast_attn",
    }
)
"""Declared settings that do not change the logits.

Token ids and the vocabulary are checked against the tokenizer and the weights. Dropout acts only in transformers'
training mode, and neither sampling nor the loss of RL uses it. The summary settings belong to classification heads.
Sliding windows are compared in a form that does not depend on the architecture (`attention_window`).
"""

_SAME_ACTIVATION = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}


def _function_settings(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings that affect the logits, normalized so that equal functions have equal settings."""
    declared = _declared(type(hf_config)) - NOT_THE_FUNCTION
    settings = {name: getattr(hf_config, name) for name in sorted(declared) if hasattr(hf_config, name)}
    settings["tie_word_embeddings"] = hf_config.tie_word_embeddings
    settings["rope_scaling"] = canonical_rope_scaling(hf_config)
    settings["partial_rotary_factor"] = getattr(hf_config, "partial_rotary_factor", 1.0)
    if "hidden_size" in declared:
        default = hf_config.hidden_size // hf_config.num_attention_heads
        settings["head_dim"] = getattr(hf_config, "head_dim", None) or default
    settings["sliding_window"] = attention_window(hf_config)
    settings["layer_types"] = settings["sliding_window"] and getattr(hf_config, "layer_types", None)
    if hf_config.model_type == "gemma":
        # Transformers' Gemma reads only `hidden_act`.
        del settings["hidden_activation"]
    if hf_config.model_type == "gpt2":
        settings["n_inner"] = hf_config.n_inner or 4 * hf_config.n_embd
    for name in _ACTIVATIONS:
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
        case "olmo2":
            return {"attention_dropout": 0.0}
    return {}


_ROPE_CONFIGS: dict[str, Any] = {
    "linear": LinearRotaryConfig,
    "llama3": Llama3RotaryEmbeddingsConfig,
    "yarn": YarnRotaryConfig,
}


def _read_json(checkpoint: str) -> dict[str, Any]:
    try:
        path = cached_file(checkpoint, "config.json")
        raw = json.loads(Path(cast(str, path)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyModelError(
            f"no model in Hugging Face format at {checkpoint!r}: it is neither a folder with a config.json nor a hub "
            f"name that could be reached ({_message(error)})"
        ) from error
    if not isinstance(raw, dict):
        raise PolicyModelError(f"config.json of {checkpoint!r} is not a JSON object")
    return raw


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "num_local_experts"),
    *("num_experts_per_tok", "n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
)
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "attn_logit_softcapping", "final_logit_softcapping"),
    "query_pre_attn_scalar",
)
_FLAGS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_SCALING_NUMBERS = (
    *("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
_NULLABLE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "n_inner", "rope_scaling"),
    *("attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"),
)


def _check_values(values: Mapping[str, Any], checkpoint: str) -> None:
    """Raise an error for settings of the wrong type and for sizes that are not positive; transformers accepts both."""
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(_SIZES, (lambda value: type(value) is int and value > 0, "a positive integer")),
        **dict.fromkeys(_NUMBERS, (_is_positive, "a positive number")),
        **dict.fromkeys(_FLAGS, (lambda value: type(value) is bool, "true or false")),
        **dict.fromkeys(_ACTIVATIONS, (lambda value: type(value) is str, "the name of an activation function")),
        "rope_scaling": (lambda value: type(value) is dict, "an object or null"),
    }
    scaling_kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(_SCALING_NUMBERS, (_is_positive, "a positive number")),
        **dict.fromkeys(("rope_type", "type"), (lambda value: type(value) is str, "the name of a type")),
        "truncate": (lambda value: type(value) is bool, "true or false"),
    }

    def check(where: str, value: Any, fits: Callable[[Any], bool], expected: str) -> None:
        if not fits(value):
            raise PolicyModelError(f"config.json of {checkpoint!r} sets {where} to {value!r}; it must be {expected}")

    for name in values.keys() & kinds.keys():
        if values[name] is not None or name not in _NULLABLE:
            check(name, values[name], *kinds[name])
    scaling = values.get("rope_scaling") or {}
    for name in scaling.keys() & scaling_kinds.keys():
        if scaling[name] is not None:
            check(f"rope_scaling.{name}", scaling[name], *scaling_kinds[name])


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < cast(float, value) < math.inf


def _translate_rope_parameters(raw: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    """Translate `rope_parameters` of transformers 5, if any, to `rope_theta` and `rope_scaling`."""
    values = dict(raw)
    parameters = values.pop("rope_parameters", None)
    if parameters is None:
        return values
    where = f"rope_parameters in config.json of {checkpoint!r}"
    if not isinstance(parameters, dict) or not isinstance(parameters.get("rope_theta"), int | float):
        raise PolicyModelError(f"{where} is {parameters!r}; it must hold a number rope_theta for all layers")
    scaling = dict(parameters)
    theta = scaling.pop("rope_theta")
    if (partial := scaling.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise PolicyModelError(f"{where} sets partial_rotary_factor to {partial!r}; only 1.0 is supported")
    given = [scaling.pop(name, None) for name in ("rope_type", "type")]
    kind = given[0] or given[1] or "default"
    # `type` is the older name; OLMo 2's config class in transformers 4 accepts no other.
    scaling = {"type" if kind == "linear" else "rope_type": kind, **scaling}
    translated = {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
    for name, value in translated.items():
        if values.get(name) not in (None, value):
            raise PolicyModelError(f"{where} contradicts {name} {values[name]!r} in it; remove one of the two")
    return values | translated


def _declared(hf_class: type[PretrainedConfig]) -> set[str]:
    return set(inspect.signature(hf_class.__init__).parameters) - {"self", "kwargs"}


def _check_undeclared(values: Mapping[str, Any], hf_class: type[PretrainedConfig], checkpoint: str) -> None:
    # Transformers reads these for every architecture, although not every config class declares them.
    read_anyway = {"rope_scaling", "partial_rotary_factor", "head_dim", "model_type", "dtype", "torch_dtype"}
    known = _declared(hf_class) | read_anyway | PretrainedConfig().to_dict().keys()
    known |= hf_class.attribute_map.keys()
    known |= {"architectures", "auto_map", "transformers_version", "attn_implementation"}
    unknown = sorted(name for name, value in values.items() if name not in known and value is not None)
    unknown = [name for name in unknown if not name.startswith("_")]
    if not unknown:
        return
    written_by = values.get("transformers_version")
    listing = ", ".join(f"{name}: {values[name]!r}" for name in unknown)
    if _is_newer(written_by):
        raise PolicyModelError(
            f"config.json of {checkpoint!r}, written by transformers {written_by}, has settings that transformers "
            f"{transformers.__version__} does not support: {listing}. They may change the model; if you are sure that "
            "they do not, remove them from a copy of the folder"
        )
    logger.warning("config.json of %r has settings that transformers does not use: %s", checkpoint, listing)


def _is_newer(written_by: object) -> bool:
    try:
        return Version(str(written_by)) > Version(transformers.__version__)
    except InvalidVersion:
        return False


def _message(error: BaseException) -> str:
    """Return the first line of an error message, or the error's type if it has no text."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
