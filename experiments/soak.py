# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Faults at random moments of an asynchronous run, and whether it is right in the end.

    python -m experiments.soak --faults 100 --seed 0 --folder runs/soak

A small model trains on sums, with two workers under Ray. Again and again a worker, all workers, the coordinator, the
machine's Ray or the trainer itself is killed, the trainer also while a worker is in the midst of fetching weights from
it, or workers stand still; the run must go on by itself, or with the same command where the trainer died. In the end
every step must have been made of whole groups, none of them twice and none too old, and nothing may be left running. It
prints a JSON object.
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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.soak_train import hold_transfers, reached, release_transfers
from marin_rl.rollouts.store import read_rollouts

CONFIG = Path(__file__).parent / "rloo_async.yaml"
GROUPS, MEMBERS, STALENESS = 4, 4, 2
SILENCE = 3.0
"""Seconds that a worker may be silent."""
TINY = {
    "model.hidden_dim": 32,
    "model.intermediate_dim": 64,
    "model.num_layers": 1,
    "warm_start.max_steps": 0,
    "evaluation.tasks": 0,
}
"""A model that takes no time, which knows nothing and is not asked."""
SETTINGS = {
    **TINY,
    "num_steps": 1_000_000,
    "rollouts.prompts_per_step": GROUPS,
    "rollouts.group_size": MEMBERS,
    "sampling.max_seqs": 16,
    "checkpoint.every": 5,
    "replay.max_staleness": STALENESS,
    "workers.num_workers": 2,
    "workers.heartbeat_timeout": SILENCE,
}
"""What is changed in the config: everything small, so that many faults fit into an hour."""


class SoakError(AssertionError):
    """A run that did not survive; the message says what was seen."""


class RunEndedError(SoakError):
    """A run that ended while something was waited for."""


STARTED = 19
"""Index of the moment at which a process started, in the fields of `_stat`."""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, as proc(5) has them: state, parent, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Child(NamedTuple):
    """A process that a run started."""

    pid: int
    """Another process may have it later."""
    started: str
    """When it began, so that it is not taken for that one."""
    name: str
    """Its command line."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        try:
            return _stat(self.pid)[STARTED] == self.started
        except OSError:
            return False


@dataclasses.dataclass
class LiveRun:
    """A training run in a process of its own, with all that it starts."""

    arguments: Sequence[str]
    """Of `python -m marin_rl.train`."""
    run_dir: Path
    """Where it leaves what it makes."""
    output: Path
    """What it prints goes there, one start after the other."""
    patience: float = 600.0
    """Seconds that anything may take on a busy machine."""
    prefix: Sequence[str] = ()
    """Words before the command, of a program that becomes it."""
    hold: Path | None = None
    """The file that pauses transfers of weights, see `experiments.soak_train`; None where that is not needed."""
    process: "subprocess.Popen[bytes] | None" = None
    """The trainer; None before the first start."""
    _said_before: int = 0

    def start(self) -> None:
        """Start the command."""
        with self.output.open("ab") as stream:
            self._said_before = stream.tell()
            program = ["marin_rl.train"] if self.hold is None else ["experiments.soak_train", str(self.hold)]
            command = [*self.prefix, sys.executable, "-m", *program, *self.arguments]
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def said(self) -> str:
        """What it has printed since its last start."""
        return self.output.read_bytes()[self._said_before :].decode()

    @property
    def is_running(self) -> bool:
        """Whether the trainer has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def steps(self) -> int:
        """Steps that are recorded; -1 before the first record, which is of step 0."""
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else -1

    @property
    def saved_steps(self) -> int:
        """The step of the newest checkpoint; -1 for none."""
        names = (path.name.removeprefix("step-") for path in (self.run_dir / "checkpoints").glob("step-*"))
        return max(map(int, names), default=-1)

    def records(self) -> list[dict[str, Any]]:
        """What it has measured, step by step."""
        # The last line may still be being written.
        whole, _, _ = (self.run_dir / "metrics.jsonl").read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def children(self) -> set[Child]:
        """Every process below the trainer."""
        assert self.process is not None
        parents, found = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    fields = _stat(int(entry.name))
                    name = (entry / "cmdline").read_text().replace("\0", " ")
                    parents[int(entry.name)] = int(fields[1])
                    found[int(entry.name)] = Child(int(entry.name), fields[STARTED], name)
        below = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in below} - below:
            below |= more
        return {found[pid] for pid in below - {self.process.pid}}

    def named(self, *words: str) -> list[int]:
        """Those of them whose command line begins with one of these, or has it as the name of its program."""
        programs = {child.pid: child.name.split(" ")[0].rpartition("/")[2] for child in self.children()}
        return [pid for pid, program in programs.items() if program.startswith(words)]

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait for something that happens while it runs.

        Raises:
            RunEndedError: if it ends before.
            SoakError: if it takes too long.
        """
        deadline = time.monotonic() + self.patience
        while not happened():
            if not self.is_running:
                raise RunEndedError(f"the run ended before {what}:\n{self.output.read_text()[-5000:]}")
            if time.monotonic() > deadline:
                raise SoakError(f"{what} did not come in {self.patience:g} s:\n{self.output.read_text()[-5000:]}")
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the trainer; its exit status.

        Raises:
            SoakError: if it takes too long.
        """
        assert self.process is not None
        try:
            return self.process.wait(self.patience)
        except subprocess.TimeoutExpired:
            said = self.output.read_text()[-5000:]
            raise SoakError(f"the run did not end in {self.patience:g} s:\n{said}") from None

    def kill(self) -> None:
        """End it, if it runs."""
        if self.process is not None and self.is_running:
            self.process.kill()
            self.process.wait()


