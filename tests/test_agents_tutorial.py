# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The agent of the page about agents, and half of its training run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "pages" / "agents.md").read_text(encoding="utf-8")


def test_page_shows_the_agent_of_the_experiment():
    [text] = re.findall(r"```python title=\"experiments/retry_agent.py\"\n(.*?)```", PAGE, re.DOTALL)
    assert (ROOT / "experiments" / "retry_agent.py").read_text(encoding="utf-8").endswith(f"\n\n{text}")


@pytest.mark.slow
def test_agent_learns(tmp_path: Path):
    pytest.importorskip("openai")
    run = tmp_path / "agent"
    options = ["--seed", "1", "--num_steps", "40", "--evaluation.every", "40", "--run_dir", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "marin_rl.train", "--config", "experiments/agent.yaml", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    before, after = json.loads(lines[0]), json.loads(lines[-1])
    name = "eval/middle_digits/accuracy_sampled"
    assert after[name] > before[name] + 0.15
    assert after["mismatch/logprob_difference_max"] < 1e-5
