# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The notebook as a kernel runs it, with fewer steps; an interrupted cell; and what is left in the kernel."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "experiments" / "largest_digit.ipynb"
INTERRUPTED = """
import os, signal, threading

def interrupting(task, reply):
    if again.metrics and again.metrics[-1]["step"] == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return largest(task, reply)

settings = dict(rollouts={"prompts_per_step": 32, "group_size": 8, "max_length": 16}, sampling=trainer.config.sampling)
settings |= dict(optimizer=adam, evaluation={"tasks": 0}, checkpoint={"every": 1}, num_steps=5, run_dir="runs/again")
again = marin_rl.RLTrainer("runs/largest_start", tasks, {"function": interrupting, "name": "largest"}, **settings)
again.train()
"""
RESUMED = """
again = marin_rl.RLTrainer("runs/largest_start", tasks, largest, **settings)
again.train()
[record["step"] for record in again.metrics]
"""
LEFT = """
import pathlib, re, shutil
children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
def left():
    # A pool that is there may get a further thread.
    threads = {re.sub(r"_\\d+$", "", thread.name) for thread in threading.enumerate()}
    return threads, children.read_text() if children.exists() else ""
before = left()
for _ in range(3):
    shutil.rmtree("runs/again")
    marin_rl.RLTrainer("runs/largest_start", tasks, largest, **settings | {"num_steps": 1}).train()
before == left()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_runs_and_an_interrupted_cell_resumes(tmp_path: Path) -> None:
    notebook: Any = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("num_steps=60", "num_steps=30").replace("num_steps=40", "num_steps=10")
    interrupted, resumed, left = [nbformat.v4.new_code_cell(text) for text in (INTERRUPTED, RESUMED, LEFT)]
    interrupted.metadata["tags"] = ["raises-exception"]
    notebook.cells += [interrupted, resumed, left]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()

    [plot] = [cell for cell in notebook.cells if cell.source == "trainer.plot()"]
    assert "image/png" in plot.outputs[-1].data
    [training] = [cell for cell in notebook.cells if cell.source.startswith("def largest")]
    bars = [output.data["text/html"] for output in training.outputs if output.output_type == "display_data"]
    assert len(bars) == 1
    assert bars[0].startswith('<progress max="10" value="10">')
    [evaluation] = [cell for cell in notebook.cells if cell.source.startswith("trainer.evaluate")]
    found = re.search(r"'eval/tasks/reward_sampled': ([0-9.]+)", evaluation.outputs[-1].data["text/plain"])
    assert found is not None
    assert float(found[1]) > 0.5
    assert interrupted.outputs[-1].ename == "KeyboardInterrupt"
    assert resumed.outputs[-1].data["text/plain"] == "[0, 1, 2, 3, 4, 5]"
    assert left.outputs[-1].data["text/plain"] == "True"
