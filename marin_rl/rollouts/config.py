# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Settings of rollouts: the handling of long prompts, and a user's hash of states."""

import dataclasses
import enum
from collections.abc import Callable

from marin_rl.types import Message
from marin_rl.utils.settings.fields import LOCAL_FILE
from marin_rl.utils.user_code import UserFileError, load_function, user_errors

StateHash = Callable[[tuple[Message, ...], object], str]
"""Maps the messages shown to the policy and the environment's `anchor_state` (None if it has none) to a string that is
equal for equal states."""


@dataclasses.dataclass(frozen=True)
class StateHashingConfig:
    """A user's state hashing function. It runs in the training process, once per prompt and once per later turn."""

    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """The Python file of the function; relative paths start at the working directory."""
    function: str
    """Name of the function. It takes the messages and the environment's `anchor_state`, and returns a string."""

    def build(self) -> StateHash:
        """Import the function.

        Raises:
            UserFileError: if the file has no such function.
        """
        function = load_function(self.path, self.function, "a function of messages and anchor state")
        source = f"rollouts.state_hashing: {self.function!r} of {self.path}"

        def hash_state(messages: tuple[Message, ...], anchor_state: object) -> str:
            with user_errors(f"{source} raised"):
                hashed = function(messages, anchor_state)
            if not isinstance(hashed, str):
                raise UserFileError(f"{source} returned {type(hashed).__name__}; it must return a str")
            return hashed

        return hash_state


class LongPrompts(enum.StrEnum):
    """Handling of tasks with a too long prompt."""

    ERROR = "error"
    """End the run with an error that names the task."""
    SKIP = "skip"
    """Skip the task and use the next one."""
    TRUNCATE_LEFT = "truncate_left"
    """Keep the prompt's last tokens."""
