# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An interrupted run equals an uninterrupted one bit for bit."""

import dataclasses
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork_server import ForkedProcess, popen
from tests.tiny_run import TinyRun, contents, interrupted_after, make_run, outcome

LAST = 6
"""Number of updates of the tiny run."""


def same_outcome(resumed: TinyRun, uninterrupted: TinyRun) -> None:
    """Compare everything except the list of kept checkpoints, part by part for readable failures."""
    found, expected = outcome(resumed), outcome(uninterrupted)
    assert [record["step"] for record in found["records"]] == list(range(LAST + 1))
    for record, wanted in zip(found["records"], expected["records"], strict=True):
        assert record == wanted
    for piece in ("progress", "state", "rollouts", "hf"):
        assert found[piece] == expected[piece], piece


@dataclasses.dataclass(frozen=True)
class Moment:
    """Time to kill a run: at a file event, or some time after a condition holds, but at the event at the latest."""

    pattern: str
    """Pattern of the first file event to count; see `tests.fork_server.die_at`."""
    count: int = 0
    """Number of file events after it."""
    seen: tuple[str, str] | None = None
    """Name of a file of the run and a text in it, of which this process may learn late."""
    delay: float = 0.0
    """Seconds after that."""
    leaves: str | None = None
    """Pattern of a half-written folder that the kill must leave behind."""


def moments(chance: random.Random) -> dict[str, Moment]:
    """Return kill times over the whole run, in an order that leaves work for each of them."""

    def checkpoint(step: int) -> str:
        return rf"os\.mkdir .*\.step-{step:08d}\.[^/]*partial$"

    def inside(step: int) -> Moment:
        # Files, the manifest, and the syncing of all of them: more than 10 events of the thread that saves.
        return Moment(checkpoint(step), chance.randint(1, 8), leaves=f"checkpoints/.step-{step:08d}.*partial")

    def recorded(step: int) -> tuple[str, str]:
        return "metrics.jsonl", f'{{"step": {step}, '

    return {
        "while starting": Moment(checkpoint(0), seen=("log.txt", ""), delay=chance.uniform(0, 2)),
        "in the warm start": Moment(checkpoint(0), seen=("log.txt", "warm start 10"), delay=chance.uniform(0, 0.2)),
        "inside the write of checkpoint 0": inside(0),
        "before checkpoint 0 gets its name": Moment(
            r"os\.rename .*\.step-00000000\.[^/]*partial$", leaves="checkpoints/.step-00000000.*partial"
        ),
        "before record 1": Moment(r"open a .*metrics\.jsonl", 1),
        "after update 1": Moment(checkpoint(2), seen=recorded(1), delay=chance.uniform(0, 0.02)),
        "inside the write of checkpoint 2": inside(2),
        "writing rollouts": Moment(r"open w .*rollouts/\.step-00000003"),
        "inside the write of checkpoint 4": inside(4),
        "deleting checkpoint 0": Moment(r"shutil\.rmtree .*step-00000000$", chance.randint(1, 3)),
        "after update 5": Moment(checkpoint(6), seen=recorded(5), delay=chance.uniform(0, 0.02)),
        "inside the write of checkpoint 6": inside(6),
        "drawing curves": Moment(r"open w .*\.curves\.png"),
        "exporting weights": Moment(r"os\.mkdir .*\.hf\.partial$", chance.randint(1, 6), leaves=".hf.partial"),
    }


def start(run: TinyRun, kill_at: tuple[str, int] | None = None) -> ForkedProcess:
    """Start the run's command."""
    with (run.path.parent / "output.txt").open("wb") as output:
        command = [sys.executable, "-m", "marin_rl.train", *run.argv]
        return popen(command, stdout=output, env=os.environ, kill_at=kill_at)


def kill_at(run: TinyRun, name: str, moment: Moment) -> None:
    """Start the run, and kill it at the given time."""
    process = start(run, (moment.pattern, moment.count))
    if moment.seen is not None:
        file, text = run.path / moment.seen[0], moment.seen[1]
        while process.poll() is None and not (file.exists() and text in file.read_text()):
            time.sleep(0.001)
        time.sleep(moment.delay)
        process.kill()
    status = process.wait()
    assert status == -signal.SIGKILL, f"{name}: not killed:\n{(run.path.parent / 'output.txt').read_text()}"
    assert moment.leaves is None or list(run.path.glob(moment.leaves)), name


