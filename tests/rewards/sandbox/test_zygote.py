# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.sandbox.zygote import parse_ready

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["functions", "failed", "x"]), inner),
    max_leaves=8,
)


@given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_stranger_says_has_the_form_that_the_trainer_reads(data: bytes):
    ready = parse_ready(data)
    assert set(ready) == {"functions", "failed"}
    assert isinstance(ready["functions"], dict)
    assert ready["failed"] is None or isinstance(ready["failed"], str)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"null", b'{"functions": {}}', b'{"functions": [], "failed": null}', b"[" * 10**6],
    ids=["nothing", "no text", "list", "null", "half", "no functions", "nested without end"],
)
def test_what_is_no_answer_is_told_as_a_failure(data: bytes):
    assert "something else than what it loaded" in parse_ready(data)["failed"]


def test_an_answer_is_taken():
    functions = {"f": {"mode": "batch", "required": []}}
    loaded = {"functions": functions, "failed": None}
    assert parse_ready(json.dumps(loaded).encode()) == loaded
    assert parse_ready(json.dumps({"functions": {}, "failed": "SyntaxError"}).encode())["failed"] == "SyntaxError"
