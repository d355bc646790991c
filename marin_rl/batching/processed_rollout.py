# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Conversion of rollouts to padded arrays."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped

from marin_rl.batching.places import join
from marin_rl.tokenization.chat import ChatTokenizer, truncate_at_reply
from marin_rl.types import Message, Rollout, Task, make_unchecked

_DTYPES = {
    "input_ids": np.int32,
    "loss_mask": np.bool_,
    "segment_ids": np.int32,
    "policy_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "turn_ids": np.int32,
    "values": np.float32,
}
_NO_TURN = -1


@dataclasses.dataclass(frozen=True)
class ProcessedRollout:
    """Arrays of one rollout, with one row per sequence, padded to a common length.

    Most rollouts are one sequence. If the chat template rewrites the history, a rollout has several sequences and is
    still counted as one rollout. Entry `t` of every array belongs to token `t`.
    """

    source: str
    """Name of the environment."""
    id: str
    """Id of the rollout."""
    input_ids: Int32[np.ndarray, "batch position"]
    """Token ids; the tokenizer's padding token if `segment_ids` is 0."""
    loss_mask: Bool[np.ndarray, "batch position"]
    """True for the sampled tokens (for supervised text, the target tokens)."""
    segment_ids: Int32[np.ndarray, "batch position"]
    """1 for tokens, 0 for padding."""
    policy_logprobs: Float32[np.ndarray, "batch position"]
    """Log-probabilities (nats) under the sampling policy; 0 outside the loss mask."""
    reference_logprobs: Float32[np.ndarray, "batch position"]
    """Log-probabilities (nats) under the frozen reference; 0 outside the loss mask and until scored."""
    turn_ids: Int32[np.ndarray, "batch position"]
    """Turn (0, 1, …) of each sampled token; -1 outside the loss mask."""
    values: Float32[np.ndarray, "batch position"]
    """The critic's value of each sampled token's state; 0 outside the loss mask and until scored."""

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.ndim != 2 or array.shape != shape:
                raise ValueError(f"ProcessedRollout {self.id}: {name} has shape {array.shape}, input_ids has {shape}")
            if array.dtype != dtype:
                raise ValueError(f"ProcessedRollout {self.id}: {name} is {array.dtype}, expected {np.dtype(dtype)}")
        if self.input_ids.size:
            self._check_values()

    def _check_values(self) -> None:
        segments, turns = self.segment_ids, self.turn_ids
        if segments.min() < 0 or segments.max() > 1 or (segments[:, :-1] < segments[:, 1:]).any():
            raise ValueError(
                f"ProcessedRollout {self.id}: segment_ids must be 1 for the tokens of a row and 0 for the padding after"
            )
        if (self.loss_mask > segments).any():
            raise ValueError(f"ProcessedRollout {self.id}: loss_mask includes padding")
        if self.loss_mask[:, 0].any():
            raise ValueError(
                f"ProcessedRollout {self.id}: loss_mask includes the first token of a row, which is never predicted"
            )
        # The extremes of an array with NaN are NaN, for which every comparison is false.
        for name in ("policy_logprobs", "reference_logprobs"):
            array = getattr(self, name)
            if not (array.min() > -np.inf and array.max() <= 0):
                raise ValueError(f"ProcessedRollout {self.id}: {name} must be finite and <= 0")
        if not (self.values.min() > -np.inf and self.values.max() < np.inf):
            raise ValueError(f"ProcessedRollout {self.id}: values must be finite")
        if ((turns >= 0) != self.loss_mask).any():
            raise ValueError(f"ProcessedRollout {self.id}: turn_ids must be >= 0 for loss tokens and -1 elsewhere")
        sampled = turns[self.loss_mask]
        if (sampled[:-1] > sampled[1:]).any():
            raise ValueError(f"ProcessedRollout {self.id}: turn_ids must not decrease")

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence."""
        return tuple(self.segment_ids.sum(axis=1).tolist())

    @functools.cached_property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens over all sequences, which is the length of arrays over action tokens."""
        return int(np.count_nonzero(self.loss_mask))


def process_rollout(rollout: Rollout, *, length: int, pad_token_id: int) -> ProcessedRollout:
    """Convert a sampled rollout to arrays with exactly the sampled tokens.

    Args:
        rollout: the rollout. A failed rollout keeps its finished turns.
        length: positions per row.
        pad_token_id: token id of the padding.

    Returns:
        The arrays, with one row per sequence. Reference log-probabilities and values are 0.

    Raises:
        ValueError: if a sequence is longer than `length`; the message gives the rollout and both lengths.
    """
    return _convert([rollout], [sequence_lengths(rollout)], [length], pad_token_id)[0]


