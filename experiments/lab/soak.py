# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Inject faults at random times into an asynchronous run, and check the results.

    python -m experiments.lab.soak --faults 100 --seed 0 --folder runs/soak
    python -m experiments.lab.soak --faults 10 --steps 300 --only worker --folder runs/soak

A small model trains on sums, with two workers under Ray. Each fault kills a worker, all workers, the coordinator, the
Ray node or the trainer, the last also during a weight transfer, or pauses workers. The run must continue, or resume
with the same command if the trainer ended. At the end every step must have complete groups, without duplicates and
within the staleness limit, and no process and no temporary file may be left. Prints a JSON object, with memory, open
files and other usage over the steps.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lab.soak_train import hold_transfers, reached, release_transfers
from experiments.lab.soak_usage import sampled, shared_memory, trends, usage
from marin_rl.runs.rollout_store import read_rollouts

CONFIG = Path(__file__).parents[1] / "rloo_async.yaml"
GROUPS, MEMBERS, STALENESS = 4, 4, 2
HEARTBEAT_TIMEOUT = 3.0
"""Heartbeat timeout of workers, in seconds."""
SAMPLE_SECONDS = 2.0
"""Time between two measurements of memory and open files, in seconds."""
TINY = {
    "model.hidden_dim": 32,
    "model.intermediate_dim": 64,
    "model.num_layers": 1,
    "warm_start.max_steps": 0,
    "evaluation.tasks": 0,
}
"""A tiny untrained model without evaluations."""
SETTINGS = {
    **TINY,
    "num_steps": 1_000_000,
    "rollouts.prompts_per_step": GROUPS,
    "rollouts.group_size": MEMBERS,
    "sampling.max_seqs": 16,
    "checkpoint.every": 5,
    "replay.max_staleness": STALENESS,
    "workers.num_workers": 2,
    "workers.heartbeat_timeout": HEARTBEAT_TIMEOUT,
}
"""Changes to the config: everything is small, so that many faults fit into an hour."""


class SoakError(AssertionError):
    """Raised when the run fails; the message describes the failure."""


class RunEndedError(SoakError):
    """Raised when the run ends during a wait."""


STARTED = 19
"""Index of the start time of a process in the fields of `_stat`."""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name (see proc(5)): state, parent, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Child(NamedTuple):
    """A process that a run started."""

    pid: int
    """Process id, which may be reused later."""
    started: str
    """Start time, which distinguishes it from a later process with the same id."""
    name: str
    """Command line."""

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        try:
            return _stat(self.pid)[STARTED] == self.started
        except OSError:
            return False


