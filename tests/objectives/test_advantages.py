# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import math
import subprocess
import sys

import draccus
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives import (
    AdvantageConfig,
    DrGrpoConfig,
    GaeConfig,
    GigpoConfig,
    GrpoConfig,
    MaxRlConfig,
    Normalization,
    ReinforceConfig,
    RlooConfig,
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    reinforce_advantages,
    rloo_advantages,
    turn_returns,
)
from tests.objectives.advantage_cases import advantages, batches, make_inputs, per_rollout, shuffled, to_inputs

FUNCTIONS = {"rloo": rloo_advantages, "dr_grpo": dr_grpo_advantages, "reinforce": reinforce_advantages}
BASELINED = [rloo_advantages, grpo_advantages, dr_grpo_advantages]
NON_NEGATIVE = [*BASELINED, maxrl_advantages]
ALL = [*NON_NEGATIVE, reinforce_advantages]

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
    np.testing.assert_allclose(FUNCTIONS[name](rewards), oracle(name, rewards), rtol=1e-9, atol=1e-9)


@given(rewards=st.lists(st.none() | st.integers(-50, 50).map(float), min_size=1, max_size=9))
def test_grpo_matches_the_formula(rewards):
    np.testing.assert_allclose(grpo_advantages(rewards), oracle("grpo", rewards), rtol=1e-9, atol=1e-9)


def test_worked_examples():
    np.testing.assert_allclose(rloo_advantages([1.0, 2.0, 5.0, 8.0]), [-4, -8 / 3, 4 / 3, 16 / 3], rtol=1e-15)
    three_of_eight = rloo_advantages([1.0] * 3 + [0.0] * 5)
    np.testing.assert_allclose(three_of_eight, [0.714286] * 3 + [-0.428571] * 5, atol=5e-7)


def test_grpo_uses_the_unbiased_standard_deviation():
    # mean 2, deviations ±1 over n - 1 = 1: std = sqrt(2).
    np.testing.assert_allclose(grpo_advantages([1.0, 3.0]), [-1 / (2**0.5 + 1e-6), 1 / (2**0.5 + 1e-6)], rtol=1e-12)


@pytest.mark.parametrize("compute", BASELINED)
@given(value=st.floats(-1e6, 1e6), size=st.integers(1, 12), missing=st.integers(0, 3))
def test_equal_rewards_give_exactly_zero(compute, value, size, missing):
    assert compute([value] * size + [None] * missing).tolist() == [0.0] * (size + missing)


def test_equal_rewards_give_zero_without_rounding_residue():
    # The naive mean has a rounding error for these values.
    assert np.mean([0.1] * 6) != 0.1
    assert rloo_advantages([0.1] * 6).tolist() == [0.0] * 6


@pytest.mark.parametrize("compute", NON_NEGATIVE)
def test_group_of_one_is_zero(compute):
    assert compute([3.0]).tolist() == [0.0]


def test_reinforce_keeps_the_reward_of_a_group_of_one():
    assert reinforce_advantages([3.0]).tolist() == [3.0]


@pytest.mark.parametrize("compute", ALL)
def test_failed_rollouts_are_excluded_from_the_baseline_and_get_zero(compute):
    with_failures = compute([None, 1.0, None, 0.0, 4.0])
    without = compute([1.0, 0.0, 4.0])
    assert with_failures[[0, 2]].tolist() == [0.0, 0.0]
    assert with_failures[[1, 3, 4]].tolist() == without.tolist()


@pytest.mark.parametrize("compute", ALL)
def test_groups_of_failed_rollouts_and_empty_groups(compute):
    assert compute([None, None]).tolist() == [0.0, 0.0]
    assert compute([]).tolist() == []


