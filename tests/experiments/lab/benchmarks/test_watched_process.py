# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Processes that write a line per step are measured from outside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.lab.benchmarks.measurement import BenchmarkedRunError
from experiments.lab.benchmarks.watched_process import WatchedRun, available_cores, watch

STEPS = """
import json, os, sys, time
with open(sys.argv[1], "a") as file:
    for step in range(4):
        deadline = time.process_time() + 0.05
        while time.process_time() < deadline:
            pass
        file.write(json.dumps({"step": step, "cores": sorted(os.sched_getaffinity(0))}) + "\\n")
        file.flush()
"""


def run(folder: Path, code: str, timeout: float = 60.0) -> WatchedRun:
    command = [sys.executable, "-c", code, str(folder / "lines")]
    return watch(
        command,
        folder / "lines",
        folder / "log",
        cores=available_cores()[-1:],
        cwd=folder,
        env=dict(os.environ),
        timeout=timeout,
    )


def test_steps_are_measured(tmp_path: Path) -> None:
    watched = run(tmp_path, STEPS)
    assert [step.line["step"] for step in watched.steps] == [1, 2, 3]
    assert watched.steps[0].line["cores"] == available_cores()[-1:]
    assert sum(step.seconds for step in watched.steps) >= 4 * 0.05
    assert sum(step.cpu_seconds for step in watched.steps) >= 4 * 0.05
    assert [step.at for step in watched.steps] == sorted(step.at for step in watched.steps)


def test_steps_of_an_earlier_run_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"step": 1}\n')
    with pytest.raises(FileExistsError, match="lines"):
        run(tmp_path, STEPS)


@pytest.mark.medium
def test_processes_that_it_started_are_ended_with_it(tmp_path: Path) -> None:
    # The child holds the write end of a pipe until it ends.
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import time; file = open({str(path)!r}, 'w'); file.write('x'); file.flush(); time.sleep(600)"
    code = f"import json, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]);\ntime.sleep(600)"
    written = b""
    with os.fdopen(reader, "rb") as pipe:
        # The start of the child may take longer than the first limit.
        for timeout in (3.0, 30.0, 300.0):
            os.set_blocking(reader, False)
            with pytest.raises(BenchmarkedRunError, match="did not end"):
                run(tmp_path, code, timeout=timeout)
            os.set_blocking(reader, True)
            if written := pipe.read():
                break
    assert written == b"x"


@pytest.mark.medium
def test_cpu_seconds_include_children() -> None:
    # In a new process, whose only child is the busy one. /proc counts in hundredths of a second, rounded down.
    busy = "import time\nwhile time.process_time() < 0.4: pass"
    code = (
        "import os, subprocess, sys\n"
        "from experiments.lab.benchmarks.watched_process import cpu_seconds\n"
        "before = cpu_seconds(os.getpid())\n"
        f"subprocess.run([sys.executable, '-c', {busy!r}], check=True)\n"
        "print(cpu_seconds(os.getpid()) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout) >= 0.3