def process_rollouts(rollouts: Sequence[Rollout], *, max_length: int, pad_token_id: int) -> list[ProcessedRollout]:
    """Convert sampled rollouts to arrays like `process_rollout`, with rows as long as the longest sequence of each.

    Args:
        rollouts: the rollouts.
        max_length: maximum number of positions per row.
        pad_token_id: token id of the padding.

    Raises:
        ValueError: if a sequence is longer than `max_length`; the message gives the rollout and both lengths.
    """
    lengths = [sequence_lengths(rollout) for rollout in rollouts]
    row_lengths = [min(max(of_rollout, default=0), max_length) for of_rollout in lengths]
    return _convert(rollouts, lengths, row_lengths, pad_token_id)


def _convert(
    rollouts: Sequence[Rollout], lengths: Sequence[Sequence[int]], row_lengths: Sequence[int], pad_token_id: int
) -> list[ProcessedRollout]:
    """Convert rollouts together: the arrays of each are views of arrays of all, which are filled and checked once."""
    for rollout, of_rollout, row_length in zip(rollouts, lengths, row_lengths, strict=True):
        if (longest := max(of_rollout, default=0)) > row_length:
            raise ValueError(
                f"rollout {rollout.id}: a sequence of {longest} tokens does not fit into rows of {row_length} "
                "positions; raise rollouts.max_length"
            )
    shapes = [(len(of_rollout), row_length) for of_rollout, row_length in zip(lengths, row_lengths, strict=True)]
    # Tokens and padding of each row.
    rows = [
        (length, row_length - length)
        for of_rollout, (_, row_length) in zip(lengths, shapes, strict=True)
        for length in of_rollout
    ]
    arrays = _fill(rollouts, np.array(rows, np.int64).reshape(-1, 2), pad_token_id)
    width = np.array([row_length for count, row_length in shapes for _ in range(count)], np.int64)
    first = (np.cumsum(width) - width)[width > 0]
    loss_mask, logprobs = arrays["loss_mask"], arrays["policy_logprobs"]
    # The rest is valid by construction. The checks of a single rollout name the error.
    is_valid = bool(np.all((logprobs > -np.inf) & (logprobs <= 0))) and not loss_mask[first].any()
    make = functools.partial(make_unchecked, ProcessedRollout) if is_valid else ProcessedRollout
    ends = np.cumsum([0, *itertools.starmap(operator.mul, shapes)])
    num_loss_tokens = np.diff(np.append(0, np.cumsum(loss_mask))[ends])
    bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), num_loss_tokens.tolist(), strict=True)
    converted = []
    for rollout, of_rollout, shape, (start, end, count) in zip(rollouts, lengths, shapes, bounds, strict=True):
        views: dict[str, Any] = {name: array[start:end].reshape(shape) for name, array in arrays.items()}
        processed = make(source=rollout.task.environment, id=rollout.id, **views)
        # The values of cached properties, which would count the tokens again.
        vars(processed).update(lengths=tuple(of_rollout), num_loss_tokens=count)
        converted.append(processed)
    return converted


def _fill(
    rollouts: Sequence[Rollout], rows: Int64[np.ndarray, "rows 2"], pad_token_id: int
) -> dict[str, Shaped[np.ndarray, " positions"]]:
    """Return the arrays of all rollouts, row by row; `rows` has the number of tokens and of padding of each row."""
    turns = [(index, turn) for rollout in rollouts for index, turn in enumerate(rollout.turns)]
    runs = [run for _, turn in turns for run in (turn.observation_tokens, turn.generation.token_ids)]
    turn_of_run = [turn for index, _ in turns for turn in (_NO_TURN, index)]
    is_token = np.repeat(np.tile([True, False], len(rows)), rows.reshape(-1))
    size = len(is_token)
    input_ids, turn_ids = np.full(size, pad_token_id, np.int32), np.full(size, _NO_TURN, np.int32)
    input_ids[is_token] = np.array([*itertools.chain.from_iterable(runs)], np.int32)
    turn_ids[is_token] = np.repeat(np.array(turn_of_run, np.int32), np.array([*map(len, runs)], np.int64))
    loss_mask, policy_logprobs = turn_ids >= 0, np.zeros(size, np.float32)
    logprobs = itertools.chain.from_iterable(turn.generation.logprobs for _, turn in turns)
    policy_logprobs[loss_mask] = np.array([*logprobs], np.float32)
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "segment_ids": is_token.astype(np.int32),
        "policy_logprobs": policy_logprobs,
        "reference_logprobs": np.zeros(size, np.float32),
        "turn_ids": turn_ids,
        "values": np.zeros(size, np.float32),
    }


