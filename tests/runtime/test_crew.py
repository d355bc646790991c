# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What is ordered is played once, and is the same whoever plays it, with whatever others."""

from collections.abc import Sequence

from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import Split
from marin_rl.rollouts.orders import GroupOrder, OrderNumber
from marin_rl.rollouts.run_rollouts import Player
from marin_rl.runtime.config import RolloutConfig
from marin_rl.runtime.crew import OwnCrew, Played, stream_orders
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.sampling.scripted import ScriptedSampler
from marin_rl.timing import PhaseTimer
from marin_rl.types import RolloutGroup
from tests.runtime.bare_run import END, bare_run, make_config, make_player

ENVIRONMENT = ArithmeticConfig(digits=1, size=50).build()
CONFIG = make_config(
    seed=5,
    rollouts=RolloutConfig(prompts_per_step=2, group_size=3, max_length=64, row_length=64),
    sampling=SamplingConfig(max_new_tokens=8, temperature=0.5),
)


def says_its_seed(request: SampleRequest) -> Sequence[int]:
    """Seven letters that another seed hardly shares."""
    return [*(97 + (request.seed >> 4 * place) % 16 for place in range(7)), END]


def player() -> Player:
    return make_player(bare_run(CONFIG, ENVIRONMENT), says_its_seed, ENVIRONMENT)


def order(step: int, index: int) -> GroupOrder:
    return GroupOrder(OrderNumber(step, index), ENVIRONMENT.tasks(Split.TRAIN)[index], 0)


ORDERS = [order(1, 0), order(1, 1), order(2, 1)]


def answers(group: RolloutGroup) -> list[tuple[int, ...]]:
    return [turn.generation.token_ids for rollout in group.rollouts for turn in rollout.turns]


def test_each_order_is_played_once_in_the_order_of_submission() -> None:
    crew = OwnCrew(CONFIG, player())
    crew.submit(ORDERS[2:])
    crew.submit(ORDERS[:1])
    assert [(number, group.id) for number, group in crew.wait(PhaseTimer())] == [
        ((2, 1), "train-2-1"),
        ((1, 0), "train-1-0"),
    ]
    crew.submit(ORDERS[1:2])
    assert [number for number, _ in crew.wait(PhaseTimer())] == [(1, 1)]


def test_size_temperature_and_time_are_the_steps_own() -> None:
    playing, timer = player(), PhaseTimer()
    crew = OwnCrew(CONFIG, playing)
    crew.submit(ORDERS[:1])
    [(_, group)] = crew.wait(timer)
    sampler = playing.sampler
    assert isinstance(sampler, ScriptedSampler)
    assert len(group.rollouts) == 3
    assert [request.temperature for request in sampler.requests] == [0.5] * 3
    assert "sample" in timer.seconds
    assert playing.timer.seconds == {}


def test_a_group_is_the_same_whoever_plays_it_and_whatever_is_played_with_it() -> None:
    crew = OwnCrew(CONFIG, player())
    crew.submit(ORDERS)
    wanted = {number: answers(group) for number, group in crew.wait(PhaseTimer())}
    # Attempts differ, and so do groups, also those of one task in two steps.
    assert len({said for group in wanted.values() for said in group}) == 9
    for one in ORDERS:
        crew.submit([one])
        assert [answers(group) for _, group in crew.wait(PhaseTimer())] == [wanted[one.number]]

    waiting, found = list(ORDERS[1:]), {}

    def hand_in(played: Played) -> list[GroupOrder]:
        found[played.number] = answers(played.group)
        return [waiting.pop()] if waiting else []

    stream_orders(CONFIG, player(), ORDERS[:1], hand_in)
    assert found == wanted
