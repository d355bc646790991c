# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Supported architectures, and checks of their settings that need neither levanter nor transformers."""

import math
from collections.abc import Iterator
from typing import Any

from marin_rl.utils.levanter_line import architectures, field_of_key

_TYPES = ("gemma", "gemma2", "gpt2", "llama", "mistral", "mixtral", "olmo2", "olmo3", "qwen2", "qwen3", "qwen3_moe")
MODEL_TYPES = architectures(_TYPES)
"""Supported architectures: values of `model_type` in a `config.json`, and of `model.type` in a run's config."""
SIZES = (
    *("seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("n_routed_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_dim"),
    *("flash_attention_block_size", "sliding_window"),
)
"""Settings of levanter's model configs that are numbers of at least 1, or null."""
MAX_EXPERTS = 65_534
"""Maximum number of experts of a layer: recorded choices have 16 bits, and one value stands for none."""

EXACT_WITH_CAP = ("vanilla", "splash", "pallas")
"""Attention kernels that differentiate the cap of the attention logits."""


def model_problems(model: Any) -> Iterator[str]:
    """Problems of the `model` section of a run. The model is a levanter config, or an object with the same settings.

    Yields:
        Messages that name the setting and the remedy.
    """
    name = model.get_choice_name(type(model))
    if name not in MODEL_TYPES:
        remedy = "; use qwen2" if name == "qwen" else ""
        yield f"model.type {name!r} is not supported{remedy}; supported are {', '.join(MODEL_TYPES)}"
        return
    dropout_fields = ("embed_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout")
    if dropout := {field: rate for field in dropout_fields if (rate := getattr(model, field, 0))}:
        yield "dropout is not applied: neither sampling nor the loss uses it. Set " + ", ".join(
            f"model.{field} to 0 (it is {rate})" for field, rate in dropout.items()
        )
    if getattr(model, "scan_layers", True) is False:
        yield "model.scan_layers is false, but the learner supports scanned layers only; set it to true"
    yield from attention_problems(model)
    if getattr(model, "rope", name) is None:
        yield "model.rope is null, but the model needs rotary embeddings; leave it out, or set model.rope.type"
    yield from rope_problems(getattr(model, "rope", None))
    yield from _gemma_problems(name, model)
    yield from _mixture_problems(model)
    sizes = {size: value for size in SIZES if (value := _setting(model, size)) is not None}
    wrong = [f"model.{size} is {value}; it must be at least 1" for size, value in sizes.items() if value < 1]
    yield from wrong or _shape_problems(sizes)


def _setting(model: Any, key: str) -> Any:
    return getattr(model, field_of_key(type(model), key), None)


def attention_problems(model: Any) -> Iterator[str]:
    """Problems of the attention settings of a model.

    The model is a levanter config, or an object with the same settings; None if there are none.

    Yields:
        Messages that name the setting and the remedy.
    """
    backend = getattr(model, "attn_backend", None)
    name = "default" if backend is None else backend.value
    cap = getattr(model, "attn_logit_softcapping", None)
    if name == "nvte":
        yield (
            "model.attn_backend is nvte, but Transformer Engine, as levanter calls it, does not read segment ids, so "
            "the sequences of a packed row would attend to one another; set it to null"
        )
    elif name not in ("default", "vanilla") and getattr(model, "use_flash_attention", None) is False:
        yield f"model.use_flash_attention is false, but model.attn_backend is {name}; set one of them only"
    elif cap is not None and name not in ("default", *EXACT_WITH_CAP):
        yield (
            f"model.attn_backend is {name}, which does not differentiate the cap of the attention logits "
            f"(model.attn_logit_softcapping, {cap}); set it to vanilla, or to null"
        )


def rope_problems(rope: Any) -> Iterator[str]:
    """Problems of the rotary settings of a model. `rope` is levanter's config; None without rotary embeddings.

    Yields:
        Messages that name the setting and the remedy.
    """
    name = None if rope is None else rope.get_choice_name(type(rope))
    if name == "yarn":
        yield "model.rope.type is 'yarn', which levanter computes unlike transformers; use hf_yarn"
    if name == "default" and rope.factor != 1.0:
        yield f"model.rope.factor is {rope.factor}, which levanter cannot export; use model.rope.type: hf_linear"


def _gemma_problems(name: str, model: Any) -> Iterator[str]:
    """Settings that levanter's gemma models ignore."""
    if name not in ("gemma", "gemma2") or min(model.num_heads, model.hidden_dim) < 1:
        return
    head_size = model.hidden_dim // model.num_heads
    implemented: dict[str, Any] = {"head_dim": head_size}
    if name == "gemma2":
        implemented |= {"final_logit_softcapping": None, "query_pre_attn_scalar": head_size}
    for key, value in implemented.items():
        if getattr(model, key) != value:
            text = "null" if value is None else value
            given = getattr(model, key)
            yield f"model.{key} is {given}, but levanter computes {name} models with {text}; set it to {text}"


def _mixture_problems(model: Any) -> Iterator[str]:
    if getattr(model, "dense_router_gradient", False):
        yield (
            "model.dense_router_gradient is true, but it is not supported: marin_rl computes the experts itself; set "
            "it to false"
        )
    for key in ("lbl_coef", "rzl_coef", "router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(model, key, None)
        if value is not None and not 0 <= value < math.inf:
            yield f"model.{key} is {value}; it must be at least 0 and finite, or null"


def window_problem(model: Any, max_length: int, section: str = "rollouts") -> str | None:
    """Problem of a mixtral's attention window, which levanter does not export.

    `max_length` is the longest sequence, in tokens, and `section` the one that sets it.
    """
    if model.get_choice_name(type(model)) != "mixtral" or (model.sliding_window or max_length) >= max_length:
        return None
    return (
        f"model.sliding_window is {model.sliding_window} and {section}.max_length {max_length}, but levanter exports "
        f"mixtral models without a window; set model.sliding_window to null, or to {section}.max_length or more"
    )


def _shape_problems(sizes: dict[str, int]) -> Iterator[str]:
    heads, kv_heads = sizes["num_heads"], sizes.get("num_kv_heads", 1)
    if heads % kv_heads:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        yield (
            f"model.num_heads is {heads} and model.num_kv_heads is {kv_heads}, but each key-value head serves the same "
            f"number of heads; set model.num_kv_heads to one of {fitting}"
        )
    if "head_dim" not in sizes and sizes["hidden_dim"] % heads:
        yield (
            f"model.hidden_dim is {sizes['hidden_dim']}, which model.num_heads = {heads} does not divide; set "
            f"hidden_dim to a multiple of it, such as {-(-sizes['hidden_dim'] // heads) * heads}, or another num_heads"
        )
    experts = "num_experts" if "num_experts" in sizes else "n_routed_experts"
    if sizes.get("num_experts_per_tok", 0) > sizes.get(experts, 0):
        yield (
            f"model.num_experts_per_tok is {sizes['num_experts_per_tok']}, but there are only model.{experts} = "
            f"{sizes.get(experts)} experts; lower it, or raise {experts}"
        )
    if sizes.get(experts, 0) > MAX_EXPERTS:
        yield f"model.{experts} is {sizes[experts]}; it must be at most {MAX_EXPERTS}"