def sequence_lengths(rollout: Rollout) -> list[int]:
    """Return the number of tokens of each sequence of a rollout."""
    lengths: list[int] = []
    for turn in rollout.turns:
        if turn.starts_sequence:
            lengths.append(0)
        lengths[-1] += turn.num_tokens
    return lengths


def process_conversation(
    messages: Sequence[Message], *, id: str, source: str, length: int, tokenizer: ChatTokenizer
) -> ProcessedRollout | None:
    """Convert a conversation to arrays with loss on the assistant messages only.

    Assistant messages that do not fit completely into `length` are dropped, so no partial message is trained on. Turn
    `k` is the k-th contiguous span of loss tokens.

    Args:
        messages: the conversation.
        id: id of the resulting rollout.
        source: name of the environment or data set.
        length: positions per row.
        tokenizer: chat tokenizer.

    Returns:
        The arrays, or None if no assistant message fits.
    """
    return _truncate_and_pad(*tokenizer.encode_conversation(messages), id, source, length, tokenizer.pad_token_id)


def process_demonstration(
    messages: Sequence[Message], task: Task, *, length: int, tokenizer: ChatTokenizer
) -> ProcessedRollout | None:
    """Convert a demonstration to the arrays of an episode that sampled its replies, like `process_conversation`.

    Args:
        messages: the messages of the task, then the replies with the observations that follow them.
        task: the task, for the id and environment of the rollout.
        length: positions per row.
        tokenizer: chat tokenizer.

    Returns:
        The arrays, or None if no reply fits.
    """
    token_ids, mask = tokenizer.encode_replies(messages, len(task.messages))
    return _truncate_and_pad(token_ids, mask, task.id, task.environment, length, tokenizer.pad_token_id)


def join_arrays(rollouts: Sequence[ProcessedRollout], name: str) -> Shaped[np.ndarray, " positions"]:
    """Join one array of every rollout, row by row."""
    return join([getattr(rollout, name) for rollout in rollouts], _DTYPES[name])


def without_loss(rollout: ProcessedRollout) -> ProcessedRollout:
    """Remove all tokens of a rollout from the loss; the tokens stay."""
    names = ("loss_mask", "policy_logprobs", "reference_logprobs", "values")
    zeros: dict[str, Any] = {name: np.zeros(rollout.input_ids.shape, _DTYPES[name]) for name in names}
    return dataclasses.replace(rollout, turn_ids=np.full(rollout.input_ids.shape, _NO_TURN, np.int32), **zeros)


def _truncate_and_pad(
    token_ids: Sequence[int], mask: Sequence[bool], id: str, source: str, length: int, pad_token_id: int
) -> ProcessedRollout | None:
    truncated = truncate_at_reply(token_ids, mask, length)
    if truncated is None:
        return None
    truncated_ids, truncated_mask = truncated
    arrays, end = _padding(1, length, pad_token_id), len(truncated_ids)
    loss_mask = np.asarray(truncated_mask, np.bool_)
    starts_reply = loss_mask & ~np.concatenate([[False], loss_mask[:-1]])
    arrays["input_ids"][0, :end] = truncated_ids
    arrays["turn_ids"][0, :end] = np.where(loss_mask, np.cumsum(starts_reply) - 1, _NO_TURN)
    arrays["loss_mask"][0, :end] = loss_mask
    arrays["segment_ids"][0, :end] = 1
    return ProcessedRollout(source=source, id=id, **arrays)


def _padding(rows: int, length: int, pad_token_id: int) -> dict[str, Any]:
    """Return the arrays of a rollout without tokens."""
    arrays = {name: np.zeros((rows, length), dtype) for name, dtype in _DTYPES.items()}
    arrays["input_ids"].fill(pad_token_id)
    arrays["turn_ids"].fill(_NO_TURN)
    return arrays