def whole_and_once(run: LiveRun, *, groups: int, members: int, staleness: int) -> int:
    """See that every step trained on its number of groups, each whole and fresh, and no group twice.

    Args:
        run: ended.
        groups: of a step.
        members: of a group.
        staleness: most that was allowed.

    Returns:
        How many steps there are.

    Raises:
        SoakError: if it is not so.
    """
    trained: dict[str, set[int]] = {}
    sizes: collections.Counter[str] = collections.Counter()
    for table in read_rollouts(run.run_dir / "rollouts", None, purposes=["training"]):
        for row in table.select(["step", "group_id"]).to_pylist():
            trained.setdefault(row["group_id"], set()).add(row["step"])
            sizes[row["group_id"]] += 1
    records = run.records()
    steps = len(records) - 1
    seen = {
        "steps in order": [record["step"] for record in records] == list(range(steps + 1)),
        "groups of every step": len(trained) == groups * steps,
        "each in one step": all(len(of_group) == 1 for of_group in trained.values()),
        "each whole": set(sizes.values()) <= {members},
        "none too old": max((record["staleness/max"] for record in records[1:]), default=0) <= staleness,
    }
    wrong = [what for what, is_so in seen.items() if not is_so]
    if wrong:
        raise SoakError(
            f"not so: {', '.join(wrong)}; {steps} steps, {len(trained)} groups, sizes {set(sizes.values())}"
        )
    return steps


def arguments_of(run_dir: Path, settings: Mapping[str, Any]) -> list[str]:
    """What `marin_rl.train` is given.

    Args:
        run_dir: of the run.
        settings: what is changed in experiments/rloo_async.yaml.
    """
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return ["--config", str(CONFIG), "--run_dir", str(run_dir), *flags]


def halt(pids: Sequence[int]) -> None:
    """Have processes stand still; when it returns, every thread of theirs does."""
    _send(pids, signal.SIGSTOP)
    while any(state not in "TZX" for pid in pids for state in _thread_states(pid)):
        time.sleep(0.001)


def wake(pids: Sequence[int]) -> None:
    """Have processes that stand still go on."""
    _send(pids, signal.SIGCONT)


