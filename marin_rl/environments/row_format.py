# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Conversion of rows of a dataset to problems."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from marin_rl.environments.row_columns import EMPTY, Row, check_columns
from marin_rl.environments.splits import Problem, problem_id, question_text
from marin_rl.rewards.reply_text import check_pattern, extract_last
from marin_rl.types import Message, Task
from marin_rl.utils.errors import nearest

_ROLES = ("system", "user", "assistant", "tool")
_PLACEHOLDER = "{prompt}"
_SHAREGPT = {**{role: role for role in _ROLES}, "human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles by the `from` of messages with `from` and `value`."""
_LOSS_FLAGS = "train training trainable train_detail training_detail loss loss_mask loss_weight mask masked"
"""Keys of other programs that mark messages with or without loss."""


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Meaning of a dataset's columns. Optional columns may be absent if they have their default names.

    A dot leads into a column of objects: `reward_model.ground_truth`.
    """

    prompt_column: str = "prompt"
    """Column with the question, as text or as a list of messages. A row has this one or `messages_column`."""
    messages_column: str = "messages"
    """Column with the question as a list of messages, each `{role: ..., content: ...}`. The content is text, or a list
    of parts `{type: text, text: ...}`, which are joined. Instead of a list of messages, the column may hold lists by
    key, `{role: [...], content: [...]}`."""
    answer_column: str = "answer"
    """Column with the ground truth: text or an integer."""
    answer_regex: str | None = None
    """Optional regular expression; group 1 of its last match in the answer column is the ground truth. GSM8K:
    `#### (-?[0-9.,]+)`."""
    worked_answer_column: str = "worked_answer"
    """Optional column with a reply that earns the full reward, for a supervised warm start. It may be the answer
    column; `answer_regex` is not applied to it."""
    id_column: str = "id"
    """Optional column with a unique id; default: a hash of the question."""
    system_prompt: str | None = None
    """Optional system message before the question."""
    prompt_template: str | None = None
    """Optional template of the prompt; `{prompt}` is replaced by the prompt column:
    `{prompt} Put the final answer within \\boxed{}.`"""

    def __post_init__(self) -> None:
        if self.answer_regex is not None:
            check_pattern("rows.answer_regex", self.answer_regex, groups=1)
        if self.prompt_template is not None and _PLACEHOLDER not in self.prompt_template:
            raise ValueError(
                f"rows.prompt_template {self.prompt_template!r} has no {_PLACEHOLDER} for the question; add it"
            )

    def problem(self, row: Row, environment: str, *, needs_answer: bool = True) -> Problem:
        """Convert a row to a problem; without `needs_answer` the default answer column may be absent.

        Raises:
            ValueError: if a column is missing or invalid; the message names the row, the column and the available
                columns.
        """
        text, messages = self._question(row)
        check_columns(row, self.used_columns)
        if self.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise ValueError(f"{row.where}: the row already has a system message; remove rows.system_prompt")
            messages = (Message(role="system", content=self.system_prompt), *messages)
        given_id = _optional(row, "id_column", self.id_column, default="id")
        task = Task(
            id=problem_id(text) if given_id is None else given_id,
            environment=environment,
            messages=messages,
            answer=self._answer(row, needs_answer),
            worked_answer=_optional(row, "worked_answer_column", self.worked_answer_column, default="worked_answer"),
        )
        return Problem(text, task, row.where)

    @property
    def used_columns(self) -> set[str]:
        """Columns that are read, those of objects without the names of their members."""
        named = [value for name, value in vars(self).items() if name.endswith("_column")]
        return {*named, *(column.partition(".")[0] for column in named)}

    def _question(self, row: Row) -> tuple[str, tuple[Message, ...]]:
        prompt = _value(row, self.prompt_column)
        column = self.messages_column if prompt is None else self.prompt_column
        if isinstance(prompt, list) or _has_lists(prompt) or (prompt is None and _value(row, column) is not None):
            messages = _messages(row, column)
            if self.prompt_template is not None:
                raise ValueError(
                    f"{row.where}: rows.prompt_template needs text in the {self.prompt_column!r} column; this row has "
                    f"messages in {column!r}; put the text into the messages, or use rows.system_prompt"
                )
            return question_text(messages), messages
        prompt = _text(row, "prompt_column", self.prompt_column)
        content = prompt if self.prompt_template is None else self.prompt_template.replace(_PLACEHOLDER, prompt)
        return question_text([Message(role="user", content=prompt)]), (Message(role="user", content=content),)

    def _answer(self, row: Row, is_needed: bool) -> str:
        if not is_needed and _optional(row, "answer_column", self.answer_column, default="answer") is None:
            return ""
        text = _text(row, "answer_column", self.answer_column)
        if self.answer_regex is None:
            return text
        answer = extract_last(self.answer_regex, text)
        if answer is None:
            raise ValueError(
                f"{row.where}: rows.answer_regex {self.answer_regex!r} does not match the answer {text[-200:]!r}"
            )
        return answer


def _value(row: Row, column: str) -> Any:
    """Return the value of a column, or None if there is none; a dot leads into a column of objects."""
    if column in row.values:
        return row.values[column]
    value: Any = row.values
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _columns(row: Row) -> list[str]:
    """Return the names of all columns, and of the members of objects."""
    inner = [f"{name}.{key}" for name, value in row.values.items() if isinstance(value, Mapping) for key in value]
    return [*row.values, *inner]


def _optional(row: Row, setting: str, column: str, default: str) -> str | None:
    if column == default and _value(row, column) is None:
        return None
    return _text(row, setting, column)


def _text(row: Row, setting: str, column: str) -> str:
    value = _value(row, column)
    if value is None and column not in row.values:
        raise ValueError(
            f"{row.where}: there is no column {column!r}; {nearest(column, _columns(row))}; set rows.{setting}"
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(
            f"{row.where}: column {column!r} holds {value!r:.200} of type {type(value).__name__}; "
            f"it must be text or an integer; correct it, or set rows.{setting}"
        )
    if not value.strip():
        raise ValueError(f"{row.where}: column {column!r} is empty; fill it or remove the row")
    return value


def _has_lists(value: Any) -> bool:
    """Return whether a value is a struct of lists, as which `datasets` returns a sequence of structs."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(items, list) for items in value.values())


def message_items(row: Row, column: str) -> list[Any]:
    """Return the items of a column of messages, which may hold lists by key instead of a list.

    Raises:
        ValueError: if it holds no messages; the message names the row and the column.
    """
    value = _value(row, column)
    if _has_lists(value):
        if len({len(items) for items in value.values()}) > 1:
            raise ValueError(f"{row.where}: column {column!r} holds lists of different lengths: {value!r:.200}")
        value = [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{row.where}: column {column!r} holds {value!r:.200}; it must be a list of messages")
    return [
        _from_sharegpt(item, f"{row.where}: column {column!r}, message {index}") for index, item in enumerate(value)
    ]


def _from_sharegpt(item: Any, where: str) -> Any:
    """Convert a message `{from: human, value: text}`; others stay as they are."""
    if not isinstance(item, Mapping) or item.get("from") is None or "value" not in item or item.get("role") is not None:
        return item
    role = _SHAREGPT.get(item["from"]) if isinstance(item["from"], str) else None
    if role is None:
        raise ValueError(
            f"{where} is from {item['from']!r:.200}; choose one of {', '.join(_SHAREGPT)}; a function_call is "
            "{role: assistant, content: text, tool_calls: [{name: ..., arguments: {...}}]}"
        )
    kept = {key: value for key, value in item.items() if key not in ("from", "value")}
    return {**kept, "role": role, "content": item["value"]}


def parse_message(item: Any, where: str) -> Message:
    """Convert an item of a column of messages.

    Args:
        item: an object with the keys `role` and `content`, and optionally `weight`: 0, or for replies 1.
        where: the row, the column and the item, for error messages.

    Raises:
        ValueError: if it is not a message with a role and text, or has another key.
    """
    if not isinstance(item, Mapping) or (content := _content(item)) is None:
        raise ValueError(
            f"{where} is {item!r:.200}; it must be {{role: ..., content: text}}, or have a list of parts "
            "{type: text, text: ...} as content"
        )
    if item.get("role") not in _ROLES:
        raise ValueError(f"{where} has the role {item.get('role')!r}; choose one of {', '.join(_ROLES)}")
    # In a dataset of structs every message has all keys, most of them null, or empty.
    if extra := [key for key, field in item.items() if key not in ("role", "content", "weight") and field not in EMPTY]:
        remedy = (
            "write weight: 0 for a reply without loss"
            if extra[0] in _LOSS_FLAGS.split()
            else "move it into the content"
        )
        raise ValueError(
            f"{where} has the key {extra[0]!r}, but only role, content and weight are supported; {remedy}, or remove it"
        )
    if (weight := item.get("weight")) is not None and weight not in ((0, 1) if item["role"] == "assistant" else (0,)):
        raise ValueError(
            f"{where} is of the {item['role']} and has the weight {weight!r:.200}; only replies have loss, and their "
            "weight must be 0 or 1"
        )
    return Message(role=item["role"], content=content)


def _messages(row: Row, column: str) -> tuple[Message, ...]:
    items = message_items(row, column)
    messages = [parse_message(item, f"{row.where}: column {column!r}, message {i}") for i, item in enumerate(items)]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{row.where}: column {column!r} ends with an assistant message; end with the question, and move the "
            "reply to the worked answer"
        )
    return tuple(messages)


def _content(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message; None if it has other content."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in parts if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(content) else None
