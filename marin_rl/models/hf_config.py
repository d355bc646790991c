# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Hugging Face configs of checkpoints, read and validated."""

import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, cast

import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import InvalidVersion, Version
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from marin_rl.models.hf_rope import canonical_scaling, read_rope
from marin_rl.models.model_settings import MODEL_TYPES
from marin_rl.utils.hub import check_source
from marin_rl.utils.levanter_line import line_problem
from marin_rl.utils.storage import check_descriptions, read_small

logger = logging.getLogger(__name__)

INVALID_CONFIG = (
    *(AttributeError, KeyError, TypeError, ValueError, AssertionError, ArithmeticError),
    # Config classes of transformers 5 check the types of their fields.
    StrictDataclassError,
)
"""Errors of levanter's and transformers' config classes for invalid values."""


class PolicyModelError(ValueError):
    """A model cannot be built, loaded or saved; the message names the setting and the remedy."""


def read_hf_config(checkpoint: str) -> PretrainedConfig:
    """Read the Hugging Face config of a checkpoint, in the form of the installed transformers.

    Rotary settings are read in the forms of transformers 4 and 5, see `hf_rope`. Transformers 4 alone would ignore the
    form of 5 and fall back to a base of 10000 without scaling.

    Keys that the config class does not declare do not affect the forward pass of the installed transformers. Training
    tools leave many of them in checkpoints, so they are only logged. If a newer transformers wrote the file, such a key
    may be a new setting, and it is rejected. `checkpoint` is a folder with `config.json`, or a hub name.

    Raises:
        HubError: if it is neither a folder nor a name on the hub that can be loaded.
        PolicyModelError: if there is no readable config, its architecture is not supported, or a key in it cannot be
            translated.
        ValueError: if a file is too large to be read.
    """
    folder = check_source(checkpoint, "initialize_from")
    if folder is not None:
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise PolicyModelError(
                    f"{checkpoint!r} is an adapter without its base; set lora.adapter to it, and initialize_from to "
                    "its base"
                )
            raise PolicyModelError(
                f"no model in Hugging Face format at {checkpoint!r}: it has no config.json; name a folder with "
                "config.json and safetensors files, a hub name or a finished run"
            )
        check_descriptions(folder)
    try:
        path = cached_file(checkpoint if folder is None else folder, "config.json")
        raw = json.loads(read_small(Path(cast(str, path))).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyModelError(
            f"no model in Hugging Face format at {checkpoint!r}: its config.json cannot be read ({first_line(error)}); "
            "name a folder with config.json and safetensors files, a hub name or a finished run"
        ) from error
    if not isinstance(raw, dict):
        raise PolicyModelError(f"config.json of {checkpoint!r} is not a JSON object")
    _check_supported(raw, checkpoint)
    try:
        values = read_experts(read_rope(raw))
        _check_values(values, checkpoint)
        canonical_scaling(values.get("rope_scaling"), values["model_type"], values.get("max_position_embeddings", 0))
    except PolicyModelError:
        raise
    except ValueError as error:
        raise PolicyModelError(f"config.json of {checkpoint!r}: {error}") from error
    hf_class = CONFIG_MAPPING[values["model_type"]]
    _check_undeclared(values, declared_settings(hf_class) | hf_class.attribute_map.keys(), checkpoint)
    try:
        return hf_class.from_dict(with_number_types(values, hf_class))
    except (*INVALID_CONFIG, IndexError) as error:
        raise PolicyModelError(f"config.json of {checkpoint!r} is invalid: {first_line(error)}") from error


def with_number_types(values: Mapping[str, Any], hf_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Convert numbers to the types of a config class: transformers 5 refuses 256.0 for 256, and 0 for 0.0."""
    defaults = hf_class().to_dict()

    def convert(value: Any, kind: type) -> Any:
        if type(value) is int and kind is float:
            return float(value)
        return int(value) if type(value) is float and value.is_integer() and kind is int else value

    return {name: convert(value, type(defaults.get(name))) for name, value in values.items()}


def read_experts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of a mixture in a `config.json`, if it is one.

    Transformers 5 writes the number of experts of `qwen3_moe` as `num_local_experts`, and transformers 4 reads only
    `num_experts`. Without a coefficient there is no balancing loss; transformers 5 refuses null.

    Raises:
        ValueError: if the two numbers differ.
    """
    values = dict(settings)
    if values.get("model_type") not in ("mixtral", "qwen3_moe"):
        return values
    local, number = values.get("num_local_experts"), values.get("num_experts")
    if None not in (local, number) and local != number:
        raise ValueError(f"num_experts {number!r} contradicts num_local_experts {local!r}; remove one of the two")
    if values["model_type"] == "qwen3_moe" and local is not None:
        values["num_experts"] = values.pop("num_local_experts")
    if "router_aux_loss_coef" in values and values["router_aux_loss_coef"] is None:
        values["router_aux_loss_coef"] = 0.0
    return values


def write_experts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `config.json` with the number of experts of `qwen3_moe` in both forms."""
    if settings.get("model_type") != "qwen3_moe":
        return dict(settings)
    number = read_experts(settings)["num_experts"]
    return {**settings, "num_experts": number, "num_local_experts": number}


def _check_supported(raw: Mapping[str, Any], checkpoint: str) -> None:
    model_type = raw.get("model_type")
    if model_type is None:
        raise PolicyModelError(
            f"config.json of {checkpoint!r} has no model_type, which names the architecture; use the config.json that "
            f"belongs to the weights; supported are {', '.join(MODEL_TYPES)}"
        )
    if (problem := line_problem(model_type)) is not None:
        raise PolicyModelError(f"{checkpoint!r} holds a {model_type!r} model: {problem}")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise PolicyModelError(
            f"{checkpoint!r} holds a {model_type!r} model, which is not supported; supported are "
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


_Rules = dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]]
"""The settings that must have a kind of value, and a test for it, by a description of the kind."""


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < cast(float, value) < math.inf


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
MAX_LAYERS = 10_000
"""Maximum number of layers; the time to build a model grows with it."""
_SETTINGS: _Rules = {
    "a positive integer below 2**31": (
        lambda value: type(value) is int and 0 < value < 2**31,
        (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "num_local_experts"),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
            *("n_embd", "n_head", "n_inner", "n_positions"),
        ),
    ),
    f"a positive integer of at most {MAX_LAYERS}": (
        lambda value: type(value) is int and 0 < value <= MAX_LAYERS,
        ("num_hidden_layers", "n_layer"),
    ),
    "a number of at least 0": (
        lambda value: type(value) in (int, float) and 0 <= value < math.inf,
        ("router_aux_loss_coef",),
    ),
    "a positive number": (
        _is_positive,
        (
            *("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "attn_logit_softcapping"),
            *("final_logit_softcapping", "query_pre_attn_scalar"),
        ),
    ),
    "true or false": (
        lambda value: type(value) is bool,
        (
            *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"),
            *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
        ),
    ),
    "the name of an activation function": (lambda value: type(value) is str, ACTIVATIONS),
    "an object or null": (lambda value: type(value) is dict, ("rope_scaling",)),
}
_NULLABLE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "n_inner", "rope_scaling"),
    *("attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"),
)
_SCALING: _Rules = {
    "a positive number": (
        _is_positive,
        (
            *("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
            "original_max_position_embeddings",
        ),
    ),
    "the name of a type": (lambda value: type(value) is str, ("rope_type", "type")),
    "true or false": (lambda value: type(value) is bool, ("truncate",)),
}
"""Settings of `rope_scaling`, all of which may be null."""


def _check_values(values: Mapping[str, Any], checkpoint: str) -> None:
    """Raise an error for settings of the wrong type and for sizes that are not positive; transformers accepts both."""

    def check(values: Mapping[str, Any], rules: _Rules, prefix: str = "") -> None:
        for kind, (fits, names) in rules.items():
            for name in names:
                if name not in values or (values[name] is None and (prefix or name in _NULLABLE)):
                    continue
                if not fits(values[name]):
                    raise PolicyModelError(
                        f"config.json of {checkpoint!r} sets {prefix}{name} to {values[name]!r}; it must be {kind}"
                    )

    check(values, _SETTINGS)
    check(values.get("rope_scaling") or {}, _SCALING, "rope_scaling.")


def declared_settings(hf_class: type[PretrainedConfig]) -> set[str]:
    """Return the settings that a config class of transformers declares, without those of every class."""
    common = inspect.signature(PretrainedConfig.__init__).parameters.keys()
    return set(inspect.signature(hf_class.__init__).parameters) - common - {"self", "kwargs"}


def _check_undeclared(values: Mapping[str, Any], declared: Set[str], checkpoint: str) -> None:
    # Transformers reads these for every architecture, although not every config class declares them.
    known = {*declared, "rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim", "model_type", "auto_map"}
    known |= {*PretrainedConfig().to_dict(), "dtype", "torch_dtype", "architectures"}
    known |= {"transformers_version", "attn_implementation"}
    # Neither transformers reads it for gemma, but transformers 4 and levanter write it.
    if values["model_type"] == "gemma":
        known.add("hidden_activation")
    # Published files have it, and no transformers reads it.
    if values["model_type"] == "qwen3_moe":
        known.add("max_window_layers")
    # Levanter writes it for qwen, also where it says the same as `attention_bias` or the architecture.
    if values.get("no_bias") is (not values.get("attention_bias", True)):
        known.add("no_bias")
    unknown = {name: value for name, value in values.items() if name not in known and value is not None}
    listing = ", ".join(f"{name}: {unknown[name]!r}" for name in sorted(unknown) if not name.startswith("_"))
    if not listing:
        return
    written_by = values.get("transformers_version")
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the error's type if it is empty."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        # Its own first line does not name the value.
        error = error.__cause__
    return next(iter(str(error).splitlines()), "") or type(error).__name__
