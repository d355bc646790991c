# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Whoever plays the groups that a run orders: the trainer itself, or workers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from marin_rl.rollouts.orders import GroupOrder, OrderNumber
from marin_rl.rollouts.run_rollouts import GroupRequest, Player, play_requests, play_stream
from marin_rl.runtime.config import TrainConfig
from marin_rl.timing import PhaseTimer
from marin_rl.types import RolloutGroup, WeightVersion


class StopRequestedError(Exception):
    """The run was asked to stop while a step waited for its groups."""


def raise_if(stop_requested: Callable[[], bool]) -> None:
    """Raise StopRequestedError if the run was asked to stop."""
    if stop_requested():
        raise StopRequestedError("the run was asked to stop while a step waited for its groups")


class Played(NamedTuple):
    """A group that was played."""

    number: OrderNumber
    """What it was ordered as."""
    group: RolloutGroup
    """All its attempts."""


@runtime_checkable
class Crew(Protocol):
    """Plays what is ordered."""

    def submit(self, orders: Sequence[GroupOrder]) -> None:
        """Take orders."""
        ...

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> Sequence[Played]:
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


class OwnCrew:
    """The trainer's own sampler, when it is waited for."""

    def __init__(self, config: TrainConfig, player: Player) -> None:
        """Have no order yet.

        Args:
            config: size of a group, temperature and seed.
            player: plays; its sampler is kept at the newest weights by others.
        """
        self._config = config
        self._player = player
        self._orders: list[GroupOrder] = []

    def submit(self, orders: Sequence[GroupOrder]) -> None:
        """See `Crew`."""
        self._orders += orders

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[Played]:
        """Play everything that was ordered; see `Crew`. A stop takes effect after a round of sampling."""
        orders, self._orders = self._orders, []
        player = dataclasses.replace(self._player, timer=timer, interrupt=lambda: raise_if(stop_requested))
        return play_orders(self._config, player, orders)

    def publish(self, model: object, version: WeightVersion) -> None:
        """Nothing: the sampler has the weights."""

    def metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}

    @property
    def counts(self) -> dict[str, int]:
        """Nothing."""
        return {}


def play_orders(config: TrainConfig, player: Player, orders: Sequence[GroupOrder]) -> list[Played]:
    """Play groups as they were ordered: each is the same wherever and with whatever others it is played.

    Args:
        config: size of a group, temperature and seed.
        player: plays.
        orders: any.
    """
    groups = play_requests(
        player,
        [_request(config, order) for order in orders],
        group_size=config.rollouts.group_size,
        temperature=config.sampling.temperature,
    )
    return [Played(order.number, group) for order, group in zip(orders, groups, strict=True)]


def stream_orders(
    config: TrainConfig,
    player: Player,
    orders: Sequence[GroupOrder],
    hand_in: Callable[[Played], Sequence[GroupOrder]],
) -> None:
    """Play groups as `play_orders` does, and further ones in their places, until there are none.

    Args:
        config: size of a group, temperature and seed.
        player: plays.
        orders: what to play first.
        hand_in: is given each group as soon as it is whole, in a thread of its own; says what to play in its place.
    """
    numbers = {order.number.group_id: order.number for order in orders}

    def take(group: RolloutGroup) -> list[GroupRequest]:
        further = hand_in(Played(numbers.pop(group.id), group))
        numbers.update({order.number.group_id: order.number for order in further})
        return [_request(config, order) for order in further]

    play_stream(
        player,
        [_request(config, order) for order in orders],
        group_size=config.rollouts.group_size,
        temperature=config.sampling.temperature,
        hand_in=take,
    )


def _request(config: TrainConfig, order: GroupOrder) -> GroupRequest:
    return GroupRequest(order.number.group_id, order.task, (config.seed, "train", *order.number))
