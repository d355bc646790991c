# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The calls that have a vLLM server reload; a whole run with them is in tests/distributed/test_samplers.py."""

from pathlib import Path

import httpx
import pytest

from experiments.reload_vllm import reload
from tests.sampling.completions_server import CompletionsServer, TableEngine, serving


@pytest.mark.parametrize("ending", ["", "/"])
def test_the_link_is_moved_before_the_server_loads_and_its_cache_is_emptied_after(tmp_path: Path, ending: str):
    seen: list[str] = []

    def load() -> TableEngine:
        seen.append((tmp_path / "current" / "weights").read_text())
        return TableEngine([0.0])

    with serving(CompletionsServer()) as server:
        server.load = load
        for version in (1, 2):
            folder = tmp_path / f"version-{version}"
            folder.mkdir()
            (folder / "weights").write_text(str(version))
            reload(folder, version, server.url + ending)
    assert seen == ["1", "2"]
    assert server.calls == ["reload_weights", "reset_prefix_cache"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "version-1", "version-2"]


def test_a_refusal_is_an_error(tmp_path: Path):
    (tmp_path / "version-1").mkdir()
    with serving(CompletionsServer()) as server, pytest.raises(httpx.HTTPStatusError, match="404"):
        reload(tmp_path / "version-1", 1, f"{server.url}/elsewhere")
