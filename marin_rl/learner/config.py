# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sections of `TrainConfig` for the critic, checkpoints and the export of weights."""

import dataclasses
import enum
import math

import jax.numpy as jnp

from marin_rl.config_fields import check_at_least, convert_enum_fields


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """Configuration of a critic, which estimates the return from each token on. `advantage: {type: gae}` needs one."""

    shared_trunk: bool = True
    """True: the value head shares the policy's trunk, at no extra cost, and the value loss also updates the trunk.
    False: the critic has a separate trunk, initialized as a copy of the policy's. It doubles time and memory, and the
    value loss does not affect the policy."""
    coefficient: float = 0.5
    """Weight of the value loss relative to the policy term, above 0."""
    clip: float | None = 0.2
    """ε_v, above 0: bound on the change of a value from its old value in the clipped value loss; null for no bound."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            raise ValueError(f"critic.coefficient is {self.coefficient}; it must be finite and above 0")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"critic.clip is {self.clip}; it must be finite and above 0, or null for no bound")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, and which ones to keep."""

    every: int = 50
    """Steps between checkpoints; the last step is always saved. 0 saves only the last step."""
    keep_last: int = 2
    """Number of newest checkpoints to keep; at least 2, so that an undamaged one remains if the newest is damaged."""
    keep_every: int = 0
    """Keep the checkpoints of all steps divisible by this number; 0 keeps only the last `keep_last`."""

    def __post_init__(self) -> None:
        check_at_least(self, "checkpoint", every=0, keep_every=0)
        if self.keep_last < 2:
            raise ValueError(f"checkpoint.keep_last is {self.keep_last}; keep at least 2, one to fall back to")


class ExportDtype(enum.StrEnum):
    """Type of exported weights."""

    PARAMETER = "parameter"
    """The type of the trained parameters."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Rounded to nearest, half the size of float32."""


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Export of the final weights in Hugging Face format."""

    dtype: ExportDtype = ExportDtype.PARAMETER
    """Type of the exported weights: `parameter` (that of the trained parameters), `float32` or `bfloat16`."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)

    @property
    def numeric_dtype(self) -> jnp.dtype | None:
        """The type; None for that of the parameters."""
        return None if self.dtype is ExportDtype.PARAMETER else jnp.dtype(self.dtype.value)
