# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Whole training steps of marin_rl with its defaults, alone or in turn with TRL or Tunix, on all cores and on one.

    python -m experiments.lab.benchmarks.benchmark_end_to_end
    python -m experiments.lab.benchmarks.benchmark_end_to_end --against trl --sizes tiny --pairs 3 --steps 10

All programs start from the same weights and train with the same prompts, reward function, group size, lengths and
optimizer. Each run is a separate process. In a pair, the programs run one after the other; the first run of a program
that compiles starts with an empty compilation cache on each set of cores.
"""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.benchmarks.measurement import (
    BenchmarkedRunError,
    benchmark_parser,
    make_report,
    ratios,
    say,
    spread,
)
from experiments.lab.benchmarks.peer_environment import (
    PEERS,
    compilation_cache,
    default_folder,
    peer_python,
    peer_versions,
)
from experiments.lab.benchmarks.watched_process import WatchedRun, available_cores, pinned, watch
from experiments.lab.benchmarks.words_problem import SIZES, Size

ROOT = Path(__file__).parents[3]
PROBLEM = "experiments.lab.benchmarks.words_problem"


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A step as the program itself reports it."""

    phases: Mapping[str, float]
    """Seconds by phase; `sample` is always present."""
    loss: float
    """Policy loss."""
    reward: float
    """Mean reward of the rollouts."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    new_tokens: float
    """Mean length of the answers."""


@dataclasses.dataclass(frozen=True)
class ProgramRun:
    """One run of a program."""

    watched: WatchedRun
    """Measurements from outside."""
    steps: tuple[MeasuredStep, ...]
    """Measurements from inside, one per watched step."""
    compiles: tuple[tuple[float, float], ...] = ()
    """Time and seconds of each compilation or load of a compiled program."""


Runner = Callable[[Sequence[int], Path], ProgramRun]
"""Runs a program on some cores; the folder is new and for its files. Called in turn with the other programs."""


def read_marin_step(line: Mapping[str, Any]) -> MeasuredStep:
    """Convert a record of metrics.jsonl."""
    phases = {name.removeprefix("seconds/"): seconds for name, seconds in line.items() if name.startswith("seconds/")}
    del phases["total"]
    length = line["train/output_length"]
    return MeasuredStep(phases, line["loss/policy_avg"], line["train/rewards"], line["grad_norm"], length)


def run_marin(
    problem: Path, caches: Path, steps: int, timeout: float, cores: Sequence[int], folder: Path
) -> ProgramRun:
    """Run marin_rl; runs on the same cores share a compilation cache.

    Args:
        problem: files of the problem.
        caches: folder of the compilation caches.
        steps: RL steps.
        timeout: seconds after which the run is ended.
        cores: cores of the run.
        folder: new folder for the run.
    """
    cache = caches / f"{len(cores)}-cores"
    command = [sys.executable, "-m", PROBLEM, "train", str(problem), "--run_dir", str(folder / "run")]
    watched = watch(
        [*command, "--steps", str(steps), "--cache", str(cache)],
        folder / "run" / "metrics.jsonl",
        folder / "output.txt",
        cores=cores,
        cwd=ROOT,
        env=_environment(),
        timeout=timeout,
    )
    compiles = [json.loads(line) for line in (folder / "run.compiles.jsonl").read_text().splitlines()]
    return ProgramRun(
        watched,
        tuple(read_marin_step(step.line) for step in watched.steps),
        tuple((compiled["at"], compiled["seconds"]) for compiled in compiles),
    )


def run_peer(
    peer: str,
    problem: Path,
    caches: Path,
    python: Path,
    steps: int,
    rows: int,
    timeout: float,
    cores: Sequence[int],
    folder: Path,
) -> ProgramRun:
    """Run another program; its runs on the same cores share a compilation cache, with marin_rl's threshold.

    Args:
        peer: the program.
        problem: files of the problem.
        caches: folder of the compilation caches.
        python: interpreter of an environment with the program.
        steps: RL steps.
        rows: rollouts of a forward and backward pass.
        timeout: seconds after which the run is ended.
        cores: cores of the run.
        folder: new folder for the run.
    """
    lines = folder / "steps.jsonl"
    command = [str(python), "-m", f"experiments.lab.benchmarks.{peer}_run", "--problem", str(problem)]
    cache = compilation_cache(caches / f"{peer}-{len(cores)}-cores")
    watched = watch(
        [*command, "--output", str(lines), "--steps", str(steps), "--rows", str(rows)],
        lines,
        folder / "output.txt",
        cores=cores,
        cwd=ROOT,
        env=_environment() | cache | {"HF_HUB_OFFLINE": "1"},
        timeout=timeout,
    )
    names = [field.name for field in dataclasses.fields(MeasuredStep)]
    return ProgramRun(
        watched, tuple(MeasuredStep(**{name: step.line[name] for name in names}) for step in watched.steps)
    )


def _environment() -> dict[str, str]:
    """Return this process's environment without settings of jax's compilation cache and of thread counts."""
    dropped = ("JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def run_in_turn(
    runners: Mapping[str, Runner], core_sets: Mapping[str, Sequence[int]], pairs: int, folder: Path
) -> dict[str, dict[str, list[ProgramRun]]]:
    """Run all programs in turn, `pairs` times, on each set of cores.

    Args:
        runners: programs by name.
        core_sets: cores by name.
        pairs: runs of each program on each set of cores.
        folder: folder for the files of the runs.

    Returns:
        Runs by set of cores and program.
    """
    runs: dict[str, dict[str, list[ProgramRun]]] = {cores: {name: [] for name in runners} for cores in core_sets}
    for cores, numbers in core_sets.items():
        for pair in range(pairs):
            for name, runner in runners.items():
                place = folder / cores / f"{name}-{pair}"
                place.mkdir(parents=True)
                runs[cores][name].append(runner(numbers, place))
                seconds = [step.seconds for step in runs[cores][name][-1].watched.steps]
                say(f"{cores}, pair {pair + 1}, {name}: {', '.join(f'{taken:.2f}' for taken in seconds)} s")
    return runs


def summarize(runs: Sequence[ProgramRun], size: Size, *, cores: int, rate: float, skip: int) -> dict[str, Any]:
    """Return the figures of one program on one set of cores, as in experiments/lab/results/benchmarks.md.

    Args:
        runs: its runs.
        size: sizes of the problem.
        cores: number of cores.
        rate: measured floating-point operations per second of matrix products on these cores.
        skip: steps at the start of each run that are excluded, in which programs are compiled.
    """
    watched = [step for run in runs for step in run.watched.steps[skip:]]
    steps = [step for run in runs for step in run.steps[skip:]]
    sampled = [size.rollouts * step.new_tokens for step in steps]
    seconds, cpu_seconds = spread([step.seconds for step in watched]), spread([step.cpu_seconds for step in watched])
    floor = (size.sampling_flops + size.training_flops) / rate
    figures: dict[str, Any] = {
        "step_seconds": seconds,
        "step_cpu_seconds": cpu_seconds,
        "tokens_per_second": spread([tokens / step.seconds for tokens, step in zip(sampled, watched, strict=True)]),
        "sampled_tokens_per_second": spread(
            [tokens / step.phases["sample"] for tokens, step in zip(sampled, steps, strict=True)]
        ),
        "phase_seconds": {name: statistics.median(step.phases[name] for step in steps) for name in steps[0].phases},
        "floor_seconds": floor,
        "share_of_floor": floor / seconds["median"],
        "cpu_share_of_floor": floor * cores / cpu_seconds["median"],
        "idle_cores": spread([cores - step.cpu_seconds / step.seconds for step in watched]),
        "peak_bytes": spread([run.watched.peak_bytes for run in runs]),
        "first_step_seconds": [run.watched.steps[0].seconds for run in runs],
        "load": [run.watched.load for run in runs],
        "rewards": [[step.reward for step in run.steps] for run in runs],
        "losses": [[step.loss for step in run.steps] for run in runs],
        "grad_norms": [[step.grad_norm for step in run.steps] for run in runs],
    }
    if any(run.compiles for run in runs):
        figures["compiles"] = [_compiles(run, skip) for run in runs]
    return figures


def _compiles(run: ProgramRun, skip: int) -> dict[str, float]:
    """Count compiled programs, and those of the steps that are measured."""
    measured_from, measured_to = run.watched.steps[skip - 1].at, run.watched.steps[-1].at
    return {
        "programs": len(run.compiles),
        "seconds": sum(seconds for _, seconds in run.compiles),
        "programs_in_measured_steps": sum(measured_from < at <= measured_to for at, _ in run.compiles),
    }


def compare(ours: Sequence[ProgramRun], theirs: Sequence[ProgramRun], skip: int) -> dict[str, Any]:
    """Return their medians over ours, pair by pair: above 1, ours is faster or smaller.

    Args:
        ours: runs of marin_rl.
        theirs: runs of the other program; run n is paired with run n of ours.
        skip: steps at the start of each run that are excluded.
    """

    def medians(runs: Iterable[ProgramRun], value: Callable[[ProgramRun], Iterable[float]]) -> list[float]:
        return [statistics.median(list(value(run))[skip:]) for run in runs]

    def over(value: Callable[[ProgramRun], Iterable[float]]) -> dict[str, float | int]:
        return ratios(medians(theirs, value), medians(ours, value))

    def training(run: ProgramRun) -> Iterable[float]:
        inside = zip(run.watched.steps, run.steps, strict=True)
        return [step.seconds - measured.phases["sample"] for step, measured in inside]

    return {
        "step_seconds": over(lambda run: [step.seconds for step in run.watched.steps]),
        "step_cpu_seconds": over(lambda run: [step.cpu_seconds for step in run.watched.steps]),
        "sample_seconds": over(lambda run: [step.phases["sample"] for step in run.steps]),
        "other_seconds": over(training),
        "peak_bytes": ratios([run.watched.peak_bytes for run in theirs], [run.watched.peak_bytes for run in ours]),
    }


def measure_size(
    name: str, arguments: Any, core_sets: Mapping[str, Sequence[int]], rates: Mapping[str, float], folder: Path
) -> dict[str, Any]:
    """Prepare the problem of one size, run all programs on it, and return the figures."""
    problem, caches = folder / "problem", folder / "caches"
    problem.mkdir(parents=True)
    _child(["prepare", str(problem), "--size", name])
    runners: dict[str, Runner] = {
        "marin_rl": functools.partial(run_marin, problem, caches, arguments.steps, arguments.timeout)
    }
    peer = arguments.against
    if peer:
        settings = caches, arguments.peer_python, arguments.steps, arguments.peer_rows, arguments.timeout
        runners[peer] = functools.partial(run_peer, peer, problem, *settings)
    runs = run_in_turn(runners, core_sets, arguments.pairs, folder / "runs")
    size = SIZES[name]
    figures: dict[str, Any] = {
        "size": {**dataclasses.asdict(size), "parameters": size.parameters},
        "sampling_flops": size.sampling_flops,
        "training_flops": size.training_flops,
    }
    for cores, numbers in core_sets.items():
        figures[cores] = {
            program: summarize(found, size, cores=len(numbers), rate=rates[cores], skip=arguments.skip)
            for program, found in runs[cores].items()
        }
        if peer:
            compared = compare(runs[cores]["marin_rl"], runs[cores][peer], arguments.skip)
            figures[cores][f"{peer}_over_marin_rl"] = compared
    return figures


def _child(arguments: Sequence[str], cores: Sequence[int] | None = None) -> str:
    """Run a command of `words_problem` and return its output."""
    command = [sys.executable, "-m", PROBLEM, *arguments]
    with pinned(available_cores() if cores is None else cores):
        done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkedRunError(f"{command} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def parse(argv: Sequence[str]) -> Any:
    """Parse the command line; mistakes end the process with a message."""
    parser = benchmark_parser("Training steps of marin_rl with its defaults, alone or in turn with another program")
    parser.add_argument("--against", choices=list(PEERS), help="another program; installed if necessary")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="models")
    parser.add_argument("--cores", nargs="+", choices=["all", "one"], default=["all", "one"], help="cores of a run")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each program on each set of cores")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    parser.add_argument("--skip", type=int, default=2, help="steps at the start of each run that are excluded")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a run is ended")
    parser.add_argument("--peer_python", type=Path, help="interpreter of an existing environment with that program")
    parser.add_argument("--peer_rows", type=int, default=32, help="rollouts of its forward and backward passes")
    arguments = parser.parse_args(argv)
    if arguments.pairs < 1:
        parser.error(f"--pairs is {arguments.pairs}; it must be at least 1")
    if not 1 <= arguments.skip < arguments.steps:
        parser.error(f"--skip is {arguments.skip}; it must be at least 1 and below --steps, which is {arguments.steps}")
    for name in arguments.sizes:
        if arguments.peer_rows < 1 or SIZES[name].rollouts % arguments.peer_rows:
            parser.error(f"--peer_rows is {arguments.peer_rows}; it must divide the {SIZES[name].rollouts} rollouts")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = parse(argv)
    peer = arguments.against
    if peer and arguments.peer_python is None:
        arguments.peer_python = peer_python(peer, default_folder(peer))
    every = available_cores()
    core_sets = {name: every if name == "all" else every[-1:] for name in arguments.cores}
    rates = {name: float(_child(["matmul"], cores)) for name, cores in core_sets.items()}
    figures: dict[str, Any] = {"matmul_flops_per_second": rates}
    if peer:
        figures["peer_versions"] = peer_versions(peer, arguments.peer_python)
    for name in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = measure_size(name, arguments, core_sets, rates, Path(folder))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    print(make_report("benchmark_end_to_end", argv, {**settings, "core_numbers": core_sets}, figures))


if __name__ == "__main__":
    main()
