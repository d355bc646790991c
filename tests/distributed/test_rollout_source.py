# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Each request runs once, and its group does not depend on the worker or other requests."""

from collections.abc import Sequence

from marin_rl.config.sections import RolloutConfig
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import Split
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.types import RolloutGroup
from marin_rl.utils.timing import PhaseTimer
from tests.scripted_sampler import ScriptedSampler
from tests.training.bare_run import END, local_rollouts, make_config, make_runner

ENVIRONMENT = ArithmeticConfig(digits=1, size=50).build()
CONFIG = make_config(
    seed=5,
    rollouts=RolloutConfig(prompts_per_step=2, group_size=3, max_length=64, row_length=64),
    sampling=SamplingConfig(max_new_tokens=8, temperature=0.5),
)


def says_its_seed(request: SampleRequest) -> Sequence[int]:
    """Return seven letters that depend on the seed."""
    return [*(97 + (request.seed >> 4 * place) % 16 for place in range(7)), END]


def runner() -> RolloutRunner:
    return make_runner(CONFIG, says_its_seed, ENVIRONMENT)


def order(step: int, index: int) -> GroupRequest:
    return GroupRequest(RequestNumber(step, index), ENVIRONMENT.tasks(Split.TRAIN)[index], 0)


ORDERS = [order(1, 0), order(1, 1), order(2, 1)]


def answers(group: RolloutGroup) -> list[tuple[int, ...]]:
    return [turn.generation.token_ids for rollout in group.rollouts for turn in rollout.turns]


def test_group_size_temperature_and_timer_are_those_of_the_step() -> None:
    playing, timer = runner(), PhaseTimer()
    rollout_source = local_rollouts(CONFIG, playing)
    rollout_source.submit(ORDERS[:1])
    [(_, group)] = rollout_source.wait(timer)
    sampler = playing.sampler
    assert isinstance(sampler, ScriptedSampler)
    assert len(group.rollouts) == 3
    assert [request.temperature for request in sampler.requests] == [0.5] * 3
    assert "sample" in timer.seconds
    assert playing.timer.seconds == {}


def test_group_does_not_depend_on_worker_or_other_requests() -> None:
    rollout_source = local_rollouts(CONFIG, runner())
    rollout_source.submit(ORDERS)
    wanted = {number: answers(group) for number, group in rollout_source.wait(PhaseTimer())}
    # Rollouts of a group differ, and so do groups of one task in two steps.
    assert len({said for group in wanted.values() for said in group}) == 9
    rollout_source.submit(ORDERS[2:])
    rollout_source.submit(ORDERS[:1])
    again = rollout_source.wait(PhaseTimer())
    assert [number for number, _ in again] == [(2, 1), (1, 0)]
    assert [answers(group) for _, group in again] == [wanted[2, 1], wanted[1, 0]]
    assert rollout_source.wait(PhaseTimer()) == []
