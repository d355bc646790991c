# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The files and bash commands of `getting_started.md` in order, and the agent of `environments.md` with half of its
run."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fork_server

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def agent_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, fork_server.ForkedProcess]]:
    """A folder, and the training run of the agent in it, which is started before the shorter tutorial."""
    folder = tmp_path_factory.mktemp("agent")
    options = ["--seed", "1", "--num_steps", "40", "--evaluation.every", "40", "--run_dir", str(folder / "run")]
    command = [sys.executable, "-m", "marin_rl.train", "--config", "experiments/agent.yaml", *options]
    with (
        (folder / "output.txt").open("wb") as output,
        fork_server.popen(command, stdout=output, env=ENVIRONMENT, cwd=ROOT) as process,
    ):
        yield folder, process
        process.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("agent_run")
def test_tutorial_trains_a_policy(tmp_path: Path):
    page = (PAGES / "getting_started.md").read_text(encoding="utf-8")
    for title, text in re.findall(r"```\w+ title=\"([^\"]+)\"\n(.*?)```", page, re.DOTALL):
        (tmp_path / title).write_text(text, encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    outputs = {}
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "python"
        # As documented for machines without sandbox isolation.
        more = ["--sandbox.require", "none"] if "marin_rl.train" in command and sys.platform != "linux" else []
        run = fork_server.run if arguments[0] == "-m" else subprocess.run
        done = run(
            [sys.executable, *arguments, *more],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command] = done.stdout
    assert outputs["python try_my_rewards.py"].splitlines() == [
        "'7' 1.0 right",
        "'4' 0.0 7 is in the middle",
        "'7 ' 0.0 7 is in the middle",
    ]
    lines = (tmp_path / "runs" / "middle" / "metrics.jsonl").read_text().splitlines()
    before, after = json.loads(lines[0]), json.loads(lines[-1])
    for accuracy in ("eval/problems/accuracy_sampled", "eval/problems/accuracy_greedy"):
        assert before[accuracy] < 0.75
        assert after[accuracy] > max(before[accuracy] + 0.1, 0.8)
    assert "train-80-" in outputs["python -m marin_rl.view runs/middle --limit 8"]
    wrong = outputs["python -m marin_rl.view runs/middle --max_reward 0 --limit 8"]
    assert "is in the middle" in wrong or wrong == "0 rollouts match the filters\n"
    assert "is in the middle" in (tmp_path / "middle.html").read_text(encoding="utf-8")


def test_page_shows_the_agent_of_the_experiment():
    page = (PAGES / "environments.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```python title=\"experiments/retry_agent.py\"\n(.*?)```", page, re.DOTALL)
    assert (ROOT / "experiments" / "retry_agent.py").read_text(encoding="utf-8").endswith(f"\n\n{text}")


@pytest.mark.slow
def test_agent_learns(agent_run: tuple[Path, fork_server.ForkedProcess]):
    folder, process = agent_run
    assert process.wait() == 0, (folder / "output.txt").read_text()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    before, after = json.loads(lines[0]), json.loads(lines[-1])
    name = "eval/middle_digits/accuracy_sampled"
    assert after[name] > before[name] + 0.15
    assert after["mismatch/logprob_difference_max"] < 1e-5
