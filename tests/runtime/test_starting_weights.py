# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path

import pytest

from marin_rl.runtime.starting_weights import hf_folder, resolve_model
from tests.runtime.reopened_run import config_of
from tests.tiny_run import TinyRun


def test_the_architecture_is_read_where_it_is_left_out(finished_run: TinyRun):
    config = config_of(finished_run)
    assert resolve_model(config) is config
    for source in (finished_run.path, finished_run.path / "hf"):
        left_out = dataclasses.replace(config, model=None, initialize_from=str(source))
        model = resolve_model(left_out).model
        assert model is not None
        assert (model.Pos.size, model.Embed.size) == (16, 16)


def test_where_weights_lie(finished_run: TinyRun, tmp_path: Path):
    assert hf_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert hf_folder(str(finished_run.path)) == str(finished_run.path / "hf")
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match=r"initialize_from: the run in .* has not finished"):
        hf_folder(str(tmp_path))