@dataclasses.dataclass
class LiveRun:
    """A training run in a separate process, with its child processes."""

    arguments: Sequence[str]
    """Arguments of the command."""
    run_dir: Path
    """Run directory."""
    output: Path
    """File for the output of all starts."""
    patience: float = 600.0
    """Timeout of every wait, in seconds."""
    prefix: Sequence[str] = ()
    """Command prefix, such as a program that executes the command."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Additional environment variables."""
    folder: Path | None = None
    """Working directory; None for that of this process."""
    hold: Path | None = None
    """File that pauses weight transfers, see `experiments.lab.soak_train`; None if not needed."""
    program: str = "marin_rl.train"
    """Module of the command."""
    popen: Callable[..., Any] = subprocess.Popen
    """Starts a process like `subprocess.Popen`."""
    process: "subprocess.Popen[bytes] | None" = None
    """The trainer; None before the first start."""
    _said_before: int = 0

    def start(self) -> None:
        """Start the command."""
        with self.output.open("ab") as stream:
            self._said_before = stream.tell()
            program = [self.program] if self.hold is None else ["experiments.lab.soak_train", str(self.hold)]
            command = [*self.prefix, sys.executable, "-m", *program, *self.arguments]
            self.process = self.popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """Output since the last start."""
        return self.output.read_bytes()[self._said_before :].decode()

    @property
    def is_running(self) -> bool:
        """Whether the trainer is running."""
        return self.process is not None and self.process.poll() is None

    @property
    def steps(self) -> int:
        """Number of recorded steps; -1 before the record of step 0."""
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else -1

    @property
    def saved_steps(self) -> int:
        """Step of the newest checkpoint; -1 if there is none."""
        names = (path.name.removeprefix("step-") for path in (self.run_dir / "checkpoints").glob("step-*"))
        return max(map(int, names), default=-1)

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics records."""
        # The last line may be incomplete.
        complete, _, _ = (self.run_dir / "metrics.jsonl").read_text().rpartition("\n")
        return [json.loads(line) for line in complete.splitlines()]

    def children(self) -> set[Child]:
        """Return all descendant processes of the trainer."""
        assert self.process is not None
        parents, processes = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    fields = _stat(int(entry.name))
                    name = (entry / "cmdline").read_text().replace("\0", " ")
                    parents[int(entry.name)] = int(fields[1])
                    processes[int(entry.name)] = Child(int(entry.name), fields[STARTED], name)
        below = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in below} - below:
            below |= more
        return {processes[pid] for pid in below - {self.process.pid}}

    def named(self, *words: str) -> list[int]:
        """Return the ids of child processes with a program name that starts with one of these words."""
        programs = {child.pid: child.name.split(" ")[0].rpartition("/")[2] for child in self.children()}
        return [pid for pid, program in programs.items() if program.startswith(words)]

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait for an event while the run is running.

        Raises:
            RunEndedError: if the run ends first.
            SoakError: if the wait times out.
        """
        deadline = time.monotonic() + self.patience
        while not happened():
            if not self.is_running:
                raise RunEndedError(f"the run ended before {what}:\n{self.output.read_text()[-5000:]}")
            if time.monotonic() > deadline:
                raise SoakError(f"{what} did not come in {self.patience:g} s:\n{self.output.read_text()[-5000:]}")
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the trainer and return its exit status.

        Raises:
            SoakError: if the wait times out.
        """
        assert self.process is not None
        try:
            return self.process.wait(self.patience)
        except subprocess.TimeoutExpired:
            said = self.output.read_text()[-5000:]
            raise SoakError(f"the run did not end in {self.patience:g} s:\n{said}") from None

    def kill(self) -> None:
        """Kill the trainer if it is running."""
        if self.process is not None and self.is_running:
            self.process.kill()
            self.process.wait()


def whole_and_once(run: LiveRun, *, groups: int, members: int, staleness: int) -> int:
    """Check that every step trained on complete, fresh groups, and each group was used in one step.

    Args:
        run: a run that has ended.
        groups: groups per step.
        members: rollouts per group.
        staleness: maximum allowed staleness.

    Returns:
        Number of steps.

    Raises:
        SoakError: if a check fails.
    """
    trained: dict[str, set[int]] = {}
    sizes: collections.Counter[str] = collections.Counter()
    for table in read_rollouts(run.run_dir / "rollouts", None, purposes=["training"]):
        for row in table.select(["step", "group_id"]).to_pylist():
            trained.setdefault(row["group_id"], set()).add(row["step"])
            sizes[row["group_id"]] += 1
    records = run.records()
    steps = len(records) - 1
    checks = {
        "steps in order": [record["step"] for record in records] == list(range(steps + 1)),
        "groups of every step": len(trained) == groups * steps,
        "each in one step": all(len(of_group) == 1 for of_group in trained.values()),
        "each whole": set(sizes.values()) <= {members},
        "none too old": max((record["staleness/max"] for record in records[1:]), default=0) <= staleness,
    }
    failed = [name for name, is_ok in checks.items() if not is_ok]
    if failed:
        raise SoakError(
            f"failed checks: {', '.join(failed)}; {steps} steps, {len(trained)} groups, sizes {set(sizes.values())}"
        )
    return steps


def arguments_of(run_dir: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments for `marin_rl.train`.

    Args:
        run_dir: run directory.
        settings: changes to experiments/rloo_async.yaml.
    """
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return ["--config", str(CONFIG), "--run_dir", str(run_dir), *flags]


def halt(pids: Sequence[int]) -> None:
    """Stop processes with SIGSTOP, and wait until all their threads have stopped."""
    _send(pids, signal.SIGSTOP)
    while any(state not in "TZX" for pid in pids for state in _thread_states(pid)):
        time.sleep(0.001)


def wake(pids: Sequence[int]) -> None:
    """Continue stopped processes."""
    _send(pids, signal.SIGCONT)


def pause(pids: Sequence[int], seconds: float) -> None:
    """Stop processes for the given time."""
    halt(pids)
    time.sleep(seconds)
    wake(pids)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _thread_states(pid: int) -> list[str]:
    """Return the state letter of each thread of a process (see proc(5)); empty if it has ended."""
    states = []
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(file.read_text().rpartition(")")[2].split()[0])
    return states


def _workers(run: LiveRun) -> list[int]:
    return run.named("ray::RayWorker")


def kill_in_transfer(run: LiveRun) -> None:
    """Kill a trainer while its weight server is between two chunks of a transfer to a worker.

    Args:
        run: a run with `hold`. If that file exists, transfers are already paused from the version in it.
    """
    assert run.hold is not None
    if not run.hold.exists():
        hold_transfers(run.hold)
    run.wait_until(reached(run.hold).exists, "a transfer of weights")
    run.kill()
    release_transfers(run.hold)


FAULTS: dict[str, Callable[[LiveRun], None]] = {
    "a worker is killed": lambda run: _send(_workers(run)[:1], signal.SIGKILL),
    "all workers are killed": lambda run: _send(_workers(run), signal.SIGKILL),
    "a worker is paused": lambda run: pause(_workers(run)[:1], 2 * HEARTBEAT_TIMEOUT),
    "all workers are paused": lambda run: pause(_workers(run), 2 * HEARTBEAT_TIMEOUT),
    "the coordinator is killed": lambda run: _send(run.named("ray::Coordinator"), signal.SIGKILL),
    "Ray's node is killed": lambda run: _send(run.named("raylet"), signal.SIGKILL),
    "the trainer is killed": lambda run: run.kill(),
    "the weight server is killed during a transfer": kill_in_transfer,
}


