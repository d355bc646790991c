# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Supported architectures, for training and for sampling with the built-in sampler."""

from levanter.models.lm_model import LmConfig

from marin_rl.models.hf_config import MODEL_TYPES, PolicyModelError, attention_window, check_export

TRAINED = tuple(MODEL_TYPES.values())
"""Values of `model.type` that can be trained, imported and exported."""
SAMPLED = ("llama", "qwen2", "qwen3")
"""Values of `model.type` that the built-in sampler (`sampler: {type: levanter}`) supports."""
_DROPOUT = ("embed_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout")
_SIZES = ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads")
"""Fields of the `model` section that are sizes, at least 1."""


def check_model(config: LmConfig, *, built_in_sampler: bool, max_length: int) -> None:
    """Raise an error for a model that the run cannot sample, train and export exactly.

    Args:
        config: the `model` section of a run.
        built_in_sampler: whether the run samples in its own processes instead of on a server.
        max_length: longest sequence, in tokens.

    Raises:
        PolicyModelError: if a setting is unsupported; the message names the setting and the remedy.
    """
    name = LmConfig.get_choice_name(type(config))
    if name not in TRAINED:
        remedy = "; use qwen2" if name == "qwen" else ""
        raise PolicyModelError(f"model.type {name!r} is not supported{remedy}; supported are {', '.join(TRAINED)}")
    if built_in_sampler and name not in SAMPLED:
        raise PolicyModelError(
            f"model.type {name!r} can be trained, but the built-in sampler cannot sample it; it samples "
            f"{', '.join(SAMPLED)}. Use one of these, or a server that samples (sampler: {{type: openai, ...}})"
        )
    if dropout := {field: rate for field in _DROPOUT if (rate := getattr(config, field, 0))}:
        raise PolicyModelError(
            "dropout is not applied: neither sampling nor the loss uses it. Set "
            + ", ".join(f"model.{field} to 0 (it is {rate})" for field, rate in dropout.items())
        )
    for size in _SIZES:
        if getattr(config, size, 1) < 1:
            raise PolicyModelError(f"model.{size} is {getattr(config, size)}; it must be at least 1")
    window = attention_window(check_export(config))
    if window is not None and max_length > window:
        raise PolicyModelError(
            f"rollouts.max_length is {max_length}, but layers of this {name!r} model attend to the last {window} "
            "positions only (model.sliding_window), which is not implemented; up to that length it makes no "
            f"difference, so set rollouts.max_length to {window} or less"
        )
