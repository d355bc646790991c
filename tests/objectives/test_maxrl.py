# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives import MaxRlConfig, dr_grpo_advantages, maxrl_advantages
from tests.objectives.advantage_cases import advantages, make_inputs, per_rollout


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ([1.0, 1.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        ([1.0, None, 0.0], [1.0, 0.0, -1.0]),
        # Mean 0.5.
        ([0.25, 0.5, 0.75], [-0.5, 0.0, 0.5]),
        ([0.0, 0.0, None], [0.0, 0.0, 0.0]),
        ([1.0, 1.0], [0.0, 0.0]),
        ([0.1] * 6, [0.0] * 6),
    ],
)
def test_worked_examples(rewards, expected):
    np.testing.assert_allclose(maxrl_advantages(rewards), expected, rtol=1e-15)


@given(rewards=st.lists(st.floats(0, 1), min_size=1, max_size=9), scale=st.sampled_from([0.25, 2.0, 1024.0]))
def test_is_bounded_and_does_not_depend_on_the_scale_of_rewards(rewards, scale):
    actual = maxrl_advantages(rewards)
    assert actual.min() >= -1 - 1e-12
    assert actual.max() <= len(rewards) - 1 + 1e-9
    if min((r for r in rewards if r), default=1) > 1e-300:
        assert maxrl_advantages([scale * r for r in rewards]).tolist() == actual.tolist()


def expected_gradient(p: float, size: int) -> float:
    """E[1/G · Σ_i A_i · ∇log π_i] for a policy that succeeds with probability p = sigmoid(θ), over all groups."""
    total = 0.0
    for outcomes in itertools.product([0.0, 1.0], repeat=size):
        chance = math.prod(p if outcome else 1 - p for outcome in outcomes)
        # ∂ log π/∂θ is 1 - p for a success and -p for a failure.
        scores = np.array(outcomes) - p
        total += chance * float(np.mean(maxrl_advantages(outcomes) * scores))
    return total


def gradient_of_the_series(p: float, terms: int) -> float:
    """The derivative of Σ_{k=1}^{terms} pass@k/k by θ, with a complex step."""
    step = 1e-30
    theta = math.log(p / (1 - p)) + 1j * step
    failure = 1 / (1 + np.exp(theta))
    return sum((1 - failure**k) / k for k in range(1, terms + 1)).imag / step if terms else 0.0


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("size", range(1, 9))
def test_the_expected_gradient_is_that_of_the_first_terms_of_the_log_likelihood(p, size):
    actual = expected_gradient(p, size)
    assert actual == pytest.approx(gradient_of_the_series(p, size - 1), rel=1e-12, abs=1e-15)
    if size > 1:
        # The next term is not part of it.
        assert abs(actual - gradient_of_the_series(p, size)) > 1e-9


def test_the_series_converges_to_the_log_likelihood():
    # ∂ log sigmoid(θ)/∂θ = 1 - p.
    assert gradient_of_the_series(0.3, 100) == pytest.approx(0.7, rel=1e-12)
    errors = [0.7 - expected_gradient(0.3, size) for size in (2, 5, 9)]
    np.testing.assert_allclose(errors, [0.7**size for size in (2, 5, 9)], rtol=1e-12)


def test_groups_of_two_binary_rewards_have_twice_the_advantages_of_dr_grpo():
    for rewards in itertools.product([0.0, 1.0], repeat=2):
        assert maxrl_advantages(rewards).tolist() == (2 * dr_grpo_advantages(rewards)).tolist()


def test_a_config_computes_the_advantages_of_each_group():
    groups = [[make_inputs(score) for score in scores] for scores in ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0], [1.0, None])]
    assert per_rollout(MaxRlConfig().compute(groups)) == [[3.0, -1.0, -1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    long = [make_inputs(1.0, [0.0, 1.0], tokens=[2, 1]), make_inputs(0.0, tokens=[1])]
    assert advantages(MaxRlConfig().compute([long])) == [[[1.0, 1.0, 1.0], [-1.0]]]


def test_negative_returns_are_refused():
    with pytest.raises(ValueError, match=r"rewards\[2\] is -0.5"):
        maxrl_advantages([1.0, None, -0.5])
    # The penalty of the KL makes the return negative.
    penalised = make_inputs(0.0, tokens=[1], penalties=[0.25], id="train-3-0-1")
    with pytest.raises(ValueError, match=r"rollout train-3-0-1: its return is -0.25"):
        MaxRlConfig().compute([[make_inputs(1.0), penalised]])
