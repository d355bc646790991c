# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokenize rows of supervised data, with a mask of the tokens to train on.

A row has one of these forms:

| columns | loss |
|---|---|
| `messages` or `conversations`, optional `tools` | on every assistant message whose `weight` is not 0 |
| `prompt` and `completion`, each text or messages; optional `tools` | on the assistant messages of the completion |
| `text` | on every token but the first |
| `input_ids`, and `labels` (-100: no loss), `assistant_masks` or `completion_mask` (1: loss) | on what all mark |

Conversations have the tokens that a policy sees and samples in an episode: a text prompt is a message of the user, a
reply ends with the end-of-turn token, which carries loss, and a template that rewrites the history begins a new
sequence. Text is tokenized with its special tokens, begins and ends with those that the tokenizer adds, and ends with
its eos token. Token ids lose the padding that `attention_mask` hides, and are divided into the documents of
`position_ids` or `seq_lengths`. Columns with a [known meaning][marin_rl.environments.row_columns] that are not applied
are refused.
"""

import dataclasses
import enum
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from marin_rl.environments.row_columns import Row, check_columns
from marin_rl.environments.row_format import message_items, parse_message
from marin_rl.environments.tools import CALL_END, CALL_START, describe_schemas
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Message
from marin_rl.utils.errors import nearest

NO_LABEL = -100
"""Label of tokens without loss, as in Hugging Face's and PyTorch's cross-entropy."""
_MASKS = ("labels", "assistant_masks", "completion_mask")
"""Columns that mark the tokens with loss."""
_OF_TOOLS = ("name", "tool_call_id")
"""Keys of tool messages that templates do not need."""


class Form(enum.Enum):
    """Form of a row; its value are the columns that identify it."""

    MESSAGES = ("messages",)
    CONVERSATIONS = ("conversations",)
    COMPLETION = ("prompt", "completion")
    TEXT = ("text",)
    TOKENS = ("input_ids",)
    PAIR = ("chosen", "rejected")

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that are applied."""
        optional = ("tools",)
        if self in (Form.TEXT, Form.TOKENS):
            optional = (*_MASKS, "attention_mask", "position_ids", "seq_lengths") if self is Form.TOKENS else ()
        return (*self.value, *optional, *(("prompt",) if self is Form.PAIR else ()))


