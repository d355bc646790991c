# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import functools
import itertools
import math

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives.aggregation import (
    ConstantConfig,
    SequenceMeanConfig,
    SequenceSumConfig,
    TokenMeanConfig,
)
from marin_rl.objectives.policy_loss import (
    CispoLossConfig,
    GspoLossConfig,
    ImportanceLossConfig,
    PolicyLossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
    RlooSequenceLossConfig,
    TokenBatch,
    policy_ratio,
    sequence_log_ratios,
)

TOKEN_LEVEL = [
    ReinforceLossConfig(),
    ImportanceLossConfig(),
    PpoClipLossConfig(clip_low=0.1, clip_high=0.4),
    PpoClipLossConfig(dual_clip=1.5),
    CispoLossConfig(clip_low=0.1, clip_high=0.4),
]
SEQUENCE_LEVEL = [
    GspoLossConfig(clip_low=0.1, clip_high=0.4),
    RlooSequenceLossConfig(clip_low=0.1, clip_high=0.4),
]
CONFIGS = TOKEN_LEVEL + SEQUENCE_LEVEL
AGGREGATIONS = [TokenMeanConfig(), SequenceMeanConfig(), SequenceSumConfig(), ConstantConfig(7)]
SHAPE = (2, 5)
SIZE = math.prod(SHAPE)


@functools.partial(jax.jit, static_argnums=0)
def terms_of(config, logprobs, old, advantages, mask, ids):
    return config.per_token(TokenBatch(logprobs, old, advantages, mask, ids))


@functools.partial(jax.jit, static_argnums=0)
def gradient_of(config, logprobs, old, advantages, mask, ids, weights):
    def loss(x):
        return jnp.sum(weights * config.per_token(TokenBatch(x, old, advantages, mask, ids)).terms)

    return jax.grad(loss)(logprobs)


@jax.jit
def sums_of(logprobs, old, mask, ids):
    return sequence_log_ratios(TokenBatch(logprobs, old, jnp.ones_like(old), mask, ids))


def arrays(*values):
    return tuple(jnp.array(value) for value in values)


def clamp(difference):
    return max(-20.0, min(20.0, difference))


def ratio_oracle(config, tokens, own):
    """Compute the ratio and the number of shares of a token's term. `tokens`: (logprob, old, A, rollout)."""
    logprob, old, _, rollout = tokens[own]
    differences = [lp - o for lp, o, _, other in tokens if other == rollout]
    match config:
        case GspoLossConfig():
            return math.exp(clamp(sum(differences) / len(differences))), 1
        case RlooSequenceLossConfig():
            return math.exp(clamp(sum(differences))), len(differences)
        case _:
            return math.exp(clamp(logprob - old)), 1


def oracle(config, tokens, own):
    """Compute the term, the clipping flag and the distance of the ratio to the next bound, for one loss token."""
    logprob, _, advantage, _ = tokens[own]
    ratio, shares = ratio_oracle(config, tokens, own)
    match config:
        case ReinforceLossConfig():
            return -advantage * logprob, False, 1.0
        case ImportanceLossConfig():
            return -advantage * ratio, False, 1.0
    low, high = 1 - config.clip_low, 1 + config.clip_high
    near = min(abs(ratio - low), abs(ratio - high))
    inside = min(max(ratio, low), high)
    if isinstance(config, CispoLossConfig):
        return -inside * advantage * logprob, inside != ratio, near
    term = max(-advantage * ratio, -advantage * inside)
    clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    dual = getattr(config, "dual_clip", None)
    if dual is not None and advantage < 0:
        clipped = clipped or ratio > dual
        near = min(near, abs(ratio - dual))
        term = min(term, -dual * advantage)
    return term / shares, clipped, near


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_term_has_no_gradient_without_advantages_as_it_declares(config):
    assert config.needs_advantage
    logprobs, old = arrays([[-0.5, -3.0, -29.0, -0.1, -7.0]] * 2, [[-0.5, -0.1, -0.5, -29.0, -7.5]] * 2)
    mask, ids = arrays([[True] * 5] * 2, [[0, 0, 1, 2, 3], [4, 4, 4, 5, 5]])
    gradient = gradient_of(config, logprobs, old, jnp.zeros(SHAPE), mask, ids, jnp.ones(SHAPE))
    assert not gradient.any()


