# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train asynchronously over two machines while the network is cut, and one machine is lost and rejoins.

    python -m experiments.lab.soak_network --folder runs/soak_network

The machines are two network namespaces of this machine with a virtual cable: trainer, coordinator and a worker on the
first, another worker on the second. Needs root and iproute2 and takes about five minutes. Prints a line per fault, and
makes the final checks of `experiments.lab.soak`.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.lab.soak import (
    GROUPS,
    MEMBERS,
    SETTINGS,
    STALENESS,
    LiveRun,
    SoakError,
    arguments_of,
    pause,
    whole_and_once,
)

ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 6400
LASTS = 60.0
"""Seconds for which the network is cut, and for which workers are paused."""


class Machines:
    """Two network namespaces with a virtual cable."""

    def __init__(self, folder: Path) -> None:
        """Create the namespaces and the cable.

        Args:
            folder: folder for Ray's files; a short path, because it holds sockets.
        """
        self.names = tuple(f"soak{os.getpid()}-{end}" for end in "ab")
        self._ends = tuple(f"s{os.getpid()}{end}" for end in "ab")
        self._folder = folder
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self._ends[0], "type", "veth", "peer", "name", self._ends[1])
        for name, end, address in zip(self.names, self._ends, ADDRESSES, strict=True):
            _run("ip", "link", "set", end, "netns", name)
            self.on(name, "ip", "addr", "add", f"{address}/24", "dev", end)
            self.on(name, "ip", "link", "set", "lo", "up")
            self.on(name, "ip", "link", "set", end, "up")

    def on(self, name: str, *command: str) -> None:
        """Run a command on a machine."""
        _run("ip", "netns", "exec", name, *command)

    def start_ray(self, index: int) -> None:
        """Start Ray with room for one worker; the first machine is the head node."""
        ray = str(Path(sys.executable).with_name("ray"))
        head = f"{ADDRESSES[0]}:{PORT}"
        place = ["--head", f"--port={PORT}", f"--temp-dir={self._folder}", "--include-dashboard=false"]
        place = place if index == 0 else [f"--address={head}"]
        options = [f"--node-ip-address={ADDRESSES[index]}", "--num-cpus=1", "--disable-usage-stats"]
        self.on(self.names[index], ray, "start", *place, *options)

    def connect(self, connected: bool) -> None:
        """Connect or cut the cable."""
        self.on(self.names[1], "ip", "link", "set", self._ends[1], "up" if connected else "down")

    def processes(self, index: int) -> list[int]:
        """Return the ids of the processes on a machine."""
        result = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in result.stdout.split()]

    def kill(self, index: int) -> None:
        """Kill all processes of a machine."""
        for pid in self.processes(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill all processes and delete the namespaces."""
        for index, name in enumerate(self.names):
            self.kill(index)
            subprocess.run(["ip", "netns", "del", name], check=False)


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SoakError(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Start two machines with Ray, and remove them at the end of the block."""
    machines = Machines(folder)
    try:
        machines.start_ray(0)
        machines.start_ray(1)
        yield machines
    finally:
        machines.close()


def soak(run: LiveRun, machines: Machines, report: Callable[[str], None]) -> int:
    """Train through the faults.

    Args:
        run: a run that is not started, on the cluster of the machines.
        machines: machines with Ray.
        report: receives one line per fault.

    Returns:
        Number of trained steps.

    Raises:
        SoakError: if the run does not continue, or a check at the end fails.
    """

    def alive() -> float:
        return run.records()[-1].get("workers/alive", 0.0) if run.steps >= 1 else 0.0

    def wait_for(workers: int, what: str) -> None:
        began, before = time.monotonic(), run.steps
        run.wait_until(lambda: alive() == workers and run.steps >= before + 5, f"{what}, {workers} workers and 5 steps")
        report(f"{what}: {workers} workers at step {run.steps}, after {time.monotonic() - began:.1f} s")

    run.start()
    wait_for(2, "started")
    machines.connect(False)
    wait_for(1, "the network is cut")
    time.sleep(LASTS)
    wait_for(1, f"it was cut for {LASTS:g} s")
    machines.connect(True)
    # Ray has dropped the machine and its processes end, so it can join as a new machine.
    machines.kill(1)
    machines.start_ray(1)
    wait_for(2, "the machine joined again")
    machines.kill(1)
    wait_for(1, "the machine is lost")
    machines.start_ray(1)
    wait_for(2, "another machine joined")
    pause(run_workers(machines), LASTS)
    wait_for(2, f"all workers were paused for {LASTS:g} s")
    assert run.process is not None
    run.process.terminate()
    if status := run.end():
        raise SoakError(f"exit status {status}:\n{run.output.read_text()[-5000:]}")
    return whole_and_once(run, groups=GROUPS, members=MEMBERS, staleness=STALENESS)


def run_workers(machines: Machines) -> list[int]:
    """Return the process ids of the rollout workers on both machines."""
    workers = []
    for pid in [*machines.processes(0), *machines.processes(1)]:
        with contextlib.suppress(OSError):
            if (Path("/proc") / str(pid) / "cmdline").read_text().startswith("ray::RayWorker"):
                workers.append(pid)
    return workers


def main(argv: Sequence[str] | None = None) -> None:
    """Run the test and print the results."""
    parser = argparse.ArgumentParser(description="Network faults while an asynchronous run trains over two machines.")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak_network"), help="a new folder for the run")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True)
    # Ray's command line and the trainer must agree on token authentication.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    folder = arguments.folder.resolve()
    settings = {**SETTINGS, "ray_address": f"{ADDRESSES[0]}:{PORT}", "weights.host": ADDRESSES[0]}
    with two_machines(folder / "ray") as machines:
        prefix = ("ip", "netns", "exec", machines.names[0])
        run = LiveRun(arguments_of(folder / "run", settings), folder / "run", folder / "output.txt", prefix=prefix)
        try:
            steps = soak(run, machines, lambda line: print(line, flush=True))
        finally:
            run.kill()
    print(f"{steps} steps, all with complete groups, without duplicates and within the staleness limit")


if __name__ == "__main__":
    main()