ROW_FORMS = (Form.MESSAGES, Form.CONVERSATIONS, Form.COMPLETION, Form.TEXT, Form.TOKENS)
"""Forms of rows of supervised fine-tuning."""
_CONVERSIONS = {
    ("instruction", "output"): '{"prompt": "\\n\\n".join(filter(None, (row["instruction"], row.get("input")))), '
    '"completion": row["output"]}',
    ("preferred_output", "non_preferred_output"): '{"prompt": row["input"]["messages"], "tools": '
    'row["input"].get("tools"), "chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}',
}
"""Expressions that convert rows of other forms, by their columns."""


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

    Sequences without loss are left out.

    Raises:
        ValueError: if no token has loss; the message names the row.
    """
    arrays = [(np.array(ids, np.int32), np.array(mask, np.bool_)) for ids, mask in sequences]
    for _, mask in arrays:
        # The first token is never predicted.
        mask[:1] = False
    kept = [(ids, mask) for ids, mask in arrays if mask.any()]
    if not kept:
        raise ValueError(f"{where}: no token has loss; remove the row, or mark the tokens to train on")
    ids, masks = zip(*kept, strict=True)
    return Example(where, tuple(map(len, masks)), np.concatenate(ids), np.concatenate(masks), chosen)


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
    for columns_of_other, conversion in _CONVERSIONS.items():
        if set(columns_of_other) <= set(given):
            remedy = f"convert each row to {conversion}"
    if found:
        remedy = f"such rows are for marin_rl.{'dpo' if found[0] is Form.PAIR else 'sft'}"
    needed = ", or ".join(" and ".join(form.value) for form in forms)
    raise ValueError(
        f"{row.where}: the row has the columns {', '.join(map(repr, given)) or 'none'}, but needs {needed}; {remedy}"
    )


def encode_row(row: Row, form: Form, tokenizer: ChatTokenizer, max_tokens: int | None = None) -> Example:
    """Tokenize a row.

    `form` is one of `ROW_FORMS`. After `max_tokens` tokens of a sequence, some may be left out; None for all tokens.

    Raises:
        ValueError: if a column is invalid; the message names the row and the column.
        ChatTemplateError: if the chat template rejects the conversation.
    """
    check_columns(row, form.used)
    match form:
        case Form.TEXT:
            return make_example(row.where, [_encode_text(row, tokenizer, max_tokens)])
        case Form.TOKENS:
            return make_example(row.where, _read_tokens(row, tokenizer.vocab_size))
        case Form.MESSAGES | Form.CONVERSATIONS:
            (column,) = form.value
            messages = read_messages(row, column)
            replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if not replies:
                raise ValueError(f"{row.where}: column {column!r} has no assistant message, so no token has loss")
            prompt, completion = messages[: replies[0]], messages[replies[0] :]
        case _:
            column = "completion"
            prompt, completion = read_messages(row, "prompt"), read_messages(row, column)
    sequences = encode_episode(row, prompt, completion, tokenizer, max_tokens)
    return make_example(row.where, _apply_weights(row, sequences, replies_with_loss(row, column)))


def replies_with_loss(row: Row, column: str, start: int = 0) -> list[bool]:
    """Return whether the weight of each reply in a column is not 0, from message `start` on."""
    if isinstance(row.values[column], str):
        return [True]
    return [item.get("weight") != 0 for item in message_items(row, column)[start:] if item["role"] == "assistant"]


def _apply_weights(
    row: Row, sequences: Sequence[tuple[Sequence[int], Sequence[bool]]], has_loss: Sequence[bool]
) -> list[tuple[Sequence[int], Sequence[bool]]]:
    """Remove the loss of replies with weight 0; each reply is a run of tokens with loss."""
    if all(has_loss):
        return list(sequences)
    mask = np.concatenate([of_sequence for _, of_sequence in sequences])
    reply = np.cumsum(mask & ~np.append(False, mask[:-1]))
    if reply[-1] != len(has_loss):
        raise ValueError(
            f"{row.where}: the template puts nothing between two replies, so weight 0 of one cannot be applied; fill "
            "the message between them"
        )
    ends = np.cumsum([len(ids) for ids, _ in sequences])[:-1]
    masks = np.split(mask & np.append(False, has_loss)[reply], ends)
    return [(ids, of_sequence.tolist()) for (ids, _), of_sequence in zip(sequences, masks, strict=True)]


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
    if isinstance(value, str) and column not in ("messages", "conversations"):
        if not value.strip():
            raise ValueError(f"{row.where}: column {column!r} is empty; fill it or remove the row")
        return [Message(role="user" if column == "prompt" else "assistant", content=value)]
    items = message_items(row, column)
    if any(isinstance(item, Mapping) and item.get("tool_calls") for item in items):
        _check_arrow(row, column, ".arguments")
    return [_message(item, f"{row.where}: column {column!r}, message {index}") for index, item in enumerate(items)]


def _check_arrow(row: Row, column: str, part: str = "") -> None:
    """Refuse JSON values that Arrow may have changed, in the paths of a column that contain `part`."""
    if row.types is None:
        return
    # Imported here because it takes time, and most runs have no such files.
    from marin_rl.environments.arrow_values import undecidable

    for path, problem in undecidable(row.values[column], row.types.field(column).type, column):
        if part in path:
            raise ValueError(
                f"{row.where}: column {column!r}, key {path.removeprefix(column)!r:.200} is {problem}; store the rows "
                f"as JSONL, or the {part.strip('.') or column} as JSON text"
            )


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
    if not isinstance(row.values["tools"], str):
        _check_arrow(row, "tools")
    _to_json(tools, f"{row.where}: column 'tools' is")
    return tools


def _function(value: Any) -> Mapping[str, Any]:
    """Return the function of a tool or of a call, which may be a part of it; empty if there is none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _from_json(value: Any, name: str) -> Any:
    """Parse a value that may be JSON as text; a message begins with `name`."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value
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
    first, last = _added_tokens(tokenizer.tokenizer)
    eos = tokenizer.tokenizer.eos_token_id
    ids = tokenizer.text_tokens(text, max_tokens)
    for part, at_start in ((first, True), (last, False), ([] if eos is None else [eos], False)):
        ids = _join(part, ids) if at_start else _join(ids, part)
    return ids, [True] * len(ids)


@functools.lru_cache(maxsize=1)
def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after a text."""
    plain, whole = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]


