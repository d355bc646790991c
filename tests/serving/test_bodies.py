# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.serving import bodies
from marin_rl.serving.bodies import ApiError, count_values, read_object

LEAVES = st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a",[{\\\n'))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('b",[')), inner))


def number_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(number_of, value.values()))
    return 1 + sum(map(number_of, value)) if isinstance(value, list) else int(isinstance(value, str))


@pytest.mark.medium
@given(VALUES)
def test_values_are_counted_without_the_marks_in_texts(value: Any):
    assert count_values(json.dumps(value).encode()) == number_of(value)


MANY = {
    "list": b'{"prompt": [%b""]}' % (b'"a",' * 1000),
    "nested lists": b'{"prompt": [%b[]]}' % (b"[]," * 1000),
    "depth": b'{"a": %b%b}' % (b"[" * 1001, b"]" * 1001),
    "keys": b"{%b}" % b",".join(b'"k%d": 0' % index for index in range(1002)),
    "equal keys": b"{%b}" % b",".join([b'"k": 0'] * 1002),
    "objects": b'{"messages": [%b{}]}' % (b"{}," * 1000),
    "after an escape": b'{"a": "\\\\", "prompt": [%b[]]}' % (b"[]," * 1000),
    "after a quote": b'{"a": "\\\\\\"", "prompt": [%b[]]}' % (b"[]," * 1000),
    "an open text": b'{"a": [%b"' % (b"[]," * 1000),
}


@pytest.mark.parametrize("name", MANY)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "MAX_VALUES", 1000)
    monkeypatch.setattr(bodies, "from_json", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ApiError, match=r"the body has \d+ texts, keys, lists and objects, more than 1000") as raised:
        read_object(MANY[name])
    assert raised.value.status == 413


def test_marks_in_texts_are_no_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "MAX_VALUES", 10)
    text = ',[{\\"' * 5000
    assert read_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"[]", "the body is a JSON list; it must be an object"),
        (b'{"a": NaN}', "expected value at line 1 column 7"),
        (b'{"a": -Infinity}', "invalid number at line 1 column 8"),
        (b'{"a": %b}' % (b"1" * 5000), "number out of range"),
        (b'{"a": %b1%b}' % (b"[" * 201, b"]" * 201), "recursion limit exceeded"),
        (b'{"a": %b1%b}' % (b'{"a":' * 201, b"}" * 201), "recursion limit exceeded"),
        (b'{"a": "\xff"}', "invalid unicode code point at line 1 column 8"),
        # A surrogate as three bytes.
        (b'{"a": "\xed\xa0\x80"}', "invalid unicode code point"),
        ('{"a": 1}'.encode("utf-16"), "expected value"),
        (b'{"a": "\\ud83d"}', "a lone surrogate is half a character"),
        (b'{"a": [{"b": "\\uDFFF"}]}', "a lone surrogate is half a character"),
        (b'{"a": [{"\\udc00": 1}]}', "a lone surrogate is half a character"),
        (b'{"\\ud800": 1}', "a lone surrogate is half a character"),
        (b'{"a": "\\ude00\\ud83d"}', "a lone surrogate is half a character"),
    ],
)
def test_invalid_bodies_are_named(data: bytes, message: str):
    with pytest.raises(ApiError, match=message) as raised:
        read_object(data)
    # The error itself can be sent.
    json.dumps(raised.value.body(), ensure_ascii=False).encode()


def test_text_with_escapes_is_read():
    assert read_object(b'{"a": "\\ud83d\\ude00 \\\\ud83d", "b": 1e999}') == {
        "a": "\U0001f600 \\ud83d",
        "b": float("inf"),
    }
