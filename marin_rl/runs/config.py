# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Section of `TrainConfig` for checkpoints."""

import dataclasses
from typing import Annotated

from annotated_types import Ge

from marin_rl.utils.settings.checks import ConfigSection


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(ConfigSection):
    """When to save checkpoints, and which ones to keep."""

    every: Annotated[int, Ge(0)] = 50
    """Steps between checkpoints; the last step is always saved. 0 saves only the last step."""
    keep_last: Annotated[int, Ge(2), "one to fall back to"] = 2
    """Number of newest checkpoints to keep: an undamaged one remains if the newest is damaged."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Keep the checkpoints of all steps divisible by this number; 0 keeps only the last `keep_last`."""
