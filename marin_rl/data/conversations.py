# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Conversations and demonstrations as batches of one rollout, with loss on the replies only."""

from collections.abc import Sequence

import numpy as np

from marin_rl.batching.rollout_batch import NO_TURN, RolloutBatch, make_batch
from marin_rl.tokenization.chat import ChatTokenizer, truncate_at_reply
from marin_rl.types import Message, Task


def batch_conversation(
    messages: Sequence[Message], *, id: str, max_length: int, tokenizer: ChatTokenizer
) -> RolloutBatch | None:
    """Convert a conversation to a batch of one rollout, with loss on the assistant messages only.

    Assistant messages that do not fit completely into `max_length` are dropped, so no partial message is trained on.
    Turn `k` is the k-th contiguous span of loss tokens. None if no assistant message fits.
    """
    return _batch_text(*tokenizer.encode_conversation(messages), id, max_length)


def batch_demonstration(
    messages: Sequence[Message], task: Task, *, max_length: int, tokenizer: ChatTokenizer
) -> RolloutBatch | None:
    """Convert a demonstration to an episode that sampled its replies, like `batch_conversation`.

    If the template rewrites the history, the batch ends with the last reply before the rewrite. `messages` are those of
    the task, then the replies with the observations that follow them. The task gives the id of the rollout and the
    number of messages before the replies. None if no reply fits.
    """
    token_ids, mask = tokenizer.encode_replies(messages, len(task.messages))[0]
    return _batch_text(token_ids, mask, task.id, max_length)


def _batch_text(token_ids: Sequence[int], mask: Sequence[bool], id: str, max_length: int) -> RolloutBatch | None:
    truncated = truncate_at_reply(token_ids, mask, max_length)
    if truncated is None:
        return None
    input_ids, loss_mask = np.array(truncated[0], np.int32), np.array(truncated[1], np.bool_)
    starts_reply = loss_mask & ~np.append(False, loss_mask[:-1])
    turn_ids = np.where(loss_mask, np.cumsum(starts_reply) - 1, NO_TURN).astype(np.int32)
    return make_batch([id], [[len(input_ids)]], input_ids=input_ids, turn_ids=turn_ids)
