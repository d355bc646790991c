# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The loops to copy have the losses, rewards and accuracies of the commands, bit for bit."""

import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.tiny_run import TinyRun

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the loops print, and the records of the commands, with the code generator of users.

    That of the tests rounds equal sums differently in different programs.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    program = [sys.executable, "-m", "tests.experiments.loop_cases", str(tmp_path_factory.mktemp("loops"))]
    done = fork_server.run([*program, str(finished_run.path)], env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def steps(printed: str) -> list[dict[str, float]]:
    """The numbers of each step that a loop has printed, by name."""
    lines = [line.partition(": ")[2] for line in printed.splitlines() if line.startswith("step ")]
    return [{name: float(value) for name, value in re.findall(r"(\w+) ([^ ,]+)", line)} for line in lines]


@pytest.mark.medium
@pytest.mark.parametrize(("case", "count"), [("rl", 5), ("sft", 9), ("dpo", 5)])
def test_losses_and_rewards_are_those_of_the_command(results: dict[str, Any], case: str, count: int) -> None:
    result, names = results[case], {"loss": "loss/total", "reward": "objective/scores"}
    found = steps(result["printed"])
    expected = [{name: record[names[name]] for name in found[0]} for record in result["records"][1:]]
    assert found == expected[: len(found)]
    assert len(found) >= count
    assert len({step["loss"] for step in found}) == len(found)


@pytest.mark.medium
def test_accuracies_are_those_of_the_command(results: dict[str, Any]) -> None:
    found = ast.literal_eval(results["rl"]["printed"].splitlines()[-1])
    assert any("accuracy" in name for name in found)
    assert found.items() <= results["rl"]["records"][-1].items()


@pytest.mark.medium
def test_the_changes_of_the_page_change_the_loop(results: dict[str, Any]) -> None:
    """The first step has the same rollouts, until tasks come from two environments."""
    first, *_ = steps(results["rl"]["printed"])
    advantage, loss, environment = results["changes"].values()
    for printed in (advantage, loss):
        changed, _ = steps(printed)
        assert changed["reward"] == first["reward"]
        assert changed["loss"] != first["loss"]
    found = ast.literal_eval(environment.splitlines()[-1])
    assert {name.split("/")[1] for name in found} == {"ones", "small"}


@pytest.mark.parametrize(("name", "most"), [("loop", 100), ("sft_loop", 60), ("dpo_loop", 70)])
def test_loops_fit_on_a_screen_or_two(name: str, most: int) -> None:
    assert len((ROOT / "experiments" / f"{name}.py").read_text().splitlines()) <= most
