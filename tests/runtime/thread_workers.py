# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout workers as threads of the test's process: the same coordinator, worker and transfer, without Ray."""

import concurrent.futures
import contextlib
from collections.abc import Iterator

from marin_rl.closing import Closing
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.coordinator import Office
from marin_rl.runtime.rollout_worker import telling_errors, work
from marin_rl.runtime.worker_policy import ReceivedPolicy


@contextlib.contextmanager
def thread_workers(config: TrainConfig, vocab_size: int, token: str) -> Iterator[Office]:
    """Takes the place of `marin_rl.runtime.ray_workers.ray_workers`."""
    office = Office(config.workers.silence)

    def run(name: str) -> None:
        with telling_errors(office, name):
            policy = ReceivedPolicy(config, vocab_size, token, office.announced)
        with Closing(policy.close):
            work(office, name, policy, silence=config.workers.silence, poll=0.5)

    with concurrent.futures.ThreadPoolExecutor(config.workers.num_workers, "worker") as pool:
        running = [pool.submit(run, f"worker-{index}") for index in range(config.workers.num_workers)]
        try:
            yield office
        finally:
            office.stop()
            # What ends a worker with an error is told to the trainer.
            concurrent.futures.wait(running)
