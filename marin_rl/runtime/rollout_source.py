# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Whoever plays the groups that a run orders: the trainer itself, or workers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from marin_rl.config.train_config import TrainConfig
from marin_rl.rollouts.run_rollouts import GroupInput, RolloutRunner, run_requests, stream_requests
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.timing import PhaseTimer
from marin_rl.types import RolloutGroup, WeightVersion


class StopRequestedError(Exception):
    """The run was asked to stop while a step waited for its groups."""


def raise_if(stop_requested: Callable[[], bool]) -> None:
    """Raise StopRequestedError if the run was asked to stop."""
    if stop_requested():
        raise StopRequestedError("the run was asked to stop while a step waited for its groups")


class FinishedGroup(NamedTuple):
    """A group that was played."""

    number: RequestNumber
    """What it was ordered as."""
    group: RolloutGroup
    """All its attempts."""


@runtime_checkable
class RolloutSource(Protocol):
    """Plays what is ordered."""

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """Take orders."""
        ...

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> Sequence[FinishedGroup]:
        """Wait until at least one group is there.

        Args:
            timer: counts where the time goes.
            stop_requested: whether to stop waiting, asked about once a second; in all training processes at the same
                points of the program.

        Raises:
            StopRequestedError: if a stop is requested.
        """
        ...

    def publish(self, model: object, version: WeightVersion) -> None:
        """Play with these weights from now on, or as soon as they have come to those who play.

        Args:
            model: the policy, a tree of arrays; when this returns, they may be donated.
            version: steps of training behind it.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """What there is to say of it."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """What it has counted since the run began; part of the run's state."""
        ...


class LocalRollouts:
    """The trainer's own sampler, when it is waited for."""

    def __init__(self, config: TrainConfig, runner: RolloutRunner) -> None:
        """Have no order yet.

        Args:
            config: size of a group, temperature and seed.
            runner: plays; its sampler is kept at the newest weights by others.
        """
        self._config = config
        self._runner = runner
        self._orders: list[GroupRequest] = []

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """See `RolloutSource`."""
        self._orders += orders

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """Play everything that was ordered; see `RolloutSource`. A stop takes effect after a round of sampling."""
        orders, self._orders = self._orders, []
        runner = dataclasses.replace(self._runner, timer=timer, interrupt=lambda: raise_if(stop_requested))
        return run_group_requests(self._config, runner, orders)

    def publish(self, model: object, version: WeightVersion) -> None:
        """Nothing: the sampler has the weights."""

    def metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}

    @property
    def counts(self) -> dict[str, int]:
        """Nothing."""
        return {}


def run_group_requests(
    config: TrainConfig, runner: RolloutRunner, orders: Sequence[GroupRequest]
) -> list[FinishedGroup]:
    """Play groups as they were ordered: each is the same wherever and with whatever others it is played.

    Args:
        config: size of a group, temperature and seed.
        runner: plays.
        orders: any.
    """
    groups = run_requests(
        runner,
        [_request(config, order) for order in orders],
        group_size=config.rollouts.group_size,
        temperature=config.sampling.temperature,
    )
    return [FinishedGroup(order.number, group) for order, group in zip(orders, groups, strict=True)]


def stream_group_requests(
    config: TrainConfig,
    runner: RolloutRunner,
    orders: Sequence[GroupRequest],
    on_group_done: Callable[[FinishedGroup], Sequence[GroupRequest]],
) -> None:
    """Play groups as `run_group_requests` does, and further ones in their places, until there are none.

    Args:
        config: size of a group, temperature and seed.
        runner: plays.
        orders: what to play first.
        on_group_done: is given each group as soon as it is whole, in a thread of its own; says what to play in its
            place.
    """
    numbers = {order.number.group_id: order.number for order in orders}

    def take(group: RolloutGroup) -> list[GroupInput]:
        further = on_group_done(FinishedGroup(numbers.pop(group.id), group))
        numbers.update({order.number.group_id: order.number for order in further})
        return [_request(config, order) for order in further]

    stream_requests(
        runner,
        [_request(config, order) for order in orders],
        group_size=config.rollouts.group_size,
        temperature=config.sampling.temperature,
        on_group_done=take,
    )


def _request(config: TrainConfig, order: GroupRequest) -> GroupInput:
    return GroupInput(order.number.group_id, order.task, (config.seed, "train", *order.number))
