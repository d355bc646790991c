# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Settings that follow from a config and its devices: shape of the microbatches, attention kernel, head blocks.

Their argument `trainer` is the trainer section as completed by `start_devices`.
"""

import dataclasses
from collections.abc import Sequence

from levanter.models.lm_model import LmConfig

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.config.sections import TOKENS_PER_MICROBATCH
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.attention_kernel import AttentionKernel, attention_kernel
from marin_rl.learner.devices import microbatch_rows, platform_of
from marin_rl.trainer_config import AbstractTrainerConfig

LOGPROB_BLOCK_SIZE = {"cpu": 256, "gpu": 1024, "tpu": 1024}
"""Tokens on each device whose logits are in memory at once, by platform, if the config does not set their number."""


def row_layout(config: TrainConfig, trainer: AbstractTrainerConfig) -> RowLayout:
    """Shape of the microbatches, for a trainer section completed by `start_devices`.

    A row of R positions and P computed pairs of a query and a key costs `R + P / (6 · hidden size)`: the second
    term is attention, relative to the flops of the linear layers of a transformer. With `per_device_parallelism`,
    rows with shared prompts have at most as many positions as that many other rows.

    Raises:
        ValueError: if the attention kernel of the trainer's platform does not support `rollouts.row_length`.
    """
    kernel, rollouts = _kernel(config, trainer), config.rollouts
    packed = rollouts.packing is not False
    layout = _layout(config, kernel, rollouts.positions(kernel), trainer.rows_per_microbatch, packed=packed)
    platform, devices = platform_of(trainer), trainer.data_axis_size
    alternatives = []
    separate = dataclasses.replace(rollouts, packing=False)
    if rollouts.packing is None and separate.positions(kernel) != layout.row_length:
        rows = microbatch_rows(config.trainer, separate.rows_per_device(platform, devices)) * devices
        alternatives.append(_layout(config, kernel, separate.positions(kernel), rows, packed=False))
    if rollouts.share_prompts and packed and rollouts.row_length is None:
        alternatives += _group_layouts(config, kernel, platform, devices, layout.row_length)
    return dataclasses.replace(layout, alternatives=tuple(alternatives))


def _group_layouts(
    config: TrainConfig, kernel: AttentionKernel, platform: str, devices: int, row_length: int
) -> Sequence[RowLayout]:
    """Return the layout of rows with shared prompts, if there is one, given the length of other rows."""
    if not kernel.supports_shared_prompts(config.model):
        return ()
    rollouts, own_rows = config.rollouts, microbatch_rows(config.trainer, 0)
    most_tokens = own_rows * row_length or TOKENS_PER_MICROBATCH[platform]
    group = rollouts.group_row(config.sampling.max_new_tokens, kernel, most_tokens)
    if group is None or not kernel.supports_shared_prompts(config.model, group):
        return ()
    rows = most_tokens // group.row_length if own_rows else rollouts.group_rows_per_device(group, platform, devices)
    return (_layout(config, kernel, group.row_length, rows * devices, packed=True, group=group),)


def _layout(
    config: TrainConfig,
    kernel: AttentionKernel,
    row_length: int,
    rows: int,
    *,
    packed: bool,
    group: GroupRow | None = None,
) -> RowLayout:
    hidden = 1024 if config.model is None else config.model.Embed.size
    return RowLayout(
        row_length,
        rows,
        packed,
        whole_rollouts=config.policy_loss.is_sequence_level,
        group=group,
        row_cost=row_length + kernel.attention_pairs(row_length, group) / (6 * hidden),
    )


def logprob_block(config: TrainConfig, trainer: AbstractTrainerConfig) -> int:
    """Tokens per device whose logits are in memory at once, for a trainer section of started devices."""
    return config.logprob_block_size or LOGPROB_BLOCK_SIZE[platform_of(trainer)]


def trained_model(config: TrainConfig, trainer: AbstractTrainerConfig) -> LmConfig:
    """Model config with the attention kernel of the trainer's platform and a block size that divides the rows.

    Raises:
        ValueError: if the attention kernel of the trainer's platform does not support `rollouts.row_length`.
    """
    assert config.model is not None
    kernel = _kernel(config, trainer)
    return kernel.configure(config.model, config.rollouts.positions(kernel))


def _kernel(config: TrainConfig, trainer: AbstractTrainerConfig) -> AttentionKernel:
    return attention_kernel(config.model, platform_of(trainer), config.context_shards)
