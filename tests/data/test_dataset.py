# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sources of supervised data, their division, long rows, and the order of batches."""

import dataclasses
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.config.supervised_config import BatchConfig
from marin_rl.data.config import DataConfig, LongSequences
from marin_rl.data.dataset import Batches, Encoded, join_examples, read_examples
from marin_rl.data.rows import Example
from marin_rl.data.token_file import Data, read_tokens, write_tokens
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer

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
    data = read_examples(DataConfig(path, **settings), "data", batch.max_length, batch.long_sequences, CHAT)
    return data.train, data.held_out


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


PAIRS = [{"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "0"} for number in range(9)]
MESSAGES = [{"messages": [{"role": role, "content": str(n)} for role in ("user", "assistant")]} for n in range(9)]


def stored_tokens(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> tuple[Data, Data | None]:
    """Tokenize rows with the file of an earlier start; the tokens, and those of the file if it is used."""
    path, pairs = write(tmp_path / "a.jsonl", rows), settings.pop("pairs", False)
    tokenizer, limit = settings.pop("tokenizer", CHAT), settings.pop("max_length", 1000)
    arguments = DataConfig(path, **settings), "data", limit, LongSequences.TRUNCATE, tokenizer
    with_file = read_examples(*arguments, pairs=pairs, stored=tmp_path / "tokens.arrow")
    return read_examples(*arguments, pairs=pairs), None if with_file.digest else with_file


@pytest.mark.parametrize(
    "settings",
    [{}, {"held_out": 0.3}, {"rows": MESSAGES}, {"rows": PAIRS, "pairs": True}, {"max_length": 8}, {"max_length": 7}],
    ids=str,
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
    ],
    ids=range(8),
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
