# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sources of rollout groups: the trainer's own sampler, or rollout workers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.rollouts.run_rollouts import GroupInput, RolloutRunner, run_requests, stream_requests
from marin_rl.timing import PhaseTimer
from marin_rl.types import RolloutGroup, WeightVersion


class StopRequestedError(Exception):
    """Raised when a stop is requested while a step waits for its groups."""


def raise_if(stop_requested: Callable[[], bool]) -> None:
    """Raise StopRequestedError if a stop was requested."""
    if stop_requested():
        raise StopRequestedError("a stop was requested while a step waited for its groups")


class FinishedGroup(NamedTuple):
    """A finished group."""

    number: RequestNumber
    """Number of its request."""
    group: RolloutGroup
    """The rollouts of the group."""


@runtime_checkable
class RolloutSource(Protocol):
    """Runs group requests."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Submit requests."""
        ...

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> Sequence[FinishedGroup]:
        """Wait until at least one group is finished.

        Args:
            timer: Records the time by phase.
            stop_requested: Returns whether to stop waiting. Called about once a second; with several training
                processes, all of them call it at the same points of the program.

        Returns:
            The finished groups.

        Raises:
            StopRequestedError: If a stop is requested.
        """
        ...

    def publish(self, model: object, version: WeightVersion) -> None:
        """Use these weights for later groups, as soon as they have reached the samplers.

        Args:
            model: The policy, a tree of arrays that may be donated after this call.
            version: Number of training steps.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this step."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """Event counts since the start of the run; part of the run state."""
        ...


class LocalRollouts:
    """Runs groups with the trainer's sampler during `wait`."""

    def __init__(self, config: TrainConfig, runner: RolloutRunner) -> None:
        """Start without requests.

        Args:
            config: Group size, temperature and seed.
            runner: Runs the rollouts; its sampler has the newest weights.
        """
        self._config = config
        self._runner = runner
        self._requests: list[GroupRequest] = []

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `RolloutSource`."""
        self._requests += requests

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """Run all submitted requests; see `RolloutSource`. A stop takes effect after a round of sampling."""
        requests, self._requests = self._requests, []
        runner = dataclasses.replace(self._runner, timer=timer, interrupt=lambda: raise_if(stop_requested))
        return run_group_requests(self._config, runner, requests)

    def publish(self, model: object, version: WeightVersion) -> None:
        """Do nothing: the sampler already has the weights."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    @property
    def counts(self) -> dict[str, int]:
        """No counts."""
        return {}


def run_group_requests(
    config: TrainConfig, runner: RolloutRunner, requests: Sequence[GroupRequest]
) -> list[FinishedGroup]:
    """Run group requests. A group depends only on its request and the weights, not on the other requests.

    Args:
        config: Group size, temperature and seed.
        runner: Runs the rollouts.
        requests: Any number of requests.

    Returns:
        The finished groups, in the order of `requests`.
    """
    groups = run_requests(
        runner,
        [_request(config, request) for request in requests],
        group_size=config.rollouts.group_size,
        temperature=config.sampling.temperature,
    )
    return [FinishedGroup(request.number, group) for request, group in zip(requests, groups, strict=True)]


def stream_group_requests(
    config: TrainConfig,
    runner: RolloutRunner,
    requests: Sequence[GroupRequest],
    on_group_done: Callable[[FinishedGroup], Sequence[GroupRequest]],
) -> None:
    """Run groups as `run_group_requests` does, and start further groups as others finish.

    Args:
        config: Group size, temperature and seed.
        runner: Runs the rollouts.
        requests: The first requests.
        on_group_done: Called in a separate thread with each finished group; returns the requests to start in its place.
    """
    numbers = {request.number.group_id: request.number for request in requests}

    def finish(group: RolloutGroup) -> list[GroupInput]:
        further = on_group_done(FinishedGroup(numbers.pop(group.id), group))
        numbers.update({request.number.group_id: request.number for request in further})
        return [_request(config, request) for request in further]

    stream_requests(
        runner,
        [_request(config, request) for request in requests],
        group_size=config.rollouts.group_size,
        temperature=config.sampling.temperature,
        on_group_done=finish,
    )


def _request(config: TrainConfig, request: GroupRequest) -> GroupInput:
    return GroupInput(request.number.group_id, request.task, (config.seed, "train", *request.number))
