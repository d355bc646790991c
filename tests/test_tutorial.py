# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The tutorial, file by file and command by command, as a reader would follow it."""

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
def test_from_an_empty_folder_to_a_trained_policy(tmp_path: Path):
    for title, text in re.findall(r"```\w+ title=\"([^\"]+)\"\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / title).write_text(text, encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    said = {}
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "python"
        # What the page says for machines that offer no isolation.
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
        said[command] = done.stdout
    assert said["python try_my_rewards.py"].splitlines() == [
        "'7' 1.0 right",
        "'4' 0.0 7 is the largest",
        "'7 ' 0.0 7 is the largest",
    ]
    lines = (tmp_path / "runs" / "largest" / "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(lines[index])["eval/problems/accuracy_sampled"] for index in (0, -1))
    assert first < 0.75
    assert last > max(first + 0.15, 0.8)
    assert "train-60-" in said["python -m marin_rl.view runs/largest --limit 8"]
    assert "is the largest" in (tmp_path / "largest.html").read_text(encoding="utf-8")
