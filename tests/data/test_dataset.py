# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sources of supervised data, their division, long rows, and the order of batches."""

import dataclasses
import datetime
import decimal
import gzip
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.config.supervised_config import BatchConfig
from marin_rl.data.config import DataConfig, LongSequences
from marin_rl.data.dataset import Batches, Encoded, encode_rows, join_examples, read_examples, truncate
from marin_rl.data.rows import Example, Form, encode_row
from marin_rl.data.token_file import Data, read_tokens, write_tokens
from marin_rl.environments.row_columns import Row
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.tokenization.conftest import chatml_tokenizer
from tests.tokenization.tool_templates import QWEN3

CHAT = ChatTokenizer(byte_tokenizer())
ROWS = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(30)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return str(path)
    data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def read(path: str, batch: BatchConfig | None = None, **settings: Any) -> tuple[Encoded, Encoded]:
    batch = batch or BatchConfig()
    data = read_examples(DataConfig(path, **settings), CHAT, batch.max_length, batch.long_sequences)
    return data.train, data.held_out


TOOLS = ChatTokenizer(chatml_tokenizer(QWEN3))


def calls(*arguments: Any, tools: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Rows that each call a tool, with the arguments and the properties of the tool's schema."""
    rows: list[dict[str, Any]] = []
    for index, each in enumerate(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": each}}
        replies = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "done"}]
        last = {"role": "assistant", "content": "ok"}
        rows.append({"messages": [{"role": "user", "content": f"question {index}"}, *replies, last]})
    for row, properties in zip(rows, tools, strict=False):
        parameters = {"type": "object", "properties": properties}
        row["tools"] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return rows


def as_struct(rows: list[dict[str, Any]], folder: Path) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return folder / "saved"


def as_json(rows: list[dict[str, Any]], folder: Path) -> Path:
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(folder / "saved")
    return folder / "saved"


def as_json_parquet(rows: list[dict[str, Any]], folder: Path) -> Path:
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def as_parquet(rows: list[dict[str, Any]], folder: Path) -> Path:
    return Path(write(folder / "b.parquet", rows))


def as_folder(rows: list[dict[str, Any]], folder: Path) -> Path:
    (folder / "folder").mkdir()
    return Path(write(folder / "folder" / "train.jsonl", rows)).parent


def tokens(path: Path) -> list[list[int]]:
    data = read_examples(DataConfig(str(path)), TOOLS, 4096)
    return [example.input_ids.tolist() for example in data.train.examples]


TEXT = {"type": "string"}
SAME: dict[str, list[dict[str, Any]]] = {
    "same keys": calls({"a": "x", "b": True}, {"a": "y", "b": False}),
    "integers": calls({"a": 3, "b": [2**62]}, {"a": 4, "b": []}),
    "fractions": calls({"a": 3.25}, {"a": 1e-9}),
    "objects in lists": calls({"a": [{"b": "x"}]}, {"a": [{"b": "y"}, {"b": "z"}]}),
    "null in a list": calls({"a": ["x", None]}, {"a": ["y"]}),
    "dates as text": calls({"a": "2024-01-01T00:00:00"}, {"a": "2024-01-02"}),
    "JSON as text": calls('{"a": 3}', '{"b": null, "c": 2.0}'),
    "schemas": calls({"a": "x"}, {"a": "y"}, tools=[{"a": TEXT}, {"a": {"type": "integer"}}]),
    "a row without schemas": calls({"a": "x"}, {"a": "y"}, tools=[{"a": TEXT}]),
}
"""Rows that Arrow does not change."""
CHANGED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "missing key": (calls({"a": "x"}, {"b": "y"}), "0: column 'messages', key .*arguments.b' is null"),
    "written null": (calls({"a": "x"}, {"a": None}), "1: column 'messages', key .*arguments.a' is null"),
    "deep key": (calls({"a": {"b": "x"}}, {"a": {"c": "x"}}), "0: column 'messages', key .*arguments.a.c' is null"),
    "key in a list": (
        calls({"a": [{"b": "x"}, {"c": "x"}]}),
        r"0: column 'messages', key .*arguments.a\[0\].c' is null",
    ),
    "empty object": (calls({"a": "x"}, {}), "1: column 'messages', key .*arguments.a' is null"),
    "whole number": (calls({"a": 3}, {"a": 4.5}), "0: column 'messages', key .*arguments.a' is 3.0"),
    "number in a list": (calls({"a": [0.5, 2]}), r"0: column 'messages', key .*arguments.a\[1\]' is 2.0"),
    "properties": (
        calls("{}", "{}", tools=[{"a": TEXT}, {"b": TEXT}]),
        "0: column 'tools', key .*properties.b' is null",
    ),
    "default": (calls("{}", tools=[{"a": {**TEXT, "default": None}}]), "0: column 'tools', key .*a.default' is null"),
    "minimum": (
        calls("{}", "{}", tools=[{"a": {"minimum": n}} for n in (1, 0.5)]),
        "0: column 'tools', key .*minimum' is 1",
    ),
    "time": (
        calls({"a": datetime.datetime(2024, 1, 1)}),
        r"0: column 'messages', key .*a' is of Arrow's type timestamp",
    ),
    "date": (calls({"a": datetime.date(2024, 1, 1)}), r"0: column 'messages', key .*a' is of Arrow's type date32"),
    "decimal": (calls({"a": decimal.Decimal("1.5")}), r"0: column 'messages', key .*a' is of Arrow's type decimal128"),
    "bytes": (calls({"a": b"x"}), r"0: column 'messages', key .*a' is of Arrow's type binary"),
}
"""Rows that Arrow changes, with the first change."""


