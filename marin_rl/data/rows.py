# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokenize rows of supervised data, with a mask of the tokens to train on.

A row has one of four forms:

| columns | loss |
|---|---|
| `messages`, optional `tools` | on every assistant message |
| `prompt` and `completion`, each text or messages; optional `tools` | on the assistant messages of the completion |
| `text` | on every token but the first |
| `input_ids`, and `labels` (-100: no loss) or `assistant_masks` (1: loss) | on the marked tokens |

Conversations have the tokens that a policy sees and samples in an episode: a text prompt is a message of the user, a
reply ends with the end-of-turn token, which carries loss, and a template that rewrites the history begins a new
sequence. Text is tokenized with its special tokens, and ends with the tokenizer's eos token.
"""

import dataclasses
import enum
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32
from numpy.typing import ArrayLike

from marin_rl.environments.row_format import Row, message_items, parse_message
from marin_rl.environments.tools import CALL_END, CALL_START, describe_schemas
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Message
from marin_rl.utils.errors import nearest

NO_LABEL = -100
"""Label of tokens without loss, as in Hugging Face's and PyTorch's cross-entropy."""
_MASK = "assistant_masks"
_OF_TOOLS = ("name", "tool_call_id")
"""Keys of tool messages that templates do not need."""


class Form(enum.Enum):
    """Form of a row; its value are the columns that identify it."""

    MESSAGES = ("messages",)
    COMPLETION = ("prompt", "completion")
    TEXT = ("text",)
    TOKENS = ("input_ids",)
    PAIR = ("chosen", "rejected")


ROW_FORMS = (Form.MESSAGES, Form.COMPLETION, Form.TEXT, Form.TOKENS)
"""Forms of rows of supervised fine-tuning."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A tokenized row: one or several sequences, one after another."""

    where: str
    """Origin of the row, for messages."""
    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    input_ids: Int32[np.ndarray, " tokens"]
    """Token ids of all sequences."""
    loss_mask: Bool[np.ndarray, " tokens"]
    """True for tokens with loss; never the first token of a sequence."""
    chosen: int = 0
    """Number of sequences of the chosen answer, which come first; 0 if the row is no pair."""
    reference: Float32[np.ndarray, " actions"] | None = None
    """Log-probabilities (nats) of the tokens with loss under a reference; None until scored."""

    def sequences(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens and the mask of each sequence."""
        ends = np.cumsum(self.lengths)[:-1]
        return list(zip(np.split(self.input_ids, ends), np.split(self.loss_mask, ends), strict=True))


def make_example(where: str, sequences: Sequence[tuple[ArrayLike, ArrayLike]], chosen: int = 0) -> Example:
    """Make an example of sequences of token ids, each with a mask of the tokens with loss.

    Raises:
        ValueError: if no token has loss; the message names the row.
    """
    mask = [np.array(of_sequence, np.bool_) for _, of_sequence in sequences]
    for of_sequence in mask:
        # The first token is never predicted.
        of_sequence[:1] = False
    loss_mask = np.concatenate(mask)
    if not loss_mask.any():
        raise ValueError(f"{where}: no token has loss; remove the row, or mark the tokens to train on")
    ids = np.concatenate([np.array(of_sequence, np.int32) for of_sequence, _ in sequences])
    return Example(where, tuple(map(len, mask)), ids, loss_mask, chosen)


def form_of(row: Row, forms: Sequence[Form] = ROW_FORMS) -> Form:
    """Return the form of a row, the first of some.

    Raises:
        ValueError: if the row has none; the message names the row and its columns.
    """
    found = [form for form in (*forms, *Form) if all(row.values.get(column) is not None for column in form.value)]
    if found and found[0] in forms:
        return found[0]
    columns = [column for form in forms for column in form.value]
    given = [column for column, value in row.values.items() if value is not None]
    unknown = [column for column in given if column not in columns]
    remedy = nearest(unknown[0], columns) if unknown else "add what is missing"
    if found:
        remedy = f"such rows are for marin_rl.{'dpo' if found[0] is Form.PAIR else 'sft'}"
    needed = ", or ".join(" and ".join(form.value) for form in forms)
    raise ValueError(
        f"{row.where}: the row has the columns {', '.join(map(repr, given)) or 'none'}, but needs {needed}; {remedy}"
    )


def encode_row(row: Row, form: Form, tokenizer: ChatTokenizer) -> Example:
    """Tokenize a row.

    Args:
        row: the row.
        form: its form, one of `ROW_FORMS`.
        tokenizer: chat tokenizer.

    Raises:
        ValueError: if a column is invalid; the message names the row and the column.
        ChatTemplateError: if the chat template rejects the conversation.
    """
    match form:
        case Form.TEXT:
            return make_example(row.where, [_encode_text(row, tokenizer)])
        case Form.TOKENS:
            return make_example(row.where, [_read_tokens(row, tokenizer.vocab_size)])
        case Form.MESSAGES:
            messages = read_messages(row, "messages")
            replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if not replies:
                raise ValueError(f"{row.where}: column 'messages' has no assistant message, so no token has loss")
            prompt, completion = messages[: replies[0]], messages[replies[0] :]
        case _:
            prompt, completion = read_messages(row, "prompt"), read_messages(row, "completion")
    return make_example(row.where, encode_episode(row, prompt, completion, tokenizer))


def encode_episode(
    row: Row, prompt: Sequence[Message], completion: Sequence[Message], tokenizer: ChatTokenizer
) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Tokenize a prompt and what follows it as an episode, with loss on the assistant messages of the completion.

    Args:
        row: the row, with the tools of the conversation.
        prompt: messages before the first reply.
        completion: the first reply, and further messages.
        tokenizer: chat tokenizer.

    Raises:
        ValueError: if the prompt is empty, the completion does not begin with a reply, or two replies follow each
            other; the message names the row.
        ChatTemplateError: if the chat template rejects the conversation.
    """
    if not prompt or prompt[-1]["role"] == "assistant":
        raise ValueError(f"{row.where}: there is no message before the first reply; add a system or user message")
    if completion[0]["role"] != "assistant":
        raise ValueError(f"{row.where}: the completion begins with a {completion[0]['role']} message, not a reply")
    roles = [message["role"] for message in completion]
    if any(one == other == "assistant" for one, other in itertools.pairwise(roles)):
        raise ValueError(f"{row.where}: two assistant messages follow each other; join them to one")
    shown = _with_tools(prompt, _read_tools(row))
    try:
        return tokenizer.encode_replies([*shown, *completion], len(shown))
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error


def read_messages(row: Row, column: str) -> list[Message]:
    """Read a column of messages, or of text: that of the user, and in other columns than `prompt` of the assistant.

    The tool calls of an assistant message are appended to its content, in the format of Qwen and Hermes, which the
    environments parse.

    Raises:
        ValueError: if it is not valid; the message names the row, the column and the message.
    """
    value = row.values[column]
    if isinstance(value, str) and column != "messages":
        if not value.strip():
            raise ValueError(f"{row.where}: column {column!r} is empty; fill it or remove the row")
        return [Message(role="user" if column == "prompt" else "assistant", content=value)]
    return [
        _message(item, f"{row.where}: column {column!r}, message {index}")
        for index, item in enumerate(message_items(row, column))
    ]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        return parse_message(item, where)
    known = {key: value for key, value in item.items() if value is not None}
    calls = known.pop("tool_calls", None)
    if known.get("role") == "tool":
        known = {key: value for key, value in known.items() if key not in _OF_TOOLS}
    if not calls:
        message = parse_message(known, where)
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError(f"{where} is a reply without text and tool calls; fill it or remove the row")
        return message
    if known.get("role") != "assistant":
        raise ValueError(f"{where} has tool_calls, but the role {known.get('role')!r}; only the assistant calls tools")
    message = parse_message({"content": "", **known}, where)
    texts = [message["content"], *(_call(call, where) for call in (calls if isinstance(calls, list) else [calls]))]
    return Message(role="assistant", content="\n".join(filter(None, texts)))


def _call(call: Any, where: str) -> str:
    """Return the text of a tool call, given in OpenAI's format, in which arguments may be JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{where} has a tool call whose arguments are not JSON: {error}") from error
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or arguments is None:
        raise ValueError(f"{where} has the tool call {call!r:.200}; it must have a name and arguments")
    text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_START}\n{text}\n{CALL_END}"


def _read_tools(row: Row) -> list[Mapping[str, Any]]:
    tools = row.values.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"{row.where}: column 'tools' is not JSON: {error}") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"{row.where}: column 'tools' holds {tools!r:.200}; it must be a list of JSON schemas")
    return tools or []


def _with_tools(prompt: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the prompt with tools in its system message, which is added if there is none."""
    if not tools:
        return list(prompt)
    text, rest = (prompt[0]["content"], prompt[1:]) if prompt[0]["role"] == "system" else ("", prompt)
    return [Message(role="system", content=text, tools=tools, tools_in_words=describe_schemas(tools)), *rest]


def _encode_text(row: Row, tokenizer: ChatTokenizer) -> tuple[list[int], list[bool]]:
    text = row.values["text"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{row.where}: column 'text' holds {text!r:.200}; it must be text that is not empty")
    ids = list(tokenizer.tokenizer(text)["input_ids"])
    eos = tokenizer.tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    return ids, [True] * len(ids)


def _read_tokens(row: Row, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    ids = _integers(row, "input_ids")
    if wrong := ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ValueError(
            f"{row.where}: column 'input_ids' has the id {wrong[0]}, outside the vocabulary of {vocab_size} tokens"
        )
    given = [column for column in ("labels", _MASK) if row.values.get(column) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{row.where}: a row with input_ids needs labels, which are {NO_LABEL} for tokens without loss, or "
            f"{_MASK}, which is 1 for tokens with loss; it has {' and '.join(given) or 'neither'}"
        )
    values = _integers(row, given[0])
    if len(values) != len(ids):
        raise ValueError(
            f"{row.where}: column {given[0]!r} has {len(values)} values, but input_ids {len(ids)}; make them equal"
        )
    if given == [_MASK]:
        if not np.isin(values, (0, 1)).all():
            raise ValueError(f"{row.where}: column {_MASK!r} must hold 0 and 1 only")
        return ids, values == 1
    if not np.isin(values[values != ids], NO_LABEL).all():
        raise ValueError(f"{row.where}: column 'labels' must hold the id of its token, or {NO_LABEL}; do not shift it")
    return ids, values != NO_LABEL


def _integers(row: Row, column: str) -> np.ndarray:
    values = row.values[column]
    if not isinstance(values, list) or not values or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{row.where}: column {column!r} holds {values!r:.200}; it must be a list of integers")
    if max(map(abs, values)) >= 2**31:
        raise ValueError(f"{row.where}: column {column!r} holds {max(values, key=abs)}, which is no id of a token")
    return np.array(values, np.int64)
