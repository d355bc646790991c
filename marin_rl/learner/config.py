# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sections of the run's config for the critic and the export of weights."""

import dataclasses
import enum
from typing import Annotated

import jax.numpy as jnp
from annotated_types import Gt

from marin_rl.utils.settings.checks import ConfigSection


@dataclasses.dataclass(frozen=True)
class CriticConfig(ConfigSection):
    """Configuration of a critic, which estimates the return from each token on. `advantage: {type: gae}` needs one."""

    shared_trunk: bool = True
    """True: the value head shares the policy's trunk, at no extra cost, and the value loss also updates the trunk.
    False: the critic has a separate trunk, initialized as a copy of the policy's. It doubles time and memory, and the
    value loss does not affect the policy."""
    coefficient: Annotated[float, Gt(0)] = 0.5
    """Weight of the value loss relative to the policy term."""
    clip: Annotated[float, Gt(0)] | None = 0.2
    """ε_v: bound on the change of a value from its old value in the clipped value loss; null for no bound."""


class ExportDtype(enum.StrEnum):
    """Type of exported weights."""

    PARAMETER = "parameter"
    """The type of the trained parameters."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Rounded to nearest, half the size of float32."""


@dataclasses.dataclass(frozen=True)
class ExportConfig(ConfigSection):
    """Export of the final weights in Hugging Face format."""

    dtype: ExportDtype = ExportDtype.PARAMETER
    """Type of the exported weights: `parameter` (that of the trained parameters), `float32` or `bfloat16`."""

    @property
    def numeric_dtype(self) -> jnp.dtype | None:
        """The type; None for that of the parameters."""
        return None if self.dtype is ExportDtype.PARAMETER else jnp.dtype(self.dtype.value)
