# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""TPU slices of a Ray cluster that a run reserves as a whole, with a worker on each host."""

import logging
import threading
from collections.abc import Callable
from typing import cast

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup

from marin_rl.config.workers_config import WorkersConfig, parse_worker_slice
from marin_rl.distributed.ray_cluster import ray_version

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
"""Seconds of one attempt to reserve a slice."""


class SliceReservations:
    """Reserves slices as they join the cluster, and starts the workers of each.

    Ray places the workers of a lost slice again when a slice of the same name joins.
    """

    def __init__(
        self,
        config: WorkersConfig,
        start: Callable[[int, PlacementGroupSchedulingStrategy], None],
        fail: Callable[[str], None],
    ) -> None:
        """Start to reserve, in a thread.

        Args:
            config: number of workers and kind of the slices.
            start: starts the worker with this index at a place; called from the thread.
            fail: called from the thread with the error that ended it.
        """
        assert config.tpu_slice is not None
        self._kind = parse_worker_slice(config.tpu_slice)
        self._config = config
        self._start, self._fail = start, fail
        self._slices: list[SlicePlacementGroup] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="TPU slices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Reserve no further slices, and start no further workers."""
        self._stopped.set()
        self._thread.join()

    def release(self) -> None:
        """Return the slices to the cluster."""
        for reserved in self._slices:
            reserved.shutdown()

    def _run(self) -> None:
        try:
            self._start_workers()
        except Exception as error:
            logger.exception("no further slices are reserved")
            self._fail(f"{type(error).__name__}: {error}")

    def _start_workers(self) -> None:
        hosts = self._kind.num_hosts
        for first in range(0, self._config.num_workers, hosts):
            group = self._reserve()
            if group is None:
                return
            logger.info("reserved slice %d, for workers %d to %d", first // hosts, first, first + hosts - 1)
            for bundle in range(hosts):
                self._start(first + bundle, PlacementGroupSchedulingStrategy(group, bundle))

    def _reserve(self) -> PlacementGroup | None:
        """Reserve a slice, and wait until all of its hosts have joined; None if `stop` was called."""
        while not self._stopped.is_set():
            try:
                reserved = SlicePlacementGroup(
                    self._kind.shape_text,
                    ray_version(self._kind),
                    resources_per_bundle=self._config.reserved,
                    head_reservation_timeout_s=POLL_SECONDS,
                )
            except (TimeoutError, RuntimeError, RayError) as error:
                logger.info("no free slice %s yet: %s", self._config.tpu_slice, error)
                self._stopped.wait(1.0)
                continue
            self._slices.append(reserved)
            group = cast(PlacementGroup, reserved.placement_group)
            complete = group.ready()
            while not self._stopped.is_set():
                if ray.wait([complete], timeout=POLL_SECONDS)[0]:
                    reserved.release_head_pgs()
                    return group
        return None
