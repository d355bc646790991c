# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollouts per second and idle shares for several numbers of rollout workers, compared with the simulator.

    python -m experiments.lab.benchmarks.benchmark_workers
    python -m experiments.lab.benchmarks.benchmark_workers --workers 1 2 4 --steps 40 --seconds 2 --spread 0.5

Every number of workers is a separate run with `mode: async`, a tiny model and an environment that responds after a
delay without using the CPU, so that more workers are faster even on a machine with few cores. The simulator uses the
durations that the run measured: seconds of a step without waiting, and seconds of a group.
"""

import collections
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.benchmarks.measurement import BenchmarkedRunError, benchmark_parser, make_report, say, spread
from experiments.lab.benchmarks.simulate_pipeline import Pipeline, Simulation
from experiments.lab.soak import TINY
from marin_rl.runs.rollout_store import read_rollouts

ROOT = Path(__file__).parents[3]
GROUPS, MEMBERS = 8, 4


def settings_of(arguments: Any, workers: int, run_dir: Path) -> dict[str, Any]:
    """Return the changes to experiments/rloo_async.yaml."""
    options = {"seconds": arguments.seconds, "spread": arguments.spread}
    return {
        **TINY,
        "run_dir": str(run_dir),
        "environment": {
            "type": "file",
            "path": str(Path(__file__).with_name("waiting_environment.py")),
            "name": "make_waiting",
            "options": options,
        },
        "num_steps": arguments.steps,
        "rollouts.prompts_per_step": GROUPS,
        "rollouts.group_size": MEMBERS,
        "sampling.max_seqs": MEMBERS * arguments.groups_together,
        "checkpoint.every": 0,
        "replay.max_staleness": arguments.max_staleness,
        "workers.num_workers": workers,
    }


def run(settings: Mapping[str, Any]) -> None:
    """Train with these settings in a separate process.

    Raises:
        BenchmarkedRunError: if it fails.
    """
    flags = [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}" for name, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "marin_rl.train",
        "--config",
        str(ROOT / "experiments" / "rloo_async.yaml"),
        *flags,
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchmarkedRunError(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")


def measured(run_dir: Path, skip: int) -> dict[str, Any]:
    """Return the figures of a run without its first steps, in which programs are compiled and workers start.

    Args:
        run_dir: directory of a finished run.
        skip: steps to exclude.
    """
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1 + skip :]
    total = sum(record["seconds/total"] for record in records)
    groups = group_seconds(run_dir, skip)
    return {
        "steps": len(records),
        "seconds_per_step": total / len(records),
        "rollouts_per_second": GROUPS * MEMBERS * len(records) / total,
        "trainer_idle_share": sum(record["seconds/wait"] for record in records) / total,
        "worker_busy_share": statistics.mean(record["workers/busy_share"] for record in records),
        "staleness_mean": statistics.mean(record["staleness/mean"] for record in records),
        "step_seconds": spread([record["seconds/total"] - record["seconds/wait"] for record in records]),
        "group_seconds": spread(groups),
        "group_seconds_mean": statistics.mean(groups),
        "group_seconds_sigma": statistics.pstdev([math.log(seconds) for seconds in groups]),
    }


def group_seconds(run_dir: Path, skip: int) -> list[float]:
    """Return the seconds of the slowest attempt of each group."""
    slowest: dict[str, float] = collections.defaultdict(float)
    for table in read_rollouts(run_dir / "rollouts", None, purposes=["training"]):
        for row in table.select(["step", "group_id", "seconds"]).to_pylist():
            if row["step"] > skip:
                took = sum(seconds for _, seconds in row["seconds"])
                slowest[row["group_id"]] = max(slowest[row["group_id"]], took)
    return list(slowest.values())


def simulated(arguments: Any, workers: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate the same pipeline with the measured durations."""
    pipeline = Pipeline(
        workers=workers,
        step_seconds=found["step_seconds"]["median"],
        group_seconds=found["group_seconds_mean"],
        spread=found["group_seconds_sigma"],
        groups_together=arguments.groups_together,
        groups_per_step=GROUPS,
        max_staleness=arguments.max_staleness,
        steps=200,
    )
    result = Simulation(pipeline).run()
    names = ("seconds_per_step", "trainer_idle_share", "worker_idle_share", "staleness_mean")
    return {name: result[name] for name in names}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark for each number of workers."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=10, help="steps at the start that are excluded")
    parser.add_argument("--seconds", type=float, default=2.0, help="mean seconds of an attempt in the environment")
    parser.add_argument("--spread", type=float, default=0.5, help="standard deviation of its logarithm over tasks")
    parser.add_argument("--groups_together", type=int, default=2, help="groups that a worker runs concurrently")
    parser.add_argument("--max_staleness", type=int, default=2)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    figures: dict[str, Any] = {}
    for workers in arguments.workers:
        with tempfile.TemporaryDirectory() as folder:
            say(f"{workers} workers, {arguments.steps} steps ...")
            run(settings_of(arguments, workers, Path(folder) / "run"))
            found = measured(Path(folder) / "run", arguments.skip)
        simulation = simulated(arguments, workers, found)
        figures[str(workers)] = {
            "measured": found,
            "simulated": simulation,
            "measured_over_simulated_seconds_per_step": found["seconds_per_step"] / simulation["seconds_per_step"],
        }
    print(make_report("benchmark_workers", given, vars(arguments), figures))


if __name__ == "__main__":
    main()
