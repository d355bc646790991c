# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sums of experiments/rloo.yaml in marin_rl and in TRL: the same start, tasks, rewards and settings.

    python -m experiments.against_trl --seed 1 --trl_rows 64

Both start from the exported warm start of the seed, get the same problems in the same order, sample with their own
generators, and answer the same held-out problems every ten steps. Prints the seconds and CPU seconds, from the start of
the process, after which the held-out accuracy reaches the target, and adds them to `times.jsonl` of the folder, beside
the metrics of both.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from levanter.optim.config import AdamConfig

from experiments.benchmarks.trl_environment import default_folder, trl_python
from experiments.benchmarks.watched_process import WatchedRun, available_cores, watch
from experiments.objectives import start
from experiments.rloo_in_code import rloo
from marin_rl.environments.base import Split
from marin_rl.export import ExportRunConfig, run_export
from marin_rl.training.session import run_session

EVERY = 10
"""Steps from one evaluation to the next."""
TIMEOUT = 3600.0
"""Seconds of a run."""
ROOT = Path(__file__).parents[1]


def prepare(seed: int, folder: Path) -> Path:
    """Write the start of a seed in Hugging Face format and the problem; return their folder, which may exist."""
    problem = folder / f"problem-seed{seed}"
    if (problem / "problem.json").exists():
        return problem
    first = start(seed, folder)
    run_session(first, sys.stdout)
    run_export(ExportRunConfig(first.run_dir, str(problem / "model")))
    config = rloo(seed)
    assert isinstance(config.optimizer, AdamConfig)
    environment = config.environment.build()
    held_out = environment.tasks(Split.HELD_OUT)[: config.evaluation.tasks]
    drawn, _ = environment.stream(seed).draw({}, config.num_steps * config.rollouts.prompts_per_step)
    values: dict[str, Any] = {
        "environment": environment.name,
        "seed": seed,
        "steps": config.num_steps,
        "every": EVERY,
        "prompts": config.rollouts.prompts_per_step,
        "group_size": config.rollouts.group_size,
        "new_tokens": config.sampling.max_new_tokens,
        **{name: getattr(config.optimizer, name) for name in ("learning_rate", "beta1", "beta2", "epsilon")},
        "max_grad_norm": config.optimizer.max_grad_norm,
        "train": [(task.messages[-1]["content"], task.answer) for task in drawn],
        "held_out": [(task.messages[-1]["content"], task.answer) for task in held_out],
    }
    (problem / "problem.json").write_text(json.dumps(values))
    return problem


def run(name: str, command: list[str], lines: Path, folder: Path) -> WatchedRun:
    """Run one of the two programs on all cores."""
    log = folder / f"{name}.log"
    return watch(command, lines, log, cores=available_cores(), cwd=ROOT, env=dict(os.environ), timeout=TIMEOUT)


def time_to(watched: WatchedRun, target: float) -> dict[str, float | None]:
    """Return step, seconds and CPU seconds at the first evaluation with a sampled accuracy of at least `target`."""
    seconds = cpu = 0.0
    for one in watched.steps:
        seconds, cpu = seconds + one.seconds, cpu + one.cpu_seconds
        if any(name.endswith("/accuracy_sampled") and value >= target for name, value in one.line.items()):
            return {"step": one.line["step"], "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}
    return {"step": None, "seconds": None, "cpu_seconds": None}


def main() -> None:
    """Run both programs once."""
    parser = argparse.ArgumentParser(description="The sums of experiments/rloo.yaml in marin_rl and in TRL.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.6, help="held-out accuracy, sampled")
    parser.add_argument("--trl_rows", type=int, default=64, help="rollouts in a forward and backward pass of TRL")
    parser.add_argument("--trl_python", type=Path, help="Python of an environment with TRL; installed by default")
    parser.add_argument("--folder", type=Path, default=Path("runs/against_trl"))
    arguments = parser.parse_args()
    seed, folder = arguments.seed, arguments.folder.absolute()
    problem = prepare(seed, folder)
    ours = folder / f"marin_rl-seed{seed}"
    theirs = folder / f"trl-seed{seed}"
    theirs.mkdir(parents=True, exist_ok=True)
    python = arguments.trl_python or trl_python(default_folder())
    commands = {
        "marin_rl": [
            *(sys.executable, "-m", "marin_rl.train", "--config", "experiments/rloo.yaml", "--seed", str(seed)),
            *("--run_dir", str(ours), "--initialize_from", str(problem / "model"), "--warm_start.max_steps", "0"),
            *("--evaluation.every", str(EVERY)),
        ],
        "trl": [
            *(str(python), "-m", "experiments.trl_sums", "--problem", str(problem)),
            *("--output", str(theirs / "metrics.jsonl"), "--rows", str(arguments.trl_rows)),
        ],
    }
    for name, command in commands.items():
        watched = run(name, command, folder / f"{name}-seed{seed}" / "metrics.jsonl", folder)
        record = {
            "program": name,
            "seed": seed,
            **({"rows": arguments.trl_rows} if name == "trl" else {}),
            **time_to(watched, arguments.target),
            "load": watched.load,
        }
        print(json.dumps(record))
        with (folder / "times.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