@pytest.mark.parametrize("compute", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_names_the_rollout(compute, bad):
    with pytest.raises(ValueError, match=rf"rewards\[2\] is {bad}"):
        compute([0.0, None, bad, 1.0])


@pytest.mark.parametrize("compute", BASELINED)
@given(rewards=st.lists(reward, min_size=2, max_size=9), seed=st.integers(0, 1000))
def test_advantages_do_not_depend_on_rollout_order(compute, rewards, seed):
    order = np.random.default_rng(seed).permutation(len(rewards))
    assert compute([rewards[i] for i in order]).tolist() == compute(rewards)[order].tolist()


@pytest.mark.parametrize("compute", NON_NEGATIVE)
@given(rewards=st.lists(st.none() | st.integers(0, 9).map(float), min_size=1, max_size=9))
def test_advantages_with_a_baseline_sum_to_zero_and_keep_the_reward_order(compute, rewards):
    advantages = compute(rewards)
    assert abs(advantages.sum()) < 1e-9
    ranked = sorted((r, a) for r, a in zip(rewards, advantages.tolist(), strict=True) if r is not None)
    assert all(low[1] <= high[1] for low, high in itertools.pairwise(ranked))


@given(rewards=st.lists(st.integers(0, 9).map(float), min_size=2, max_size=8))
def test_large_reward_offsets_do_not_lose_precision(rewards):
    assert rloo_advantages([r + 2.0**40 for r in rewards]).tolist() == rloo_advantages(rewards).tolist()


NORMALIZED = [RlooConfig, DrGrpoConfig]


def deviation(values):
    mean = sum(values) / max(len(values), 1)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "normalize"),
    [("grpo", None), ("reinforce", None), *itertools.product(["rloo", "dr_grpo"], Normalization)],
)
@settings(max_examples=25)
@given(drawn=batches)
def test_a_batch_matches_the_formulas(name, normalize, drawn):
    groups = to_inputs(drawn)
    config = AdvantageConfig.get_choice_class(name)(**({"normalize": normalize} if normalize else {}))
    returns = [[None if s.score is None else s.score - sum(s.penalties.tolist()) for s in group] for group in groups]
    expected = [oracle(name, of_group) for of_group in returns]
    pooled = [
        a for rs, own in zip(returns, expected, strict=True) for r, a in zip(rs, own, strict=True) if r is not None
    ]
    for group, of_group, own, results in zip(groups, returns, expected, config.compute(groups), strict=True):
        divisor = {
            None: 1.0 - 1e-6,
            Normalization.NONE: 1.0 - 1e-6,
            Normalization.GROUP: deviation([r for r in of_group if r is not None]),
            Normalization.BATCH: deviation(pooled),
        }[normalize]
        for inputs, advantage, result in zip(group, own, results, strict=True):
            np.testing.assert_allclose(
                result.advantages, [advantage / (divisor + 1e-6)] * len(inputs.turn_ids), rtol=1e-9, atol=1e-9
            )
            assert result.value_targets.tolist() == [0.0] * len(inputs.turn_ids)


def test_rollouts_of_different_numbers_of_turns_form_one_group():
    turns = [1, 2, 6, 3]
    group = [
        make_inputs(score, [0.0] * n, tokens=list(range(1, n + 1)))
        for score, n in zip([1.0, 2.0, 5.0, 8.0], turns, strict=True)
    ]
    results = RlooConfig().compute([group])
    np.testing.assert_allclose(per_rollout(results), [[-4, -8 / 3, 4 / 3, 16 / 3]], rtol=1e-15)
    assert [result.advantages.size for result in results[0]] == [1, 3, 21, 6]


def test_penalties_are_subtracted_before_the_baseline():
    group = [make_inputs(2.0, tokens=[2], penalties=[0.5, 0.5]), make_inputs(2.0), make_inputs(5.0)]
    # Returns 1, 2, 5.
    np.testing.assert_allclose(per_rollout(RlooConfig().compute([group])), [[-2.5, -1.0, 3.5]], rtol=1e-15)
    assert per_rollout(ReinforceConfig().compute([group])) == [[1.0, 2.0, 5.0]]


