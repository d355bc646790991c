# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Open the rollout source, replay buffer, staleness limits and weight history of a config."""

import contextlib
from collections.abc import Mapping

from levanter.models.lm_model import LmHeadModel

from marin_rl.config.input_files import Inputs
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.replay_buffer import ReplayBuffer
from marin_rl.distributed.rollout_source import LocalRollouts, RolloutSource
from marin_rl.distributed.scheduler import StalenessLimits
from marin_rl.learner.weight_history import WeightHistory
from marin_rl.rollouts.run_rollouts import RolloutRunner


def open_rollout_source(
    config: TrainConfig,
    inputs: Inputs,
    runner: RolloutRunner,
    vocab_size: int,
    worker_counts: Mapping[str, int],
    opened: contextlib.ExitStack,
) -> RolloutSource:
    """Open the trainer's sampler as rollout source, or start workers and a weight server.

    Args:
        config: mode, number of workers and weight transfer.
        inputs: checksums of the input files, with which workers compare theirs.
        runner: runs the trainer's rollouts.
        vocab_size: vocabulary size of the model.
        worker_counts: worker counts of the run so far.
        opened: closes everything that is started here.

    Returns:
        The rollout source.
    """
    if config.mode is Mode.SYNC:
        return LocalRollouts(config, runner)
    # Imported here because workers need Ray, which is an extra.
    from marin_rl.distributed.open_worker_pool import open_worker_pool

    return open_worker_pool(config, inputs, vocab_size, worker_counts, opened)


def make_staleness_limits(config: TrainConfig) -> StalenessLimits:
    """Return the staleness limits of a config; in `mode: sync` groups are never sampled ahead."""
    groups_per_step = config.rollouts.prompts_per_step
    replacements = (config.filter.max_batches - 1) * groups_per_step
    if config.mode is Mode.SYNC:
        return StalenessLimits(groups_per_step, replacements_per_step=replacements)
    replay = config.replay
    return StalenessLimits(
        groups_per_step,
        replay.max_staleness,
        replay.max_uses,
        replacements,
        last_step=config.num_steps,
    )


def make_replay_buffer(config: TrainConfig) -> ReplayBuffer:
    """Make an empty replay buffer; in `mode: sync` it holds the groups of one step only."""
    if config.mode is Mode.SYNC:
        return ReplayBuffer(max_staleness=0)
    return ReplayBuffer(max_staleness=config.replay.max_staleness, max_uses=config.replay.max_uses)


def make_history(config: TrainConfig) -> WeightHistory[LmHeadModel] | None:
    """Make the history of sampling weights for groups in the replay buffer; None if it is not needed."""
    if config.mode is Mode.SYNC or not config.replay.keep_sampling_weights:
        return None
    return WeightHistory(config.replay.max_staleness + 1)
