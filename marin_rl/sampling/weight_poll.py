# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""When newer weights may come while sequences are being decoded."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class WeightPoll:
    """Moments between two rounds of decoding at which newer weights may be handed over."""

    look: Callable[[], None]
    """Called before prompts are read and then between rounds, in the thread that samples. It may call
    `update_weights`; what it raises ends the call of `sample`."""
    rounds: int
    """Rounds of decoding between two looks, each a token for every sequence. At least 1."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; there is at least 1 between two looks")
