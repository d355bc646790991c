# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.sandbox.forkserver import parse_names, parse_ready

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["forkserver", "functions", "failed", "raised", "x"]), inner)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
def test_untrusted_messages_parse_to_the_declared_types(data: bytes):
    forkserver, failed = parse_ready(data)
    assert (type(forkserver) is int and failed is None) or (forkserver is None and isinstance(failed, str))
    names, failed = parse_names(data)
    assert isinstance(names, dict)
    assert failed is None or (not names and isinstance(failed, str))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"null", b"{}", b'{"forkserver": true}', b'{"functions": []}', b"[" * 10**6, b"9" * 5000],
    ids=["nothing", "no text", "list", "null", "empty", "no number", "functions", "nested without end", "digits"],
)
def test_invalid_messages_are_failures(data: bytes):
    process, failed = parse_ready(data)
    assert process is None
    assert "invalid message" in str(failed)
    assert parse_names(data) == ({}, "the forkserver sent no valid description of its reward functions")


def test_valid_messages():
    assert parse_ready(b'{"forkserver": 12, "failed": null}') == (12, None)
    assert parse_ready(b'{"forkserver": null, "failed": "SyntaxError"}') == (None, "SyntaxError")
    assert parse_names(b'{"functions": {"f": {"mode": "batch"}}}') == ({"f": {"mode": "batch"}}, None)
    assert parse_names(b'{"raised": "raised TypeError"}') == ({}, "listing its reward functions raised TypeError")


def test_the_worker_needs_only_the_standard_library():
    code = (
        "import sys; import marin_rl.rewards.sandbox.worker\n"
        "assert not {'pydantic', 'jax', 'numpy', 'draccus'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
