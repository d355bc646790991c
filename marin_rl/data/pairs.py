# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokenize rows of preference data: pairs of a chosen and a rejected answer to one prompt.

| columns | prompt |
|---|---|
| `prompt`, `chosen` and `rejected`, each text or messages | `prompt` |
| `chosen` and `rejected`, conversations that begin alike; `prompt` may repeat a part of it | what both begin with |

Loss is on the assistant messages after the prompt. Tokens are those of [rows][marin_rl.data.rows] of supervised data.
"""

import itertools

from marin_rl.data.rows import Example, Form, encode_episode, make_example, read_messages, replies_with_loss
from marin_rl.environments.row_columns import Row, check_columns
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Message


def encode_pair(row: Row, tokenizer: ChatTokenizer, max_tokens: int | None = None) -> Example:
    """Tokenize a pair: the sequences of the chosen answer, then those of the rejected one.

    After `max_tokens` tokens of a sequence, some may be left out; None for all tokens.

    Raises:
        ValueError: if a column is invalid, or the answers are equal or not to the same prompt; the message names the
            row and the column.
        ChatTemplateError: if the chat template rejects a conversation.
    """
    check_columns(row, Form.PAIR.used)
    prompt, *answers = split_pair(row)
    chosen, rejected = (encode_episode(row, prompt, answer, tokenizer, max_tokens) for answer in answers)
    is_complete = max_tokens is None or all(len(ids) < max_tokens for ids, _ in chosen)
    if chosen == rejected and is_complete:
        raise ValueError(f"{row.where}: chosen and rejected have the same tokens, so neither is better; remove the row")
    return make_example(row.where, [*chosen, *rejected], chosen=len(chosen))


def split_pair(row: Row) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the prompt of a row, and the chosen and the rejected answer to it.

    Raises:
        ValueError: if a column is invalid, or the answers are equal or not to the same prompt; the message names the
            row and the column.
    """
    prompt = [] if row.values.get("prompt") is None else read_messages(row, "prompt")
    sides = {column: read_messages(row, column) for column in ("chosen", "rejected")}
    chosen, rejected = sides.values()
    if chosen == rejected:
        raise ValueError(f"{row.where}: chosen and rejected are equal; remove the row, or correct one of them")
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    starts = {column: messages[0]["role"] == "assistant" for column, messages in sides.items()}
    if all(starts.values()):
        if not prompt:
            raise ValueError(
                f"{row.where}: column 'prompt' is missing, and chosen and rejected begin with the answer; add it, or "
                "begin both with the messages of the prompt"
            )
    elif any(starts.values()):
        raise ValueError(
            f"{row.where}: only one of chosen and rejected begins with the answer; begin both with it, or both with "
            "the prompt"
        )
    elif not any(chosen[start : start + len(prompt)] == prompt for start in range(shared - len(prompt) + 1)):
        raise ValueError(
            f"{row.where}: column 'prompt' is not among the messages with which chosen and rejected begin; correct it, "
            "or remove the prompt from them"
        )
    else:
        prompt = []
    for column, messages in sides.items():
        if len(messages) == shared:
            raise ValueError(f"{row.where}: column {column!r} has no answer after the messages that both columns share")
        if (role := messages[shared]["role"]) != "assistant":
            raise ValueError(
                f"{row.where}: chosen and rejected differ in message {shared}, which is of the {role} in {column!r}; "
                "they must be answers to the same prompt"
            )
        if not all(replies_with_loss(row, column, shared)):
            raise ValueError(
                f"{row.where}: column {column!r} has a reply with weight 0, but the whole answers are compared; remove "
                "the weight, or move the reply to the prompt"
            )
    return [*prompt, *chosen[:shared]], chosen[shared:], rejected[shared:]
