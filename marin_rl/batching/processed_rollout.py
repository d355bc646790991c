# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From rollouts to padded arrays."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from marin_rl.tokenization.chat import ChatTokenizer, truncate_at_reply
from marin_rl.types import Message, Rollout, Task


@dataclasses.dataclass(frozen=True)
class ProcessedRollout:
    """One rollout as arrays: a row for each of its sequences, padded to a common length.

    Almost every rollout is one sequence. Where a chat template rewrote the history it is several, and
    still counts as one rollout. Entry `t` of every array belongs to token `t` (see
    `marin_rl.batching.alignment`).
    """

    source: str
    """Name of the environment it comes from."""
    id: str
    """The rollout's id."""
    input_ids: Int32[np.ndarray, "batch position"]
    """Token ids; the tokenizer's padding token where `segment_ids` is 0."""
    loss_mask: Bool[np.ndarray, "batch position"]
    """True exactly on tokens that the policy sampled (or, for supervised text, should have written)."""
    segment_ids: Int32[np.ndarray, "batch position"]
    """1 on tokens, 0 on padding."""
    policy_logprobs: Float32[np.ndarray, "batch position"]
    """Log-probabilities under the policy that sampled; 0 where there is no loss."""
    reference_logprobs: Float32[np.ndarray, "batch position"]
    """Log-probabilities under the frozen reference; 0 where there is no loss, and 0 until scored."""
    turn_ids: Int32[np.ndarray, "batch position"]
    """Which turn of the rollout (0, 1, …) each sampled token belongs to; -1 where there is no loss."""
    values: Float32[np.ndarray, "batch position"]
    """The critic's value of each sampled token's state; 0 where there is no loss, and 0 until scored."""

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        expected: Mapping[str, tuple[np.ndarray, type]] = {
            "input_ids": (self.input_ids, np.int32),
            "loss_mask": (self.loss_mask, np.bool_),
            "segment_ids": (self.segment_ids, np.int32),
            "policy_logprobs": (self.policy_logprobs, np.float32),
            "reference_logprobs": (self.reference_logprobs, np.float32),
            "turn_ids": (self.turn_ids, np.int32),
            "values": (self.values, np.float32),
        }
        for name, (array, dtype) in expected.items():
            if array.ndim != 2 or array.shape != shape:
                raise ValueError(f"ProcessedRollout {self.id}: {name} has shape {array.shape}, input_ids has {shape}")
            if array.dtype != dtype:
                raise ValueError(f"ProcessedRollout {self.id}: {name} is {array.dtype}, expected {np.dtype(dtype)}")
        tokens = self.segment_ids == 1
        if np.any(~tokens & (self.segment_ids != 0)) or np.any(~tokens[:, :-1] & tokens[:, 1:]):
            raise ValueError(
                f"ProcessedRollout {self.id}: segment_ids is not 1 on the first positions of a row and 0 after them"
            )
        if np.any(self.loss_mask & ~tokens):
            raise ValueError(f"ProcessedRollout {self.id}: loss_mask covers padding")
        if np.any(self.loss_mask[:, 0]):
            raise ValueError(f"ProcessedRollout {self.id}: loss_mask covers a first token, which nothing predicts")
        for name, array in (("policy_logprobs", self.policy_logprobs), ("reference_logprobs", self.reference_logprobs)):
            if not np.all(np.isfinite(array)) or np.any(array > 0):
                raise ValueError(f"ProcessedRollout {self.id}: {name} has values that are not finite or above 0")
        if not np.all(np.isfinite(self.values)):
            raise ValueError(f"ProcessedRollout {self.id}: values has entries that are not finite")
        if np.any((self.turn_ids >= 0) != self.loss_mask):
            raise ValueError(
                f"ProcessedRollout {self.id}: turn_ids is not the turn of each loss token and -1 elsewhere"
            )
        if np.any(np.diff(self.turn_ids[self.loss_mask]) < 0):
            raise ValueError(f"ProcessedRollout {self.id}: turn_ids goes back from a turn to an earlier one")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(np.count_nonzero(self.segment_ids, axis=1).tolist())

    @property
    def num_loss_tokens(self) -> int:
        """Tokens with loss, over all sequences: the length of every array over its action tokens."""
        return int(np.count_nonzero(self.loss_mask))


