# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Start-up times: imports, `--dry_run`, and the first update, without and with cached programs.

Seconds depend on what else the machine does. CPU seconds depend on it less, and `taskset -c 0` before the command keeps
all threads on one core.

    python -m experiments.lab.benchmarks.benchmark_startup
    python -m experiments.lab.benchmarks.benchmark_startup --config experiments/jsonl_start.yaml --repeats 5

Every measurement uses a separate process. A run gets a fresh run directory and a fresh compilation cache; a second run
gets another run directory and the same cache. The user's compilation cache is not used.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.lab.benchmarks.measured_start import CPU_SECONDS
from experiments.lab.benchmarks.measurement import (
    BenchmarkedRunError,
    benchmark_parser,
    config_arguments,
    make_report,
    ratios,
    say,
    spread,
    timed,
)

MODULES = ("jax", "levanter", "marin_rl.train", "marin_rl.sessions.session")
"""Modules whose imports are timed; the last one is that of a training session."""

SHORT_RUN = (
    # Start with RL, without an evaluation between the start of RL and the first update's record.
    "--warm_start.max_steps=0",
    "--num_steps=2",
    "--evaluation.every=0",
    "--evaluation.tasks=64",
)
"""Settings of a short run for timing its start; later arguments override these."""

POLL_SECONDS = 0.02
SECONDS = "seconds"
"""Key of the seconds until the first update, next to those of `measured_start`."""


def measure_imports(repeats: int) -> dict[str, Any]:
    """Return seconds and CPU seconds of `import` of each module in a fresh interpreter, after a warm-up import."""
    found: dict[str, list[list[float]]] = {module: [] for module in MODULES}
    for repeat in range(repeats + 1):
        for module, values in found.items():
            clocks = "[time.perf_counter(), time.process_time()]"
            code = f"import time; start = {clocks}; import {module}; print(*start, *{clocks})"
            first, first_cpu, last, last_cpu = map(float, _run([sys.executable, "-c", code]).split())
            if repeat:
                values.append([last - first, last_cpu - first_cpu])
    return {
        unit: {module: spread([value[index] for value in values]) for module, values in found.items()}
        for index, unit in enumerate(("import_seconds", "import_cpu_seconds"))
    }


def measure_dry_run(train_arguments: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return wall-clock seconds of `marin_rl.train --dry_run`, interpreter start included."""
    command = [sys.executable, "-m", "marin_rl.train", *train_arguments, "--dry_run"]
    return spread([timed(lambda: _run(command)) for _ in range(repeats)])


def measure_first_update(train_arguments: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure a process until the record of the first update, with an empty and with a filled cache.

    Args:
        train_arguments: a command line of `marin_rl.train` for a short run; run directory and cache are added.
        repeats: pairs of runs, each pair with a fresh cache.
    """
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name, runs in found.items():
                runs.append(_first_update(train_arguments, Path(folder) / name, Path(folder) / "cache"))
                say(f"first update with a {name} cache after {runs[-1][SECONDS]:.1f} s: {runs[-1]}")
    figures: dict[str, Any] = {
        f"{name}_cache_{key}": spread([run[key] for run in runs]) for name, runs in found.items() for key in runs[0]
    }
    for key in (SECONDS, CPU_SECONDS):
        cold, warm = ([run[key] for run in runs] for runs in found.values())
        figures[f"cold_over_warm_{key}"] = ratios(cold, warm)
    return figures


def _first_update(train_arguments: Sequence[str], run_dir: Path, cache: Path) -> dict[str, float]:
    result, log = run_dir.with_suffix(".json"), run_dir.with_suffix(".printed")
    places = [f"--run_dir={run_dir}", f"--trainer.jax_compilation_cache_dir={cache}"]
    program = "experiments.lab.benchmarks.measured_start"
    command = [sys.executable, "-m", program, str(result), *train_arguments, *places]
    elapsed = None
    with log.open("wb") as output:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment()) as process:
            while elapsed is None and process.poll() is None:
                time.sleep(POLL_SECONDS)
                if result.exists():
                    elapsed = time.perf_counter() - start
    if elapsed is None or process.returncode:
        raise BenchmarkedRunError(f"{command} ended with status {process.returncode}:\n{log.read_text()}")
    return {SECONDS: elapsed, **json.loads(result.read_text())}


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if done.returncode:
        raise BenchmarkedRunError(f"{list(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Return this process's environment without settings of another compilation cache."""
    return {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Imports, dry run and time to the first update; other flags are those of marin_rl.train")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each kind")
    arguments, rest = parser.parse_known_args(argv)
    train_arguments = [*SHORT_RUN, *config_arguments(rest)]
    figures = {
        **measure_imports(arguments.repeats),
        "dry_run_seconds": measure_dry_run(train_arguments, arguments.repeats),
        "first_update": measure_first_update(train_arguments, arguments.repeats),
    }
    settings = {"repeats": arguments.repeats, "short_run": " ".join(SHORT_RUN)}
    print(make_report("benchmark_startup", argv, settings, figures))


if __name__ == "__main__":
    main()
