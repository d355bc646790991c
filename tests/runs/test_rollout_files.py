# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.runs.rollout_store import (
    RolloutStore,
    RolloutStoreConfig,
    RolloutStoreError,
    StoredFormat,
)
from marin_rl.runs.stored_rollout import SCHEMA, SCHEMA_VERSION, StoredAdvantages
from marin_rl.types import RolloutGroup
from tests.rollouts.rollout_cases import group_of, rich_group, rich_signal, rollout_of, rows, write


def test_both_formats_store_the_same_values(tmp_path):
    for kind in ("parquet", "jsonl"):
        (tmp_path / kind).mkdir()
        write(tmp_path / kind, 7, [rich_group()], {"g-0": rich_signal()}, format=kind)
    assert rows(tmp_path / "parquet") == rows(tmp_path / "jsonl")


def test_json_lines_are_strict_json(tmp_path):
    odd = rollout_of("g-0", metrics={"worst": -math.inf, "unknown": math.nan})
    write(tmp_path, 7, [RolloutGroup("g", [odd])], format="jsonl")
    [line] = (tmp_path / "step-00000007.jsonl").read_text(encoding="utf-8").splitlines()
    result = json.loads(line, parse_constant=pytest.fail)
    assert result["metrics"] == {"worst": "-Infinity", "unknown": "NaN"}
    assert result["rewards"] == {"correct": 1.0}
    [back] = rows(tmp_path)
    assert back["metrics"][0] == ("worst", -math.inf)
    assert math.isnan(back["metrics"][1][1])


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_nonfinite_scores_of_tokens_are_restored(tmp_path, kind):
    scores = StoredAdvantages(np.ones(2), learner_logprobs=np.array([math.nan, -math.inf]))
    write(tmp_path, 7, [RolloutGroup("g", [rollout_of("g-0", error="NaN")])], {"g-0": scores}, format=kind)
    [row] = rows(tmp_path)
    first, second = row["turns"][0]["learner_logprobs"]
    assert math.isnan(first)
    assert second == -math.inf
    assert row["error"] == "NaN"


@given(st.lists(st.tuples(st.text(), st.binary(max_size=4)), max_size=5), st.sampled_from(["parquet", "jsonl"]))
@settings(deadline=None, max_examples=30)
def test_any_text_and_any_bytes_are_restored(tmp_path_factory, texts, kind):
    folder = tmp_path_factory.mktemp("any")
    rollouts = [rollout_of(f"g-{index}", error=text) for index, (text, _) in enumerate(texts)]
    pieces = [data for _, data in texts]
    store = RolloutStore(
        folder, RolloutStoreConfig(format=StoredFormat(kind)), lambda token: pieces[token % len(pieces)]
    )
    store.write(1, [RolloutGroup("g", rollouts)], {})
    store.close()
    assert [row["error"] for row in rows(folder)] == [text for text, _ in texts]
    for row in rows(folder):
        [turn] = row["turns"]
        assert turn["pieces"] == [pieces[token % len(pieces)] for token in turn["token_ids"]]


