# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of asynchronous sampling: rollout workers, and the replay buffer between workers and trainer."""

import dataclasses
import enum
import math

from marin_rl.enum_fields import convert_enum_fields


class Mode(enum.StrEnum):
    """Whether sampling alternates with training or runs at the same time."""

    SYNC = "sync"
    """Sample in the trainer process between updates. Does not use Ray, `workers`, `replay` or `weights`."""
    ASYNC = "async"
    """Sample in rollout workers while the trainer trains."""


class Refresh(enum.StrEnum):
    """When a rollout worker loads newer weights."""

    BETWEEN_GROUPS = "between_groups"
    """After all of its running groups have finished. It starts no group once newer weights are available."""
    IN_FLIGHT = "in_flight"
    """As soon as they have arrived, also during answers: later tokens are sampled with the newer weights and the KV
    cache of the older ones (PipelineRL)."""


@dataclasses.dataclass(frozen=True)
class WorkersConfig:
    """Rollout workers. Each is a process with its own sampler."""

    num_workers: int = 1
    """Number of workers. At least 1."""
    refresh: Refresh = Refresh.BETWEEN_GROUPS
    """When workers load newer weights: `between_groups`, or `in_flight` for long answers, which would otherwise delay
    the update."""
    decode_steps_per_weight_poll: int = 32
    """With `in_flight`, tokens sampled per answer between two polls for newer weights. At least 1; a poll pauses the
    sampler for a few milliseconds."""
    gpus_per_worker: float = 0.0
    """GPUs that Ray reserves for each worker. At least 0."""
    heartbeat_timeout: float = 30.0
    """Seconds without a heartbeat after which a worker counts as lost and its groups are assigned to other workers.
    Above 0."""
    no_progress_timeout: float = 900.0
    """Seconds without a finished group, or without a coordinator, after which the run fails. Above 0; must exceed the
    compile time of the workers."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if self.num_workers < 1:
            raise ValueError(f"workers.num_workers is {self.num_workers}; it must be at least 1, or mode: sync")
        if self.decode_steps_per_weight_poll < 1:
            raise ValueError(
                f"workers.decode_steps_per_weight_poll is {self.decode_steps_per_weight_poll}; it must be at least 1"
            )
        if not (self.gpus_per_worker >= 0 and math.isfinite(self.gpus_per_worker)):
            raise ValueError(f"workers.gpus_per_worker is {self.gpus_per_worker}; it must be at least 0")
        for name in ("heartbeat_timeout", "no_progress_timeout"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"workers.{name} is {value}; it must be a number of seconds above 0")


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Replay buffer between sampling and training."""

    max_staleness: int = 1
    """Maximum age of a group in steps, at least 0: the step that trains on it minus the version of the weights that
    sampled its oldest token. Older groups are dropped. 0 samples each step's groups with its weights, as `mode: sync`
    does."""
    max_uses: int = 1
    """Steps that train on each group, from 1 to `max_staleness + 1`."""
    half_life: float | None = None
    """Steps after which the probability of drawing a waiting group is halved, above 0; null: oldest groups first."""
    capacity: int | None = None
    """Maximum groups requested or waiting at a time, at least `rollouts.prompts_per_step`; null: as many as can be
    trained on within `max_staleness`."""
    keep_sampling_weights: bool = False
    """Keep the last `max_staleness` versions of the weights in host memory, so that `off_policy_correction` scores
    each rollout with the weights that sampled it. If false, the newest weights score all rollouts, and the correction
    also covers staleness."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"replay.max_staleness is {self.max_staleness}; it must be at least 0")
        if not 1 <= self.max_uses <= self.max_staleness + 1:
            raise ValueError(
                f"replay.max_uses is {self.max_uses}; a group can be used once per step for "
                f"replay.max_staleness + 1 steps, so it must be from 1 to {self.max_staleness + 1}"
            )
        if self.half_life is not None and not (self.half_life > 0 and math.isfinite(self.half_life)):
            raise ValueError(f"replay.half_life is {self.half_life}; it must be a number of steps above 0, or null")
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"replay.capacity is {self.capacity}; it must be at least 1, or null")
