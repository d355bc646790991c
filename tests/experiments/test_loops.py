# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The loops to copy have the losses, rewards and accuracies of the commands, bit for bit."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments import dpo_loop, loop, sft_loop
from marin_rl.sessions.earlier_run import read_config
from tests.tiny_run import TinyRun, make_run
from tests.training.test_preference_run import make_run as make_dpo_run
from tests.training.test_preference_run import train as train_dpo
from tests.training.test_supervised_run import make as make_sft_run

STEPS = 5


def config_of(run: TinyRun) -> Any:
    """The config of a run that has started."""
    from marin_rl.runs.run_directory import RunDirectory

    return read_config(RunDirectory(run.path))


def printed(output: str) -> list[dict[str, float]]:
    """The numbers of each step that a loop has printed, by name."""
    steps = [line.partition(": ")[2] for line in output.splitlines() if line.startswith("step ")]
    return [{name: float(value) for name, value in re.findall(r"(\w+) ([^ ,]+)", step)} for step in steps]


def recorded(run: TinyRun, names: Mapping[str, str]) -> list[dict[str, float]]:
    """The same numbers of a command; `names` has the metric of each."""
    return [{name: record[metric] for name, metric in names.items()} for record in run.records()[1:]]


@pytest.mark.medium
def test_rl_has_the_losses_rewards_and_accuracies_of_the_command(
    finished_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {"initialize_from": str(finished_run.path), "warm_start__max_steps": 0, "model": None}
    run = make_run(tmp_path, seed=loop.SEED, num_steps=STEPS, evaluation={"greedy": True}, **started)
    assert run.train() == 0
    config = config_of(run)
    sizes = {"prompts": 4, "group_size": 4, "max_length": 12, "max_new_tokens": 3}
    capsys.readouterr()
    loop.main(str(finished_run.path), config.environment, config.optimizer, num_steps=STEPS, **sizes)
    output = capsys.readouterr().out
    found = printed(output)
    assert len(found) == STEPS
    assert found == recorded(run, {"loss": "loss/total", "reward": "objective/scores"})
    assert len({step["loss"] for step in found}) == STEPS
    accuracies = json.loads(output.splitlines()[-1].replace("'", '"'))
    assert accuracies.items() <= run.records()[-1].items()


@pytest.mark.medium
def test_sft_has_the_losses_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_sft_run(tmp_path, seed=0)
    assert run.train() == 0
    config = config_of(run)
    capsys.readouterr()
    sft_loop.main(config.model, config.data, config.optimizer, epochs=1, batch_size=config.batch.size, max_length=16)
    found = printed(capsys.readouterr().out)
    assert len(found) > 1
    assert found == recorded(run, {"loss": "loss/total"})[: len(found)]


@pytest.mark.medium
def test_dpo_has_the_losses_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_dpo_run(tmp_path, seed=0, loss={"beta": dpo_loop.BETA})
    assert train_dpo(run) == 0
    config = config_of(run)
    capsys.readouterr()
    sizes = {"batch_size": config.batch.size, "max_length": config.batch.max_length}
    dpo_loop.main(config.model, config.preferences, config.optimizer, epochs=2, **sizes)
    found = printed(capsys.readouterr().out)
    assert len(found) > 1
    assert found == recorded(run, {"loss": "loss/total"})[: len(found)]
