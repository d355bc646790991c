# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls to the coordinator, a Ray actor, from the trainer and the rollout workers."""

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from marin_rl.distributed.coordinator import Coordinator
from marin_rl.utils.errors import UserError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Seconds between calls to a coordinator that is down."""
ANSWER_SECONDS = 10.0
"""Seconds added to the time limit of a call, because calls of idle workers wait for a change."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class RayLostError(UserError):
    """Raised when the coordinator does not answer, or Ray has ended on this machine; the message names the remedy."""


class CoordinatorClient:
    """Blocking calls of trainer and workers to the coordinator; safe to use from several threads.

    Ray restarts a coordinator that is down, and calls are retried until then. Actors call each other directly, so they
    may continue for a while after Ray's node has died; but then no actor is restarted.
    """

    def __init__(
        self, coordinator: ActorHandle, no_progress_timeout: float, workers: Mapping[str, Any] | None = None
    ) -> None:
        """Make a client.

        The coordinator may be down or paused for `no_progress_timeout` seconds. `workers`, only for the trainer, has
        the Ray reference to the result of each worker, by name.
        """
        self._coordinator = coordinator
        self._no_progress_timeout = no_progress_timeout
        self._workers = workers or {}

    @overload
    def call(
        self,
        method: Callable[Concatenate[Coordinator, Arguments], Coroutine[Any, Any, Result]],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result: ...

    @overload
    def call(
        self,
        method: Callable[Concatenate[Coordinator, Arguments], Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result: ...

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of the coordinator, such as `Coordinator.heartbeat`, and return its result.

        Raises:
            RayLostError: if the coordinator does not answer within the timeout, or Ray has ended on this machine.
        """
        deadline = time.monotonic() + self._no_progress_timeout
        while True:
            try:
                answer = getattr(self._coordinator, method.__name__).remote(*arguments, **named)
                return ray.get(answer, timeout=max(deadline - time.monotonic(), 0.0) + ANSWER_SECONDS)
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > deadline:
                    raise RayLostError(
                        f"the coordinator of the rollout workers has not answered for {self._no_progress_timeout:g} s "
                        "(workers.no_progress_timeout): it was not restarted, or its process is paused; check the "
                        "memory and the load of its machine, and run the same command again to resume from the last "
                        "checkpoint"
                    ) from error
                check_node()
                logger.warning("the coordinator is down; retrying")
                time.sleep(RETRY_SECONDS)

    def find_failure(self) -> str | None:
        """Return the error of a worker that ended with one. A worker that fails to start cannot report it itself.

        Raises:
            RayLostError: if Ray has ended on this machine.
        """
        check_node()
        # A copy, because workers may be added meanwhile.
        for name, end in list(self._workers.items()):
            ended, _ = ray.wait([end], timeout=0)
            try:
                ray.get(ended)
            except RayError as error:
                return f"{name}: {str(error).strip().splitlines()[-1]}"
        return None


def check_node() -> None:
    """Check that Ray's node of this process is alive.

    Raises:
        RayLostError: if it is not. Ray needs some seconds to notice.
    """
    own = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
        raise RayLostError(
            f"Ray's node {own[:8]} on this machine has died, so failed workers cannot be restarted; check whether the "
            "machine ran out of memory, and run the same command again to resume from the last checkpoint"
        )
