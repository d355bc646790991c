# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import draccus
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives import AdvantageConfig, dr_grpo_advantages, grpo_advantages
from marin_rl.objectives.gigpo import GigpoConfig, GigpoNormalization, step_advantages
from tests.objectives.advantage_cases import advantages, batches, make_inputs, shuffled, to_inputs

EXAMPLE = [
    make_inputs(1.0, [0.0, 0.0, 1.0], anchors=["s0", "s1", "s2"], id="T0"),
    make_inputs(0.0, [0.0, 0.0, 0.0], anchors=["s0", "s1", "s3"], id="T1"),
    make_inputs(1.0, [0.0, 1.0], anchors=["s0", "s2"], id="T2"),
]
EPISODE = [1 / 3, -2 / 3, 1 / 3]
STEP = [[0.285, 0.475, 0.0], [-0.6175, -0.475, 0.0], [0.3325, 0.0]]


def compared(value, values, std):
    """Compare one value with the mean of all values, from the definition."""
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else 0.0
    return (value - mean) / (deviation + 1e-6 if std else 1.0)


def oracle(group, omega, gamma, std, default):
    """Compute A(i,t) with loops over turns, from the definition in the paper."""
    alive = [inputs for inputs in group if inputs.score is not None]
    total = {id(s): s.score - sum(s.penalties.tolist()) for s in alive}
    turn_returns = {}
    for s in alive:
        rewards = [default if k in s.unrewarded_turns else r for k, r in enumerate(s.turn_rewards.tolist())]
        rewards[-1] += s.score - sum(s.turn_rewards.tolist())
        for t in range(len(rewards)):
            turn_returns[id(s), t] = sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
    result = []
    for s in group:
        if s.score is None or len(alive) == 1:
            result.append([0.0] * s.turn_ids.size)
            continue
        episode = compared(total[id(s)], list(total.values()), std)
        turns = []
        for t, anchor in enumerate(s.anchors):
            same = [turn_returns[id(o), k] for o in alive for k, a in enumerate(o.anchors) if a == anchor]
            turns.append(episode + omega * compared(turn_returns[id(s), t], same, std))
        result.append([turns[t] for t in s.turn_ids])
    return result


@settings(max_examples=60)
@given(
    batches,
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.booleans(),
    st.sampled_from([0.0, -0.5]),
)
def test_matches_the_loops(groups, omega, gamma, std, default):
    groups = to_inputs(groups)
    normalize = GigpoNormalization.STD if std else GigpoNormalization.NONE
    config = GigpoConfig(omega, gamma, normalize, default)
    for group, results in zip(groups, config.compute(groups), strict=True):
        for expected, result in zip(oracle(group, omega, gamma, std, default), results, strict=True):
            np.testing.assert_allclose(result.advantages, expected, rtol=1e-6, atol=1e-6)
            assert result.value_targets.tolist() == [0.0] * result.advantages.size


def test_worked_example():
    both = advantages(GigpoConfig().compute([EXAMPLE]))[0]
    separate = advantages(GigpoConfig(omega=0.0).compute([EXAMPLE]))[0]
    for episode, steps, sums, episodes in zip(EPISODE, STEP, both, separate, strict=True):
        np.testing.assert_allclose(episodes, [episode] * len(steps), atol=1e-15)
        np.testing.assert_allclose(sums, np.add(episode, steps), atol=1e-15)
    np.testing.assert_allclose(EPISODE, [0.333333, -0.666667, 0.333333], atol=5e-7)


def test_components_of_the_worked_example():
    [results] = GigpoConfig().compute([EXAMPLE])
    parts = [result.turn_advantages for result in results]
    assert [part.episode_advantage for part in parts] == pytest.approx(EPISODE)
    assert [part.step_advantages.tolist() for part in parts] == [pytest.approx(own) for own in STEP]
    returns = [[0.9025, 0.95, 1.0], [0.0, 0.0, 0.0], [0.95, 1.0]]
    assert [part.returns.tolist() for part in parts] == [pytest.approx(own) for own in returns]


