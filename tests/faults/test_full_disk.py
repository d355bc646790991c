# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A full disk ends a run with a message, and the same command resumes when there is space."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.lab.soak import halt, wake, whole_and_once
from marin_rl.runs.saved_checkpoint import open_checkpoint
from marin_rl.sessions import session
from tests.faults.live_run import all_end, async_settings, live, started
from tests.fork_server import popen
from tests.tiny_run import TinyRun, contents, copy_of, interrupted_after, make_run, outcome, set_num_steps


def mount(place: Path, size: str, *options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(place)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for one or two checkpoints of the tiny model."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = os.geteuid() == 0 and mount(place, "900k")
    if not mounted:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.medium
def test_full_disk_of_the_console_output_does_not_stop_the_run(finished_run: TinyRun, tmp_path: Path) -> None:
    run = interrupted_after(finished_run, 4, tmp_path / "run")
    with open("/dev/full", "wb") as full:
        process = popen([sys.executable, "-m", "marin_rl.train", *run.argv], stdout=full, env=os.environ)
    assert process.wait() == 0
    assert [record["step"] for record in run.records()] == list(range(7))
    message = "standard output cannot be written: No space left on device; the command goes on without it"
    assert (run.path / "log.txt").read_text().count(message) == 1


@pytest.mark.medium
def test_full_disk_stops_the_run_without_loss(
    finished_run: TinyRun,
    disk: Path,
    new_run: Callable[..., TinyRun],
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = {
        "initialize_from": str(finished_run.path),
        "warm_start__max_steps": 0,
        "num_steps": 6,
        "evaluation": {"every": 0, "tasks": 2, "greedy": False},
        "checkpoint": {"every": 1, "keep_every": 1},
    }
    whole = new_run(**settings)
    assert whole.train() == 0
    run = make_run(disk, **settings)
    capfd.readouterr()
    assert run.train() == 1
    told = capfd.readouterr().err
    assert f"error: could not write checkpoint {run.checkpoints}" in told
    assert "free disk space" in told
    assert "Traceback" not in told
    assert run.steps()[0] == 0
    assert mount(disk, "64m", "remount")
    assert run.train() == 0
    assert "damaged" not in capfd.readouterr().out
    found, expected = outcome(run), outcome(whole)
    assert found == expected


def fill(disk: Path, leave: int) -> Path:
    """Fill the disk except for some bytes; return the file that fills it."""
    file, status = disk / "filler", os.statvfs(disk)
    with file.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, status.f_bavail * status.f_frsize - leave)
    return file


@pytest.mark.medium
@pytest.mark.parametrize("last", ["", "config.json", "model.safetensors"])
def test_full_disk_at_the_end_keeps_the_previous_export(
    finished_run: TinyRun,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    last: str,
) -> None:
    assert mount(disk, "64m", "remount")
    run = copy_of(finished_run, disk)
    # An export of an unknown step is repeated.
    (run.path / "hf" / "training_step.json").unlink()
    before = contents(run.path / "hf")
    files = [run.path / "hf" / name for name in ("config.json", "model.safetensors", "tokenizer.json")]
    # Room for the checkpoints up to the last that fits.
    fitting = files[: [file.name for file in files].index(last) + 1] if last else []
    leave = sum(file.stat().st_blocks * 512 for file in fitting)
    export = session.export_folder

    def export_to_a_full_disk(*arguments: Any) -> None:
        fill(disk, leave)
        export(*arguments)

    monkeypatch.setattr(session, "export_folder", export_to_a_full_disk)
    capfd.readouterr()
    assert run.train() == 1
    told = capfd.readouterr().err
    assert f"error: cannot write '{run.path / 'hf'}': the disk is full; free some space and rerun the same" in told
    assert "Traceback" not in told
    assert contents(run.path / "hf") == before


GROUPS, MEMBERS, STALENESS = 4, 4, 3


@pytest.mark.slow
def test_full_disk_stops_an_async_run_with_all_its_processes(finished_run: TinyRun, disk: Path) -> None:
    assert mount(disk, "64m", "remount")
    settings = async_settings(
        initialize_from=str(finished_run.path),
        workers__num_workers=1,
        # It cannot end before its disk is full.
        num_steps=100_000,
        replay__max_staleness=STALENESS,
        checkpoint={"every": 1},
        evaluation={"every": 0, "tasks": 2, "greedy": False},
    )
    run = make_run(disk, **settings)
    # No file fits, including the log, but the output is elsewhere.
    running = dataclasses.replace(live(run), output=disk.with_name("output.txt"))
    with started(running):
        running.wait_until(lambda: running.steps >= 2, "step 2")
        assert running.process is not None
        children = running.children()
        halt([running.process.pid])
        filler = fill(disk, 0)
        wake([running.process.pid])
        assert running.end() == 1
        all_end(children)
    filler.unlink()
    said, step = running.output.read_text(), run.steps()[-1]
    # The next step's files are written while the checkpoint is saved, so either may fail first.
    assert re.search(rf"error: (cannot write '|could not write checkpoint ){re.escape(str(run.path))}/\S", said), said
    assert "free" in said
    assert "Traceback" not in said
    assert open_checkpoint(run.checkpoint(step)).step == step
    set_num_steps(run, step + 2)
    with started(running):
        assert running.end() == 0, running.output.read_text()[-5000:]
    assert f"resuming after step {step}, from {run.checkpoint(step)}" in (run.path / "log.txt").read_text()
    assert whole_and_once(running, groups=GROUPS, members=MEMBERS, staleness=STALENESS) == step + 2
