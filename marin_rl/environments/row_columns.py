# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of data, and columns that have a known meaning in other programs: they are applied, or refused."""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

_WEIGHTS = "weight weights loss_weight loss_weights sample_weight sample_weights token_weights"
_MARKS = "label kto_tag"
_MASK = "and write completion_mask, 1 for tokens with loss, not shifted"
_LENGTHS = "and write seq_lengths, the number of tokens of each document"
_REFERENCE = "because the reference is the policy of step 0"
_KNOWN = {
    "image images video videos audio audios pixel_values": "and the rows that need it, because only text is read",
    "system system_prompt system_message": "and write it as the first message, with the role system, or into the text",
    "context": "and write it into the prompt",
    "history": "and write its turns as messages",
    "chat_template_kwargs": "and write their values into a copy of the template, tokenizer.chat_template",
    "tools": "and describe them in the text or in a system message",
    "functions": "and describe them in a system message, or write them as tools for supervised training",
    "function_call tool_choice parallel_tool_calls response_format": "because the chat template has no place for it",
    _WEIGHTS: "and the rows that should not count, because all weigh 1",
    _MARKS: "and the rows whose answer it marks as bad",
    "input_ids prompt_input_ids chosen_input_ids rejected_input_ids": "or those of the text",
    "loss_mask label_mask labels_mask assistant_mask target_mask prompt_mask prompt_length source_len": _MASK,
    "shift_labels targets target_ids": "and write labels, which are not shifted",
    "segment_ids sequence_ids document_ids doc_ids seq_idx cu_seqlens cu_seq_lens cu_seq_lens_q": _LENGTHS,
    "token_type_ids": "because the model has no types of tokens",
    "ref_chosen_logps ref_rejected_logps": _REFERENCE,
    "reference_chosen_logps reference_rejected_logps": _REFERENCE,
}
REMEDIES = {column: remedy for columns, remedy in _KNOWN.items() for column in columns.split()}
"""What to do beside removing a column, for rows in which the column is not used but has an effect."""

EMPTY = None, "", [], {}
"""Values without an effect in every column, and in every key of a message."""
_DEFAULTS = {"token_type_ids": 0, "parallel_tool_calls": True, "tool_choice": "auto"}
_NEUTRAL = {**_DEFAULTS, **dict.fromkeys(_WEIGHTS.split(), 1)}
"""Further values without an effect."""
OF_TOKENS = "targets prompt_length source_len"
"""Columns with a known meaning only beside `input_ids`."""


class Row(NamedTuple):
    """Row of a dataset with its origin."""

    values: Mapping[str, Any]
    """Values by column."""
    where: str
    """File and line, or dataset and row, for messages."""
    types: "pa.Schema | None" = None
    """Types of the columns if Arrow stored the row, which cannot tell a missing key of an object from null."""


def check_columns(row: Row, used: Collection[str]) -> None:
    """Check that a row has no columns with a known meaning that would be ignored.

    `used` are the columns that are applied.

    Raises:
        ValueError: if it has one with an effect; the message names the row and the column.
    """
    ignored = {*used, *(OF_TOKENS.split() if row.values.get("input_ids") is None else ())}
    for name, value in row.values.items():
        if name in REMEDIES and name not in ignored and _has_effect(name, value) and not _is_message(value, row, used):
            raise ValueError(
                f"{row.where}: column {name!r} holds {value!r:.200}, which is not applied; remove the column, "
                f"{REMEDIES[name]}"
            )


def unused_columns(rows: Iterable[Row], used: Collection[str]) -> list[str]:
    """Return the columns that hold a value in some row and are not used, in their order."""
    held = dict.fromkeys(name for row in rows for name, value in row.values.items() if value is not None)
    return [name for name in held if name not in used]


def _is_message(value: Any, row: Row, used: Collection[str]) -> bool:
    """Return whether a value, such as a system prompt, is also the text of a message."""
    lists = [row.values[column] for column in used if isinstance(row.values.get(column), list)]
    messages = (item for items in lists for item in items if isinstance(item, Mapping))
    return any(value in (item.get("content"), item.get("value")) for item in messages)


def _has_effect(name: str, value: Any) -> bool:
    if name in _MARKS.split():
        # Other values are classes.
        return value is False
    parts, neutral = [value], (*EMPTY, _NEUTRAL.get(name))
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping | list):
            # Arrow stores an empty object as one of nulls.
            parts += part.values() if isinstance(part, Mapping) else part
        elif part not in neutral:
            return True
    return False
