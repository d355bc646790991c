# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Polling for newer weights during decoding."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class WeightPoll:
    """Polls for newer weights between decode steps."""

    poll: Callable[[], None]
    """Called before each prefill and then between decode steps, in the thread that samples. It may call
    `update_weights`; an exception ends the call of `sample`."""
    decode_steps: int
    """Number of decode steps between two polls; each samples one token per sequence. At least 1."""

    def __post_init__(self) -> None:
        if self.decode_steps < 1:
            raise ValueError(f"decode_steps must be at least 1, got {self.decode_steps}")
