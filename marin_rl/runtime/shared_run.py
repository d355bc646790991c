# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run over several training processes: one on each host, together they hold the mesh.

All of them run the same loop on the same groups, so that tasks, orders, replay buffer and batches are the same
everywhere without being sent. The main process alone has workers, asks them, tells the others what came, and writes.
"""

import json
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from marin_rl import multihost
from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample
from marin_rl.config.command_line import to_yaml
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.checkpoint import Checkpoint, Checkpoints
from marin_rl.rollouts.group_codec import decode_group
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.runtime.rollout_source import FinishedGroup, raise_if
from marin_rl.runtime.run_directory import RunDirectoryError, config_differences, writing
from marin_rl.runtime.worker_pool import WorkerPool
from marin_rl.timing import PhaseTimer
from marin_rl.types import WeightVersion
from marin_rl.weights.config import ArrowFlightConfig, is_loopback
from marin_rl.weights.protocol import WeightSender


class SharedWorkerPool:
    """Workers whom the main process asks; what came of it, all processes are told."""

    def __init__(self, rollout_source: WorkerPool | None, sender: WeightSender) -> None:
        """Owe nothing.

        Args:
            rollout_source: the main process's; None in the others.
            sender: offers this process's shards of the weights, where there is no crew that does.
        """
        self._rollout_source = rollout_source
        self._sender = sender

    def submit(self, orders: Sequence[GroupRequest]) -> None:
        """See [`RolloutSource`][marin_rl.runtime.rollout_source.RolloutSource]."""
        if self._rollout_source is not None:
            self._rollout_source.submit(orders)

    def wait(self, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False) -> list[FinishedGroup]:
        """See [`WorkerPool`][marin_rl.runtime.worker_pool.WorkerPool].

        Raises:
            StopRequestedError: in every process, if a stop is requested.
            MainProcessError: if the main process gave up.
        """
        deadline = None if self._rollout_source is None else self._rollout_source.deadline()

        def ask() -> str:
            assert self._rollout_source is not None
            assert deadline is not None
            return json.dumps(self._rollout_source.ask(deadline))

        raise_if(stop_requested)
        # The others are told of every question, so that they never wait in one exchange for long.
        while not (came := json.loads(multihost.on_main(ask))):
            raise_if(stop_requested)
        return [FinishedGroup(RequestNumber(*number), decode_group(text)) for number, text in came]

    def publish(self, model: object, version: WeightVersion) -> None:
        """See [`RolloutSource`][marin_rl.runtime.rollout_source.RolloutSource]."""
        if self._rollout_source is None:
            self._sender.publish(model, version)
        else:
            self._rollout_source.publish(model, version)

    def metrics(self) -> dict[str, float]:
        """See [`RolloutSource`][marin_rl.runtime.rollout_source.RolloutSource]; nothing but in the main process."""
        return {} if self._rollout_source is None else self._rollout_source.metrics()

    @property
    def counts(self) -> dict[str, int]:
        """See [`RolloutSource`][marin_rl.runtime.rollout_source.RolloutSource]; empty outside the main process."""
        return {} if self._rollout_source is None else self._rollout_source.counts


def require_shared_folder(folder: Path) -> None:
    """Check that all training processes see one run directory, into which each writes its shards of the checkpoints.

    The main process writes a random text, and every process reads it back.

    Args:
        folder: the run directory, which exists on the main process's host.

    Raises:
        RunDirectoryError: in every process, naming the processes that do not see the folder.
    """
    if not multihost.is_multihost():
        return
    # A name that no host has looked up before: NFS clients remember for a while which names do not exist.
    nonce = multihost.on_main(lambda: _write_nonce(folder))
    file = folder / f".{nonce}"
    try:
        sees = file.read_text(encoding="utf-8") == nonce
    except OSError:
        sees = False
    own = {"sees": sees, "place": f"{str(folder.absolute())!r} on host {socket.gethostname()}"}
    found = [json.loads(text) for text in multihost.gather_texts(json.dumps(own))]
    if multihost.is_main():
        file.unlink()
    if blind := [f"process {index} ({each['place']})" for index, each in enumerate(found) if not each["sees"]]:
        raise RunDirectoryError(
            f"training {', '.join(blind)} does not see the run directory of the main process ({found[0]['place']}). "
            "Every training process writes its shards of the checkpoints there: set run_dir to an absolute path on a "
            "file system that all training hosts share, such as NFS or a mounted bucket"
        )


def _write_nonce(folder: Path) -> str:
    nonce = secrets.token_hex(16)
    with writing(folder):
        (folder / f".{nonce}").write_text(nonce, encoding="utf-8")
    return nonce


def require_same_config(config: TrainConfig, may_differ: Sequence[str]) -> None:
    """Check that all training processes were given one config.

    Args:
        config: of this process.
        may_differ: dotted keys, or sections, that do not change what the run computes.

    Raises:
        RunDirectoryError: in every process, naming the processes and keys that differ from the main one's.
    """
    if not multihost.is_multihost():
        return
    own = to_yaml(config)
    of_main = multihost.on_main(lambda: own)
    found = multihost.gather_texts("\n".join(config_differences(of_main, own, [*may_differ, "run_dir"])))
    if differing := [f"process {index}:\n{text}" for index, text in enumerate(found) if text]:
        raise RunDirectoryError(
            "the training processes have different configs; compared with the main process (there), in "
            + "\n".join(differing)
            + "\nstart all of them with the same config"
        )


def require_same_batch(step: int, microbatches: Sequence[RlExample]) -> None:
    """Check that all training processes are about to train on the same arrays.

    Each process computes the batch from the rollouts and puts its own rows on its devices, so a process that differs
    would make the gradient wrong without any other sign.

    Args:
        step: of the run.
        microbatches: all microbatches of all updates of the step.

    Raises:
        ProcessesDifferError: in every process, naming the processes and arrays that differ.
    """
    if not multihost.is_multihost():
        return
    arrays = {name: [np.asarray(getattr(one, name).array) for one in microbatches] for name in PER_TOKEN_DTYPES}
    values = {name: b"".join(array.tobytes() for array in of_name) for name, of_name in arrays.items()}
    shapes = [array.shape for array in arrays["input_ids"]]
    multihost.require_equal({"shapes": f"{step} {shapes}".encode(), **values}, f"the batch of step {step}")


def check_config(config: TrainConfig) -> None:
    """Check what several training processes need: samplers outside the trainer, and weights that all can fetch.

    Raises:
        ValueError: naming the setting and what to set instead.
    """
    count = jax.process_count()
    if count == 1:
        return
    refused = {
        f"mode is {config.mode}": (config.mode is not Mode.ASYNC, "set mode: async, whose workers sample"),
        f"warm_start.max_steps is {config.warm_start.max_steps}": (
            config.warm_start.max_steps > 0,
            "set it to 0, and warm up in a run of its own on one process, whose directory initialize_from then names",
        ),
        f"evaluation.tasks is {config.evaluation.tasks}": (
            config.evaluation.tasks > 0,
            "set it to 0, and measure checkpoints with python -m marin_rl.evaluate --run RUN --evaluation.tasks N",
        ),
    }
    for setting, (wrong, remedy) in refused.items():
        if wrong:
            raise ValueError(
                f"{setting}, but training runs in {count} processes, where the trainer's own sampler does not work; "
                f"{remedy}"
            )
    hosts = list(dict.fromkeys(multihost.gather_texts(socket.gethostname())))
    if len(hosts) > 1 and isinstance(config.weights, ArrowFlightConfig) and is_loopback(config.weights.host):
        raise ValueError(
            f"weights.host is {config.weights.host}, but training runs on {len(hosts)} hosts ({', '.join(hosts)}), and "
            "workers fetch weights from each of them; set weights.host: 0.0.0.0 in a network that you trust"
        )


def newest_good(checkpoints: Checkpoints) -> Checkpoint | None:
    """The newest good checkpoint, the same one in every process: which it is, the main process says.

    Raises:
        CheckpointError: if there are checkpoints and every one is damaged.
    """
    found: list[Checkpoint | None] = []

    def look() -> str:
        found.append(checkpoints.newest_good())
        return "" if found[0] is None else str(found[0].step)

    step = multihost.on_main(look)
    if found:
        return found[0]
    return checkpoints.open(int(step)) if step else None
