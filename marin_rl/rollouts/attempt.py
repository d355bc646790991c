# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The inputs of one rollout: its task and seeds, and its limits."""

import dataclasses
import hashlib
import json
import logging

from marin_rl.rollouts.config import LongPrompts
from marin_rl.sampling.sampler import PromptTooLongError
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, Message, Task

logger = logging.getLogger(__name__)


def anchor_of(observation: object) -> str:
    """Hash an observation to its anchor state: the hexadecimal SHA-256 of its JSON with sorted keys and no blanks.

    Raises:
        TypeError: if the observation is not JSON-serialisable; dictionaries must have string keys.

    >>> anchor_of({"x": 1, "y": [2]}) == anchor_of({"y": [2], "x": 1})
    True
    >>> anchor_of("room 1") == anchor_of("room 2")
    False
    """
    try:
        text = json.dumps(observation, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"an observation of type {type(observation).__name__} has no canonical JSON ({error}); "
            "use strings, finite numbers, lists and dictionaries with string keys"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()


def state_hash(messages: tuple[Message, ...], anchor_state: object) -> str:
    """Hash the canonical JSON of the environment's anchor state or, if it is None, of the messages.

    GiGPO compares turns with equal hashes.
    """
    return anchor_of(list(messages) if anchor_state is None else anchor_state)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one rollout."""

    max_length: int
    """Maximum tokens of one sequence, prompt and replies together."""
    max_new_tokens: int
    """Maximum tokens of one reply, including the stop token."""
    max_turns: int = 1
    """Maximum number of replies in one rollout."""
    max_tokens: int | None = None
    """Maximum tokens of all replies of a rollout together; None: no limit."""
    max_seconds: float = 120.0
    """Maximum seconds that the environment may take for a whole rollout; the wait for the sampler does not count."""
    max_prompt_length: int | None = None
    """Maximum tokens of a task's prompt; None: `max_length - 1`, which leaves room for one token of a reply."""
    long_prompts: LongPrompts = LongPrompts.ERROR
    """Handling of tasks with a longer prompt."""

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a task's prompt."""
        return self.max_length - 1 if self.max_prompt_length is None else self.max_prompt_length

    @property
    def prompt_setting(self) -> str:
        """Setting that determines `longest_prompt`."""
        return "rollouts.max_length" if self.max_prompt_length is None else "rollouts.max_prompt_length"

    def should_skip(self, task: Task, tokenizer: ChatTokenizer) -> bool:
        """Whether to skip a task because its prompt is too long; log the task if so."""
        if self.long_prompts is not LongPrompts.SKIP:
            return False
        length = len(tokenizer.prompt_tokens(task.messages))
        if too_long := length > self.longest_prompt:
            logger.warning(
                "skipping task %s of environment %s: its prompt has %d tokens, more than %d (rollouts.long_prompts)",
                task.id,
                task.environment,
                length,
                self.longest_prompt,
            )
        return too_long

    def prompt_tokens(self, task: Task, tokenizer: ChatTokenizer) -> tuple[int, ...]:
        """Tokenize a task's prompt.

        Raises:
            PromptTooLongError: if the prompt is too long.
        """
        tokens, longest = tokenizer.prompt_tokens(task.messages), self.longest_prompt
        if len(tokens) <= longest:
            return tokens
        limit = self.prompt_setting
        raise PromptTooLongError(
            f"task {task.id!r} of environment {task.environment!r}: its prompt has {len(tokens)} tokens, but {limit} "
            f"allows {longest}; raise {limit}, remove the task, or set rollouts.long_prompts: skip"
        )


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The inputs of one rollout."""

    task: Task
    """The task to attempt."""
    prompt: tuple[int, ...]
    """The task's messages as tokens."""
    reply_start: str
    """Text of the assistant's turn that the prompt contains, such as `<think>`."""
    group_id: str
    """Group id of the rollout."""
    id: str
    """Id of the rollout."""
    seed: int
    """Seed of the policy's replies."""
    start_seed: int
    """Seed of the environment; equal within a group."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    anchor: str
    """Hash of the state that the prompt shows."""


def keep_new_experts(rollout_id: str, generation: Generation, num_context: int, num_observed: int) -> Generation:
    """Remove the chosen experts that earlier turns have; those of the previous turn's last token are new.

    Args:
        rollout_id: id of the rollout, for the error.
        generation: the sampler's reply, with the experts of its whole prompt.
        num_context: number of tokens of the sequence before the turn.
        num_observed: number of tokens of the turn's observation.

    Raises:
        ValueError: if the reply has the experts of another number of tokens; names the rollout.
    """
    if generation.experts is None:
        return generation
    prompt, sampled = num_context + num_observed, len(generation.token_ids)
    if len(generation.experts) != prompt + sampled - 1:
        raise ValueError(
            f"rollout {rollout_id}: the sampler reported the experts of {len(generation.experts)} tokens for a prompt "
            f"of {prompt} and {sampled} sampled tokens; expected those of {prompt + sampled - 1}, all but the last"
        )
    # A copy, because a view would keep the rows of the whole prompt in memory.
    return dataclasses.replace(generation, experts=generation.experts[max(num_context - 1, 0) :].copy())
