# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The pipeline with tiny runs: complete stages are skipped, interrupted ones resumed."""

import signal
from pathlib import Path
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from experiments.pipeline import pipeline, rl, sft
from marin_rl.config.command_line import parse_config
from marin_rl.config.supervised_config import SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.settings.yaml_text import to_yaml
from tests.tiny_run import TinyRun, contents, in_this_process, make_run, outcome
from tests.training.test_supervised_run import make as make_sft_run

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def run(folder: Path) -> dict[str, float]:
    """Run or continue the stages in a folder."""
    (folder / "sft").mkdir(parents=True, exist_ok=True)
    rows = make_sft_run(folder / "sft", num_steps=4)
    sums = make_run(folder, initialize_from=str(rows.path), warm_start__max_steps=0)
    configs = parse_config(SftConfig, rows.argv).config, parse_config(TrainConfig, sums.argv).config
    with in_this_process():
        return pipeline(*configs, folder)


@pytest.mark.slow
def test_an_interrupted_pipeline_goes_on_and_ends_like_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from marin_rl.training.batch_builder import BatchBuilder

    metrics = run(tmp_path / "whole")
    assert (
        metrics["eval/ones/accuracy_greedy"]
        == TinyRun(tmp_path / "whole" / "run", Path()).records()[-1]["eval/ones/accuracy_greedy"]
    )
    build, count = BatchBuilder.build, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            signal.raise_signal(signal.SIGTERM)
        return build(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(BatchBuilder, "build", interrupted)
        with pytest.raises(SystemExit, match="interrupted"):
            run(tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "evaluation.json").exists()
    assert run(tmp_path / "stopped") == metrics
    found, expected = (outcome(TinyRun(tmp_path / name / "run", Path())) for name in ("stopped", "whole"))
    for part in ("records", "progress", "state", "rollouts", "hf"):
        assert found[part] == expected[part], part
    before = contents(tmp_path / "stopped")
    assert run(tmp_path / "stopped") == metrics
    assert contents(tmp_path / "stopped") == before
    assert before["model/model.safetensors"] == before["run/hf/model.safetensors"]


def test_the_stages_equal_the_yaml_files():
    """The second one with the options with which `sft.yaml` continues."""
    first = ["--config", str(EXPERIMENTS / "sft.yaml"), "--run_dir", "a/sft"]
    assert to_yaml(sft(Path("a"))) == to_yaml(parse_config(SftConfig, first).config)
    options = ["--initialize_from", "a/sft", "--warm_start.max_steps", "0", "--optimizer.learning_rate", "1e-4"]
    second = ["--config", str(EXPERIMENTS / "rloo.yaml"), "--run_dir", "a/rl", *options]
    assert to_yaml(rl(Path("a"))) == to_yaml(parse_config(TrainConfig, second).config)