def check_end(run: LiveRun) -> None:
    """Check that a trainer ended because it or Ray's node was killed.

    Raises:
        SoakError: if it ended for another reason.
    """
    assert run.process is not None
    if run.process.returncode != -signal.SIGKILL and "\nerror: Ray's node " not in run.said:
        raise SoakError(f"the run ended by itself with status {run.process.returncode}:\n{run.said[-5000:]}")


def _has_forgotten(run: LiveRun, step: int) -> bool:
    return run.steps <= step


def soak(
    run: LiveRun,
    faults: int,
    chance: random.Random,
    report: Callable[[str], None],
    *,
    steps: int = 0,
    kinds: Sequence[str] = tuple(FAULTS),
) -> dict[str, Any]:
    """Train through faults.

    Args:
        run: a run that is not started.
        faults: least number of faults.
        chance: chooses the faults and their times.
        report: receives one line per fault.
        steps: least number of steps; there are more faults until then.
        kinds: faults to choose from.

    Returns:
        Counts and recovery times.

    Raises:
        SoakError: if the run does not continue, or a check at the end fails.
    """
    recovery: dict[str, list[float]] = {name: [] for name in FAULTS}
    starts, left = 1, set[Child]()
    run.start()
    run.wait_until(lambda: run.steps >= 1, "the first step")
    number = 0
    while number < faults or run.steps < steps:
        number += 1
        time.sleep(chance.uniform(0, 2))
        name = chance.choice(kinds)
        left |= run.children()
        before, began = run.steps, time.monotonic()
        # If the run ended by itself, check_end below decides whether that is an error.
        with contextlib.suppress(RunEndedError):
            FAULTS[name](run)
        # Only steps after a restart count as progress.
        while (not run.is_running or run.steps < before + 2) and time.monotonic() < began + run.patience:
            if not run.is_running:
                check_end(run)
                starts += 1
                run.start()
                # Steps after the last checkpoint are repeated.
                before = run.saved_steps
                run.wait_until(functools.partial(_has_forgotten, run, before), "a resume")
            time.sleep(0.02)
        if run.steps < before + 2:
            raise SoakError(f"{name}: no step in {run.patience:g} s:\n{run.output.read_text()[-5000:]}")
        recovery[name].append(time.monotonic() - began)
        report(f"{number:4d}  {name}, at step {before}: two further steps after {recovery[name][-1]:.1f} s")
    left |= run.children()
    assert run.process is not None
    run.process.terminate()
    status = run.end()
    if status:
        raise SoakError(f"exit status {status}:\n{run.output.read_text()[-5000:]}")
    # Ray's helper processes check their node every few seconds, and end if it was killed.
    deadline = time.monotonic() + run.patience
    while still := [child for child in left if child.is_alive]:
        if time.monotonic() > deadline:
            raise SoakError(f"still running after the end: {still}")
        time.sleep(0.1)
    return {
        "faults": number,
        "starts": starts,
        "steps": whole_and_once(run, groups=GROUPS, members=MEMBERS, staleness=STALENESS),
        "seconds_to_two_further_steps": {
            name: {"count": len(taken), "median": statistics.median(taken), "most": max(taken)}
            for name, taken in recovery.items()
            if taken
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the soak and print the results."""
    parser = argparse.ArgumentParser(description="Inject faults at random times into an asynchronous run.")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=0, help="more faults until this step")
    parser.add_argument("--only", default="", help="only faults with this word, such as worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="a new folder for the run")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True)
    run_dir, hold = arguments.folder / "run", arguments.folder / "hold"
    kinds = [name for name in FAULTS if arguments.only in name]
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        run = LiveRun(
            arguments_of(run_dir, SETTINGS),
            run_dir,
            arguments.folder / "output.txt",
            environment={"TMPDIR": folder},
            hold=hold,
        )

        def measure() -> dict[str, float]:
            assert run.process is not None
            names = {child.pid: child.name for child in run.children()}
            return {"step": run.steps, **usage(run.process.pid, names, Path(folder))}

        def report(line: str) -> None:
            print(line, flush=True)

        before = shared_memory()
        try:
            chance = random.Random(arguments.seed)
            with sampled(measure, SAMPLE_SECONDS) as samples:
                results = soak(run, arguments.faults, chance, report, steps=arguments.steps, kinds=kinds)
        finally:
            run.kill()
        if left := sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*")):
            raise SoakError(f"{len(left)} temporary files are left, the first {left[:5]}")
    # One per step, and none of the last, after which processes end.
    firsts = {sample["step"]: sample for sample in reversed(samples) if 1 <= sample["step"] < results["steps"]}
    lines = [f"{json.dumps(firsts[step])}\n" for step in sorted(firsts)]
    (arguments.folder / "usage.jsonl").write_text("".join(lines))
    results |= {"shared_memory_mib": [before, shared_memory()], "usage": trends(list(map(json.loads, lines)))}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
