# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import math
import subprocess
import sys

import draccus
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives.advantages import (
    AdvantageConfig,
    DrGrpoConfig,
    GrpoConfig,
    ReinforceConfig,
    RlooConfig,
    dr_grpo_advantages,
    grpo_advantages,
    reinforce_advantages,
    rloo_advantages,
)

BASELINED = [rloo_advantages, grpo_advantages, dr_grpo_advantages]
ALL = [*BASELINED, reinforce_advantages]

reward = st.floats(-100, 100, allow_nan=False)
group = st.lists(st.none() | reward, min_size=1, max_size=9)


def oracle(name, rewards):
    """The papers' formulas, one rollout at a time."""
    present = [r for r in rewards if r is not None]
    advantages = []
    for index, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != index and r is not None]
        if own is None:
            advantages.append(0.0)
        elif name == "reinforce":
            advantages.append(own)
        elif not others:
            advantages.append(0.0)
        elif name == "rloo":
            advantages.append(own - sum(others) / len(others))
        else:
            mean = sum(present) / len(present)
            variance = sum((r - mean) ** 2 for r in present) / (len(present) - 1)
            divisor = math.sqrt(variance) + 1e-6 if name == "grpo" else 1.0
            advantages.append((own - mean) / divisor)
    return advantages


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "reinforce"])
@given(rewards=group)
def test_matches_the_formula(name, rewards):
    compute = AdvantageConfig.get_choice_class(name)().compute
    np.testing.assert_allclose(compute(rewards), oracle(name, rewards), rtol=1e-9, atol=1e-9)


@given(rewards=st.lists(st.none() | st.integers(-50, 50).map(float), min_size=1, max_size=9))
def test_grpo_matches_the_formula(rewards):
    np.testing.assert_allclose(grpo_advantages(rewards), oracle("grpo", rewards), rtol=1e-9, atol=1e-9)


def test_worked_examples():
    np.testing.assert_allclose(rloo_advantages([1.0, 2.0, 5.0, 8.0]), [-4, -8 / 3, 4 / 3, 16 / 3], rtol=1e-15)
    three_of_eight = rloo_advantages([1.0] * 3 + [0.0] * 5)
    np.testing.assert_allclose(three_of_eight, [0.714286] * 3 + [-0.428571] * 5, atol=5e-7)


def test_grpo_divides_by_the_unbiased_deviation():
    # mean 2, deviations ±1 over n - 1 = 1: std = sqrt(2).
    np.testing.assert_allclose(grpo_advantages([1.0, 3.0]), [-1 / (2**0.5 + 1e-6), 1 / (2**0.5 + 1e-6)], rtol=1e-12)


@pytest.mark.parametrize("compute", BASELINED)
@given(value=st.floats(-1e6, 1e6), size=st.integers(1, 12), missing=st.integers(0, 3))
def test_equal_rewards_give_exactly_zero(compute, value, size, missing):
    assert compute([value] * size + [None] * missing).tolist() == [0.0] * (size + missing)


def test_equal_rewards_would_leave_a_residue_without_care():
    # The case that the shift in _center is for.
    assert np.mean([0.1] * 6) != 0.1
    assert rloo_advantages([0.1] * 6).tolist() == [0.0] * 6


@pytest.mark.parametrize("compute", BASELINED)
def test_group_of_one_is_zero(compute):
    assert compute([3.0]).tolist() == [0.0]


def test_reinforce_keeps_the_reward_of_a_group_of_one():
    assert reinforce_advantages([3.0]).tolist() == [3.0]


@pytest.mark.parametrize("compute", ALL)
def test_missing_reward_leaves_the_baseline_and_gets_zero(compute):
    with_failures = compute([None, 1.0, None, 0.0, 4.0])
    without = compute([1.0, 0.0, 4.0])
    assert with_failures[[0, 2]].tolist() == [0.0, 0.0]
    assert with_failures[[1, 3, 4]].tolist() == without.tolist()


@pytest.mark.parametrize("compute", ALL)
def test_all_missing_and_empty_groups(compute):
    assert compute([None, None]).tolist() == [0.0, 0.0]
    assert compute([]).tolist() == []


@pytest.mark.parametrize("compute", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_names_the_rollout(compute, bad):
    with pytest.raises(ValueError, match=rf"rewards\[2\] is {bad}"):
        compute([0.0, None, bad, 1.0])


@pytest.mark.parametrize("compute", BASELINED)
@given(rewards=st.lists(reward, min_size=2, max_size=9), seed=st.integers(0, 1000))
def test_order_of_the_rollouts_does_not_matter(compute, rewards, seed):
    order = np.random.default_rng(seed).permutation(len(rewards))
    assert compute([rewards[i] for i in order]).tolist() == compute(rewards)[order].tolist()


@pytest.mark.parametrize("compute", BASELINED)
@given(rewards=st.lists(st.none() | st.integers(0, 9).map(float), min_size=1, max_size=9))
def test_baselined_advantages_sum_to_zero_and_keep_the_order(compute, rewards):
    advantages = compute(rewards)
    assert abs(advantages.sum()) < 1e-9
    ranked = sorted((r, a) for r, a in zip(rewards, advantages.tolist(), strict=True) if r is not None)
    assert all(low[1] <= high[1] for low, high in itertools.pairwise(ranked))


@given(rewards=st.lists(st.integers(0, 9).map(float), min_size=2, max_size=8))
def test_a_large_offset_costs_no_precision(rewards):
    assert rloo_advantages([r + 2.0**40 for r in rewards]).tolist() == rloo_advantages(rewards).tolist()


def test_configs_are_chosen_by_type():
    assert draccus.decode(AdvantageConfig, {"type": "rloo"}) == RlooConfig()
    assert draccus.decode(AdvantageConfig, {"type": "grpo"}) == GrpoConfig()
    assert draccus.decode(AdvantageConfig, {"type": "dr_grpo"}) == DrGrpoConfig()
    assert draccus.decode(AdvantageConfig, {"type": "reinforce"}) == ReinforceConfig()


@pytest.mark.parametrize(("name", "size"), [("rloo", 2), ("grpo", 2), ("dr_grpo", 2), ("reinforce", 1)])
def test_minimum_group_size_is_the_first_that_carries_signal(name, size):
    config = AdvantageConfig.get_choice_class(name)()
    rewards = [float(i + 1) for i in range(size)]
    assert config.minimum_group_size == size
    assert config.compute(rewards).any()
    assert not config.compute(rewards[:-1]).any()


def test_the_host_side_objectives_load_no_jax():
    modules = "advantages, marin_rl.objectives.aggregation, marin_rl.objectives.pass_at_k"
    code = f"import sys, marin_rl.objectives.{modules}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
