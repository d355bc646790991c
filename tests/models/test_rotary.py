# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import haliax as hax
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.rotary import RotaryEmbeddingsConfig

from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig, yarn_attention_factor

HeadSize, Position = Axis("head_size", 16), Axis("position", 40)


def rotated(config: RotaryEmbeddingsConfig) -> np.ndarray:
    """Return rotated unit vectors along the first half of the head: `[position, head_size]`."""
    start = np.concatenate([np.ones((Position.size, 8)), np.zeros((Position.size, 8))], axis=1).astype(np.float32)
    query = hax.named(start, (Position, HeadSize))
    return np.asarray(config.build(HeadSize)(query, hax.arange(Position)).rearrange((Position, HeadSize)).array)


def angles_and_length(config: RotaryEmbeddingsConfig) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = np.split(rotated(config), 2, axis=1)
    return np.unwrap(np.arctan2(sin, cos), axis=0)[1], np.hypot(cos, sin)


def test_yarn_keeps_fast_dimensions_and_slows_slow_ones():
    config = YarnRotaryConfig(factor=4.0, original_max_position_embeddings=32, beta_fast=4.0)
    plain = 10000.0 ** (-np.arange(8) / 8)
    found, length = angles_and_length(config)
    # Dimension d makes 32 plain[d] / 2π rotations: 5.1 for 0, 1.6 for 1, 0.5 for 2.
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
    assert plain[1] / 4 < found[1] < plain[1]
    np.testing.assert_allclose(found[2:], plain[2:] / 4, rtol=1e-4)
    np.testing.assert_allclose(length, 0.1 * math.log(4) + 1, rtol=1e-5)


def test_explicit_attention_factor_is_used():
    config = YarnRotaryConfig(factor=4.0, attention_factor=1.5, original_max_position_embeddings=32)
    _, length = angles_and_length(config)
    np.testing.assert_allclose(length, 1.5, rtol=1e-5)


def test_the_attention_factor_from_two_scales():
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(math.e) == pytest.approx(1.1)
    assert yarn_attention_factor(math.e, 2.0, 1.0) == pytest.approx(1.2 / 1.1)
    assert yarn_attention_factor(math.e, 2.0, None) == pytest.approx(1.1)


def test_linear_scaling_divides_the_angles():
    found, length = angles_and_length(LinearRotaryConfig(theta=100.0, factor=4.0))
    np.testing.assert_allclose(found, 100.0 ** (-np.arange(8) / 8) / 4, rtol=1e-5)
    np.testing.assert_allclose(length, 1.0, rtol=1e-5)


def test_factor_below_1_is_rejected():
    with pytest.raises(ValueError, match=r"rope.factor is 0.5; YaRN extends a context"):
        YarnRotaryConfig(factor=0.5)
