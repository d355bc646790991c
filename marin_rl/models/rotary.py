# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Linear and YaRN scaling of rotary position embeddings, equal to those of transformers.

Levanter also registers `linear` and `yarn`. Its `linear` has no Hugging Face form. Its `yarn` divides the positions by
the factor in addition to the frequencies, and takes the square root of the attention factor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, RotaryEmbeddings, RotaryEmbeddingsConfig


@RotaryEmbeddingsConfig.register_subclass("hf_linear")
@dataclass(frozen=True)
class LinearRotaryConfig(DefaultRotaryEmbeddingsConfig):
    """Rotary embeddings with frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    @classmethod
    def make_from_hf_config(cls, rope_theta: float, config: Mapping[str, Any]) -> "LinearRotaryConfig":
        """Build the configuration from `rope_theta` and `rope_scaling` of a Hugging Face config."""
        return cls(theta=rope_theta, factor=config["factor"])

    def to_hf_config(self) -> tuple[float, dict[str, Any] | None]:
        """Return `rope_theta` and `rope_scaling` of a Hugging Face config."""
        # OLMo 2's config class accepts no other name of the type; see `hf_rope` for that of OLMo 3.
        return float(self.theta), {"type": "linear", "factor": self.factor}


@RotaryEmbeddingsConfig.register_subclass("hf_yarn")
@dataclass(frozen=True)
class YarnRotaryConfig(RotaryEmbeddingsConfig):
    """Rotary embeddings with YaRN scaling (arXiv:2309.00071), as in transformers.

    Dimensions that make more than `beta_fast` rotations over the original context keep their frequency. Dimensions
    that make fewer than `beta_slow` have it divided by `factor`. In between, the divisor follows a linear ramp. Queries
    and keys are multiplied by the attention factor.
    """

    theta: float = 10000.0
    """Base of the rotary frequencies."""
    factor: float = 1.0
    """Ratio of the extended context to the original one, at least 1."""
    attention_factor: float | None = None
    """Multiplies rotated queries and keys; null: `0.1 ln(factor) + 1`."""
    beta_fast: float = 32.0
    """Rotations above which a frequency is kept."""
    beta_slow: float = 1.0
    """Rotations below which a frequency is divided by `factor`."""
    original_max_position_embeddings: int = 2048
    """Context of the original model, tokens."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"rope.factor is {self.factor}; YaRN extends a context, so it must be at least 1")

    @property
    def scale(self) -> float:
        """The effective attention factor."""
        return yarn_attention_factor(self.factor) if self.attention_factor is None else self.attention_factor

    def build(self, HeadSize: Axis) -> "YarnRotary":
        """Build the rotary embedding for heads of this size."""
        return YarnRotary(HeadSize, self)

    @classmethod
    def make_from_hf_config(cls, rope_theta: float, config: Mapping[str, Any]) -> "YarnRotaryConfig":
        """Build the configuration from `rope_theta` and a `rope_scaling` with all its settings."""
        return cls(theta=rope_theta, **{name: value for name, value in config.items() if name != "rope_type"})

    def to_hf_config(self) -> tuple[float, dict[str, Any]]:
        """Return `rope_theta` and `rope_scaling` of a Hugging Face config."""
        names = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate")
        settings = {name: getattr(self, name) for name in names}
        return float(self.theta), {"rope_type": "yarn", "attention_factor": self.scale, **settings}

    def inverse_frequencies(self, head_size: int) -> np.ndarray:
        """Return radians per position, `[head_size / 2]`, float32."""
        frequencies = self.theta ** (-np.arange(0, head_size, 2) / head_size)

        def ramp_end(rotations: float) -> float:
            context = self.original_max_position_embeddings
            return head_size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = ramp_end(self.beta_fast), ramp_end(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        if low == high:
            high += 0.001
        scaled_share = np.clip((np.arange(head_size // 2) - low) / (high - low), 0, 1)
        return (frequencies * (scaled_share / self.factor + 1 - scaled_share)).astype(np.float32)


class YarnRotary(RotaryEmbeddings):
    """Rotates queries or keys by the frequencies of a `YarnRotaryConfig`."""

    HeadSize: Axis = eqx.field(static=True)
    config: YarnRotaryConfig = eqx.field(static=True)

    def __call__(self, q: NamedArray, position_ids: NamedArray) -> NamedArray:
        """Rotate `q` by the angles of its positions, and multiply it by the attention factor."""
        Half = self.HeadSize.resize(self.HeadSize.size // 2)
        frequencies = hax.named(jnp.asarray(self.config.inverse_frequencies(self.HeadSize.size)), Half)
        angles = position_ids * frequencies.broadcast_axis(position_ids.axes)
        angles = hax.concatenate(self.HeadSize, (angles, angles))
        cos = (hax.cos(angles) * self.config.scale).astype(q.dtype)
        sin = (hax.sin(angles) * self.config.scale).astype(q.dtype)
        first, second = q[self.HeadSize, : Half.size], q[self.HeadSize, Half.size :]
        return q * cos + hax.concatenate(self.HeadSize, (-second, first)) * sin


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Compute YaRN's attention factor for a config that does not set it.

    `factor` is the ratio of the extended context to the original one. `mscale` and `mscale_all_dim` are the weights of
    `ln(factor)` in numerator and denominator; both are used or none.
    """

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
