# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout workers in threads of the test process, with the real coordinator, worker and transfer but without Ray."""

import concurrent.futures
import contextlib
from collections.abc import Iterator

from marin_rl.closing import Closing
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.coordinator import CoordinatorActor
from marin_rl.distributed.worker import reporting_errors, work
from marin_rl.distributed.worker_policy import ReceivedPolicy


@contextlib.contextmanager
def thread_workers(config: TrainConfig, vocab_size: int, token: str) -> Iterator[CoordinatorActor]:
    """Replacement of `marin_rl.distributed.ray_workers.ray_workers`."""
    coordinator_actor = CoordinatorActor(config.workers.heartbeat_timeout)

    def run(name: str) -> None:
        with reporting_errors(coordinator_actor, name):
            policy = ReceivedPolicy(config, vocab_size, token, coordinator_actor.announced)
        with Closing(policy.close):
            work(coordinator_actor, name, policy, heartbeat_timeout=config.workers.heartbeat_timeout, poll=0.5)

    with concurrent.futures.ThreadPoolExecutor(config.workers.num_workers, "worker") as pool:
        running = [pool.submit(run, f"worker-{index}") for index in range(config.workers.num_workers)]
        try:
            yield coordinator_actor
        finally:
            coordinator_actor.stop()
            # Errors of workers are reported to the trainer.
            concurrent.futures.wait(running)