def test_a_failed_rollout_has_no_components():
    [results] = GigpoConfig().compute([[*EXAMPLE, make_inputs(None, [0.0], anchors=["s0"], id="T3")]])
    assert [result.turn_advantages is None for result in results] == [
        False,
        False,
        False,
        True,
    ]


def test_std_divides_each_component_by_its_standard_deviation():
    config = GigpoConfig(normalize=GigpoNormalization.STD)
    actual = advantages(config.compute([EXAMPLE]))[0]
    episode = grpo_advantages([1.0, 0.0, 1.0])
    at_s0 = grpo_advantages([0.9025, 0.0, 0.95])
    at_s1 = grpo_advantages([0.95, 0.0])
    np.testing.assert_allclose(actual[0], episode[0] + np.array([at_s0[0], at_s1[0], 0.0]), rtol=1e-9)
    np.testing.assert_allclose(actual[1], episode[1] + np.array([at_s0[1], at_s1[1], 0.0]), rtol=1e-9)
    np.testing.assert_allclose(actual[2], episode[2] + np.array([at_s0[2], 0.0]), rtol=1e-9)


def test_repeated_visits_count_each_time():
    # State s is visited three times: twice by the first rollout, with returns 3 and 5, and once with 1.
    parts = step_advantages([np.array([3.0, 5.0]), np.array([1.0])], [["s", "s"], ["s"]], GigpoNormalization.NONE)
    assert [part.tolist() for part in parts] == [[0.0, 2.0], [-2.0]]


def test_all_tokens_of_a_turn_share_its_advantage():
    longer = [
        make_inputs(1.0, [0.0, 1.0], anchors=["s", "t"], tokens=[3, 2]),
        make_inputs(0.0, [0.0, 0.0], anchors=["s", "t"], tokens=[1, 0]),
    ]
    first, second = advantages(GigpoConfig(gamma=1.0).compute([longer]))[0]
    assert first == [1.0] * 5
    assert second == [-1.0]


def test_episode_mean_is_over_rollouts_and_not_over_turns():
    long = make_inputs(1.0, [0.0] * 5 + [1.0], anchors=list("abcdef"))
    short = make_inputs(0.0, [0.0], anchors=["z"])
    assert advantages(GigpoConfig().compute([[long, short]]))[0] == [[0.5] * 6, [-0.5]]


def test_states_and_groups_of_one_have_zero_advantages():
    # Every state is visited once.
    distinct = [make_inputs(1.0, [1.0], anchors=["a"]), make_inputs(1.0, [1.0], anchors=["b"])]
    for normalize in GigpoNormalization:
        config = GigpoConfig(normalize=normalize)
        assert advantages(config.compute([distinct])) == [[[0.0], [0.0]]]
        # A group of one rollout, even if it visits a state twice; also a group with one graded rollout.
        twice = make_inputs(1.0, [0.0, 1.0], anchors=["a", "a"])
        assert advantages(config.compute([[twice]])) == [[[0.0, 0.0]]]
        assert advantages(config.compute([[twice, make_inputs(None, [9.0])]])) == [[[0.0, 0.0], [0.0]]]
        assert advantages(config.compute([[make_inputs(None, [9.0])] * 2, []])) == [[[0.0], [0.0]], []]


def test_equal_returns_are_exactly_zero():
    same = [make_inputs(0.1, [0.0, 0.1], anchors=["s", "t"]) for _ in range(6)]
    for normalize in GigpoNormalization:
        assert advantages(GigpoConfig(normalize=normalize).compute([same])) == [[[0.0, 0.0]] * 6]


def test_groups_are_independent():
    separate = [GigpoConfig().compute([group])[0] for group in (EXAMPLE, EXAMPLE[:2])]
    combined = GigpoConfig().compute([EXAMPLE, EXAMPLE[:2]])
    assert advantages(combined) == advantages(separate)


def test_one_turn_per_rollout_doubles_dr_grpo():
    scores = [1.0, 2.0, 5.0, 8.0]
    group = [make_inputs(score, anchors=["s"]) for score in scores]
    actual = np.ravel(advantages(GigpoConfig().compute([group]))[0])
    np.testing.assert_allclose(actual, 2 * dr_grpo_advantages(scores), rtol=1e-15)


