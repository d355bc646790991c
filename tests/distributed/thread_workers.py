# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout workers in threads of the test process, with the real coordinator, worker and transfer but without Ray."""

import concurrent.futures
import contextlib
import functools
from collections.abc import Iterator

from marin_rl.config.input_files import Inputs
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient, LocalClient
from marin_rl.distributed.worker_program import RunWorker


@contextlib.contextmanager
def thread_workers(
    run_worker: RunWorker, config: TrainConfig, inputs: Inputs, vocab_size: int, base: str, secret: str
) -> Iterator[CoordinatorClient]:
    """Replacement of `marin_rl.distributed.ray_workers.ray_workers`."""
    client, count = LocalClient(Coordinator(config.workers.heartbeat_timeout)), config.workers.num_workers
    with concurrent.futures.ThreadPoolExecutor(count, "worker") as pool:
        run = functools.partial(run_worker, config, inputs, vocab_size, base, secret, client)
        running = [pool.submit(run, f"worker-{i}") for i in range(count)]
        try:
            yield client
        finally:
            client.call(Coordinator.stop)
            # Errors of workers are reported to the trainer.
            concurrent.futures.wait(running)