@pytest.mark.parametrize("store", [as_struct, as_json, as_json_parquet, as_parquet, as_folder])
def test_arguments_and_schemas_are_those_of_jsonl(store: Callable[..., Path], tmp_path: Path):
    for index, rows in enumerate(SAME.values()):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert tokens(store(rows, folder)) == tokens(Path(write(folder / "rows.jsonl", rows)))


@pytest.mark.parametrize("store", [as_struct, as_parquet])
@pytest.mark.parametrize("case", CHANGED)
def test_arguments_and_schemas_that_arrow_may_have_changed_are_refused(
    case: str, store: Callable[..., Path], tmp_path: Path
):
    rows, text = CHANGED[case]
    with pytest.raises(ValueError, match=rf"row {text}.*JSONL, or the (arguments|tools) as JSON text$"):
        tokens(store(rows, tmp_path))


@pytest.mark.parametrize("store", [as_json, as_json_parquet, as_folder])
@pytest.mark.parametrize(
    "case", ["missing key", "written null", "deep key", "empty object", "whole number", "properties"]
)
def test_objects_that_datasets_keeps_as_json_are_exact(case: str, store: Callable[..., Path], tmp_path: Path):
    rows = CHANGED[case][0]
    assert tokens(store(rows, tmp_path)) == tokens(Path(write(tmp_path / "rows.jsonl", rows)))


def test_a_map_of_arrow_is_refused(tmp_path: Path):
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    reply = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [("a", "x")]}]}
    column = pa.array([[{"role": "user", "content": "q"}, reply]], pa.list_(message))
    pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 0: column 'messages', key .*arguments' is of Arrow's type map"):
        tokens(tmp_path / "a.parquet")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_identical_rows_are_named_after_their_own_errors(share: float, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [ROWS[0]] * 5)
    assert len(read(path)[0].examples) == 5
    with pytest.raises(ValueError, match=rf"^all 5 rows of data are identical, so data.held_out {share} cannot"):
        read(path, held_out=share)
    bad = write(tmp_path / "b.jsonl", [{**ROWS[0], "completion": " "}] * 5)
    with pytest.raises(ValueError, match=r"b\.jsonl:1: column 'completion' is empty"):
        read(bad, held_out=share)


def test_unused_columns_are_listed(tmp_path: Path):
    rows = [
        {**row, "source": "sums", "tools": None, "notes": None, **({"id": 3} if index else {})}
        for index, row in enumerate(ROWS)
    ]
    assert read(write(tmp_path / "a.jsonl", rows))[0].unused == ("source", "id")
    assert read(write(tmp_path / "b.jsonl"))[0].unused == ()


def contents(encoded: Encoded) -> list[tuple[list[int], list[bool]]]:
    return [(example.input_ids.tolist(), example.loss_mask.tolist()) for example in encoded.examples]


def test_every_source_gives_the_same_rows(tmp_path: Path):
    expected = contents(read(write(tmp_path / "a.jsonl"))[0])
    assert len(expected) == len(ROWS)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl")
    for path in (write(tmp_path / "a.jsonl.gz"), write(tmp_path / "a.parquet"), str(folder)):
        assert contents(read(path)[0]) == expected


def test_a_share_is_held_out_by_content(tmp_path: Path):
    train, held_out = read(write(tmp_path / "a.jsonl"), held_out=0.3)
    reversed_train, reversed_held_out = read(write(tmp_path / "b.jsonl", ROWS[::-1]), held_out=0.3)
    assert 3 < len(held_out.examples) < 15
    assert contents(reversed_held_out) == contents(held_out)[::-1]
    assert contents(reversed_train) == contents(train)[::-1]
    assert sorted(contents(train) + contents(held_out)) == sorted(contents(read(str(tmp_path / "a.jsonl"))[0]))