far = st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-5, 5), st.integers(-1, 3))
close = st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-5, 5), st.integers(-1, 3))


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@settings(deadline=None, max_examples=40)
@given(
    st.lists(far | close | close, min_size=SIZE, max_size=SIZE), st.lists(st.booleans(), min_size=SIZE, max_size=SIZE)
)
def test_matches_the_formula(config, tokens, losses):
    """Tokens of rollouts 0 to 3 in any order over two rows, some without loss."""
    mask = np.array([loss and token[3] >= 0 for loss, token in zip(losses, tokens, strict=True)])
    columns = [np.array(column).reshape(SHAPE) for column in zip(*tokens, strict=True)]
    with jax.enable_x64(True):
        result = terms_of(config, *arrays(*columns[:3], mask.reshape(SHAPE), columns[3].astype(np.int32)))
        terms, clipped = np.array(result.terms).ravel(), np.array(result.clipped).ravel()
    with_loss = [token for token, loss in zip(tokens, mask, strict=True) if loss]
    for own, position in enumerate(np.flatnonzero(mask)):
        term, flag, near = oracle(config, with_loss, own)
        assert terms[position] == pytest.approx(term, rel=1e-9, abs=1e-12)
        # For a subnormal A, -A·r can round to -A·(1 ± ε), so that no clipping is observed.
        if near > 1e-9 and abs(with_loss[own][2]) > 1e-9:
            assert clipped[position] == flag
    if config.is_sequence_level:
        assert not terms[~mask].any()
        assert not clipped[~mask].any()


