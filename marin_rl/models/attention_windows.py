# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention windows of the layers of a model: the last positions that a token attends to, its own included."""

from typing import Any

from marin_rl.utils.levanter_line import max_positions

Windows = tuple[int | None, ...]
"""The window of each layer; None for all positions."""


def layer_windows(model: Any) -> Windows:
    """Return the windows of a levanter model config, which are those of transformers' model of its export.

    Levanter's models ignore most of these settings, so that sampler and learner apply the windows. `mixtral` has none:
    levanter exports it without.
    """
    layers, window = range(model.num_layers), getattr(model, "sliding_window", None)
    # A subclass need not be registered.
    names = {choice: name for name, choice in model.get_known_choices().items()}
    match next((names[base] for base in type(model).__mro__ if base in names), None):
        case "mistral":
            has_window = [True for _ in layers]
        case "gemma2":
            # Levanter exports null as the length of the context.
            window = max_positions(model) if window is None else window
            has_window = [layer % 2 == 0 for layer in layers]
        case "qwen3" if model.use_sliding_window:
            # Levanter has no `max_window_layers`, and exports its default.
            has_window = [layer >= 28 for layer in layers]
        case "qwen3_moe" if model.use_sliding_window:
            has_window = [True for _ in layers]
        case "olmo3" if model.layer_types is not None:
            has_window = [kind == "sliding_attention" for kind in model.layer_types]
        case "olmo3":
            has_window = [layer % 4 != 3 for layer in layers]
        case _:
            has_window = [False for _ in layers]
    return tuple(window if has else None for has in has_window)


def window_rope(model: Any) -> Any:
    """Return the rotary embeddings of the layers with a window, a levanter config; None if they are those of all."""
    return getattr(model, "window_rope", None)


def windows_within(model: Any, positions: int) -> Windows | None:
    """Return the windows of a model that make a difference for sequences of some length; None if there are none."""
    windows = layer_windows(model)
    if window_rope(model) is None:
        windows = tuple(None if window is None or window >= positions else window for window in windows)
    return windows if any(windows) else None
