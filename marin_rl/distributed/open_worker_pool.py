# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Start the weight server and the rollout workers of an asynchronous run."""

import contextlib
from collections.abc import Mapping

from marin_rl import multihost
from marin_rl.config.input_files import Inputs
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.ray_workers import ray_workers
from marin_rl.distributed.worker_pool import WorkerPool
from marin_rl.errors import Closing
from marin_rl.weights.manifest import make_secret
from marin_rl.weights.publish import MultiHostSender, TrainingHost


def open_worker_pool(
    config: TrainConfig,
    inputs: Inputs,
    vocab_size: int,
    worker_counts: Mapping[str, int],
    opened: contextlib.ExitStack,
) -> WorkerPool:
    """Start the weight server of this process, and, in the main process, the workers.

    Args:
        config: number of workers and weight transfer.
        inputs: checksums of the input files, with which workers compare theirs.
        vocab_size: vocabulary size of the model.
        worker_counts: worker counts of the run so far.
        opened: closes everything that is started here.
    """
    secret = multihost.on_main(make_secret)
    sender = config.weights.open_sender(secret, TrainingHost.current())
    # With several hosts, `sender` is replaced below.
    opened.enter_context(Closing(lambda: sender.close()))
    addresses = multihost.gather_texts(sender.address)
    if len(addresses) > 1 and multihost.is_main():
        receiver = config.weights.open_receiver(addresses, secret)
        sender = MultiHostSender(sender, receiver.newest, timeout=config.workers.no_progress_timeout)
    client = None
    if multihost.is_main():
        # Workers are stopped before their weight server.
        client = opened.enter_context(ray_workers(config, inputs, vocab_size, secret))
    pool = WorkerPool(
        client,
        sender,
        addresses=addresses,
        counts=worker_counts,
        no_progress_timeout=config.workers.no_progress_timeout,
    )
    opened.enter_context(Closing(pool.close))
    return pool
