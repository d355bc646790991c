# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the process of a rollout worker runs, whichever engine starts it."""

import dataclasses
import os
from collections.abc import Callable, Mapping, MutableMapping

import jax

from marin_rl.config.input_files import Inputs
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import GPU, TPU
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.utils.logs import log_to, module_levels
from marin_rl.utils.settings.yaml_text import from_yaml
from marin_rl.utils.storage import storage_path

_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Shape of the chips of a process, by their number."""

RunWorker = Callable[[TrainConfig, Inputs, int, str, str, CoordinatorClient, str], None]
"""Runs a worker; its arguments are config, inputs, vocabulary size, base, secret, client of the coordinator, name."""


@dataclasses.dataclass(frozen=True)
class WorkerProgram:
    """A rollout worker, as its engine sends it to the process."""

    run_worker: RunWorker
    """Runs the worker until the run ends."""
    config: str
    """Config of the run, as YAML."""
    inputs: Inputs
    """Checksums of the trainer's input files."""
    vocab_size: int
    """Vocabulary size of the model."""
    base: str
    """Fingerprint of the base of the trainer's adapter; empty without an adapter."""
    name: str
    """Name of the worker."""

    def run(self, secret: str, connect: Callable[[float], CoordinatorClient]) -> None:
        """Run until the run ends.

        `secret` is the run's. `connect` makes a client of the coordinator, which may be down for this many seconds.
        """
        config = from_yaml(TrainConfig, self.config, "the run's config")
        file = storage_path(config.run_dir) / "workers" / f"{self.name}.txt"
        with log_to(file, config.log_level.number, module_levels(config.logging)):
            open_only_reserved(config.workers.reserved, os.environ)
            client = connect(config.workers.no_progress_timeout)
            self.run_worker(config, self.inputs, self.vocab_size, self.base, secret, client, self.name)


def open_only_reserved(reserved: Mapping[str, float], environ: MutableMapping[str, str]) -> None:
    """Make jax open only the devices that are reserved for this process; call it before jax opens any.

    Ray hides GPUs and TPU chips of others from a process that reserves some, but none from one that reserves none.
    libtpu would wait for the other hosts of a slice, which have workers of their own. `environ` is the environment of
    this process.
    """
    if not {GPU, TPU} & reserved.keys():
        jax.config.update("jax_platforms", "cpu")
    if chips := reserved.get(TPU):
        environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _CHIP_BOUNDS[int(chips)]
        environ["TPU_PROCESS_BOUNDS"] = "1,1,1"
        environ["CLOUD_TPU_TASK_ID"] = "0"
