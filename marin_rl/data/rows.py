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


def encode_row(row: Row, form: Form, tokenizer: ChatTokenizer, max_tokens: int | None = None) -> Example:
    """Tokenize a row.

    Args:
        row: the row.
        form: its form, one of `ROW_FORMS`.
        tokenizer: chat tokenizer.
        max_tokens: number of tokens of a sequence after which some may be left out; None for all tokens.

    Raises:
        ValueError: if a column is invalid; the message names the row and the column.
        ChatTemplateError: if the chat template rejects the conversation.
    """
    match form:
        case Form.TEXT:
            return make_example(row.where, [_encode_text(row, tokenizer, max_tokens)])
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
    return make_example(row.where, encode_episode(row, prompt, completion, tokenizer, max_tokens))


def encode_episode(
    row: Row,
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tokenizer: ChatTokenizer,
    max_tokens: int | None = None,
) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Tokenize a prompt and what follows it as an episode, with loss on the assistant messages of the completion.

    Args:
        row: the row, with the tools of the conversation.
        prompt: messages before the first reply.
        completion: the first reply, and further messages.
        tokenizer: chat tokenizer.
        max_tokens: as for `encode_row`.

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
        return tokenizer.encode_replies([*shown, *completion], len(shown), max_tokens)
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
    function = _function(call)
    name, arguments = function.get("name"), _from_json(function.get("arguments"), f"{where} has arguments that are")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError(f"{where} has the tool call {call!r:.200}; it must have a name and arguments, an object")
    text = _to_json({"name": name, "arguments": arguments}, f"{where} has a tool call that is")
    return f"{CALL_START}\n{text}\n{CALL_END}"


def _read_tools(row: Row) -> list[Mapping[str, Any]]:
    tools = _from_json(row.values.get("tools"), f"{row.where}: column 'tools' is")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(_function(tool).get("name"), str) for tool in tools):
        raise ValueError(
            f"{row.where}: column 'tools' holds {tools!r:.200}; it must be a list of JSON schemas of functions, each "
            "with a name"
        )
    _to_json(tools, f"{row.where}: column 'tools' is")
    return tools


def _function(value: Any) -> Mapping[str, Any]:
    """Return the function of a tool or of a call, which may be a part of it; empty if there is none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _from_json(value: Any, name: str) -> Any:
    """Parse a value that may be JSON as text; a message begins with `name`."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} not JSON: {error}") from error


def _to_json(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} not JSON: {error}") from error


def _with_tools(prompt: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the prompt with tools in its system message, which is added if there is none."""
    if not tools:
        return list(prompt)
    text, rest = (prompt[0]["content"], prompt[1:]) if prompt[0]["role"] == "system" else ("", prompt)
    return [Message(role="system", content=text, tools=tools, tools_in_words=describe_schemas(tools)), *rest]


def _encode_text(row: Row, tokenizer: ChatTokenizer, max_tokens: int | None) -> tuple[list[int], list[bool]]:
    text = row.values["text"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{row.where}: column 'text' holds {text!r:.200}; it must be text that is not empty")
    ids = tokenizer.text_tokens(text, max_tokens)
    eos = tokenizer.tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    return ids, [True] * len(ids)


def _read_tokens(row: Row, vocab_size: int) -> tuple[list[int], list[bool]]:
    ids = _integers(row, "input_ids", range(vocab_size))
    given = [column for column in ("labels", _MASK) if row.values.get(column) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{row.where}: a row with input_ids needs labels, which are {NO_LABEL} for tokens without loss, or "
            f"{_MASK}, which is 1 for tokens with loss; it has {' and '.join(given) or 'neither'}"
        )
    is_mask = given == [_MASK]
    values = _integers(row, given[0], range(2) if is_mask else range(NO_LABEL, vocab_size))
    if len(values) != len(ids):
        raise ValueError(
            f"{row.where}: column {given[0]!r} has {len(values)} values, but input_ids {len(ids)}; make them equal"
        )
    if not is_mask and any(label not in (NO_LABEL, id) for label, id in zip(values, ids, strict=True)):
        raise ValueError(f"{row.where}: column 'labels' must hold the id of its token, or {NO_LABEL}; do not shift it")
    return ids, [value == 1 if is_mask else value != NO_LABEL for value in values]


def _integers(row: Row, column: str, allowed: range) -> list[int]:
    """Read a column of integers; of a mask also of booleans."""
    values, types = row.values[column], {int, bool} if column == _MASK else {int}
    if not isinstance(values, list) or not values:
        raise ValueError(f"{row.where}: column {column!r} holds {values!r:.200}; it must be a list of integers")
    # Sets of types are compared without a loop in Python, which would take long.
    if not set(map(type, values)) <= types or min(values) not in allowed or max(values) not in allowed:
        index = next(i for i, value in enumerate(values) if type(value) not in types or value not in allowed)
        raise ValueError(
            f"{row.where}: column {column!r}, item {index} is {values[index]!r:.200}; it must be an integer from "
            f"{allowed[0]} to {allowed[-1]}"
        )
    return values