def test_held_out_rows_of_a_second_file(tmp_path: Path):
    train, held_out = read(write(tmp_path / "a.jsonl"), held_out_path=write(tmp_path / "b.jsonl", ROWS[:3]))
    assert contents(held_out) == contents(train)[:3]


def test_long_rows_are_refused_skipped_or_truncated(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [*ROWS[:2], {"prompt": "9+1=", "completion": "1" * 50}, ROWS[3]])
    length = len(read(path)[0].examples[2].input_ids)
    with pytest.raises(
        ValueError, match=re.escape(f"a.jsonl:3: a sequence has at least {length} tokens, more than batch.max")
    ):
        read(path, BatchConfig(max_length=20))
    skipped = read(path, BatchConfig(max_length=20, long_sequences="skip"))[0]  # pyrefly: ignore
    assert (skipped.skipped, skipped.truncated) == (1, 0)
    assert [example.where[-1] for example in skipped.examples] == ["1", "2", "4"]
    cut = read(path, BatchConfig(max_length=20, long_sequences="truncate"))[0]  # pyrefly: ignore
    assert (cut.skipped, cut.truncated) == (0, 1)
    assert len(cut.examples[2].input_ids) == 20
    assert contents(cut)[2][0] == contents(read(path)[0])[2][0][:20]
    # A prompt that fills the row leaves nothing to train on.
    none = BatchConfig(max_length=5, long_sequences="truncate")  # pyrefly: ignore
    with pytest.raises(
        ValueError, match=r"none of the 4 rows of data that are to train on fits into batch\.max_length"
    ):
        read(path, none)


