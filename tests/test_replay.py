# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.replay import main
from tests.tiny_run import TinyRun, copy_of

Capture = pytest.CaptureFixture[str]


@pytest.mark.medium
def test_replay_as_text(finished_run: TinyRun, capfd: Capture):
    assert main(["--run", str(finished_run.path), "--step", "4"]) == 0
    title, header, *lines, last = capfd.readouterr().out.splitlines()
    assert title == f"{finished_run.path}, step 4, from the checkpoint of step 3"
    assert header.split() == ["replayed", "recorded"]
    assert last == "the weights after the step equal those of the checkpoint of step 4"
    found = {line.split()[0]: line.split()[1:] for line in lines}
    loss = format(finished_run.records()[4]["loss/policy_avg"], ".7g")
    assert found["loss/policy_avg"] == [loss, loss]
    assert len(found["seconds/step"]) == 2


@pytest.mark.medium
def test_synthetic_rollouts(finished_run: TinyRun, capfd: Capture):
    shape = "prompt=3,completion=6"
    assert (
        main(["--run", str(finished_run.path), "--rollouts.prompts_per_step", "2", "--fake", f"{shape},steps=2"]) == 0
    )
    size, first, medians, *lines, speed, memory = capfd.readouterr().out.splitlines()
    assert size == "8 rollouts, 72 tokens"
    assert first.startswith("first step, with compilation: ")
    assert medians == "medians of the other 1 steps:"
    assert {"seconds/batch", "seconds/step", "tokens/trained_per_second"} <= {line.split()[0] for line in lines}
    assert speed.startswith("tokens per second, prompts included: ")
    assert memory.startswith("peak memory: device not tracked on this platform, host ")


def test_a_config_of_another_version_is_named(finished_run: TinyRun, tmp_path: Path, capfd: Capture):
    run = copy_of(finished_run, tmp_path)
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("num_steps:", "number_of_steps:", 1))
    assert main(["--run", str(run.path), "--step", "4"]) == 1
    assert f"error: {config}: unknown key number_of_steps" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give --run DIR and --step N to replay a step, or --fake SHAPE"),
        (["--run", "RUN"], "give --run DIR and --step N"),
        (["--step", "3"], "give --run DIR and --step N"),
        (["--step", "three"], "argument --step: invalid int value: 'three'; see --help"),
        (["--fake", "prompt=1,completion=1", "--step", "3"], "--step is 3, but --fake replays no step"),
        (["--run", "missing", "--step", "3"], "'missing' is not a run directory"),
        (["--run", "RUN", "--step", "9"], "has no step 9; its steps are 1 to 6"),
        (["--run", "RUN", "--step", "3", "--polcy_loss.type", "grpo"], "unknown key polcy_loss"),
        (["--run", "RUN", "--step", "3", "--model.hidden_dim", "32"], "does not fit the configured model"),
        (["--run", "RUN", "--step", "3", "--critic", "{}", "--advantage.type", "gae"], "does not fit the configured"),
        (["--run", "RUN", "--fake", "prompt=9,completion=9"], "exceed rollouts.max_length, 12"),
        (["--fake", "prompt=9,completion=9"], "no config; give its file with --config FILE"),
    ],
)
def test_mistakes_are_named(finished_run: TinyRun, argv: list[str], message: str, capfd: Capture):
    assert main([str(finished_run.path) if word == "RUN" else word for word in argv]) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert message in error
