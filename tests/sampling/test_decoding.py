# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.sampling.config import MIN_TEMPERATURE
from marin_rl.sampling.decoding import draw

LARGEST_BELOW_1 = 1 - 2.0**-24
SIZES = [1, 2, 63, 64, 65, 4096, 4097, 151_936]
"""Vocabulary sizes: one token, partial and whole blocks of both sizes, and a real one."""

draw_compiled = jax.jit(draw)


def log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def draw_tokens(logits: np.ndarray, uniforms: np.ndarray, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Draw a token for each number from one row of logits."""
    rows = np.broadcast_to(logits, (len(uniforms), len(logits)))
    temperatures = np.full(len(uniforms), temperature, np.float32)
    tokens, logprobs = draw_compiled(rows, temperatures, uniforms.astype(np.float32))
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize("vocab", SIZES)
def test_draw_inverts_the_cumulative_distribution(vocab: int):
    """The expected token is that of float64; rounding may move a number that lies at a boundary to a neighbour."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(scale=2.0, size=vocab).astype(np.float32)
    uniforms = np.concatenate([[0.0, LARGEST_BELOW_1], rng.random(30)])
    tokens, logprobs = draw_tokens(logits, uniforms)
    expected = log_softmax(logits, 1.0)
    ends = np.cumsum(np.exp(expected))
    assert (ends[tokens] >= uniforms - 1e-6).all()
    assert (ends[tokens] - np.exp(expected[tokens]) <= uniforms + 1e-6).all()
    np.testing.assert_allclose(logprobs, expected[tokens], atol=2e-5)


@pytest.mark.medium
@pytest.mark.parametrize("masked", [-np.inf, -1000.0])
@pytest.mark.parametrize("vocab", [2, 65, 4097])
def test_token_of_probability_0_is_never_drawn(vocab: int, masked: float):
    """Rounding gives some of these tokens an interval of the cumulative sums, which some of the numbers hit."""
    rng = np.random.default_rng(0)
    logits = np.full(vocab, masked, np.float32)
    # In one block, where the intervals are widest.
    logits[1:512] = rng.normal(scale=2.0, size=min(vocab, 512) - 1)
    logits[1:-1][rng.random(vocab - 2) < 0.5] = masked
    weights = np.exp(logits.astype(np.float64))
    ends = np.cumsum(weights) / weights.sum()
    near = ends[:512][logits[:512] == masked][:, None] + 2.0**-24 * np.arange(-3, 4)
    uniforms = np.concatenate([[0.0, LARGEST_BELOW_1], np.clip(near, 0.0, LARGEST_BELOW_1).reshape(-1)])
    for start in range(0, len(uniforms), 500):
        tokens, logprobs = draw_tokens(logits, np.resize(uniforms[start:], 500))
        assert (logits[tokens] > masked).all()
        assert (logprobs > -50).all()


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1e-6, 100.0])
def test_extreme_temperatures(temperature: float):
    logits = np.linspace(-3.0, 3.0, 65, dtype=np.float32)
    uniforms = (np.arange(200) + 0.5) / 200
    tokens, logprobs = draw_tokens(logits, uniforms, temperature)
    expected = log_softmax(logits, temperature)
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)
    assert len(set(tokens.tolist())) == (1 if temperature < 1 else 65)


def test_greedy_draws_the_most_probable_token_at_temperature_1():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 300)).astype(np.float32)
    # The first one of equally probable tokens.
    logits[0, [7, 200]] = 9.0
    tokens, logprobs = draw_compiled(logits, jnp.zeros(5), jnp.linspace(0.0, 0.9, 5))
    assert np.asarray(tokens).tolist() == logits.argmax(axis=-1).tolist()
    np.testing.assert_allclose(logprobs, log_softmax(logits, 1.0).max(axis=-1), atol=1e-5)