WRONG: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "missing": (b"", {"path": "none.jsonl"}, "data.path is .*none.jsonl', which does not exist"),
    "empty": (b"", {}, "has no rows to train on"),
    "not UTF-8": (b'{"text": "\xff"}\n', {}, r"a\.jsonl:1: not UTF-8 text at byte 11"),
    "not JSON": (
        b"text\n",
        {},
        r"a\.jsonl:1: not JSON: .*; write each row as one JSON object .*, with the columns of its form: b'text",
    ),
    "surrogate": (b'{"text": "\\ud800"}\n', {}, r"a\.jsonl:1: \\ud800 is an unpaired surrogate"),
    "mixed": (b'{"text": "a"}\n{"prompt": "a", "completion": "b"}\n', {}, r"a\.jsonl:2: the row has prompt and compl"),
    "all held out": (b'{"text": "a"}\n', {"held_out": 0.999}, "has no rows to train on, with data.held_out 0.999"),
    "none held out": (b'{"text": "a"}\n', {"held_out": 0.001}, "no row of data is held out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_data_is_named(case: str, tmp_path: Path):
    data, settings, text = WRONG[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=text):
        read(**{"path": str(path), **settings})


def test_two_ways_to_hold_out_are_refused():
    with pytest.raises(ValueError, match=r"held_out 0\.1 and held_out_path 'b' exclude each other"):
        DataConfig("a", held_out=0.1, held_out_path="b")


@given(st.integers(1, 12), st.integers(1, 20), st.integers(0, 3), st.integers(1, 4))
def test_every_epoch_has_every_item_once(items: int, size: int, seed: int, epochs: int):
    batches = Batches(range(items), size, seed)
    steps = batches.steps(epochs)
    drawn = [item for step in range(1, steps + 1) for item in batches.of_step(step)]
    assert len(drawn) - size < epochs * items <= len(drawn)
    for epoch in range(epochs):
        assert sorted(drawn[epoch * items : (epoch + 1) * items]) == list(range(items))
    assert batches.epochs(steps) == len(drawn) / items
    # A step needs no state.
    assert batches.of_step(steps) == drawn[-size:]


def test_epochs_and_seeds_have_other_orders():
    batches, others = Batches(range(50), 50, 0), Batches(range(50), 50, 1)
    assert len({tuple(each.of_step(step)) for each in (batches, others) for step in (1, 2)}) == 4


def test_joined_examples_keep_tokens_and_masks(tmp_path: Path):
    examples = read(write(tmp_path / "a.jsonl"))[0].examples[:3]
    batch = join_examples(examples)
    assert batch.input_ids.tolist() == [token for example in examples for token in example.input_ids]
    assert np.array_equal(batch.loss_mask, np.concatenate([example.loss_mask for example in examples]))
    assert batch.lengths == tuple(example.lengths for example in examples)


@pytest.mark.parametrize("max_length", [1, 5, 9, 16, 17, 40, 900])
@pytest.mark.parametrize("chat", [CHAT, TOOLS], ids=["bytes", "Qwen3"])
def test_a_row_is_cut_before_it_is_tokenized_as_afterwards(chat: ChatTokenizer, max_length: int):
    long = "a<|end|>b" * 800
    turns = [
        [("user", "q", None), ("assistant", text, weight), ("user", other, None), ("assistant", "</think>5", 1)]
        for weight in (0, 1)
        for text, other in itertools.product(("x", long, f"<think>{long}</think>x"), ("", "y", long))
    ]
    for parts in turns:
        messages = [{"role": role, "content": text, "weight": weight} for role, text, weight in parts]
        row = Row({"messages": messages}, "row")
        whole = truncate(encode_row(row, Form.MESSAGES, chat), max_length)
        [*cut], _, _, _ = encode_rows([row], chat, max_length, LongSequences.TRUNCATE)
        expected = [] if whole is None else [(whole.lengths, whole.input_ids.tolist(), whole.loss_mask.tolist())]
        assert [(one.lengths, one.input_ids.tolist(), one.loss_mask.tolist()) for one in cut] == expected


PAIRS = [{"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "0"} for number in range(9)]
MESSAGES = [{"messages": [{"role": role, "content": str(n)} for role in ("user", "assistant")]} for n in range(9)]


def stored_tokens(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> tuple[Data, Data | None]:
    """Tokenize rows with the file of an earlier start; the tokens, and those of the file if it is used."""
    path, pairs = write(tmp_path / "a.jsonl", rows), settings.pop("pairs", False)
    tokenizer, limit = settings.pop("tokenizer", CHAT), settings.pop("max_length", 1000)
    arguments = DataConfig(path, **settings), tokenizer, limit, LongSequences.TRUNCATE
    with_file = read_examples(*arguments, pairs=pairs, stored=tmp_path / "tokens.arrow")
    return read_examples(*arguments, pairs=pairs), None if with_file.digest else with_file


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"held_out": 0.3},
        {"rows": [{**row, "source": "sums"} for row in ROWS]},
        {"rows": MESSAGES},
        {"rows": PAIRS, "pairs": True},
        {"max_length": 8},
        {"max_length": 9},
    ],
    ids=range(7),
)
def test_stored_tokens_are_those_of_the_rows(settings: dict[str, Any], tmp_path: Path):
    data, found = stored_tokens(tmp_path, **settings)
    assert found is None
    assert data.digest is not None
    write_tokens(tmp_path / "tokens.arrow", data, data.digest)
    again, found = stored_tokens(tmp_path, **settings)
    assert found is not None
    assert again.digest == data.digest
    for part, stored in zip(data[:2], found[:2], strict=True):
        assert stored[1:] == part[1:]
        for one, other in zip(part.examples, stored.examples, strict=True):
            for field in dataclasses.fields(Example):
                expected, value = getattr(one, field.name), getattr(other, field.name)
                assert type(value) is type(expected)
                np.testing.assert_array_equal(value, expected)
                assert getattr(value, "dtype", None) == getattr(expected, "dtype", None)


def other_template() -> ChatTokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", "' <|end|>'")
    return ChatTokenizer(tokenizer)


def splitting_special_tokens() -> ChatTokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = True
    return ChatTokenizer(tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": [*ROWS[:-1], {"prompt": "29+1=", "completion": "31"}]},
        {"rows": ROWS[:-1]},
        {"rows": [*ROWS[1:], ROWS[0]]},
        {"rows": [*ROWS[:-1], {**ROWS[-1], "tools": []}]},
        {"held_out": 0.3},
        {"max_length": 999},
        {"tokenizer": ChatTokenizer(byte_tokenizer(), (97,))},
        {"tokenizer": other_template()},
        {"tokenizer": splitting_special_tokens()},
    ],
    ids=range(9),
)
def test_stored_tokens_of_other_rows_or_settings_are_not_used(settings: dict[str, Any], tmp_path: Path):
    data, _ = stored_tokens(tmp_path)
    assert data.digest is not None
    write_tokens(tmp_path / "tokens.arrow", data, data.digest)
    assert stored_tokens(tmp_path)[1] is not None
    assert stored_tokens(tmp_path, **settings)[1] is None


def test_damaged_stored_tokens_are_not_used(tmp_path: Path):
    data, _ = stored_tokens(tmp_path)
    assert data.digest is not None
    file = tmp_path / "tokens.arrow"
    write_tokens(file, data, data.digest)
    content = file.read_bytes()
    damaged = [content[:size] for size in (0, 1, 31, 32, 33, len(content) - 1)]
    damaged += [content + b"\0", b"\0" * len(content)]
    for place in range(0, len(content), 97):
        damaged.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for part in damaged:
        file.write_bytes(part)
        assert read_tokens(file, data.digest) is None
    file.unlink()
    file.mkdir()
    assert read_tokens(file, data.digest) is None
