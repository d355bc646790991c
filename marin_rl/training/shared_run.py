# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training in several processes: one per host, which together hold the device mesh.

All processes run the same loop on the same groups, so tasks, requests, replay buffer and batches are equal everywhere
without being sent. In `mode: sync` each process samples a share of the groups, and they exchange finished groups. In
`mode: async` only the main process has workers; it broadcasts finished groups. The main process writes the run
directory.
"""

import hashlib
import json
import secrets
import socket
from collections.abc import Callable, Sequence

import jax

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.input_files import Inputs, input_changes
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.runs.run_directory import config_differences
from marin_rl.sampling.config import OpenAiSamplerConfig, SamplerConfig
from marin_rl.types import Task
from marin_rl.utils import multihost
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.settings.fields import is_loopback
from marin_rl.utils.storage import StoragePath, writing


def require_shared_folder(folder: StoragePath) -> None:
    """Check that all training processes see the same run directory, which stores the checkpoint shards of each.

    The main process writes a random text, and every process reads it back. The folder exists on the host of the main
    process.

    Raises:
        RunDirectoryError: in every process; names the processes that do not see the folder.
    """
    if not multihost.is_multihost():
        return
    # A new file name: NFS clients cache for a while which names do not exist.
    nonce = multihost.on_main(lambda: _write_nonce(folder))
    file = folder / f".{nonce}"
    shown = folder if isinstance(folder, RemotePath) else folder.absolute()
    place = f"{str(shown)!r} on host {socket.gethostname()}"
    try:
        sees = file.read_text(encoding="utf-8") == nonce
    except FileNotFoundError:
        sees = False
    except OSError as error:
        sees, place = False, f"{place}: {error}"
    own_answer = {"sees": sees, "path": place}
    answers = [json.loads(text) for text in multihost.gather_texts(json.dumps(own_answer))]
    if multihost.is_main():
        file.unlink()
    if blind := [f"process {index} ({answer['path']})" for index, answer in enumerate(answers) if not answer["sees"]]:
        raise RunDirectoryError(
            f"training {', '.join(blind)} does not see the run directory of the main process ({answers[0]['path']}). "
            "Every training process writes its shards of the checkpoints there: set run_dir to an absolute path on a "
            "file system that all training hosts share, such as NFS, or to an address in an object store (gs://, s3://)"
        )


def _write_nonce(folder: StoragePath) -> str:
    nonce = secrets.token_hex(16)
    with writing(folder):
        (folder / f".{nonce}").write_text(nonce, encoding="utf-8")
    return nonce


_OF_EACH_PROCESS = (
    *("run_dir", "ray_address", "log_level", "logging", "weights.host", "weights.port", "sampler.base_url"),
    *("trainer.distributed", "trainer.tracker", "trainer.jax_compilation_cache_dir"),
)
"""Keys that do not determine what the processes do together. Other keys that may change when a run is resumed, such as
`checkpoint.every`, must still be equal: a process that saves would wait for the others."""


def require_same_config(own: str) -> None:
    """Check that all training processes have the same config, except for addresses, folders and logs.

    `own` is the config of this process, as YAML.

    Raises:
        RunDirectoryError: in every process; names the processes and keys that differ from the main process.
    """
    if differing := _compared_with_main(own, lambda of_main: config_differences(of_main, own, _OF_EACH_PROCESS)):
        raise RunDirectoryError(
            f"the training processes have different configs; compared with the main process (there), in {differing}\n"
            "start all of them with the same config"
        )


def require_same_inputs(inputs: Inputs) -> None:
    """Check that all training processes have the same input files, each on its own host.

    Raises:
        ProcessesDifferError: in every process; names the processes and files that differ from the main process.
    """
    if differing := _compared_with_main(json.dumps(inputs), lambda of_main: input_changes(json.loads(of_main), inputs)):
        raise multihost.ProcessesDifferError(
            f"the training processes have different input files; compared with the main process, in {differing}\n"
            "copy the same files to all training hosts"
        )


def _compared_with_main(own: str, differences: Callable[[str], list[str]]) -> str:
    """Return the differences of each process from the main process, given its text; empty if there are none."""
    if not multihost.is_multihost():
        return ""
    of_main = multihost.on_main(lambda: own)
    found = multihost.gather_texts("\n".join(differences(of_main)))
    return "\n".join(f"process {index}:\n{text}" for index, text in enumerate(found) if text)


def require_same_tasks(environment: AbstractEnvironment) -> None:
    """Check that the environment has the same tasks, in the same order, in all training processes.

    Each process draws the tasks of all groups itself, and samples a share of them. With other tasks in one process, a
    warm start would mix two batches, and a process could wait for groups that the others do not need.

    Raises:
        ProcessesDifferError: in every process; names the processes and splits that differ.
    """
    if multihost.is_multihost():
        digests = {split.value: _digest(environment.tasks(split)) for split in Split}
        multihost.require_equal(digests, f"the list of tasks of the environment {environment.name!r}")


def _digest(tasks: Sequence[Task]) -> bytes:
    digest = hashlib.blake2b()
    for task in tasks:
        digest.update(repr(task).encode())
    return digest.digest()


def require_same_batch(step: int, batch: RolloutBatch, updates: Sequence[PackedBatch]) -> None:
    """Check that all training processes have the same batch.

    Each process computes the batch from the rollouts and feeds its rows to its devices, so an undetected difference
    would make the gradient wrong. This process may have a part of the rows of `updates`.

    Raises:
        ProcessesDifferError: in every process; names the processes and arrays that differ.
    """
    if not multihost.is_multihost():
        return
    values = {
        "rollouts": f"{step} {batch.ids} {batch.lengths}".encode(),
        "rows": repr([(packed.layout, packed.slots) for packed in updates]).encode(),
        **{name: array.tobytes() for name, array in batch.arrays.items()},
    }
    multihost.require_equal(values, f"the batch of step {step}")


def check_weight_address(host: str) -> None:
    """Check that workers can fetch weights from all training processes at `weights.host`.

    Raises:
        ValueError: if it is reachable from its own machine only, and training runs on several.
    """
    hosts = list(dict.fromkeys(multihost.gather_texts(socket.gethostname())))
    if len(hosts) > 1 and is_loopback(host):
        raise ValueError(
            f"weights.host is {host}, but training runs on {len(hosts)} hosts ({', '.join(hosts)}), and "
            "workers fetch weights from each of them; set weights.host: 0.0.0.0 in a network that you trust"
        )


def check_shared_sampling(sampler: SamplerConfig, batch_scoped: Sequence[str]) -> None:
    """Check that several training processes can divide the groups of a step among themselves.

    The sampler is that of a run in `mode: sync`. `batch_scoped` are keys of the reward functions with `scope: batch`.

    Raises:
        ValueError: if they cannot; the message names the setting and the remedy.
    """
    count = jax.process_count()
    if count > 1 and isinstance(sampler, OpenAiSamplerConfig):
        raise ValueError(
            f"sampler is openai and mode is sync, but training runs in {count} processes, each of which would reload "
            f"the weights of {sampler.base_url}; set mode: async, so that a rollout worker samples"
        )
    if count > 1 and batch_scoped:
        raise ValueError(
            f"{batch_scoped[0]} has scope: batch, which needs all rollouts of a step together, but training runs in "
            f"{count} processes, each of which scores the groups that it samples; use scope: group"
        )
