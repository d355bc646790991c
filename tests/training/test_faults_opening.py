# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Resources opened for a run or an evaluation are closed with it, also if it fails while it starts."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TinyRun, copy_of, make_run
from tests.training.fault_cases import SHORT, is_alive, recorded_sandboxes, written

REWARD = """
    from marin_rl.rewards import reward_function


    @reward_function
    def length(messages, ground_truth, **kwargs):
        return float(len(messages[-1]["content"]))
"""

ENVIRONMENT = """
    from marin_rl.environments.base import AbstractEnvironment, Split, Step
    from marin_rl.types import Message, Task


    class Shy(AbstractEnvironment):
        name = "shy"

        def tasks(self, split):
            return [Task(f"{split}{n}", self.name, (Message(role="user", content=f"{n}"),), "") for n in range(4)]

        async def start(self, task, seed):
            return self

        async def step(self, reply):
            return Step({})

        async def close(self):
            pass
"""


@dataclasses.dataclass
class Watch:
    """Records the reward workers and threads that exist while a run is opened."""

    sandboxes: list[Any]
    before: frozenset[threading.Thread]
    pids: list[int] = dataclasses.field(default_factory=list)
    threads: set[str] = dataclasses.field(default_factory=set)

    def update(self) -> None:
        self.pids = self.sandboxes[-1].worker_pids
        self.threads = {thread.name.partition("_")[0] for thread in threading.enumerate() if thread not in self.before}

    def assert_all_ended(self, *threads: str) -> None:
        """Check that all recorded workers and threads have ended."""
        assert self.pids
        assert not any(map(is_alive, self.pids))
        assert self.threads >= {"episodes", *threads}
        started = [thread for thread in threading.enumerate() if thread not in self.before]
        left = [thread for thread in started if thread.name.startswith(("episodes", "rollout-store"))]
        for thread in left:
            # A thread may return from its last call a moment before it ends.
            thread.join(60)
        assert not [thread.name for thread in left if thread.is_alive()]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(recorded_sandboxes(monkeypatch), frozenset(threading.enumerate()))


@pytest.fixture(scope="module")
def shy_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run with a reward function that was not started."""
    folder = tmp_path_factory.mktemp("opening")
    file = written(folder / "shy.py", ENVIRONMENT)
    written(folder / "length.py", REWARD)
    reward = {"type": "function", "path": str(folder / "length.py"), "function": "length"}
    environment = {"type": "file", "path": str(file), "name": "Shy", "rewards": [reward]}
    changes = {**SHORT, "environment": environment, "sandbox": {"workers": 1, "require": "none"}}
    return make_run(folder, **changes)


def open_it(run: TinyRun, folder: Path, report: Callable[[str], None]) -> None:
    from marin_rl.config.command_line import parse_config
    from marin_rl.config.train_config import TrainConfig
    from marin_rl.parts.rl import RunParts
    from marin_rl.training.open_run import Start, open_run

    (folder / "rollouts").mkdir()
    argv = [*run.argv, "--warm_start.max_steps", "0"]
    open_run(RunParts, parse_config(TrainConfig, argv).config, None, Start(folder, report))


@pytest.mark.medium
def test_interrupt_in_first_evaluation_and_failing_store_close(
    shy_run: TinyRun, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from marin_rl.runs.rollout_store import RolloutStore

    close = RolloutStore.close

    def fail(store: RolloutStore) -> None:
        close(store)
        raise OSError(28, "No space left on device")

    def interrupt(message: str) -> None:
        if message.startswith("warning: only 1 held-out task"):
            return
        assert message.startswith("before RL")
        watch.update()
        raise KeyboardInterrupt

    monkeypatch.setattr(RolloutStore, "close", fail)
    with pytest.raises(KeyboardInterrupt):
        open_it(shy_run, tmp_path, interrupt)
    watch.assert_all_ended()
    assert "closing after an error (KeyboardInterrupt: ) failed too" in caplog.text
    assert "the disk is full" in caplog.text


@pytest.mark.medium
def test_failing_first_checkpoint_closes_everything(
    shy_run: TinyRun, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: object) -> Path:
        watch.update()
        raise OSError(28, "No space left on device", "checkpoints")

    monkeypatch.setattr("marin_rl.runs.checkpoint.Checkpoints.save", fail)
    with pytest.raises(OSError, match="No space left on device"):
        open_it(shy_run, tmp_path, lambda message: None)
    watch.assert_all_ended("rollout-store")


@pytest.fixture
def rewarded(finished_run: TinyRun, shy_run: TinyRun, tmp_path: Path) -> TinyRun:
    """A finished run with a reward function added to its config."""
    import yaml

    run = copy_of(finished_run, tmp_path / "copy")
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    shy = yaml.safe_load(shy_run.config.read_text())
    config["environment"]["rewards"] = shy["environment"]["rewards"]
    config["sandbox"] = shy["sandbox"]
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    return run


@pytest.mark.medium
@pytest.mark.parametrize("fails", [True, False])
def test_evaluation_closes_everything(rewarded: TinyRun, watch: Watch, fails: bool, monkeypatch: pytest.MonkeyPatch):
    from marin_rl import evaluate as command
    from marin_rl.training import evaluation

    measure = evaluation.evaluate

    def watched(*arguments: Any, **keywords: Any) -> dict[str, float]:
        found = measure(*arguments, **keywords)
        watch.update()
        if fails:
            raise ZeroDivisionError("in the evaluation")
        return found

    monkeypatch.setattr(evaluation, "evaluate", watched)
    config = command.EvaluateConfig(str(rewarded.path))
    if fails:
        with pytest.raises(ZeroDivisionError, match="in the evaluation"):
            command.run_evaluation(config)
    else:
        step, metrics = command.run_evaluation(config)
        assert (step, metrics["eval/ones/tasks"]) == (6, 16.0)
    watch.assert_all_ended()
