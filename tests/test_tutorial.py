# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run the files and commands of the tutorial in order."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "pages" / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_tutorial_trains_a_policy(tmp_path: Path):
    for title, text in re.findall(r"```\w+ title=\"([^\"]+)\"\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / title).write_text(text, encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    outputs = {}
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "python"
        # As documented for machines without sandbox isolation.
        more = ["--sandbox.require", "none"] if "marin_rl.train" in command and sys.platform != "linux" else []
        done = subprocess.run(
            [sys.executable, *arguments, *more],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
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
    assert "is in the middle" in (tmp_path / "middle.html").read_text(encoding="utf-8")
