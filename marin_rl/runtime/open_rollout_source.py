# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Who plays a run's groups, how far ahead of training, and where they wait: as the config says."""

import contextlib
from collections.abc import Mapping

from levanter.models.lm_model import LmHeadModel

from marin_rl import multihost
from marin_rl.closing import Closing
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.weight_history import WeightHistory
from marin_rl.rollouts.replay_buffer import ReplayBuffer
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.rollouts.scheduler import StalenessLimits
from marin_rl.runtime.progress import Progress
from marin_rl.runtime.ray_workers import ray_workers
from marin_rl.runtime.rollout_source import LocalRollouts, RolloutSource
from marin_rl.runtime.shared_run import SharedWorkerPool
from marin_rl.runtime.worker_pool import WorkerPool
from marin_rl.weights.auth import make_secret
from marin_rl.weights.multi_host_sender import MultiHostSender
from marin_rl.weights.snapshot import TrainingHost


class WorkerDevicesError(ValueError):
    """Rollout workers would open accelerators that the trainer holds; the message names the remedy."""


SHARES_GPU_MEMORY = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
"""Environment variables that let several jax processes share the memory of a GPU."""


def check_worker_devices(config: TrainConfig, platform: str, environ: Mapping[str, str]) -> None:
    """Check that rollout workers do not open the accelerators of the trainer.

    Ray hides GPUs only from a worker that asks for some, and jax opens every accelerator that it sees.

    Args:
        config: names mode, workers and cluster.
        platform: of the trainer's devices: `cpu`, `gpu` or `tpu`.
        environ: the trainer's environment variables, which workers inherit from a Ray that it starts.

    Raises:
        WorkerDevicesError: if they would, naming the settings to change.
    """
    if config.mode is Mode.SYNC or platform == "cpu":
        return
    if platform == "tpu":
        raise WorkerDevicesError(
            "mode is async, but this trainer runs on TPU: rollout workers reserve no TPU chips and would open those "
            "that the trainer holds. Set mode: sync, on one TPU host; rollout workers on TPU, and with them training "
            "on several TPU hosts, are not supported yet"
        )
    apart = (
        "Give trainer and workers GPUs of their own: start Ray with those of the workers (CUDA_VISIBLE_DEVICES=4,5,6,7 "
        "ray start --head) and the trainer with the others (CUDA_VISIBLE_DEVICES=0,1,2,3, ray_address: 127.0.0.1:6379)"
    )
    if config.workers.gpus_per_worker == 0:
        raise WorkerDevicesError(
            "workers.gpus_per_worker is 0, but this trainer runs on GPU: a worker that asks Ray for no GPU sees all of "
            f"its machine and would open those that the trainer holds. {apart} and workers.gpus_per_worker: 1; or set "
            "mode: sync"
        )
    if config.ray_address is None and not any(environ.get(name) for name in SHARES_GPU_MEMORY):
        raise WorkerDevicesError(
            "ray_address is not set, so workers get GPUs that the trainer holds, and jax reserves three quarters of a "
            f"GPU's memory for the first process. {apart}; or let them share each GPU, with "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=.45 in the environment"
        )


def open_rollout_source(
    config: TrainConfig, runner: RolloutRunner, progress: Progress, opened: contextlib.ExitStack
) -> RolloutSource:
    """The trainer's own sampler, or workers, started and served with weights.

    Args:
        config: says which, and how many.
        runner: the trainer's own.
        progress: knows the size of the model's vocabulary, and what workers of the run have done before.
        opened: ends what is started here.
    """
    if config.mode is Mode.SYNC:
        return LocalRollouts(config, runner)
    token = multihost.on_main(make_secret)
    sender = config.weights.open_sender(token, TrainingHost.current())
    # Where there are several hosts, it becomes the sender of them all.
    opened.enter_context(Closing(lambda: sender.close()))
    addresses = multihost.gather_texts(sender.address)
    if len(addresses) > 1 and multihost.is_main():
        receiver = config.weights.open_receiver(addresses, token)
        sender = MultiHostSender(sender, receiver, timeout=config.workers.no_progress_timeout)
    if not multihost.is_main():
        return SharedWorkerPool(None, sender)
    # The workers end before the server that they fetch from.
    desk = opened.enter_context(ray_workers(config, progress.vocab_size, token))
    patience, counts = config.workers.no_progress_timeout, progress.worker_counts
    rollout_source = WorkerPool(desk, sender, patience=patience, addresses=addresses, counts=counts)
    opened.enter_context(Closing(rollout_source.close))
    return rollout_source if len(addresses) == 1 else SharedWorkerPool(rollout_source, sender)


def make_staleness_limits(config: TrainConfig) -> StalenessLimits:
    """How far ahead of training the config lets groups be ordered; in `mode: sync` not at all."""
    wanted = config.rollouts.prompts_per_step
    replacements = (config.filter.batches - 1) * wanted
    if config.mode is Mode.SYNC:
        return StalenessLimits(wanted, replacements_per_step=replacements)
    replay = config.replay
    return StalenessLimits(
        wanted, replay.max_staleness, replay.max_uses, replacements, replay.capacity, last_step=config.num_steps
    )


def make_replay(config: TrainConfig) -> ReplayBuffer:
    """An empty replay buffer; in `mode: sync` one that holds a step's groups and no longer."""
    if config.mode is Mode.SYNC:
        return ReplayBuffer(max_staleness=0)
    replay = config.replay
    return ReplayBuffer(
        max_staleness=replay.max_staleness,
        max_uses=replay.max_uses,
        half_life=replay.half_life,
        seed=config.seed,
    )


def make_history(config: TrainConfig) -> WeightHistory[LmHeadModel] | None:
    """What keeps the weights that waiting groups were sampled with; in `mode: sync` none wait."""
    if config.mode is Mode.SYNC or not config.replay.keep_sampling_weights:
        return None
    return WeightHistory(config.replay.max_staleness + 1)
