# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from pathlib import Path

import pytest

from marin_rl.evaluate import EvaluateConfig, main, run_evaluation
from tests.tiny_run import TinyRun, contents, copy_of

Capture = pytest.CaptureFixture[str]


def evaluations(record: dict) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("eval/")}


def test_the_newest_checkpoint_is_measured_and_nothing_changes(finished_run: TinyRun, capfd: Capture):
    before = contents(finished_run.path)
    assert main(["--run", str(finished_run.path), "--json"]) == 0
    expected = evaluations(finished_run.records()[-1])
    assert json.loads(capfd.readouterr().out) == {"run": str(finished_run.path), "step": 6, **expected}
    assert contents(finished_run.path) == before


def test_lines_for_people(finished_run: TinyRun, capfd: Capture):
    assert main(["--run", str(finished_run.path), "--step", "3"]) == 0
    title, *lines = capfd.readouterr().out.splitlines()
    assert title == f"{finished_run.path}, after step 3"
    found = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert found == pytest.approx(evaluations(finished_run.records()[3]), rel=1e-5)


def test_other_settings_than_the_runs_own(finished_run: TinyRun, capfd: Capture):
    argv = ["--run", str(finished_run.path), "--json", "--evaluation", "{tasks: 5, samples: 4, pass_at: [1, 2, 4]}"]
    assert main(argv) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["eval/ones/tasks"] == 5.0
    passes = [found[f"eval/ones/pass@{k}"] for k in (1, 2, 4)]
    assert passes == sorted(passes)


def test_temperature_and_split_matter(finished_run: TinyRun):
    config = EvaluateConfig(str(finished_run.path), step=0)
    _, own = run_evaluation(config)
    _, hot = run_evaluation(dataclasses.replace(config, temperature=50.0))
    _, validation = run_evaluation(dataclasses.replace(config, validation=True))
    # At that temperature replies are noise; greedy ones do not depend on it.
    assert hot["eval/ones/accuracy_sampled"] < own["eval/ones/accuracy_sampled"]
    assert hot["eval/ones/accuracy_greedy"] == own["eval/ones/accuracy_greedy"]
    assert validation["eval/ones/tasks"] != own["eval/ones/tasks"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--step", "9"], "has no checkpoint of step 9; it has [0, 1, 2, 3, 4, 5, 6]"),
        (["--temperature", "0"], "temperature is 0"),
        (["--stpe", "3"], "did you mean 'step'?"),
        (["--evaluation", "{samples: 2, pass_at: [4]}"], "k = 4 with evaluation.samples = 2"),
    ],
)
def test_bad_arguments(finished_run: TinyRun, capfd: Capture, argv: list[str], message: str):
    assert main(["--run", str(finished_run.path), *argv]) == 1
    assert message in capfd.readouterr().err


def test_an_address_is_no_run_directory(capfd: Capture):
    assert main(["--run", "gs://bucket/run"]) == 1
    assert "run is 'gs://bucket/run', but it must be a path of a mounted file system" in capfd.readouterr().err


def test_a_folder_without_a_run(tmp_path: Path, capfd: Capture):
    assert main(["--run", str(tmp_path)]) == 1
    assert "is not a run directory: it has no config.yaml" in capfd.readouterr().err


def test_a_run_that_has_no_checkpoint_yet(finished_run: TinyRun, tmp_path: Path, capfd: Capture):
    (tmp_path / "config.yaml").write_text((finished_run.path / "config.yaml").read_text())
    (tmp_path / "checkpoints").mkdir()
    assert main(["--run", str(tmp_path)]) == 1
    assert "has no checkpoint yet" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_unless_it_was_asked_for(
    finished_run: TinyRun, tmp_path: Path, capfd: Capture
):
    copied = copy_of(finished_run, tmp_path / "copy")
    (copied.checkpoint(6) / "manifest.json").unlink()
    assert main(["--run", str(copied.path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 5
    assert main(["--run", str(copied.path), "--step", "6"]) == 1
    assert "step-00000006" in capfd.readouterr().err
