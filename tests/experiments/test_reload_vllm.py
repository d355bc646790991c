# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The calls that have a vLLM server reload; a whole run with them is in tests/distributed/test_samplers.py."""

import json
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from experiments.reload_vllm import HEAD_FILE, INDEX_FILE, main, reload
from tests.sampling.completions_server import CompletionsServer, TableEngine, serving


def write_config(folder: Path, *, tied: bool, model_type: str = "llama") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "tie_word_embeddings": tied, "a": 1}))


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
            write_config(folder, tied=False)
            (folder / "weights").write_text(str(version))
            reload(folder, version, server.url + ending)
    assert seen == ["1", "2"]
    assert server.calls == ["reload_weights", "reset_prefix_cache"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "version-1", "version-2"]


def test_an_adapter_is_loaded_in_place_of_the_former_one(tmp_path: Path):
    with serving(CompletionsServer()) as server:
        for version in (0, 1):
            folder = tmp_path / f"version-{version}"
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            reload(folder, version, server.url)
    loads = [f"load policy from version-{version}" for version in (0, 1)]
    assert server.calls == [loads[0], "reset_prefix_cache", loads[1], "reset_prefix_cache"]
    assert not (tmp_path / "current").exists()


def test_a_refusal_is_an_error(tmp_path: Path):
    write_config(tmp_path / "version-1", tied=False)
    with serving(CompletionsServer()) as server, pytest.raises(httpx.HTTPStatusError, match="404"):
        reload(tmp_path / "version-1", 1, f"{server.url}/elsewhere")


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_tied_model_gets_a_head_of_its_own(tmp_path: Path, has_index: bool, dtype: type):
    model, served = tmp_path / "model", tmp_path / "served"
    write_config(model, tied=True)
    embedding = np.arange(12).reshape(4, 3).astype(dtype)
    save_file({"a": np.zeros(5, dtype), "model.embed_tokens.weight": embedding}, model / "model.safetensors")
    if has_index:
        names = ("a", "model.embed_tokens.weight")
        (model / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    main([str(model), str(served)])
    config = json.loads((served / "current" / "config.json").read_text())
    assert config == {"model_type": "llama", "tie_word_embeddings": False, "a": 1}
    with safe_open(served / "current" / HEAD_FILE, "np") as tensors:
        assert list(tensors.keys()) == ["lm_head.weight"]
    [head] = load_file(served / "current" / HEAD_FILE).values()
    assert head.dtype == dtype
    np.testing.assert_array_equal(head, embedding)
    if has_index:
        assert json.loads((served / "current" / INDEX_FILE).read_text())["weight_map"]["lm_head.weight"] == HEAD_FILE
    # The model of the user is unchanged, and nothing is overwritten.
    assert not (model / HEAD_FILE).exists()
    with pytest.raises(FileExistsError):
        main([str(model), str(served)])


@pytest.mark.parametrize(("tied", "model_type"), [(False, "llama"), (True, "gemma2")])
def test_other_models_stay_as_they_are(tmp_path: Path, tied: bool, model_type: str):
    write_config(tmp_path / "model", tied=tied, model_type=model_type)
    main([str(tmp_path / "model"), str(tmp_path / "served")])
    assert [path.name for path in (tmp_path / "served" / "start").iterdir()] == ["config.json"]