def pause(pids: Sequence[int], seconds: float) -> None:
    """Have processes stand still for so long."""
    halt(pids)
    time.sleep(seconds)
    wake(pids)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _thread_states(pid: int) -> list[str]:
    """A letter for each thread of a process, as proc(5) has them; none where it has ended."""
    states = []
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(file.read_text().rpartition(")")[2].split()[0])
    return states


def _workers(run: LiveRun) -> list[int]:
    return run.named("ray::Worker")


def kill_in_transfer(run: LiveRun) -> None:
    """Kill a trainer while its weight server, a thread of it, is between two chunks of a transfer to a worker.

    Args:
        run: it has a `hold`. If that file exists already, the run's transfers are paused from the version in it on.
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
    "a worker stands still": lambda run: pause(_workers(run)[:1], 2 * SILENCE),
    "all workers stand still": lambda run: pause(_workers(run), 2 * SILENCE),
    "the coordinator is killed": lambda run: _send(run.named("ray::CoordinatorActor"), signal.SIGKILL),
    "Ray's node is killed": lambda run: _send(run.named("raylet"), signal.SIGKILL),
    "the trainer is killed": lambda run: run.kill(),
    "the weight server is killed in mid-transfer": kill_in_transfer,
}


def check_end(run: LiveRun) -> None:
    """See why a trainer ended: it was killed, or Ray's node was, and it says so.

    Raises:
        SoakError: if it ended otherwise.
    """
    assert run.process is not None
    if run.process.returncode != -signal.SIGKILL and "\nerror: Ray's node " not in run.said:
        raise SoakError(f"the run ended by itself with status {run.process.returncode}:\n{run.said[-5000:]}")


def _has_forgotten(run: LiveRun, step: int) -> bool:
    return run.steps <= step


def soak(run: LiveRun, faults: int, chance: random.Random, report: Callable[[str], None]) -> dict[str, Any]:
    """Train through faults.

    Args:
        run: not started yet.
        faults: how many.
        chance: decides which and when.
        report: is told of each, a line.

    Raises:
        SoakError: if the run does not go on, or something is wrong in the end.
    """
    recovery: dict[str, list[float]] = {name: [] for name in FAULTS}
    starts, left = 1, set[Child]()
    run.start()
    run.wait_until(lambda: run.steps >= 1, "the first step")
    for number in range(1, faults + 1):
        time.sleep(chance.uniform(0, 2))
        name = chance.choice(list(FAULTS))
        left |= run.children()
        before, began = run.steps, time.monotonic()
        # It may have ended by itself; whether it may is looked at below.
        with contextlib.suppress(RunEndedError):
            FAULTS[name](run)
        # Steps that were made before it died are none that it went on with.
        while (not run.is_running or run.steps < before + 2) and time.monotonic() < began + run.patience:
            if not run.is_running:
                check_end(run)
                starts += 1
                run.start()
                # What came after the last checkpoint is forgotten, and done anew.
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
    # Ray's own helpers look for their node every few seconds, and end themselves where it was killed.
    deadline = time.monotonic() + run.patience
    while still := [child for child in left if child.is_alive]:
        if time.monotonic() > deadline:
            raise SoakError(f"still running after the end: {still}")
        time.sleep(0.1)
    return {
        "faults": faults,
        "starts": starts,
        "steps": whole_and_once(run, groups=GROUPS, members=MEMBERS, staleness=STALENESS),
        "seconds_to_two_further_steps": {
            name: {"count": len(taken), "median": statistics.median(taken), "most": max(taken)}
            for name, taken in recovery.items()
            if taken
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the soak and print what came of it."""
    parser = argparse.ArgumentParser(description="Faults at random moments of an asynchronous run.")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="a new folder for the run")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True)
    run_dir = arguments.folder / "run"
    hold = arguments.folder / "hold"
    run = LiveRun(arguments_of(run_dir, SETTINGS), run_dir, arguments.folder / "output.txt", hold=hold)
    try:
        found = soak(run, arguments.faults, random.Random(arguments.seed), lambda line: print(line, flush=True))
    finally:
        run.kill()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
