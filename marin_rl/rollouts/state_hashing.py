# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""State hashing of GiGPO: the default function, and functions of the user."""

import dataclasses
from collections.abc import Callable

from marin_rl.objectives.gigpo import anchor_of
from marin_rl.types import Message
from marin_rl.user_code import UserFileError, load_from_file

StateHash = Callable[[tuple[Message, ...], object], str]
"""Maps the messages shown to the policy and the environment's `anchor_state` (None if it has none) to a string that is
equal for equal states."""


def default_state_hash(messages: tuple[Message, ...], anchor_state: object) -> str:
    """Hash the canonical JSON of the environment's anchor state or, if it is None, of the messages."""
    return anchor_of(list(messages) if anchor_state is None else anchor_state)


@dataclasses.dataclass(frozen=True)
class StateHashingConfig:
    """A user's state hashing function. It runs in the training process, once per turn."""

    path: str
    """The Python file of the function; relative paths start at the working directory."""
    function: str
    """Name of the function. It takes the messages and the environment's `anchor_state`, and returns a string."""

    def build(self) -> StateHash:
        """Import the function.

        Raises:
            UserFileError: if the file has no such function.
        """
        function = load_from_file(self.path, self.function)
        if not callable(function):
            raise UserFileError(
                f"{self.function!r} of {self.path} is {type(function).__name__}; it must be a function of messages and "
                "anchor state"
            )
        source = f"rollouts.state_hashing: {self.function!r} of {self.path}"

        def hash_state(messages: tuple[Message, ...], anchor_state: object) -> str:
            try:
                hashed = function(messages, anchor_state)
            except Exception as error:
                raise UserFileError(f"{source} raised {type(error).__name__}: {error}") from error
            if not isinstance(hashed, str):
                raise UserFileError(f"{source} returned {type(hashed).__name__}; it must return a str")
            return hashed

        return hash_state
