# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.sandbox.forkserver import parse_ready

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
    match parse_ready(data):
        case process, functions:
            assert type(process) is int
            assert isinstance(functions, dict)
        case failed:
            assert isinstance(failed, str)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"null", b"{}", b'{"forkserver": true, "functions": {}}', b'{"forkserver": 1}',
     b'{"forkserver": 1, "functions": []}', b"[" * 10**6, b"9" * 5000],
    ids=range(10),
)  # fmt: skip
def test_invalid_messages_are_failures(data: bytes):
    assert "invalid message" in parse_ready(data)


def test_valid_messages():
    functions = {"f": {"mode": "batch", "required": []}}
    assert parse_ready(json.dumps({"forkserver": 12, "functions": functions}).encode()) == (12, functions)
    assert parse_ready(b'{"failed": "SyntaxError"}') == "SyntaxError"


def test_the_worker_needs_only_the_standard_library():
    code = (
        "import sys; import marin_rl.rewards.sandbox.worker\n"
        "assert not {'pydantic', 'jax', 'numpy', 'draccus'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