@functools.cache
def ragged(seed=0, size=48, rollouts=12):
    """Rollouts of 1 to 7 tokens in random positions; every third token of the array has no loss. float64."""
    rng = np.random.default_rng(seed)
    ids = np.where(np.arange(size) % 3 == 2, -1, rng.integers(0, rollouts, size))
    rng.shuffle(ids)
    old = rng.uniform(-3, 0, size)
    logprobs = old + rng.normal(scale=0.6, size=size)
    per_rollout = rng.choice([-1.5, -0.7, 0.4, 1.2], rollouts)
    advantages = np.where(ids >= 0, per_rollout[ids], 0.0)
    return logprobs, old, advantages, ids >= 0, ids.astype(np.int32)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_gradient_is_the_finite_difference(config):
    logprobs, old, _, mask, ids = ragged()
    rng = np.random.default_rng(1)
    advantages, weights = rng.normal(size=(2, mask.size))
    weights = weights * mask
    fixed = arrays(old, advantages, mask, ids)
    step = 1e-6

    @jax.jit
    @jax.vmap
    def total(x):
        if isinstance(config, CispoLossConfig):
            # The derivative treats the weight as a constant.
            constant = jnp.clip(jnp.exp(jnp.array(logprobs - old)), 1 - config.clip_low, 1 + config.clip_high)
            return jnp.sum(weights * -constant * advantages * x)
        return jnp.sum(weights * config.per_token(TokenBatch(x, *fixed)).terms)

    with jax.enable_x64(True):
        fixed = arrays(old, advantages, mask, ids)
        actual = np.array(gradient_of(config, jnp.array(logprobs), *fixed, jnp.array(weights)))
        moved = step * np.eye(mask.size)
        difference = (np.array(total(jnp.array(logprobs + moved))) - np.array(total(jnp.array(logprobs - moved)))) / (
            2 * step
        )
    np.testing.assert_allclose(actual, difference, rtol=1e-6, atol=1e-7)
    assert np.abs(actual).max() > 0.1


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_sign_rule(config, advantage):
    """Descent raises the probability of every token of positive advantage, and lowers those of a negative one."""
    old = jnp.array([[-1.0, -0.5, -2.0], [-0.1, -3.0, -1.0]])
    mask, ids = jnp.array([[True, True, False], [True, True, True]]), jnp.array([[0, 0, 0], [1, 0, 2]])
    gradient = gradient_of(config, old, old, jnp.full((2, 3), advantage), mask, ids, mask.astype(jnp.float32))
    assert (np.sign(gradient)[mask] == -np.sign(advantage)).all()
    assert float(gradient[0, 2]) == 0.0
    # For rollouts of one token every term has the gradient of -A·log π.
    np.testing.assert_allclose(np.array([gradient[1, 0], gradient[1, 2]]), -advantage, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_zero_advantage_gives_no_term_and_no_gradient(config):
    logprobs, old, _, mask, ids = ragged()
    with jax.enable_x64(True):
        inputs = arrays(logprobs, old, np.zeros(mask.size), mask, ids)
        assert not np.array(terms_of(config, *inputs).terms).any()
        assert not np.array(gradient_of(config, *inputs, jnp.array(mask.astype(np.float64)))).any()


def loss_weights(aggregation, mask, ids):
    return np.where(mask, aggregation.loss_weights(np.bincount(ids[mask]))[ids], 0.0)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_on_policy_gradients_equal_reinforce_under_every_aggregation(config):
    _, old, advantages, mask, ids = ragged()
    with jax.enable_x64(True):
        fixed = arrays(old, advantages, mask, ids)
        for aggregation in AGGREGATIONS:
            weights = jnp.array(loss_weights(aggregation, mask, ids))
            expected = np.where(mask, -advantages * np.array(weights), 0.0)
            actual = np.array(gradient_of(config, fixed[0], *fixed, weights))
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("config", TOKEN_LEVEL, ids=repr)
def test_on_policy_token_level_terms_use_token_advantages(config):
    _, old, _, mask, ids = ragged()
    advantages, weights = np.random.default_rng(2).normal(size=(2, mask.size))
    with jax.enable_x64(True):
        fixed = arrays(old, advantages, mask, ids)
        actual = np.array(gradient_of(config, fixed[0], *fixed, jnp.array(weights * mask)))
    np.testing.assert_allclose(actual, np.where(mask, -advantages * weights, 0.0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_terms_do_not_depend_on_token_order_or_rollout_ids(config):
    logprobs, old, advantages, mask, ids = ragged()
    rng = np.random.default_rng(3)
    order, names = rng.permutation(mask.size), rng.permutation(mask.size)
    renamed = np.where(mask, names[ids], -1).astype(np.int32)
    weights = mask.astype(np.float64)
    with jax.enable_x64(True):
        before = arrays(logprobs, old, advantages, mask, ids)
        after = arrays(*(array[order] for array in (logprobs, old, advantages, mask, renamed)))
        terms, moved = (terms_of(config, *inputs) for inputs in (before, after))
        gradient = np.array(gradient_of(config, *before, jnp.array(weights)))
        moved_gradient = np.array(gradient_of(config, *after, jnp.array(weights[order])))
        visible = mask[order]
        np.testing.assert_allclose(np.array(moved.terms)[visible], np.array(terms.terms)[order][visible], rtol=1e-12)
        assert (np.array(moved.clipped)[visible] == np.array(terms.clipped)[order][visible]).all()
    np.testing.assert_allclose(moved_gradient, gradient[order], rtol=1e-12, atol=1e-15)


BOUNDED = [config for config in CONFIGS if not isinstance(config, (ReinforceLossConfig, ImportanceLossConfig))]


@pytest.mark.parametrize("config", BOUNDED, ids=repr)
def test_clipped_tokens_are_those_with_zero_gradient(config):
    samples = [ragged(seed) for seed in range(5, 9)]
    with jax.enable_x64(True):
        flags = [np.array(terms_of(config, *arrays(*inputs)).clipped) for inputs in samples]
        weights = [jnp.array(mask.astype(np.float64)) for *_, mask, _ in samples]
        gradients = [np.array(gradient_of(config, *arrays(*g), w)) for g, w in zip(samples, weights, strict=True)]
    mask = np.concatenate([mask for *_, mask, _ in samples])
    clipped, gradient = np.concatenate(flags)[mask], np.concatenate(gradients)[mask]
    assert 0 < clipped.sum() < clipped.size
    if isinstance(config, CispoLossConfig):
        # CISPO bounds the weight, and every token has a gradient.
        ratio = np.concatenate([np.exp(logprobs - old) for logprobs, old, *_ in samples])[mask]
        outside = (ratio > 1 + config.clip_high) | (ratio < 1 - config.clip_low)
        assert (clipped == outside).all()
        assert (gradient != 0).all()
    else:
        assert (clipped == (gradient == 0)).all()


SIDES = [
    (math.log(1.21), 1.0, True),
    (math.log(1.19), 1.0, False),
    (math.log(0.79), 1.0, False),
    (math.log(0.79), -1.0, True),
    (math.log(0.81), -1.0, False),
    (math.log(1.21), -1.0, False),
]


@pytest.mark.parametrize(
    "config", [PpoClipLossConfig(), GspoLossConfig(0.2, 0.2), RlooSequenceLossConfig(0.2, 0.2)], ids=repr
)
def test_clipped_side_depends_on_the_sign_of_the_advantage(config):
    ratios, advantages, expected = (np.array(column) for column in zip(*SIDES, strict=True))
    ids = jnp.arange(len(SIDES))
    mask = jnp.ones(len(SIDES), bool)
    result = terms_of(config, jnp.array(ratios), jnp.zeros(len(SIDES)), jnp.array(advantages), mask, ids)
    assert result.clipped.tolist() == expected.tolist()


def test_dual_clip_applies_to_negative_advantages_only():
    config = PpoClipLossConfig(dual_clip=3.0)
    ratios = jnp.log(jnp.array([2.9, 3.1, 3.1]))
    advantages = jnp.array([-1.0, -1.0, 1.0])
    result = terms_of(config, ratios, jnp.zeros(3), advantages, jnp.ones(3, bool), jnp.arange(3))
    np.testing.assert_allclose(result.terms, [2.9, 3.0, -1.2], rtol=1e-6)
    assert result.clipped.tolist() == [False, True, True]


class TestSequences:
    def test_worked_example(self):
        # Rollout 0 takes both rows: Δ = .5, .25, -.15, so Σ = .6 and mean = .2. Rollout 1 is one token, Δ = -1.
        logprobs = np.array([[-0.5, -0.75, -9.0], [-1.15, -2.0, -9.0]])
        old = np.array([[-1.0, -1.0, -3.0], [-1.0, -1.0, -3.0]])
        mask = np.array([[True, True, False], [True, True, False]])
        ids = np.array([[0, 0, 0], [0, 1, -1]], np.int32)
        advantages = np.where(ids == 1, -1.0, 2.0)
        inputs = arrays(*(a.astype(np.float32) for a in (logprobs, old, advantages)), mask, ids)
        gspo = terms_of(GspoLossConfig(0.5, 0.5), *inputs)
        each = -2 * math.exp(0.2)
        # Of exp(-1) and the bound 0.5, the negative advantage takes the bound.
        np.testing.assert_allclose(gspo.terms, [[each, each, 0], [each, 0.5, 0]], rtol=1e-6)
        assert gspo.clipped.tolist() == [[False, False, False], [False, True, False]]
        rloo = terms_of(RlooSequenceLossConfig(0.5, 0.5), *inputs)
        share = -2 * 1.5 / 3
        np.testing.assert_allclose(rloo.terms, [[share, share, 0], [share, 0.5, 0]], rtol=1e-6)
        assert rloo.clipped.tolist() == [[True, True, False], [True, True, False]]

    def test_sums_are_over_loss_tokens_of_the_rollout(self):
        logprobs, old, _, mask, ids = ragged()
        with jax.enable_x64(True):
            sums, lengths = map(np.array, sums_of(logprobs, old, mask, ids))
        for position in range(mask.size):
            same = [k for k in range(mask.size) if mask[k] and ids[k] == ids[position]] if mask[position] else []
            assert float(sums[position]) == pytest.approx(sum(logprobs[k] - old[k] for k in same), abs=1e-12)
            assert float(lengths[position]) == max(len(same), 1)

    def test_as_many_rollouts_as_tokens(self):
        tokens = np.arange(6).reshape(2, 3)
        sums, lengths = sums_of(-tokens.astype(np.float32), np.zeros((2, 3), np.float32), np.ones((2, 3), bool), tokens)
        assert sums.tolist() == [[0.0, -1.0, -2.0], [-3.0, -4.0, -5.0]]
        assert lengths.tolist() == [[1.0] * 3] * 2

    def test_clipped_terms_of_rollouts_of_one_token_agree(self):
        logprobs, old, advantages, mask, _ = ragged()
        inputs = arrays(*(a.astype(np.float32) for a in (logprobs, old, advantages)), mask, np.arange(mask.size))
        expected = terms_of(PpoClipLossConfig(0.2, 0.3), *inputs)
        for config in (GspoLossConfig(0.2, 0.3), RlooSequenceLossConfig(0.2, 0.3)):
            actual = terms_of(config, *inputs)
            assert np.array(actual.terms)[mask].tolist() == np.array(expected.terms)[mask].tolist()
            assert np.array(actual.clipped)[mask].tolist() == np.array(expected.clipped)[mask].tolist()

    @pytest.mark.parametrize(
        ("config", "aggregation"),
        [(GspoLossConfig(0.2, 0.3), SequenceMeanConfig()), (RlooSequenceLossConfig(0.2, 0.3), SequenceSumConfig())],
    )
    def test_loss_is_the_mean_over_rollouts_of_the_term_in_the_paper(self, config, aggregation):
        logprobs, old, advantages, mask, ids = ragged()
        weights = loss_weights(aggregation, mask, ids)
        with jax.enable_x64(True):
            result = terms_of(config, *arrays(logprobs, old, advantages, mask, ids))
            actual = float((np.array(result.terms) * weights).sum())
        expected_terms = []
        for rollout in sorted(set(ids[mask])):
            own = [k for k in range(mask.size) if mask[k] and ids[k] == rollout]
            exponent = sum(logprobs[k] - old[k] for k in own)
            ratio = math.exp(exponent / len(own) if isinstance(config, GspoLossConfig) else exponent)
            advantage = advantages[own[0]]
            expected_terms.append(-min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.3)))
        assert actual == pytest.approx(sum(expected_terms) / len(expected_terms), rel=1e-7)

    @pytest.mark.parametrize("config", SEQUENCE_LEVEL, ids=repr)
    def test_values_outside_the_mask_are_ignored(self, config):
        logprobs, old = jnp.array([-1.0, jnp.nan, jnp.inf, -2.0]), jnp.array([-1.0, 0.0, -jnp.inf, -2.0])
        mask, ids = jnp.array([True, False, False, True]), jnp.array([0, 0, -1, 0])
        inputs = logprobs, old, jnp.array([1.0, jnp.nan, 1.0, 1.0]), mask, ids
        expected = -0.5 if isinstance(config, RlooSequenceLossConfig) else -1.0
        assert terms_of(config, *inputs).terms.tolist() == [expected, 0.0, 0.0, expected]

        # On-policy, so that the gradient is that of -A·log π.
        gradient = gradient_of(config, *inputs, jnp.ones(4))
        assert gradient.tolist() == pytest.approx([-1.0, 0.0, 0.0, -1.0])

    @pytest.mark.parametrize("config", SEQUENCE_LEVEL, ids=repr)
    def test_fully_masked(self, config):
        inputs = arrays(np.ones(3, np.float32), np.zeros(3, np.float32), np.ones(3, np.float32), np.zeros(3, bool))
        result = terms_of(config, *inputs, jnp.array([0, 0, 1]))
        assert result.terms.tolist() == [0.0] * 3
        assert result.clipped.tolist() == [False] * 3
        assert gradient_of(config, *inputs, jnp.array([0, 0, 1]), jnp.ones(3)).tolist() == [0.0] * 3


def test_ratio_is_clamped():
    ratio = policy_ratio(jnp.array([0.0, -900.0]), jnp.array([-900.0, 0.0]))
    np.testing.assert_allclose(ratio, [math.exp(20), math.exp(-20)], rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_extreme_differences_are_finite_in_float32(config):
    logprobs, old = jnp.array([[0.0, -1e30, -1.0]] * 2), jnp.array([[-1e30, 0.0, -1.0]] * 2)
    mask = jnp.ones((2, 3), bool)
    for advantage, ids in itertools.product((-3.0, 3.0), ([[0, 1, 2], [3, 4, 5]], [[0, 0, 0], [1, 2, 2]])):
        inputs = logprobs, old, jnp.full((2, 3), advantage), mask, jnp.array(ids)
        assert np.isfinite(terms_of(config, *inputs).terms).all()
        assert np.isfinite(gradient_of(config, *inputs, jnp.ones((2, 3)))).all()


def test_long_rollouts_are_clamped_if_summed_and_not_if_averaged():
    tokens = 1000
    inputs = arrays(np.zeros(tokens, np.float32), np.full(tokens, -0.1, np.float32), -np.ones(tokens, np.float32))
    inputs = (*inputs, jnp.ones(tokens, bool), jnp.zeros(tokens, jnp.int32))
    summed, averaged = (terms_of(config, *inputs).terms for config in (RlooSequenceLossConfig(), GspoLossConfig()))
    np.testing.assert_allclose(summed, math.exp(20) / tokens, rtol=1e-4)
    np.testing.assert_allclose(averaged, math.exp(0.1), rtol=1e-4)


def test_configs_are_selected_by_type():
    decoded = {
        "reinforce": ReinforceLossConfig(),
        "importance": ImportanceLossConfig(),
        "ppo_clip": PpoClipLossConfig(0.2, 0.2),
        "gspo": GspoLossConfig(3e-4, 4e-4),
        "rloo_sequence": RlooSequenceLossConfig(0.2, 0.2),
        "cispo": CispoLossConfig(1.0, 0.2),
    }
    assert set(PolicyLossConfig.get_known_choices()) == set(decoded)
    for name, config in decoded.items():
        assert draccus.decode(PolicyLossConfig, {"type": name}) == config
    fields = {"clip_low": 0.1, "clip_high": 0.3}
    for name in ("gspo", "rloo_sequence", "cispo"):
        expected = type(decoded[name])(**fields)
        assert draccus.decode(PolicyLossConfig, {"type": name, **fields}) == expected
    dual = draccus.decode(PolicyLossConfig, {"type": "ppo_clip", **fields, "dual_clip": 3.0})
    assert dual == PpoClipLossConfig(0.1, 0.3, 3.0)


@pytest.mark.medium
def test_declared_properties():
    assert [config.is_sequence_level for config in TOKEN_LEVEL + SEQUENCE_LEVEL] == [False] * 5 + [True] * 2
    assert [config.uses_ratio for config in TOKEN_LEVEL + SEQUENCE_LEVEL] == [False] + [True] * 6
