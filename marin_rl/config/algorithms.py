# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Algorithms by name: the sections of the objective that a paper, or its reference code, uses.

Learning rate, group size and `updates` are the user's: papers choose them for their models and batches.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from marin_rl.utils.errors import nearest
from marin_rl.utils.settings.section_types import ConfigError, default_of, without_texts

ALGORITHM = "algorithm"
"""Key of an algorithm's name, which its sections replace before the config is decoded."""


def algorithms(max_new_tokens: int) -> dict[str, dict[str, Any]]:
    """Return the raw values of all algorithms by name, for answers of at most `max_new_tokens` tokens."""
    grpo, no_kl, token_mean = {"type": "grpo"}, {"type": "none"}, {"type": "token_mean"}
    clip = {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}
    return {
        # Ahmadian et al. 2024, arXiv 2402.14740, section 3 and appendix C.
        "rloo": {
            "advantage": {"type": "rloo"},
            "policy_loss": {"type": "reinforce"},
            "kl": {"type": "in_reward", "beta": 0.03},
            "aggregation": {"type": "sequence_sum"},
        },
        # Shao et al. 2024, arXiv 2402.03300, equations 3 and 4; the bound is that of TRL's GRPOConfig.
        "grpo": {
            "advantage": grpo,
            "policy_loss": clip,
            "kl": {"type": "in_loss", "beta": 0.04, "estimator": "k3"},
            "aggregation": {"type": "sequence_mean"},
        },
        # Liu et al. 2025, arXiv 2503.20783, and sail-sg/understand-r1-zero, which divides by generate_max_length.
        "dr_grpo": {
            "advantage": {"type": "dr_grpo"},
            "policy_loss": clip,
            "kl": no_kl,
            "aggregation": {"type": "constant", "length": max_new_tokens},
        },
        # Yu et al. 2025, arXiv 2503.14476, sections 3 and 4.1: 4,096 of at most 20,480 tokens are the buffer.
        "dapo": {
            "advantage": grpo,
            "policy_loss": {**clip, "clip_high": 0.28},
            "kl": no_kl,
            "aggregation": token_mean,
            "overlong": {"buffer": max_new_tokens // 5, "factor": 1.0},
            "filter": {"type": "resample"},
        },
        # Schulman et al. 2017, arXiv 1707.06347; the head is that of Ziegler et al. 2019, arXiv 1909.08593, and the
        # numbers those of TRL's PPOConfig.
        "ppo": {
            "advantage": {"type": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True},
            "critic": {"shared_trunk": True, "coefficient": 0.1, "clip": 0.2},
            "policy_loss": clip,
            "kl": {"type": "in_reward", "beta": 0.05},
            "aggregation": token_mean,
        },
        # Zheng et al. 2025, arXiv 2507.18071, equation 5 and section 5.1.
        "gspo": {
            "advantage": grpo,
            "policy_loss": {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
            "kl": no_kl,
            "aggregation": {"type": "sequence_mean"},
        },
        # MiniMax 2025, arXiv 2506.13585, equations 4 and 5; the largest weight, 5, is that of arXiv 2510.13786.
        "cispo": {
            "advantage": grpo,
            "policy_loss": {"type": "cispo", "clip_low": 1.0, "clip_high": 4.0},
            "kl": no_kl,
            "aggregation": token_mean,
        },
        # Tajwar et al. 2026, arXiv 2602.02710, and tajwarfahim/maxrl, qwen3_experiments/run_qwen3_training.sh.
        "maxrl": {"advantage": {"type": "maxrl"}, "policy_loss": clip, "kl": no_kl, "aggregation": token_mean},
        # Feng et al. 2025, arXiv 2505.10978, and langfengQ/verl-agent, verl/trainer/config/ppo_trainer.yaml.
        "gigpo": {
            "advantage": {"type": "gigpo", "omega": 1.0, "gamma": 0.95, "normalize": "none"},
            "policy_loss": clip,
            "kl": {"type": "in_loss", "beta": 0.01, "estimator": "k3"},
            "aggregation": token_mean,
        },
        # Lu 2025, "On-Policy Distillation", and tinker_cookbook/distillation/train_on_policy.py.
        "opd": {
            "distillation": {"coefficient": 1.0, "alone": True},
            "advantage": {"type": "reinforce"},
            "policy_loss": {"type": "importance"},
            "kl": no_kl,
            "aggregation": {"type": "sequence_sum"},
        },
    }


NAMES = tuple(algorithms(1))
"""Names of the algorithms."""
SECTIONS = frozenset(section for sections in algorithms(1).values() for section in sections)
"""Sections of the objective, which the name of an algorithm replaces as a whole."""


def with_sections(config_class: Any, layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Replace the last name of an algorithm in layers of raw values by its sections.

    They are below the layer that has the name, and replace those of lower layers. A null names none.

    Raises:
        ConfigError: if the algorithm is unknown, or needs a section that only the user can give.
    """
    named = [index for index, layer in enumerate(layers) if ALGORITHM in layer]
    if not named:
        return list(layers)
    sections = _sections(config_class, layers, without_texts(layers[named[-1]][ALGORITHM]))
    dropped = {ALGORITHM, *(SECTIONS if sections else ())}
    below = [_without(layer, dropped) for layer in layers[: named[-1]]]
    return [*below, sections, *(_without(layer, {ALGORITHM}) for layer in layers[named[-1] :])]


def _without(layer: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if key not in keys}


def _sections(config_class: Any, layers: Sequence[Mapping[str, Any]], name: Any) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in NAMES:
        raise ConfigError(f"{ALGORITHM} is {name!r}, which is not one of the algorithms; {nearest(str(name), NAMES)}")
    if name == "opd" and not any("reference" in layer for layer in layers):
        raise ConfigError(
            "algorithm 'opd' needs a teacher: set reference, such as {type: checkpoint, path: FOLDER}, or "
            "{type: server, base_url: ..., model: ...}"
        )
    given = [without_texts(layer["sampling"]) for layer in layers if isinstance(layer.get("sampling"), Mapping)]
    lengths = [sampling["max_new_tokens"] for sampling in given if "max_new_tokens" in sampling]
    default = default_of(config_class, "sampling").max_new_tokens
    # Decoding reports another value.
    is_valid = bool(lengths) and type(lengths[-1]) is int and lengths[-1] > 0
    return algorithms(lengths[-1] if is_valid else default)[name]