def process_rollout(rollout: Rollout, *, length: int, pad_token_id: int) -> ProcessedRollout:
    """Lay a sampled rollout out as arrays, token for token as it was sampled.

    Args:
        rollout: what was sampled. A failed rollout keeps the turns it got to; it has no return.
        length: positions of a row.
        pad_token_id: what fills a row's tail.

    Raises:
        ValueError: if a sequence is longer than `length`, naming the rollout and both lengths.
    """
    sequences: list[_Sequence] = []
    for index, turn in enumerate(rollout.turns):
        if turn.starts_sequence:
            sequences.append(_Sequence([], [], []))
        observed, sampled = turn.observation_tokens, turn.generation
        sequences[-1].token_ids.extend([*observed, *sampled.token_ids])
        sequences[-1].turn_ids.extend([_NO_TURN] * len(observed) + [index] * len(sampled.token_ids))
        sequences[-1].logprobs.extend([*[0.0] * len(observed), *sampled.logprobs])
    return _lay_out(sequences, rollout.task.environment, rollout.id, length, pad_token_id)


def process_conversation(
    messages: Sequence[Message], *, id: str, source: str, length: int, tokenizer: ChatTokenizer
) -> ProcessedRollout | None:
    """Lay a written conversation out as arrays: loss on what the assistant says, and nowhere else.

    The text is tokenized through the chat template with assistant masks. Assistant messages that do
    not fit whole into `length` are dropped whole, so that half of one is never trained on. Turn `k` is
    the k-th stretch of loss tokens.

    Returns:
        The arrays, or None where no assistant message fits.
    """
    return _fitted(*tokenizer.encode_conversation(messages), id, source, length, tokenizer.pad_token_id)


def process_demonstration(
    messages: Sequence[Message], task: Task, *, length: int, tokenizer: ChatTokenizer
) -> ProcessedRollout | None:
    """Lay a demonstration out as an episode that sampled its replies; see `ChatTokenizer.encode_replies`.

    Replies that do not fit whole into `length` are dropped, as in `process_conversation`.

    Args:
        messages: the task's, then replies and what they were answered.
        task: names the rollout and its environment.
        length: positions of a row.
        tokenizer: text to tokens.

    Returns:
        The arrays, or None where no reply fits.
    """
    token_ids, mask = tokenizer.encode_replies(messages, len(task.messages))
    return _fitted(token_ids, mask, task.id, task.environment, length, tokenizer.pad_token_id)


def without_loss(rollout: ProcessedRollout) -> ProcessedRollout:
    """The same tokens with loss on none of them: a rollout that is kept but not learned from."""
    zeros = np.zeros(rollout.input_ids.shape, np.float32)
    return dataclasses.replace(
        rollout,
        loss_mask=np.zeros(rollout.input_ids.shape, np.bool_),
        turn_ids=np.full(rollout.input_ids.shape, _NO_TURN, np.int32),
        policy_logprobs=zeros,
        reference_logprobs=zeros,
        values=zeros,
    )


def _fitted(
    token_ids: Sequence[int], mask: Sequence[bool], id: str, source: str, length: int, pad_token_id: int
) -> ProcessedRollout | None:
    fitted = truncate_at_reply(token_ids, mask, length)
    if fitted is None:
        return None
    fitted_ids, fitted_mask = fitted
    loss_mask = np.asarray(fitted_mask, np.bool_)
    starts_reply = loss_mask & ~np.concatenate([[False], loss_mask[:-1]])
    turn_ids = np.where(loss_mask, np.cumsum(starts_reply) - 1, _NO_TURN)
    sequence = _Sequence(list(fitted_ids), turn_ids.tolist(), [0.0] * len(fitted_ids))
    return _lay_out([sequence], source, id, length, pad_token_id)


_NO_TURN = -1


class _Sequence(NamedTuple):
    token_ids: list[int]
    turn_ids: list[int]
    logprobs: list[float]


def _lay_out(sequences: Sequence[_Sequence], source: str, id: str, length: int, pad_token_id: int) -> ProcessedRollout:
    rows = len(sequences)
    input_ids = np.full((rows, length), pad_token_id, dtype=np.int32)
    turn_ids = np.full((rows, length), _NO_TURN, dtype=np.int32)
    segment_ids = np.zeros((rows, length), dtype=np.int32)
    policy_logprobs = np.zeros((rows, length), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        used = len(sequence.token_ids)
        if used > length:
            raise ValueError(
                f"rollout {id}: a sequence of {used} tokens does not fit into rows of {length} positions; "
                "raise rollouts.max_length"
            )
        input_ids[row, :used] = sequence.token_ids
        turn_ids[row, :used] = sequence.turn_ids
        policy_logprobs[row, :used] = sequence.logprobs
        segment_ids[row, :used] = 1
    return ProcessedRollout(
        source=source,
        id=id,
        input_ids=input_ids,
        loss_mask=turn_ids != _NO_TURN,
        segment_ids=segment_ids,
        policy_logprobs=policy_logprobs,
        reference_logprobs=np.zeros((rows, length), dtype=np.float32),
        turn_ids=turn_ids,
        values=np.zeros((rows, length), dtype=np.float32),
    )
