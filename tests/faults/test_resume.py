# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run that was interrupted, however it was, ends as one that was not: bit for bit."""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_run import TinyRun, contents, copy_of, make_run, outcome

LAST = 6
"""Updates of the tiny run."""


def same_outcome(resumed: TinyRun, uninterrupted: TinyRun) -> None:
    """Compare everything but which checkpoints were kept, piece by piece so that a failure says which one differs."""
    found, expected = outcome(resumed), outcome(uninterrupted)
    assert [record["step"] for record in found["records"]] == list(range(LAST + 1))
    for record, wanted in zip(found["records"], expected["records"], strict=True):
        assert record == wanted
    for piece in ("progress", "state", "hf"):
        assert found[piece] == expected[piece], piece


def interrupted_after(run: TinyRun, step: int, folder: Path) -> TinyRun:
    """A run as it stands when its process dies right after saving update `step`."""
    copied = copy_of(run, folder)
    shutil.rmtree(copied.path / "hf")
    for later in copied.steps():
        if later > step:
            shutil.rmtree(copied.checkpoint(later))
    lines = (copied.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied.path / "metrics.jsonl").write_text("".join(lines[: step + 1]))
    return copied


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: once `reached` says so, and a little later."""

    name: str
    reached: Callable[[TinyRun], bool]
    delay: float = 0.0
    """Seconds from then."""
    inside: str | None = None
    """A folder that must be there after the kill, if the moment is inside a write."""


def logged(text: str) -> Callable[[TinyRun], bool]:
    def reached(run: TinyRun) -> bool:
        log = run.path / "log.txt"
        return log.exists() and text in log.read_text()

    return reached


def recorded(step: int) -> Callable[[TinyRun], bool]:
    def reached(run: TinyRun) -> bool:
        metrics = run.path / "metrics.jsonl"
        return metrics.exists() and metrics.read_bytes().count(b"\n") > step

    return reached


def there(name: str) -> Callable[[TinyRun], bool]:
    return lambda run: (run.path / name).exists()


def inside(name: str) -> Moment:
    return Moment(f"inside the write of {name}", there(name), inside=name)


def moments(chance: random.Random) -> list[Moment]:
    """Twelve moments, from the first second to the last, so that every restart has work left for the next kill."""
    return [
        Moment("while starting", lambda run: True, chance.uniform(0.5, 3.0)),
        Moment("in the warm start", logged("warm start 10"), chance.uniform(0, 0.2)),
        inside("checkpoints/.step-00000000.partial"),
        Moment("before the first update", there("checkpoints/step-00000000"), chance.uniform(0, 0.5)),
        Moment("after update 1", recorded(1), chance.uniform(0, 0.05)),
        inside("checkpoints/.step-00000002.partial"),
        Moment("after update 3", recorded(3), chance.uniform(0, 0.05)),
        inside("checkpoints/.step-00000004.partial"),
        Moment("after update 5", recorded(5), chance.uniform(0, 0.05)),
        inside("checkpoints/.step-00000006.partial"),
        Moment("after the last checkpoint", there("checkpoints/step-00000006"), chance.uniform(0, 0.5)),
        inside(".hf.partial"),
    ]


def start(run: TinyRun) -> subprocess.Popen[bytes]:
    # Equinox's runtime checks are callbacks, and programs with callbacks cannot be cached: every start would compile.
    environment = {**os.environ, "EQX_ON_ERROR": "off"}
    return subprocess.Popen(
        [sys.executable, "-m", "marin_rl.train", *run.argv],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end, and give back what was said."""
    output, _ = process.communicate()
    return output.decode()


def kill_at(run: TinyRun, moment: Moment) -> bool:
    """Start the run, and end it with SIGKILL at the moment.

    Returns:
        Whether a write was under way, for moments that are to be inside one.
    """
    process = start(run)
    while not moment.reached(run):
        assert process.poll() is None, f"the run ended before the moment {moment.name!r}:\n{finish(process)}"
        time.sleep(0.0005)
    if moment.delay:
        time.sleep(moment.delay)
    os.killpg(process.pid, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == -signal.SIGKILL, f"{moment.name}: the run ended by itself:\n{output}"
    return moment.inside is not None and (run.path / moment.inside).exists()


@pytest.mark.slow
def test_a_run_killed_twelve_times_ends_like_one_that_was_not(finished_run: TinyRun, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    plan = moments(random.Random(20))
    caught = [kill_at(run, moment) for moment in plan]
    last = start(run)
    output = finish(last)
    assert last.returncode == 0, output
    same_outcome(run, finished_run)
    # Between the write's first sign and the kill a loaded machine may finish the write; not every time.
    assert sum(caught) >= 2
    assert len(plan) >= 10
    assert not list(run.checkpoints.glob(".*.partial"))