def test_the_part_of_the_score_that_is_no_turn_reward_is_added_to_the_last_turn():
    rewards = [0.5, 0.25]
    group = [make_inputs(2.0, rewards, anchors=["s", "t"]), make_inputs(0.0, [0.0, 0.0], anchors=["s", "t"])]
    # The returns are 1.25 from the last turn and .5 + .5·(.25 + 1.25) from the first.
    assert advantages(GigpoConfig(gamma=0.5).compute([group]))[0] == [[1.625, 1.75], [-1.625, -1.75]]


def test_turn_rewards_that_are_the_whole_score_count_once():
    group = [make_inputs(0.75, [0.5, 0.25], anchors=["s", "t"]), make_inputs(0.0, [0.0, 0.0], anchors=["s", "t"])]
    # .375 + (.5 + .5·.25)/2, .375 + .25/2
    assert advantages(GigpoConfig(gamma=0.5).compute([group]))[0] == [[0.6875, 0.5], [-0.6875, -0.5]]


def test_turns_without_a_reward_get_the_default():
    group = [
        make_inputs(0.0, [0.0, 0.0], anchors=["s", "t"], unrewarded=[1]),
        make_inputs(0.0, [0.0, 0.0], anchors=["s", "t"]),
    ]
    actual = advantages(GigpoConfig(gamma=0.5, default_step_reward=-1.0).compute([group]))[0]
    assert actual == [[-0.25, -0.5], [0.25, 0.5]]


@settings(max_examples=30)
@given(batches, st.integers(0, 99), st.sampled_from(list(GigpoNormalization)))
def test_results_are_bit_identical_for_any_rollout_order(groups, seed, normalize):
    config = GigpoConfig(normalize=normalize)
    groups = to_inputs(groups)
    moved, orders = shuffled(groups, seed)
    expected = advantages(config.compute(groups))
    for original, actual, order in zip(expected, advantages(config.compute(moved)), orders, strict=True):
        assert actual == [original[source] for source in order]


@given(
    rewards=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7, -0.1]), min_size=1, max_size=6),
    shaping=st.sampled_from([0.0, 1.0, -0.3]),
    seed=st.integers(0, 99),
)
def test_undiscounted_rollouts_with_equal_rewards_in_another_order_have_no_signal(rewards, shaping, seed):
    moved = np.random.default_rng(seed).permutation(rewards)
    score = math.fsum([*rewards, shaping])
    # Both rollouts meet only in their first state.
    anchors = [["start", *(f"{name}{turn}" for turn in range(1, len(rewards)))] for name in "ab"]
    group = [make_inputs(score, order, anchors=own) for order, own in zip((rewards, moved), anchors, strict=True)]
    assert advantages(GigpoConfig(gamma=1.0).compute([group])) == [[[0.0] * len(rewards)] * 2]


def test_a_missing_anchor_raises_an_error_that_names_the_rollout():
    bad = make_inputs(1.0, [0.0, 1.0], anchors=["s", ""], id="step-7-2")
    with pytest.raises(ValueError, match="rollout step-7-2: turn 1 has no anchor state"):
        GigpoConfig().compute([[EXAMPLE[0], bad]])


def test_compute_does_not_modify_its_inputs():
    group = [make_inputs(2.0, [0.5, 0.0], unrewarded=[1]), make_inputs(0.0, [0.0, 0.0])]
    GigpoConfig(default_step_reward=3.0).compute([group])
    assert group[0].turn_rewards.tolist() == [0.5, 0.0]


def test_config():
    fields = {"type": "gigpo", "omega": 0.5, "gamma": 0.9, "normalize": "std", "default_step_reward": -0.1}
    config = draccus.decode(AdvantageConfig, fields)
    assert config == GigpoConfig(0.5, 0.9, GigpoNormalization.STD, -0.1)
    assert draccus.decode(AdvantageConfig, {"type": "gigpo"}) == GigpoConfig(1.0, 0.95)
    assert config.needs_turns
    assert not config.needs_critic
    assert config.minimum_group_size == 2
