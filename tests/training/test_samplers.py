# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Samplers of trainer and workers, in this process and on a server over HTTP on loopback, which reloads the weights."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from haliax import Axis  # noqa: F401  before marin_rl: see tests/tiny_run.py

from marin_rl.sampling.policy_check import PROMPTS
from marin_rl.sessions.earlier_run import resolve_model
from tests.distributed.thread_workers import thread_workers
from tests.sampling.completions_server import CompletionsServer, SamplerEngine, serving
from tests.tiny_run import TinyRun, interrupted_after, make_run, outcome
from tests.training.levanter_server import Loader, config_of, served_by

SHORT = {
    "num_steps": 3,
    "warm_start__max_steps": 2,
    "warm_start__check_every": 1,
    "evaluation": {"every": 2, "tasks": 4, "samples": 1, "pass_at": [1]},
    "checkpoint": {"every": 1, "keep_every": 1},
}
"""A warm start, three steps, and few evaluation tasks."""

NO_START = {**SHORT, "warm_start__max_steps": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[CompletionsServer]:
    with serving(CompletionsServer()) as started:
        yield started


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same run with the in-process sampler and with a server."""

    own: TinyRun
    served: TinyRun
    loader: Loader
    server: CompletionsServer


@pytest.fixture(scope="module")
def pair(finished_run: TinyRun, server: CompletionsServer, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    start = {"initialize_from": str(finished_run.path), **SHORT}
    own = make_run(tmp_path_factory.mktemp("own"), **start)
    folder = tmp_path_factory.mktemp("served")
    weights = folder / "weights"
    served = make_run(folder, **start, sampler=served_by(server, weights))
    loader = Loader(resolve_model(config_of(served)), weights / "current")
    server.load = loader
    assert own.train() == 0
    assert served.train() == 0
    return Pair(own, served, loader, server)


@pytest.mark.medium
def test_run_with_a_server_equals_run_with_levanter(pair: Pair):
    """Return all records, rollouts, weights and optimizer moments."""
    own, served = outcome(pair.own), outcome(pair.served)
    assert own["records"][-1]["step"] == 3
    for part in own:
        assert own[part] == served[part], part


@pytest.mark.medium
def test_interrupted_run_resumes_exactly(pair: Pair, tmp_path: Path):
    interrupted = interrupted_after(pair.served, 1, tmp_path / "again")
    # Another address of the same server is the same run.
    text = interrupted.config.read_text()
    interrupted.config.write_text(text.replace("/weights", "/other_weights"))
    folder = config_of(interrupted).sampler.reload.folder
    loader = Loader(pair.loader.config, Path(folder) / "current")
    pair.server.load = loader
    assert interrupted.train() == 0
    assert outcome(interrupted) == outcome(pair.served)
    assert loader.loaded == ["version-1", "version-2", "version-3"]


@pytest.mark.medium
def test_worker_with_a_server_equals_worker_with_levanter(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without staleness; the trainer evaluates with the in-process sampler."""
    monkeypatch.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)
    start = {"initialize_from": str(config_of(pair.own).initialize_from), **SHORT}
    weights = tmp_path / "weights"
    run = make_run(tmp_path, mode="async", replay__max_staleness=0, **start, sampler=served_by(pair.server, weights))
    loader = Loader(pair.loader.config, weights / "current")
    monkeypatch.setattr(pair.server, "load", loader)
    asked = len(pair.server.received)
    assert run.train() == 0
    own, found = outcome(pair.own), outcome(run)
    for part in ("rollouts", "state", "hf"):
        assert found[part] == own[part], part
    # The worker may receive the last announcement before the stop.
    assert loader.loaded[:3] == ["version-0", "version-1", "version-2"]
    # The check after each reload, and the rollouts of the training steps.
    assert len(pair.server.received) == asked + PROMPTS * len(loader.loaded) + 48


@pytest.mark.medium
def test_server_reload_error_ends_an_async_run(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)

    def broken() -> Any:
        raise RuntimeError("no room for the weights")

    monkeypatch.setattr(pair.server, "load", broken)
    start = {"initialize_from": str(pair.own.path), **SHORT, "warm_start__max_steps": 0}
    run = make_run(tmp_path, mode="async", **start, sampler=served_by(pair.server, tmp_path / "weights"))
    assert run.train() == 1
    error = capfd.readouterr().err
    assert "sampler.reload: 'reload' of" in error
    assert "Traceback" not in error


@pytest.mark.medium
def test_evaluation_of_a_run_needs_no_server(pair: Pair, capsys: pytest.CaptureFixture[str]):
    from marin_rl.evaluate import main

    asked = len(pair.server.received)
    assert main(["--run", str(pair.served.path)]) == 0
    assert "after step 3" in capsys.readouterr().out
    assert len(pair.server.received) == asked


# A sampler without a run.


def test_server_without_weights_fails_before_training(
    finished_run: TinyRun, new_run: Callable[..., TinyRun], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    hook = tmp_path / "hook.py"
    hook.write_text("def reload(folder, version, base_url):\n    pass\n")
    with serving(CompletionsServer()) as empty:
        sampler = {**served_by(empty, tmp_path / "weights")}
        sampler["reload"] = {"folder": str(tmp_path / "weights"), "path": str(hook), "function": "reload"}
        run = new_run(initialize_from=str(finished_run.path), sampler=sampler, **SHORT)
        assert run.train() == 1
    error = capfd.readouterr().err
    assert "returned status 503" in error
    assert "weights are not loaded yet" in error
    assert "Traceback" not in error


@pytest.mark.medium
def test_a_server_that_keeps_old_weights_ends_the_run(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """It reports success. The first reload is that of the start."""
    run = make_run(
        tmp_path, initialize_from=str(pair.own.path), sampler=served_by(pair.server, tmp_path / "weights"), **NO_START
    )
    loader = Loader(pair.loader.config, tmp_path / "weights" / "current")
    engines: list[SamplerEngine] = []

    def load_once() -> SamplerEngine:
        engines.append(engines[0] if engines else loader())
        return engines[0]

    monkeypatch.setattr(pair.server, "load", load_once)
    assert run.train() == 1
    error = " ".join(capfd.readouterr().err.split())
    assert "does not sample from version 1 of the policy" in error
    assert "its answers are those of version 0" in error
    assert "Traceback" not in error
