# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marin_rl.environments.base import Step
from marin_rl.environments.single_turn import SingleTurnEpisode
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.sessions.session import stop_on_signals
from marin_rl.utils.errors import RunDirectoryError
from tests.free_port import free_port
from tests.tiny_run import TinyRun, contents, copy_of, interrupted_after, outcome


@pytest.mark.medium
def test_plots_that_fail_do_not_cost_the_model(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> None:
        raise RunDirectoryError("no font")

    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", fail)
    run = new_run(num_steps=1, warm_start__max_steps=0, evaluation__tasks=0)
    assert run.train(curves=True) == 1
    assert "no font" in capsys.readouterr().err
    assert (run.path / "hf" / "model.safetensors").is_file()


def test_finished_run_directory_is_complete(finished_run: TinyRun):
    directory = RunDirectory(finished_run.path)
    assert all(path.is_file() for path in (directory.config, directory.metrics, directory.log, directory.curves))
    assert directory.curves.read_bytes().startswith(b"\x89PNG")
    stored = sorted(path.name for path in directory.rollouts.iterdir())
    assert stored == [
        *(f"eval-{step:08d}.parquet" for step in (0, 3, 6)),
        *(f"step-{step:08d}.parquet" for step in range(1, 7)),
    ]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.hf.iterdir()}
    assert finished_run.steps() == [0, 1, 2, 3, 4, 5, 6]
    assert "warm start 30: loss" in directory.log.read_text()


def test_only_settings_without_effect_on_results_may_change_on_resume(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    again = copy_of(finished_run, tmp_path / "copy")
    harmless = {
        "checkpoint.every": "5",
        "evaluation.every": "2",
        "rollout_store.max_mb": "500",
        "ray_address": "auto",
        "workers.num_workers": "3",
        "workers.heartbeat_timeout": "5",
        "weights.port": "1234",
        "weights.retry.give_up_seconds": "9",
    }
    assert again.train(*[part for key, value in harmless.items() for part in (f"--{key}", value)]) == 0
    files = contents(again.path)
    assert again.train("--seed", "4", "--optimizer.learning_rate", "1", "--workers.refresh", "in_flight") == 1
    error = capfd.readouterr().err
    assert f"run directory {str(again.path)!r} belongs to a run with another config:" in error
    assert "seed: 3 there, 4 now" in error
    # This one is named, so it could change if a step were trained.
    assert "the run has done 6 steps, so no step would be trained with the new optimizer.learning_rate" in error
    assert 'workers.refresh: "between_groups" there, "in_flight" now' in error
    assert "choose another run_dir" in error
    files.pop(".lock")
    assert {name: data for name, data in contents(again.path).items() if name != ".lock"} == files


def test_missing_ray_cluster_is_reported_before_run_starts(
    new_run: Callable[..., TinyRun], capfd: pytest.CaptureFixture[str]
):
    run = new_run(mode="async", ray_address=f"127.0.0.1:{free_port()}")
    assert run.train() == 1
    assert "error: no Ray cluster responds at ray_address '127.0.0.1:" in capfd.readouterr().err
    assert not run.path.exists()


def test_first_interrupt_requests_stop_and_second_exits():
    messages: list[str] = []
    former = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def twice() -> None:
        with stop_on_signals(messages.append) as stop:
            assert not stop.is_set()
            signal.raise_signal(signal.SIGINT)
            assert stop.is_set()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert len(messages) == 1
    assert messages[0].startswith("SIGINT: stopping and saving; ")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == former


class Interrupted(io.RawIOBase):
    """A stream with a first write that SIGTERM interrupts, as a write to a full pipe may be."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.written:
            signal.raise_signal(signal.SIGTERM)
        self.written += bytes(data)
        return len(data)


def test_sigterm_during_console_write_requests_stop():
    raw = Interrupted()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")

    def report(message: str) -> None:
        print(message, file=stream, flush=True)

    with stop_on_signals(report) as stop:
        report("step 1/10")
        assert stop.is_set()
    first, second = raw.written.decode().splitlines()
    assert first == "step 1/10"
    assert second.startswith("SIGTERM: stopping and saving; ")


@pytest.mark.medium
def test_sigterm_during_blocked_step_saves_last_finished_step(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    run = interrupted_after(finished_run, 3, tmp_path / "copy")
    step, graded = SingleTurnEpisode.step, 0

    async def held(self: SingleTurnEpisode, reply: str) -> Step:
        """Score the 16 rollouts of step 4 and some of step 5, and block on all others."""
        nonlocal graded
        graded += 1
        if graded <= 20:
            return await step(self, reply)
        if graded == 21:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(SingleTurnEpisode, "step", held)
        assert run.train("--checkpoint.every", "0") == 0
    assert "stopped after step 4 of 6; everything is saved" in capfd.readouterr().out
    assert run.steps() == [0, 1, 2, 3, 4]
    assert [record["step"] for record in run.records()] == [0, 1, 2, 3, 4]
    assert run.train() == 0
    assert outcome(run) == outcome(finished_run)


@pytest.mark.medium
@pytest.mark.parametrize("step", [3, 6])
def test_sigterm_during_evaluation_saves_step_and_resume_repeats_evaluation(
    finished_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    step: int,
):
    run = interrupted_after(finished_run, step - 1, tmp_path / "copy")
    score, graded = SingleTurnEpisode.step, 0

    async def held(self: SingleTurnEpisode, reply: str) -> Step:
        """Score the 16 rollouts of the step and some of its evaluation, and block on all others."""
        nonlocal graded
        graded += 1
        if graded <= 20:
            return await score(self, reply)
        if graded == 21:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(SingleTurnEpisode, "step", held)
        assert run.train() == 0
    output = capfd.readouterr().out
    assert f"stopped after step {step} of 6; everything is saved" in output
    assert "Held-out accuracy" not in output
    assert run.steps() == list(range(step + 1))
    assert [record["step"] for record in run.records()] == list(range(step))
    assert not (run.path / "hf").exists()
    assert run.train() == 0
    assert outcome(run) == outcome(finished_run)


@pytest.mark.parametrize("slow", ["environments.dataset.DatasetConfig.build", "parts.model.first_policy"])
def test_sigterm_interrupts_the_preparation_of_a_run(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], slow: str
):
    def prepare(*arguments: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError

    monkeypatch.setattr(f"marin_rl.{slow}", prepare)
    former = signal.getsignal(signal.SIGTERM)
    run = new_run()
    assert run.train() == 130
    assert "interrupted; run the same command again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is former
    assert run.steps() == []


@pytest.mark.medium
def test_sigterm_during_a_warm_start_ends_the_run_without_a_checkpoint(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def terminated(*arguments: object) -> float:
        signal.raise_signal(signal.SIGTERM)
        return 0.0

    monkeypatch.setattr("marin_rl.training.warm_start._accuracy", terminated)
    run = new_run(warm_start__max_steps=1000, warm_start__check_every=1, evaluation={"tasks": 0})
    assert run.train() == 0
    assert "stopped before the first step, of which nothing is saved" in capfd.readouterr().out
    assert not run.checkpoints.exists() or run.steps() == []
