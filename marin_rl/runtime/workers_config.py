# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How sampling runs beside training: rollout workers, and the replay buffer between them and the trainer."""

import dataclasses
import enum
import math

from marin_rl.enum_fields import convert_enum_fields


class Mode(enum.StrEnum):
    """Who samples."""

    SYNC = "sync"
    """The trainer itself, between two updates. No Ray; `workers`, `replay` and `weights` play no part."""
    ASYNC = "async"
    """Rollout workers, while the trainer trains."""


class Refresh(enum.StrEnum):
    """When a rollout worker goes over to newer weights."""

    BETWEEN_GROUPS = "between_groups"
    """When all groups that it plays have ended; it begins no others from when it hears of newer weights."""
    IN_FLIGHT = "in_flight"
    """As soon as they have come, in the middle of answers too: later tokens are sampled from the newer weights, over
    the KV cache that the older ones made (PipelineRL)."""


@dataclasses.dataclass(frozen=True)
class WorkersConfig:
    """Rollout workers, each a process with a sampler of its own."""

    num_workers: int = 1
    """How many. At least 1."""
    refresh: Refresh = Refresh.BETWEEN_GROUPS
    """When workers go over to newer weights: `between_groups`, or `in_flight` for long answers, which would else keep
    the old ones in use."""
    decode_steps_per_weight_poll: int = 32
    """With `in_flight`, tokens that each answer grows by between two looks for newer weights. At least 1; the sampler
    pauses for some milliseconds at each."""
    gpus_per_worker: float = 0.0
    """GPUs that Ray sets aside for each worker; at least 0."""
    heartbeat_timeout: float = 30.0
    """Seconds after which a worker that says nothing is given up: what it was playing goes to others. Above 0."""
    no_progress_timeout: float = 900.0
    """Seconds without a single group, or without a coordinator, after which the run ends with an error. Above 0; the
    first group comes after the workers have compiled."""

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
                raise ValueError(f"workers.{name} is {value}; it is a number of seconds above 0")


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """What lies between sampling and training."""

    max_staleness: int = 1
    """Most steps by which the weights behind a group's oldest token may be behind those that it updates; older groups
    are dropped. 0 samples only what the next step needs, with its weights, as `mode: sync` does."""
    max_uses: int = 1
    """Steps that each group is trained in, at most `max_staleness + 1`."""
    half_life: float | None = None
    """Steps after which a waiting group is half as likely to be drawn; null trains on the oldest first."""
    capacity: int | None = None
    """Most groups that are ordered or waiting at a time, at least `rollouts.prompts_per_step`; null leaves it to
    `max_staleness`: as many as are trained on before they are too old."""

    keep_sampling_weights: bool = False
    """Keep the weights of the last `max_staleness` versions in host memory, so that an `off_policy_correction` scores
    each rollout with the very weights that sampled it, and ratios start there. Without it the newest weights do the
    scoring, and the correction makes up for staleness too."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"replay.max_staleness is {self.max_staleness}; it must be at least 0")
        if not 1 <= self.max_uses <= self.max_staleness + 1:
            raise ValueError(
                f"replay.max_uses is {self.max_uses}; a group is used once a step and for "
                f"replay.max_staleness = {self.max_staleness} steps, so it must be from 1 to {self.max_staleness + 1}"
            )
        if self.half_life is not None and not (self.half_life > 0 and math.isfinite(self.half_life)):
            raise ValueError(f"replay.half_life is {self.half_life}; it is a number of steps above 0, or null")
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"replay.capacity is {self.capacity}; it must be at least 1, or null")
