# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import re
from pathlib import Path

import pyarrow as pa

from marin_rl.rollouts.stored_rollout import SCHEMA, SCHEMA_VERSION, StoredAdvantages, as_row
from tests.rollouts.rollout_cases import piece, rich_rollout

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "viewing.md"


def names_in(fields: pa.StructType | pa.Schema) -> set[str]:
    """All names in nested columns."""
    found = set()
    for field in fields:
        found.add(field.name)
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        if pa.types.is_struct(inner):
            found |= names_in(inner)
    return found


def test_every_column_is_documented():
    tables = PAGE.read_text(encoding="utf-8").partition("## Columns")[2]
    lines = [line for line in tables.splitlines() if line.startswith("| `")]
    documented = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    assert names_in(SCHEMA) <= documented
    first = [name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert set(first) <= names_in(SCHEMA)
    assert f"this is version {SCHEMA_VERSION}." in tables


def test_a_row_has_a_value_for_every_column():
    row = as_row(rich_rollout(), 1, "training", None, piece)
    assert list(row) == SCHEMA.names
    [turn, _] = row["turns"]
    assert set(turn) <= {field.name for field in SCHEMA.field("turns").type.value_type}


def test_other_keys_of_a_message_are_kept():
    rollout = rich_rollout()
    message = {"role": "tool", "content": "4", "name": "calculator"}
    turn = dataclasses.replace(rollout.turns[0], messages=(message,))
    row = as_row(dataclasses.replace(rollout, turns=(turn,)), 1, "training", None, piece)
    assert row["turns"][0]["messages"] == [{"role": "tool", "content": "4", "more": '{"name": "calculator"}'}]


def test_the_mean_advantage_of_a_rollout_without_tokens_is_none():
    assert StoredAdvantages(None).mean_advantage is None
