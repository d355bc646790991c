# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sources of rollout groups: the trainer's own sampler, or rollout workers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.rollouts.run_rollouts import GroupInput, RolloutRunner, run_groups
from marin_rl.types import RolloutGroup, WeightVersion
from marin_rl.utils.host_status import raise_if
from marin_rl.utils.timing import PhaseTimer


class FinishedGroup(NamedTuple):
    """A finished group."""

    number: RequestNumber
    """Number of its request."""
    group: RolloutGroup
    """The rollouts of the group."""


@runtime_checkable
class RolloutSource(Protocol):
    """Runs group requests."""

    counts: dict[str, int]
    """Event counts since the start of the run; part of the run state."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Submit requests."""

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> Sequence[FinishedGroup]:
        """Wait until at least one group is finished; the groups are equal in all training processes.

        `timer` records the time by phase. `stop_requested` returns whether this process was asked to stop, and is
        called about once a second.

        Raises:
            StopRequestedError: in all training processes, if one of them was asked to stop.
        """

    def publish(self, model: object, version: WeightVersion) -> None:
        """Use these weights for later groups, as soon as they have reached the samplers.

        The model is a tree of arrays that may be donated after this call. `version` is the number of training steps.
        """

    def flush(self) -> None:
        """Wait until the published weights have left all training processes."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this step."""


def group_inputs(requests: Sequence[GroupRequest], seed: int) -> list[GroupInput]:
    """Return the groups to run; their seeds do not depend on the worker or on the other groups."""
    return [GroupInput(one.number.group_id, one.task, (seed, "train", *one.number)) for one in requests]


class LocalRollouts:
    """Runs groups with the sampler of each training process during `wait`."""

    def __init__(self, runner: RolloutRunner, *, group_size: int, temperature: float, seed: int) -> None:
        """Start without requests, with a runner whose sampler has the newest weights."""
        self._runner = runner
        self._group_size = group_size
        self._temperature = temperature
        self._seed = seed
        self._requests: list[GroupRequest] = []
        self.counts: dict[str, int] = {}
        """Always empty."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `RolloutSource`."""
        self._requests += requests

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """Run all submitted requests; see `RolloutSource`. A stop takes effect after a round of sampling."""
        requests, self._requests = self._requests, []
        runner = dataclasses.replace(self._runner, timer=timer, interrupt=lambda: raise_if(stop_requested))
        groups = run_groups(
            runner,
            group_inputs(requests, self._seed),
            group_size=self._group_size,
            temperature=self._temperature,
        )
        return [FinishedGroup(request.number, group) for request, group in zip(requests, groups, strict=True)]

    def publish(self, model: object, version: WeightVersion) -> None:
        """Do nothing: the sampler already has the weights."""

    def flush(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}