@pytest.mark.parametrize("config", NORMALIZED)
def test_failed_rollouts_are_excluded_from_the_statistics(config):
    with_failures = [[make_inputs(None, [7.0]), make_inputs(1.0), make_inputs(4.0)], [make_inputs(None, [9.0])] * 2]
    without = [[make_inputs(1.0), make_inputs(4.0)]]
    for normalize in Normalization:
        first, second = per_rollout(config(normalize=normalize).compute(with_failures))
        assert first == [0.0, *per_rollout(config(normalize=normalize).compute(without))[0]]
        assert second == [0.0, 0.0]


def test_dr_grpo_with_group_normalisation_equals_grpo():
    groups = [[make_inputs(score) for score in scores] for scores in ([1.0, 2.0, 5.0], [0.0, 0.0], [3.0])]
    normalised = DrGrpoConfig(normalize=Normalization.GROUP).compute(groups)
    assert advantages(normalised) == advantages(GrpoConfig().compute(groups))


def test_batch_normalised_advantages_have_standard_deviation_one():
    groups = [[make_inputs(score) for score in scores] for scores in ([1.0, 2.0, 5.0], [0.0, 9.0], [3.0])]
    for config in NORMALIZED:
        flat = [a for group in per_rollout(config(normalize=Normalization.BATCH).compute(groups)) for a in group]
        assert np.std(flat, ddof=1) == pytest.approx(1.0, rel=1e-5)


def test_group_normalisation_does_not_use_the_leave_one_out_deviation():
    # The leave-one-out standard deviation of the last rollout would be 0.
    (actual,) = per_rollout(
        RlooConfig(normalize=Normalization.GROUP).compute([[make_inputs(s) for s in (0.0, 0.0, 1.0)]])
    )
    np.testing.assert_allclose(actual, [-0.5 / 3**-0.5, -0.5 / 3**-0.5, 1 / 3**-0.5], rtol=1e-5)


@pytest.mark.parametrize("normalize", list(Normalization))
@pytest.mark.parametrize("config", NORMALIZED)
def test_normalised_advantages_of_equal_returns_are_exactly_zero(config, normalize):
    groups = [[make_inputs(0.1) for _ in range(6)], [make_inputs(0.3)]]
    assert per_rollout(config(normalize=normalize).compute(groups)) == [[0.0] * 6, [0.0]]


@pytest.mark.parametrize("name", sorted(AdvantageConfig.get_known_choices()))
def test_failed_masked_and_empty_groups(name):
    config = AdvantageConfig.get_choice_class(name)()
    failed, masked = make_inputs(None, [1.0, 2.0]), make_inputs(1.0, tokens=[0])
    first, second, third = advantages(config.compute([[failed, failed], [masked, make_inputs(1.0)], []]))
    assert first == [[0.0, 0.0], [0.0, 0.0]]
    assert second[0] == []
    assert third == []
    assert config.compute([]) == []


@settings(max_examples=30)
@given(drawn=batches, seed=st.integers(0, 99))
def test_results_are_bit_identical_for_any_rollout_order(drawn, seed):
    groups = to_inputs(drawn)
    moved, orders = shuffled(groups, seed)
    configs = [GrpoConfig(), ReinforceConfig(), ReinforceConfig(0.5)]
    configs += [config(normalize=normalize) for config in NORMALIZED for normalize in Normalization]
    for config in configs:
        expected = advantages(config.compute(groups))
        for original, actual, order in zip(expected, advantages(config.compute(moved)), orders, strict=True):
            assert actual == [original[source] for source in order]


