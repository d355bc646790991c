# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs in an object store: an emulator of Google Cloud Storage on this machine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.lab.soak import LiveRun
from marin_rl.evaluate import main as evaluate
from marin_rl.view import main as view
from tests.faults.live_run import NO_PROGRESS_TIMEOUT
from tests.fork_server import popen
from tests.gcs_emulator import Fault, Gcs
from tests.tiny_run import TinyRun, contents, make_run, outcome

ADDRESS = "gs://bucket/runs/tiny"
PREFIX = "runs/tiny/"


def remote_run(folder: Path, **changes: Any) -> TinyRun:
    """A tiny run in the bucket; its local path is where `local_copy` puts its files."""
    folder.mkdir(exist_ok=True)
    return make_run(folder, **{"run_dir": ADDRESS, "checkpoint__keep_every": 1, "checkpoint__every": 1, **changes})


def local_copy(gcs: Gcs, run: TinyRun, folder: Path) -> TinyRun:
    """Download the run directory."""
    gcs.download(PREFIX, folder)
    return TinyRun(folder, run.config)


def same_outcome(found: TinyRun, expected: TinyRun) -> None:
    ours, theirs = outcome(found), outcome(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == theirs[name], name


@pytest.fixture
def stored(gcs: Gcs, finished_run: TinyRun) -> Gcs:
    """The finished run, copied into the bucket."""
    for name, data in contents(finished_run.path).items():
        if name != ".lock":
            gcs.put(PREFIX + name, data)
    text = (finished_run.path / "config.yaml").read_text().replace(str(finished_run.path), ADDRESS)
    gcs.put(f"{PREFIX}config.yaml", text.encode())
    return gcs


def forget(gcs: Gcs, *prefixes: str) -> None:
    """Delete the files of the run whose names begin with one of the prefixes."""
    for name in gcs.names(PREFIX):
        if name.startswith(prefixes):
            del gcs.objects[PREFIX + name]


@pytest.fixture
def stored_run(stored: Gcs, finished_run: TinyRun, tmp_path: Path) -> TinyRun:
    """The command that resumes the run in the bucket, with the problems that it has read so far."""
    return remote_run(tmp_path / "here", environment__path=str(finished_run.path.parent / "problems.jsonl"))


@pytest.mark.medium
def test_run_in_a_bucket_equals_a_local_run(
    gcs: Gcs, finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = remote_run(tmp_path / "here")
    assert run.train(curves=True) == 0
    copy = local_copy(gcs, run, tmp_path / "copy")
    same_outcome(copy, finished_run)
    assert (copy.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "warm start 10: loss" in (copy.path / "log.txt").read_text()
    assert not list(Path.cwd().glob("gs:*"))
    assert capfd.readouterr().err == ""

    assert view([ADDRESS]) == 0
    assert "train-6-" in capfd.readouterr().out
    assert evaluate(["--run", ADDRESS, "--json"]) == 0
    assert '"step": 6' in capfd.readouterr().out
    # It may be started from in other runs.
    other = make_run(tmp_path / "here", initialize_from=ADDRESS, num_steps=0, warm_start={"max_steps": 0})
    assert other.train() == 0


def run_process(run: TinyRun, folder: Path, gcs: Gcs, killed_at: str | None = None) -> tuple[int, str]:
    """Run the command as a process with its own working directory; return its exit status and output.

    Args:
        run: the run.
        folder: the working directory.
        gcs: the store.
        killed_at: request at which the process is killed; it is not served.
    """
    folder.mkdir(exist_ok=True)
    environment = {**gcs.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    output = folder / "output.txt"
    live = LiveRun(run.argv, run.path, output, NO_PROGRESS_TIMEOUT, environment=environment, folder=folder, popen=popen)
    live.start()
    assert live.process is not None
    pid = live.process.pid
    if killed_at is not None:
        gcs.watched.append((killed_at, lambda: os.kill(pid, signal.SIGKILL) is None))
    try:
        return live.end(), output.read_text()
    finally:
        live.kill()


MOMENTS = [
    r"POST runs/tiny/checkpoints/step-00000000/\w+/state/",
    r"POST runs/tiny/checkpoints/step-00000002/manifest\.json",
    r"POST runs/tiny/rollouts/step-00000004\.parquet",
    r"DELETE runs/tiny/checkpoints/step-00000003/\w+/state/",
    r"POST runs/tiny/hf/model\.safetensors",
]
"""Requests at which the run is killed; they are not served."""


@pytest.mark.slow
def test_run_killed_5_times_in_other_folders_equals_an_uninterrupted_run(
    gcs: Gcs, finished_run: TinyRun, tmp_path: Path
) -> None:
    run = remote_run(tmp_path / "here", checkpoint__keep_every=0)
    for number, moment in enumerate(MOMENTS):
        code, output = run_process(run, tmp_path / f"host-{number}", gcs, killed_at=moment)
        assert code == -signal.SIGKILL, f"{moment}: {code} {output}"
        assert not gcs.watched
    code, output = run_process(run, tmp_path / "last", gcs)
    assert code == 0, output
    copy = local_copy(gcs, run, tmp_path / "copy")
    found, expected = outcome(copy), outcome(finished_run)
    assert found.pop("steps") == [5, 6]
    del expected["steps"]
    assert found == expected
    # Nothing is left of the killed processes.
    kept = {name.split("/")[1] for name in gcs.names(PREFIX) if name.startswith("checkpoints/")}
    assert kept == {"step-00000005", "step-00000006"}


@pytest.mark.medium
def test_a_run_that_is_complete_or_in_use_is_not_changed(
    stored: Gcs, stored_run: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    from marin_rl.runs.lock import hold
    from marin_rl.utils.remote_path import RemotePath

    before = dict(stored.objects)
    assert stored_run.train() == 0
    assert "is complete after step 6, and nothing is changed" in capfd.readouterr().out
    assert stored.objects == before
    # A complete run is not opened.
    forget(stored, "hf/training_step.json")
    with hold(RemotePath(f"{ADDRESS}/.lock")):
        before = dict(stored.objects)
        assert stored_run.train() == 1
        assert stored.objects == before
    message = rf"error: run directory '{ADDRESS}' is in use by process {os.getpid()} on .*; wait for it to end"
    assert re.search(message, capfd.readouterr().err)


@pytest.mark.medium
def test_failing_requests_are_repeated(
    stored: Gcs,
    stored_run: TinyRun,
    finished_run: TinyRun,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    forget(stored, "hf/", "checkpoints/step-00000006/", "rollouts/step-00000006")
    stored.faults = [
        Fault(r"POST .*\.lock", 503, 1),
        Fault(r"GET .*step-00000005/manifest.json", 503, 1),
        Fault(r"GET .*step-00000005/state/", 503, 1),
        Fault(r"POST .*step-00000006/\w+/state/", 503, 1),
        Fault(r"POST .*rollouts/step-00000006", 429, 1),
        Fault(r"POST .*hf/config.json", 503, 1),
    ]
    assert stored_run.train() == 0
    assert [fault.times for fault in stored.faults] == [0] * 6
    assert capfd.readouterr().err == ""
    same_outcome(local_copy(stored, stored_run, tmp_path / "copy"), finished_run)


@pytest.mark.parametrize(
    ("faults", "address", "message"),
    [
        (
            [Fault(r"POST ", 403)],
            ADDRESS,
            r"cannot write '.*/\.lock': permission denied \(emulated 403\); give the acc",
        ),
        ([Fault(r".", 401)], ADDRESS, "permission denied|no valid credentials"),
        ([], "gs://other/run", r"cannot write 'gs://other/run/\.lock': the bucket does not exist; create it, or"),
    ],
)
def test_a_store_that_refuses_is_named_before_anything_starts(
    gcs: Gcs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    faults: list[Fault],
    address: str,
    message: str,
) -> None:
    monkeypatch.setattr("marin_rl.parts.model.start_devices", None)  # calling it would raise
    run = make_run(tmp_path, run_dir=address)
    gcs.faults = faults
    assert run.train() == 1
    error = capfd.readouterr().err
    assert re.fullmatch(rf"error: .*({message}).*\n", error), error
    assert not gcs.objects


def flip(gcs: Gcs, name: str) -> None:
    data = bytearray(gcs.read(PREFIX + name))
    data[len(data) // 2] ^= 1
    gcs.put(PREFIX + name, bytes(data))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (flip, "state/", r"step-00000006 is damaged: state/\S+\.bin differs from what was written; falling back"),
        (forget, "state/", r"step-00000006 is damaged: state/\S+\.bin is missing; falling back to the one before it"),
        (forget, "manifest", r"step-00000006 is ignored: its save was interrupted before it wrote manifest\.json"),
    ],
)
def test_torn_checkpoint_falls_back(
    stored: Gcs,
    stored_run: TinyRun,
    finished_run: TinyRun,
    tmp_path: Path,
    damage: Callable[[Gcs, str], None],
    kind: str,
    message: str,
) -> None:
    folder = "checkpoints/step-00000006/"
    damage(stored, folder + next(name for name in stored.names(PREFIX + folder) if name.startswith(kind)))
    forget(stored, "hf/")
    assert stored_run.train() == 0
    copy = local_copy(stored, stored_run, tmp_path / "copy")
    assert re.search(message, (copy.path / "log.txt").read_text())
    same_outcome(copy, finished_run)


@pytest.mark.medium
def test_resume_reads_each_byte_of_a_checkpoint_once(stored: Gcs, stored_run: TinyRun) -> None:
    forget(stored, "hf/")
    assert stored_run.train() == 0
    folder = f"{PREFIX}checkpoints/step-00000006/"
    for name in stored.names(folder):
        assert stored.downloads[folder + name] == [(0, len(stored.read(folder + name)))], name
    assert not [name for name in stored.downloads if name.startswith(f"{PREFIX}checkpoints/step-00000005")]


@pytest.mark.medium
def test_compiled_programs_are_cached_in_a_bucket(gcs: Gcs) -> None:
    code = "import jax; jax.config.update('jax_compilation_cache_dir', 'gs://bucket/jax'); jax.jit(lambda x: -x)(2.0)"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")},
        **gcs.environment,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=environment, check=True)
    programs = [name for name in gcs.names("jax/") if name.endswith("-cache")]
    assert programs
    before = dict(gcs.objects)
    subprocess.run(command, env=environment, check=True)
    assert all(gcs.downloads[f"jax/{name}"] for name in programs)
    assert all(gcs.objects[f"jax/{name}"] == before[f"jax/{name}"] for name in programs)


@pytest.mark.medium
def test_process_that_lost_its_lock_ends_without_writing(
    stored: Gcs,
    stored_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from marin_rl.training.batch_builder import BatchBuilder

    forget(stored, "hf/", "checkpoints/step-00000006/", "checkpoints/step-00000005/")
    build = BatchBuilder.build
    others = ("metrics.jsonl", "log.txt", "rollouts/step-00000005.parquet")

    def suspended(*arguments: object) -> object:
        """Another process takes over during the step."""
        stored.put(f"{PREFIX}.lock/00000002", b"{}")
        for name in others:
            stored.put(PREFIX + name, b"of the other process\n")
        return build(*arguments)

    monkeypatch.setattr(BatchBuilder, "build", suspended)
    monkeypatch.setattr("marin_rl.runs.lock.CHECK_SECONDS", 0.0)
    assert stored_run.train() == 1
    assert f"error: run directory '{ADDRESS}' was taken over by another process" in capfd.readouterr().err
    for name in others:
        assert stored.read(PREFIX + name) == b"of the other process\n", name
    assert not stored.names(f"{PREFIX}checkpoints/step-00000005/")
