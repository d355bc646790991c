# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sums of experiments/rloo.yaml in marin_rl and in TRL or Tunix: the same start, tasks, rewards and settings.

    python -m experiments.lab.against_peer trl --seed 1

Both start from the exported warm start of the seed, get the same problems in the same order, sample with their own
generators, and answer the same held-out problems every ten steps. The other program runs twice: with its default number
of rollouts in a forward and backward pass, and with another one. Adds held-out accuracies, seconds and CPU seconds to
the records of the results page; runs with a record are skipped. All seeds share a compilation cache.
"""

import argparse
import datetime
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from levanter.optim.config import AdamConfig

from experiments.lab.benchmarks.peer_environment import compilation_cache, default_folder, peer_python, peer_versions
from experiments.lab.benchmarks.watched_process import available_cores, watch
from experiments.lab.objectives import start
from experiments.lab.results.runs import AGAINST, LABELS, OURS, ROOT, Record, add, own_versions, read, scores
from experiments.rloo_in_code import rloo
from marin_rl.environments.base import Split
from marin_rl.sessions.run_export import export_run
from marin_rl.sessions.session import run_session

EVERY = 10
"""Steps from one evaluation to the next."""
TIMEOUT = 3600.0
"""Seconds of a run."""
ROWS = {"trl": (8, 512), "tunix": (512, 64)}
"""Rollouts in a forward and backward pass of each program, its default first; 512 are all of a step."""


def prepare(seed: int, folder: Path) -> Path:
    """Write the start of a seed in Hugging Face format and the problem; return their folder, which may exist."""
    problem = folder / f"problem-seed{seed}"
    if (problem / "problem.json").exists():
        return problem
    first = start(seed, folder)
    run_session(first, sys.stdout)
    export_run(first.run_dir, problem / "model")
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


def record(label: str, seed: int, command: list[str], folder: Path, versions: dict[str, str]) -> Record:
    """Run one of the programs on all cores that this process may use, in a new folder.

    Raises:
        BenchmarkedRunError: if it fails, or takes more than an hour.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = folder / "metrics.jsonl"
    log = folder.with_suffix(".log")
    cache = compilation_cache(folder.parent / "compiled")
    watched = watch(command, lines, log, cores=available_cores(), cwd=ROOT, env=os.environ | cache, timeout=TIMEOUT)
    steps, sampled, greedy = scores(folder)
    seconds = cpu = 0.0
    times: dict[int, tuple[float, float]] = {}
    for one in watched.steps:
        seconds, cpu = seconds + one.seconds, cpu + one.cpu_seconds
        times[one.line["step"]] = round(seconds, 1), round(cpu, 1)
    timed = tuple(times[step] for step in steps if step > 0)
    today, shown = datetime.date.today().isoformat(), shlex.join(command[1:]).replace(f"{ROOT}/", "")
    return Record(label, seed, shown.removeprefix("-m "), today, versions, round(cpu, 1), steps, sampled, greedy, timed)


def main() -> None:
    """Run the programs that have no record."""
    parser = argparse.ArgumentParser(description="The sums of experiments/rloo.yaml in marin_rl and another program.")
    parser.add_argument("peer", choices=list(ROWS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer_python", type=Path, help="Python of an environment with it; installed by default")
    parser.add_argument("--folder", type=Path, help="folder for the files of the runs, by default runs/against_PEER")
    arguments = parser.parse_args()
    seed, peer, name = arguments.seed, arguments.peer, AGAINST[arguments.peer]
    folder = (arguments.folder or Path("runs") / name).absolute()
    done = {one.label for one in read(name) if one.seed == seed}
    rows_of = {f"{LABELS[peer]}, {rows} rows": rows for rows in ROWS[peer]}
    if done >= {OURS, *rows_of}:
        print(f"all runs of seed {seed} have records; nothing to do")
        return
    problem = prepare(seed, folder)
    python = arguments.peer_python or peer_python(peer, default_folder(peer))
    ours = folder / f"marin_rl-seed{seed}"
    programs = {
        OURS: (
            [
                *(sys.executable, "-m", "marin_rl.train", "--config", "experiments/rloo.yaml", "--seed", str(seed)),
                *("--run_dir", str(ours), "--initialize_from", str(problem / "model"), "--warm_start.max_steps", "0"),
                *("--evaluation.every", str(EVERY)),
            ],
            ours,
            own_versions(),
        )
    }
    for label, rows in rows_of.items():
        theirs = folder / f"{peer}-{rows}-rows-seed{seed}"
        output = theirs / "metrics.jsonl"
        command = [str(python), "-m", f"experiments.lab.{peer}_sums", "--problem", str(problem)]
        programs[label] = [*command, "--output", str(output), "--rows", str(rows)], theirs, peer_versions(peer, python)
    for label, (command, run_folder, versions) in programs.items():
        if label not in done:
            add(name, record(label, seed, command, run_folder, versions))


if __name__ == "__main__":
    main()
