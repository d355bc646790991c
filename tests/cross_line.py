# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Use runs of each line of levanter with the other one: `python -m tests.cross_line PYTHON`.

PYTHON is that of an environment with the other line. Each line trains a tiny run. The other one resumes it from a
checkpoint in the middle, and replays, evaluates, exports and views it. The results are equal if both environments have
the same jax; otherwise they differ by rounding, and only the exit statuses are checked. Moments of the optimizer may
differ in their last bit, because haliax reads embeddings with other instructions, and are not compared.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.tiny_run import TinyRun, interrupted_after, make_run, outcome

ROOT = Path(__file__).parent.parent
STEP = 3
"""Step after which the other line takes over."""
RESULTS = ("records", "steps", "progress", "rollouts", "weights")
"""Parts of a run that do not depend on the line."""


def command(python: str, *arguments: str) -> str:
    """Run `python -m` with one of the two environments, and return its output."""
    settings = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    completed = subprocess.run(
        [python, "-m", *arguments], cwd=ROOT, env=environment | settings, capture_output=True, text=True, check=False
    )
    if completed.returncode != 0:
        raise SystemExit(f"{python} -m {' '.join(arguments)} failed:\n{completed.stdout}\n{completed.stderr}")
    return completed.stdout


def results(run: TinyRun) -> dict[str, Any]:
    found = outcome(run)
    weights = {name: array for name, array in found["state"].items() if name.startswith(".model")}
    return {**found, "weights": [weights, digest(run.path / "hf")]}


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def jax_of(run: TinyRun) -> str:
    return json.loads((run.checkpoint(run.steps()[-1]) / "run_files.json").read_text())["software"]["jax"]


def differences(first: str, second: str, folder: Path) -> list[str]:
    """Train with one line, use the run with the other, and return what differs."""
    run = make_run(folder, checkpoint__keep_every=1, checkpoint__every=1)
    command(first, "marin_rl.train", *run.argv)
    resumed = interrupted_after(run, STEP, folder / "resumed")
    command(second, "marin_rl.train", *resumed.argv)
    replayed = json.loads(command(second, "marin_rl.replay", "--run", str(run.path), "--step", str(STEP), "--json"))
    evaluated = json.loads(command(second, "marin_rl.evaluate", "--run", str(run.path), "--json"))
    command(second, "marin_rl.export", "--run", str(run.path), "--output", str(folder / "exported"))
    views = {python: command(python, "marin_rl.view", str(run.path)) for python in (first, second)}
    last = run.records()[-1]
    expected, found = results(run), results(resumed)
    same = {
        **{f"{name} of the resumed run": found[name] == expected[name] for name in RESULTS},
        "weights of the replayed step": replayed["weight_difference"] == 0,
        "metrics of the evaluation": all(last.get(name, value) == value for name, value in evaluated.items()),
        "exported weights": digest(folder / "exported") == digest(run.path / "hf"),
        "view": views[first] == views[second],
    }
    is_comparable = jax_of(run) == jax_of(resumed)
    return [name for name, is_same in same.items() if is_comparable and not is_same]


def main() -> int:
    """Compare both ways, and print what differs."""
    failed = False
    for first, second in ((sys.executable, sys.argv[1]), (sys.argv[1], sys.executable)):
        with tempfile.TemporaryDirectory() as folder:
            found = differences(first, second, Path(folder))
        print(f"{first} and then {second}: {'different: ' + ', '.join(found) if found else 'ok'}", flush=True)
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
