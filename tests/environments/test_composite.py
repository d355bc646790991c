# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.environments import ArithmeticConfig
from marin_rl.environments.streams import CompositeEnvironment, by_name, draw_by_weight, part_rewards
from marin_rl.rewards.component import FunctionRewardConfig
from marin_rl.seeds import derive_seed
from marin_rl.types import Task
from tests.environments.fake_environments import Cards

PARTS = by_name([Cards("a", 3), Cards("b", 7), Cards("c", 5)], "the test")


def drawn_in(counts: list[int], weights: dict[str, float], seed: int, state: dict | None = None) -> list[Task]:
    """Draw tasks in calls of the given sizes."""
    tasks, place = [], state or {}
    for count in counts:
        more, place = draw_by_weight(PARTS, weights, place, count, seed)
        tasks += more
    return tasks


@given(
    counts=st.lists(st.integers(0, 9), max_size=6),
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(1e-3, 1e3), min_size=1),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None)
def test_draws_are_independent_of_call_sizes_and_parts_keep_their_order(
    counts: list[int], weights: dict[str, float], seed: int
):
    drawn = drawn_in(counts, weights, seed)
    assert drawn == drawn_in([sum(counts)], weights, seed)
    for name, part in PARTS.items():
        own = [task for task in drawn if task.environment == name]
        alone, _ = part.stream(derive_seed(seed, "part", name)).draw({}, len(own))
        assert own == alone
        assert name in weights or not own


def test_draw_keeps_other_state_entries_and_does_not_mutate_the_state():
    before = {"drawn": 4, "parts": {"a": {"drawn": 2}}, "scores": [1, 2]}
    copy = {"drawn": 4, "parts": {"a": {"drawn": 2}}, "scores": [1, 2]}
    _, after = draw_by_weight(PARTS, {"a": 1.0}, before, 3, seed=0)
    assert before == copy
    assert after == {"drawn": 7, "parts": {"a": {"drawn": 5}}, "scores": [1, 2]}


def test_a_part_continues_in_its_order_after_a_pause():
    first, place = draw_by_weight(PARTS, {"a": 1.0}, {}, 2, seed=0)
    _, place = draw_by_weight(PARTS, {"b": 1.0}, place, 4, seed=0)
    rest, _ = draw_by_weight(PARTS, {"a": 1.0}, place, 1, seed=0)
    assert {task.id for task in [*first, *rest]} == {"train0", "train1", "train2"}


def test_parts_have_their_own_and_the_common_reward_functions():
    own, shared = (FunctionRewardConfig(path="rewards.py", function=name) for name in ("own", "shared"))
    configs = [ArithmeticConfig(size=50, name="judged", rewards=(own,)), ArithmeticConfig(size=50, name="plain")]
    environment = CompositeEnvironment(
        "both", by_name([config.build() for config in configs], "both"), Cards("a").stream
    )
    assert part_rewards(environment, configs, (shared,)) == {"judged": (own, shared), "plain": (shared,)}
