# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Secrets of a task, which Iris gives it as files."""

import os
from pathlib import Path

import pytest

from tests.needs_iris import NEEDS_IRIS

pytestmark = pytest.mark.both_lines


@NEEDS_IRIS
@pytest.mark.medium
def test_secrets_become_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from marin_rl.utils.iris_hosts import set_secrets

    values = {"KEY_1": b"new", "LINES_1": "a\r\nb\rcä\n".encode(), "EMPTY_1": b"", "HIDDEN_1": b"x", ".derived": b"x"}
    for name, value in values.items():
        (tmp_path / name).write_bytes(value)
    # As Kubernetes does.
    (tmp_path / "..data").mkdir()
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ |= {"RIGGING_SECRETS_DIR": str(tmp_path), "KEY_1": "of the cluster"}
    before = set(os.environ)
    set_secrets(hidden=["HIDDEN_1"])
    assert set(os.environ) - before == {"LINES_1", "EMPTY_1"}
    assert (os.environ["KEY_1"], os.environ["LINES_1"], os.environ["EMPTY_1"]) == ("new", "a\r\nb\rcä\n", "")
