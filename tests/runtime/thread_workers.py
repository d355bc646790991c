# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout workers as threads of the test's process: the same coordinator, worker and transfer, without Ray."""

import concurrent.futures
import contextlib
from collections.abc import Iterator

from marin_rl.closing import Closing
from marin_rl.config.train_config import TrainConfig
from marin_rl.runtime.coordinator import CoordinatorActor
from marin_rl.runtime.rollout_worker import telling_errors, work
from marin_rl.runtime.worker_policy import ReceivedPolicy


@contextlib.contextmanager
def thread_workers(config: TrainConfig, vocab_size: int, token: str) -> Iterator[CoordinatorActor]:
    """Takes the place of `marin_rl.runtime.ray_workers.ray_workers`."""
    coordinator_actor = CoordinatorActor(config.workers.heartbeat_timeout)

    def run(name: str) -> None:
        with telling_errors(coordinator_actor, name):
            policy = ReceivedPolicy(config, vocab_size, token, coordinator_actor.announced)
        with Closing(policy.close):
            work(coordinator_actor, name, policy, silence=config.workers.heartbeat_timeout, poll=0.5)

    with concurrent.futures.ThreadPoolExecutor(config.workers.num_workers, "worker") as pool:
        running = [pool.submit(run, f"worker-{index}") for index in range(config.workers.num_workers)]
        try:
            yield coordinator_actor
        finally:
            coordinator_actor.stop()
            # What ends a worker with an error is told to the trainer.
            concurrent.futures.wait(running)