@pytest.mark.slow
def test_run_killed_14_times_equals_uninterrupted_run(finished_run: TinyRun, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name, moment in moments(random.Random(20)).items():
        kill_at(run, name, moment)
    status, output = start(run).wait(), (run.path.parent / "output.txt").read_text()
    assert status == 0, output
    assert f"resuming after step {LAST}" in output
    same_outcome(run, finished_run)
    assert not [path for path in run.path.rglob("*") if path.name.endswith(".partial")]


def damage(path: Path) -> None:
    """Flip one bit of a file without changing its size or time."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    times = path.stat()
    path.write_bytes(bytes(data))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.medium
def test_leftovers_of_a_killed_process_are_ignored_and_damaged_checkpoints_skipped_and_named(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = interrupted_after(finished_run, 5, tmp_path / "copy")
    for folder in (run.checkpoints / ".step-00000006.1f.partial" / "state", run.path / ".hf.partial"):
        folder.mkdir(parents=True)
        (folder / "half").write_text("written")
    for file in (run.path / "rollouts" / ".step-00000006.parquet.partial", run.path / ".metrics.jsonl.partial"):
        file.write_text("half")
    with (run.path / "metrics.jsonl").open("a") as metrics:
        # The record of an update without a checkpoint, and half of the next record.
        metrics.write(f'{json.dumps({**finished_run.records()[6], "loss/total": 42.0})}\n{{"step": 7, "lo')
    damage(max((run.checkpoint(5) / "state").iterdir(), key=lambda path: path.stat().st_size))
    (run.checkpoint(4) / "manifest.json").unlink()
    assert run.train() == 0
    output = capfd.readouterr().out
    assert "the checkpoint of step 4 is damaged and was skipped" in output
    assert "the checkpoint of step 5 is damaged and was skipped" in output
    assert "resuming after step 3, from" in output
    log = (run.path / "log.txt").read_text()
    assert re.search(r"step-00000005 is damaged: state/\S+\.bin differs from what was written", log)
    assert "step-00000004 has no readable manifest.json" in log
    same_outcome(run, finished_run)
    assert not list(run.path.rglob("half"))


@pytest.mark.medium
def test_run_stops_when_every_checkpoint_is_damaged(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = interrupted_after(finished_run, 1, tmp_path / "copy")
    for step in run.steps():
        (run.checkpoint(step) / "manifest.json").unlink()
    before = contents(run.checkpoints)
    assert run.train() == 1
    assert "is damaged" in capfd.readouterr().err
    assert contents(run.checkpoints) == before


@pytest.mark.medium
def test_interrupt_finishes_the_update_saves_and_prints_how_to_resume(
    finished_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from marin_rl.training.batch_builder import BatchBuilder

    run = interrupted_after(finished_run, 3, tmp_path / "copy")
    build = BatchBuilder.build

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return build(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(BatchBuilder, "build", interrupted)
        assert run.train() == 0
    output = capfd.readouterr().out
    assert "SIGINT: stopping and saving; a step that is still being sampled is discarded, one that is being" in output
    assert f"stopped after step 4 of 6; everything is saved in {run.path}. Run the same command again" in output
    assert run.records()[-1]["step"] == run.steps()[-1] == 4
    assert not (run.path / "hf").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    log = run.path / "log.txt"
    assert " DEBUG " not in log.read_text()
    # The log level may differ from the first start and has no effect on results.
    assert run.train("--log_level", "debug", "--logging", "{marin_rl.runs.rollout_store: error}") == 0
    same_outcome(run, finished_run)
    debug = [line for line in log.read_text().splitlines() if " DEBUG " in line]
    for step in (5, 6):
        for words in ("observation [", "action '", "anchor state [", "structured action '", "advantages ["):
            assert any(f": rollout train-{step}-0-0 turn 0: {words}" in line for line in debug), words


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["in_loss", "in_reward"])
def test_resume_with_kl_penalty(
    kind: str, finished_run: TinyRun, new_run: Callable[..., TinyRun], tmp_path: Path
) -> None:
    settings = {
        "initialize_from": str(finished_run.path),
        "warm_start__max_steps": 0,
        "num_steps": 3,
        "kl": {"type": kind, "beta": 0.5},
        "checkpoint__every": 1,
    }
    whole = new_run(**settings)
    assert whole.train() == 0
    # The reference is the policy at the start of RL; its checkpoint is never deleted.
    assert whole.steps() == [0, 2, 3]
    assert [record["objective/kl"] == 0.0 for record in whole.records()[1:]] == [False] * 3
    resumed = interrupted_after(whole, 2, tmp_path / "copy")
    assert resumed.train() == 0
    assert outcome(resumed) == outcome(whole)