@settings(max_examples=50)
@given(drawn=batches, gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_discounted_reinforce_matches_the_sum(drawn, gamma):
    groups = to_inputs(drawn)
    for group, results in zip(groups, ReinforceConfig(gamma).compute(groups), strict=True):
        for s, result in zip(group, results, strict=True):
            if s.score is None:
                assert result.advantages.tolist() == [0.0] * len(s.turn_ids)
                continue
            n = s.turn_rewards.size
            taken = [sum(s.penalties[s.turn_ids == k].tolist()) for k in range(n)]
            rewards = [r - p for r, p in zip(s.turn_rewards.tolist(), taken, strict=True)]
            rewards[-1] += s.score - sum(s.turn_rewards.tolist())
            per_turn = [sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]
            np.testing.assert_allclose(result.advantages, [per_turn[t] for t in s.turn_ids], rtol=1e-12, atol=1e-12)


def test_undiscounted_return_of_the_first_turn_is_the_total_return():
    # A shaping reward of 3 in addition to the turn rewards, and penalties.
    inputs = make_inputs(6.0, [1.0, 2.0], tokens=[1, 2], penalties=[0.5, 0.25, 0.25])
    assert turn_returns(inputs, 1.0).tolist() == [5.0, 4.5]
    assert turn_returns(inputs, 1.0)[0] == inputs.total_return
    assert advantages(ReinforceConfig(1.0).compute([[inputs]])) == [[[5.0, 4.5, 4.5]]]
    assert advantages(ReinforceConfig().compute([[inputs]])) == [[[5.0, 5.0, 5.0]]]


def test_discount_has_no_effect_with_one_turn():
    group = [make_inputs(2.0, tokens=[3], penalties=[0.5, 0.25, 0.0]), make_inputs(-1.0)]
    assert advantages(ReinforceConfig(0.3).compute([group])) == advantages(ReinforceConfig().compute([group]))


def test_configs_are_selected_by_type():
    assert set(AdvantageConfig.get_known_choices()) == {"rloo", "grpo", "dr_grpo", "maxrl", "reinforce", "gigpo", "gae"}
    assert draccus.decode(AdvantageConfig, {"type": "rloo"}) == RlooConfig()
    assert draccus.decode(AdvantageConfig, {"type": "grpo"}) == GrpoConfig()
    assert draccus.decode(AdvantageConfig, {"type": "dr_grpo"}) == DrGrpoConfig()
    assert draccus.decode(AdvantageConfig, {"type": "maxrl"}) == MaxRlConfig()
    assert draccus.decode(AdvantageConfig, {"type": "reinforce"}) == ReinforceConfig()
    assert draccus.decode(AdvantageConfig, {"type": "reinforce", "gamma": 0.9}) == ReinforceConfig(0.9)
    assert draccus.decode(AdvantageConfig, {"type": "gigpo"}) == GigpoConfig()
    assert draccus.decode(AdvantageConfig, {"type": "gae"}) == GaeConfig()


@pytest.mark.parametrize("normalize", list(Normalization))
@pytest.mark.parametrize(("name", "config"), [("rloo", RlooConfig), ("dr_grpo", DrGrpoConfig)])
def test_normalization_is_selected_by_name(name, config, normalize):
    assert draccus.decode(AdvantageConfig, {"type": name, "normalize": normalize.value}) == config(normalize)


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in ("rloo", "grpo", "dr_grpo", "maxrl", "gigpo")), ("reinforce", 1), ("gae", 1)],
)
def test_minimum_group_size_is_the_smallest_with_non_zero_advantages(name, size):
    config = AdvantageConfig.get_choice_class(name)(**({"whiten": False} if name == "gae" else {}))
    group = [make_inputs(float(i + 1)) for i in range(size)]
    assert config.minimum_group_size == size
    assert any(map(any, advantages(config.compute([group]))[0]))
    assert not any(map(any, advantages(config.compute([group[:-1]]))[0]))


def test_declared_requirements():
    configs = [AdvantageConfig.get_choice_class(name)() for name in sorted(AdvantageConfig.get_known_choices())]
    assert [type(config) for config in configs if config.needs_critic] == [GaeConfig]
    assert [type(config) for config in configs if config.needs_turns] == [GigpoConfig]


def test_host_side_objectives_do_not_import_jax():
    names = (
        "advantage_inputs",
        "advantages",
        "aggregation",
        "gae",
        "gigpo",
        "pass_at_k",
        "shaping",
    )
    modules = ", ".join(f"marin_rl.objectives.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