def test_a_lone_surrogate_is_escaped(tmp_path):
    write(tmp_path, 1, [RolloutGroup("g", [rollout_of("g-0", error="\ud83d")])])
    assert rows(tmp_path)[0]["error"] == "\\ud83d"


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        *(("parquet", harm) for harm in ("cut", "bit", "empty", "unnamed", "else")),
        *(("jsonl", harm) for harm in ("cut", "bit", "unnamed", "else", "number", "deep")),
    ],
)
def test_a_damaged_file_is_named(tmp_path, kind, harm):
    write(tmp_path, 1, [group_of("g", 1.0)], format=kind)
    path = tmp_path / f"step-00000001.{kind}"
    data = path.read_bytes()
    changes = {
        "cut": data[: len(data) // 2],
        "bit": b"x" + data[1:-1] + b"x",
        "empty": b"",
        "else": b"[1]\n",
        "number": b"3\n",
        "deep": b"[" * 100_000,
    }
    path.write_bytes(_with_version(path, None) if harm == "unnamed" else changes[harm])
    with pytest.raises(RolloutStoreError, match=rf"step-00000001\.{kind} is not a readable rollout file") as caught:
        rows(tmp_path)
    assert "delete it to continue without it" in str(caught.value)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_error_for_another_version_does_not_suggest_deletion(tmp_path, kind):
    write(tmp_path, 1, [group_of("g", 1.0)], format=kind)
    path = tmp_path / f"step-00000001.{kind}"
    path.write_bytes(_with_version(path, 1))
    with pytest.raises(RolloutStoreError) as caught:
        rows(tmp_path)
    assert str(caught.value) == (
        f"{path} was written by another version of marin_rl: its schema version is 1, this program reads version "
        f"{SCHEMA_VERSION}. Read it with that version; to continue with this version, set another run_dir, or move the "
        "rollouts/ folder out of the run directory"
    )


def without_column(table):
    return table.drop_columns(["status"])


def with_another_type(table):
    index = table.schema.get_field_index("step")
    return table.set_column(index, "step", table["step"].cast(pa.string()))


def with_null(table):
    index = table.schema.get_field_index("id")
    return table.set_column(index, "id", pa.nulls(len(table), pa.string()))


def with_null_inside(table):
    turns = [
        [{**turn, "token_ids": None} for turn in row] for row in table["turns"].to_pylist(maps_as_pydicts="strict")
    ]
    index = table.schema.get_field_index("turns")
    return table.set_column(index, "turns", pa.array(turns, SCHEMA.field("turns").type))


EDITS = {
    without_column: "it has no column 'status'",
    with_another_type: "column 'step' has the type string, expected int64",
    with_null: "'id' contains null",
    with_null_inside: "'turns.token_ids' contains null",
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_parquet_file_is_named(tmp_path, edit):
    write(tmp_path, 1, [group_of("g", 1.0)])
    path = tmp_path / "step-00000001.parquet"
    pq.write_table(edit(pq.read_table(path)), path)
    with pytest.raises(RolloutStoreError) as caught:
        rows(tmp_path)
    assert str(caught.value).startswith(f"{path} is not a readable rollout file ({EDITS[edit]})")


def test_columns_that_are_not_read_are_not_checked(tmp_path):
    write(tmp_path, 1, [group_of("g", 1.0)])
    path = tmp_path / "step-00000001.parquet"
    pq.write_table(without_column(pq.read_table(path)), path)
    assert rows(tmp_path, columns=["id"]) == [{"id": "g-0"}]
    with pytest.raises(RolloutStoreError, match="no column 'status'"):
        rows(tmp_path, columns=["id", "status"])


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda row: row.pop("status"), "line 1 has no column 'status'"),
        (lambda row: row.update(id=None), "'id' contains null"),
        (lambda row: row["turns"][0].pop("token_ids"), "'turns.token_ids' contains null"),
        (lambda row: row.update(turns=[None]), "'turns' contains null"),
        # Without checks, each of these ends the process or gives a traceback.
        (lambda row: row.update(rewards=[None]), "'rewards' is a list, expected an object of numbers"),
        (lambda row: row["metrics"].update(a=10**400), "int too large to convert to float"),
        (lambda row: row.update(step=2**70), "Python int too large to convert to C long"),
        (lambda row: row["turns"][0].update(anchor_state=None), "'turns.anchor_state' contains null"),
        (
            lambda row: row["turns"][0].update(advantages=[]),
            "'turns.advantages' differs in length from 'turns.token_ids'",
        ),
        (
            lambda row: row["turns"][0]["observation_pieces"].append("x"),
            "'turns.observation_pieces' differs in length from 'turns.observation_tokens'",
        ),
    ],
)
def test_an_edited_jsonl_file_is_named(tmp_path, edit, problem):
    write(tmp_path, 1, [group_of("g", 1.0)], format="jsonl")
    path = tmp_path / "step-00000001.jsonl"
    row = json.loads(path.read_text())
    edit(row)
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(RolloutStoreError) as caught:
        rows(tmp_path)
    assert str(caught.value).startswith(f"{path} is not a readable rollout file ({problem})")


def _with_version(path, version):
    """The bytes of a file with another schema version, or with none."""
    if path.suffix == ".jsonl":
        row = json.loads(path.read_text())
        del row["version"]
        return json.dumps(row if version is None else {"version": version, **row}).encode() + b"\n"
    metadata = {} if version is None else {b"marin_rl.rollouts.version": str(version).encode()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    return path.read_bytes()