def _join(first: list[int], second: list[int]) -> list[int]:
    """Join token ids; those with which the first ends and the second begins occur once."""
    shared = next(n for n in range(min(len(first), len(second)), -1, -1) if first[len(first) - n :] == second[:n])
    return first + second[shared:]


def _read_tokens(row: Row, vocab_size: int) -> list[tuple[ArrayLike, ArrayLike]]:
    """Read token ids, without padding; return those of each document, with their masks."""
    ids = _integers(row, "input_ids", range(vocab_size))
    given = [column for column in _MASKS if row.values.get(column) is not None]
    if not given:
        raise ValueError(
            f"{row.where}: a row with input_ids needs labels, which are {NO_LABEL} for tokens without loss, or "
            "assistant_masks or completion_mask, which are 1 for tokens with loss; it has none of them"
        )
    mask = np.ones(len(ids), np.bool_)
    for column in given:
        values = _integers(row, column, range(NO_LABEL, vocab_size) if column == "labels" else range(2), len(ids))
        if column == "labels" and any(label not in (NO_LABEL, id) for label, id in zip(values, ids, strict=True)):
            raise ValueError(
                f"{row.where}: column 'labels' must hold the id of its token, or {NO_LABEL}; do not shift it"
            )
        mask &= np.array(values) != (NO_LABEL if column == "labels" else 0)
    kept = _without_padding(row, mask)
    tokens, mask = np.array(ids, np.int32)[kept], mask[kept]
    starts = _document_starts(row, kept, len(ids))
    return list(zip(np.split(tokens, starts), np.split(mask, starts), strict=True))


def _without_padding(row: Row, mask: Bool[np.ndarray, " tokens"]) -> slice:
    """Return the part of a row that is not hidden by its `attention_mask`."""
    if row.values.get("attention_mask") is None:
        return slice(0, len(mask))
    seen = np.flatnonzero(_integers(row, "attention_mask", range(2), len(mask)))
    if not seen.size or np.any(np.diff(seen) > 1):
        raise ValueError(f"{row.where}: column 'attention_mask' hides tokens between others, or all; remove them")
    kept = slice(int(seen[0]), int(seen[-1]) + 1)
    if mask.sum() > mask[kept].sum():
        raise ValueError(f"{row.where}: column 'attention_mask' hides a token with loss; mark it as one without loss")
    return kept


def _document_starts(row: Row, kept: slice, size: int) -> Int32[np.ndarray, " starts"]:
    """Return the first token of each document but the first, among the kept ones of a row of some size."""
    index = np.arange(kept.stop - kept.start)
    starts = None
    if row.values.get("position_ids") is not None:
        positions = np.array(_integers(row, "position_ids", range(2**31), size))[kept]
        starts = np.flatnonzero(positions == 0)
        if np.any(positions != index - np.maximum.accumulate(np.where(positions == 0, index, 0))):
            raise ValueError(f"{row.where}: column 'position_ids' must count from 0 in each document; renumber it")
    if row.values.get("seq_lengths") is not None:
        ends = np.cumsum(_integers(row, "seq_lengths", range(1, len(index) + 1)))
        if ends[-1] != len(index) or (starts is not None and not np.array_equal(starts[1:], ends[:-1])):
            raise ValueError(
                f"{row.where}: column 'seq_lengths' must add up to the {len(index)} tokens without padding, and agree "
                "with position_ids; correct it"
            )
        return ends[:-1]
    return index[:0] if starts is None else starts[1:]


def _integers(row: Row, column: str, allowed: range, size: int | None = None) -> list[int]:
    """Read a column of integers, of masks also of booleans; `size` is their number."""
    values, types = row.values[column], {int, bool} if "mask" in column else {int}
    if not isinstance(values, list) or not values:
        raise ValueError(f"{row.where}: column {column!r} holds {values!r:.200}; it must be a list of integers")
    if size is not None and len(values) != size:
        raise ValueError(
            f"{row.where}: column {column!r} has {len(values)} values, but input_ids {size}; make them equal"
        )
    # Sets of types are compared without a loop in Python, which would take long.
    if not set(map(type, values)) <= types or min(values) not in allowed or max(values) not in allowed:
        index = next(i for i, value in enumerate(values) if type(value) not in types or value not in allowed)
        raise ValueError(
            f"{row.where}: column {column!r}, item {index} is {values[index]!r:.200}; it must be an integer from "
            f"{allowed[0]} to {allowed[-1]}"
        )
    return values
