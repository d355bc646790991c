# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Which turns stood at the same place: the state hashing function of GiGPO, the user's or the default."""

import dataclasses
from collections.abc import Callable

from marin_rl.environments.user_file import UserFileError, load_from_file
from marin_rl.objectives.gigpo import anchor_of
from marin_rl.types import Message

StateHash = Callable[[tuple[Message, ...], object], str]
"""From the messages that the policy was shown, and the environment's `anchor_state` (None where it named none), to a
text that equal states share."""


def default_state_hash(messages: tuple[Message, ...], anchor_state: object) -> str:
    """The hash of the canonical JSON of the environment's anchor state or, without one, of the messages."""
    return anchor_of(list(messages) if anchor_state is None else anchor_state)


@dataclasses.dataclass(frozen=True)
class StateHashingConfig:
    """A state hashing function of one's own. It runs in the training process, once a turn."""

    path: str
    """The Python file that has it; relative paths start at the working directory."""
    function: str
    """Its name: it takes the messages shown and the environment's `anchor_state`, and returns a text."""

    def build(self) -> StateHash:
        """Import the function.

        Raises:
            UserFileError: if the file has no such function.
        """
        found = load_from_file(self.path, self.function)
        if not callable(found):
            raise UserFileError(
                f"{self.function!r} of {self.path} is {type(found).__name__}, and not a function of messages and "
                "anchor state"
            )
        where = f"rollouts.state_hashing: {self.function!r} of {self.path}"

        def hash_state(messages: tuple[Message, ...], anchor_state: object) -> str:
            try:
                hashed = found(messages, anchor_state)
            except Exception as error:
                raise UserFileError(f"{where} raised {type(error).__name__}: {error}") from error
            if not isinstance(hashed, str):
                raise UserFileError(f"{where} returned {type(hashed).__name__}; it must return a text")
            return hashed

        return hash_state
