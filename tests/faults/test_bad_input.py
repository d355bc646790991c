# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Bad input ends with exit status 1 and a message with the cause and a remedy, and loses no data."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from marin_rl import evaluate, view
from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Episode, Split, Step
from marin_rl.runs.rollout_store import read_rollouts
from marin_rl.tokenization.load import CHAT_TEMPLATE
from marin_rl.train import main
from marin_rl.training.batch_builder import BatchBuilder
from marin_rl.types import Message, Task
from tests.tiny_run import TinyRun, contents, copy_of, make_run, outcome

Capture = pytest.CaptureFixture[str]


@dataclasses.dataclass(frozen=True)
class JudgeConfig(EnvironmentConfig):
    """Environment whose rewards for training tasks fail in a configurable way."""

    whim: str = "none"

    def build(self) -> "Judge":
        return Judge(self.whim)


@dataclasses.dataclass(frozen=True)
class Judge(AbstractEnvironment):
    whim: str
    name: str = "judge"

    def tasks(self, split: Split) -> list[Task]:
        names = [f"{split.value[0]}{index}" for index in range(8)]
        return [Task(name, self.name, (Message(role="user", content=name),), "1") for name in names]

    async def start(self, task: Task, seed: int) -> Episode:
        return Verdict(task, self.whim if task.id.startswith("t") else "none")


@dataclasses.dataclass(frozen=True)
class Verdict:
    task: Task
    whim: str

    async def step(self, reply: str) -> Step:
        if self.whim == "raises for all" or (self.whim == "raises for some" and self.task.id in ("t0", "t1", "t2")):
            raise TimeoutError(f"no verdict on {self.task.id}")
        value = {"nan": math.nan, "infinity": -math.inf}.get(self.whim, float("1" in reply))
        return Step({"correct": value})

    async def close(self) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[None]:
    """Register `environment: {type: judge}` during a test."""
    EnvironmentConfig.register_subclass("judge")(JudgeConfig)
    yield
    del EnvironmentConfig._choice_registry["judge"]


@pytest.fixture
def quick(finished_run: TinyRun) -> dict[str, Any]:
    """Return settings of a run from trained weights, with few evaluation tasks and no plots."""
    return {
        "initialize_from": str(finished_run.path),
        "warm_start__max_steps": 0,
        "num_steps": 2,
        "evaluation": {"every": 0, "tasks": 2, "greedy": False},
        "checkpoint__every": 1,
    }


def error(capfd: Capture) -> str:
    """Return the error message, and check that there is no traceback."""
    text = capfd.readouterr().err
    start = text.find("error: ")
    assert start >= 0, text
    assert "Traceback" not in text
    return text[start:]


# Before training: the run directory stays free for the corrected config.

GOOD_LINE = json.dumps({"prompt": "2x3", "answer": "1"})
PLAIN_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def with_file(name: str, text: str | None) -> Callable[[Path, TinyRun], list[str]]:
    """Write or remove a file next to the config."""

    def prepare(folder: Path, finished: TinyRun) -> list[str]:
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_text(text)
        return []

    return prepare


def with_options(*argv: str) -> Callable[[Path, TinyRun], list[str]]:
    return lambda folder, finished: list(argv)


def with_template(folder: Path, finished: TinyRun) -> list[str]:
    with_file("plain.jinja", PLAIN_TEMPLATE)(folder, finished)
    return ["--tokenizer.chat_template", str(folder / "plain.jinja"), "--warm_start.max_steps", "1"]


def with_small_vocabulary(folder: Path, finished: TinyRun) -> list[str]:
    weights = copy_of(finished, folder / "copy").path / "hf"
    described = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**described, "vocab_size": 200}))
    return ["--initialize_from", str(weights)]


def with_unfinished_run(folder: Path, finished: TinyRun) -> list[str]:
    source = copy_of(finished, folder / "copy").path
    (source / "hf" / "config.json").unlink()
    return ["--initialize_from", str(source)]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("prepare", "messages"),
    [
        (with_options("--sede", "1", "--num_step", "2"), ["did you mean 'seed'?", "did you mean 'num_steps'?"]),
        (with_options("--num_steps", "many", "--rollouts.groupsize", "4"), ["num_steps is 'many'", "'group_size'?"]),
        (with_options("--rollouts.max_length", "17"), ["max_length is 17, but the model's context has 16 tokens"]),
        (
            with_options("--rollouts.max_length", "6"),
            ["has 6 tokens, but rollouts.max_length allows 5", "raise rollouts.max_length"],
        ),
        (with_options("--trainer.model_axis_size", "2"), ["cannot be split into trainer.model_axis_size 2"]),
        (with_options("--trainer.require_accelerator", "true"), ["is true, but jax found only a CPU"]),
        (with_file("problems.jsonl", None), ["problems.jsonl"]),
        (with_file("problems.jsonl", f"{GOOD_LINE}\n{{broken\n"), ["problems.jsonl:2: not JSON"]),
        (
            with_file("problems.jsonl", f'{GOOD_LINE}\n{{"prompt": "a", "anwser": "1"}}\n'),
            ["problems.jsonl:2", "no column 'answer'", "anwser"],
        ),
        (with_template, ["has no {% generation %} blocks", "put {% generation %} and {% endgeneration %} around"]),
        (with_small_vocabulary, ["the tokenizer has 264 tokens", "a vocabulary of 200", "tokenizer.path: "]),
        (with_unfinished_run, ["the run in '", "has not finished"]),
    ],
)
def test_a_run_that_cannot_start_names_the_cause_and_leaves_its_directory_free(
    quick: dict[str, Any],
    finished_run: TinyRun,
    new_run: Callable[..., TinyRun],
    capfd: Capture,
    prepare: Callable[[Path, TinyRun], list[str]],
    messages: list[str],
) -> None:
    run = new_run(**quick)
    assert run.train(*prepare(run.config.parent, finished_run)) == 1
    text = error(capfd)
    for message in messages:
        assert message in text
    assert run.steps() == []
    assert not (run.path / "metrics.jsonl").exists()
    if "raise rollouts.max_length" in messages:
        assert run.train("--num_steps", "0") == 0


def test_missing_config_file_is_named_with_nearest_match(finished_run: TinyRun, capfd: Capture) -> None:
    before = contents(finished_run.path)
    assert main(["--config", str(finished_run.config.with_name("tyni.yaml"))]) == 1
    assert "tyni.yaml' does not exist; did you mean 'tiny.yaml'?" in error(capfd)
    assert contents(finished_run.path) == before


# While training: rewards, losses, disks.


@pytest.mark.parametrize(
    ("whim", "message"),
    [
        ("nan", "Rollout train-1-0-0: reward 'correct' is nan; rewards must be finite"),
        ("infinity", "Rollout train-1-0-0: reward 'correct' is -inf; rewards must be finite"),
        (
            "raises for all",
            r"all 16 rollouts failed; the first, train-1-0-0 .*'judge'\): TimeoutError: no verdict on t",
        ),
    ],
)
def test_rewards_that_cannot_be_trained_on_stop_the_run(
    judge: None, quick: dict[str, Any], new_run: Callable[..., TinyRun], capfd: Capture, whim: str, message: str
) -> None:
    run = new_run(**quick)
    run.config.write_text(with_judge(run.config.read_text(), whim))
    assert run.train() == 1
    assert re.search(message, error(capfd))
    assert run.steps() == [0]
    assert [record["step"] for record in run.records()] == [0]


def with_judge(config: str, whim: str) -> str:
    """Write the config with the judge as environment."""
    head, rest = config.split("environment:\n", 1)
    lines = rest.splitlines(keepends=True)
    after = next(index for index, line in enumerate(lines) if not line.startswith(" "))
    return f"{head}environment: {{type: judge, whim: {whim}}}\n{''.join(lines[after:])}"


@pytest.mark.medium
def test_reward_failures_are_recorded_and_the_run_continues(
    judge: None, quick: dict[str, Any], new_run: Callable[..., TinyRun]
) -> None:
    run = new_run(**{**quick, "evaluation": {"every": 1, "tasks": 2, "greedy": False}})
    run.config.write_text(with_judge(run.config.read_text(), "raises for some"))
    assert run.train() == 0
    records = run.records()[1:]
    # Two updates of four tasks use all eight tasks, three of which have no reward.
    assert sum(record["rollouts/failed"] for record in records) == 3 * 4
    stored = read_rollouts(run.path / "rollouts", purposes=["training"])
    written = [rollout for table in stored for rollout in table.to_pylist()]
    failed = [rollout for rollout in written if rollout["status"] == "failed"]
    assert {rollout["task_id"] for rollout in failed} == {"t0", "t1", "t2"}
    assert {rollout["error"].split(" on ")[0] for rollout in failed} == {"TimeoutError: no verdict"}
    assert all(rollout["advantage"] is None and rollout["rewards"] == [] for rollout in failed)
    assert {rollout["not_trained"] for rollout in failed} == {"failed"}
    log = (run.path / "log.txt").read_text()
    assert log.count("rollouts failed and are not trained on, such as ") == 1
    assert "of environment 'judge': TimeoutError: no verdict on t" in log


@pytest.mark.medium
def test_nan_loss_stops_before_the_update(
    quick: dict[str, Any], new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    whole, run = new_run(**quick), new_run(**quick)
    assert whole.train() == 0
    build = BatchBuilder.build

    def poisoned(builder: BatchBuilder, groups: Any, model: Any, step: int, *rest: Any) -> Any:
        batch = build(builder, groups, model, step, *rest)
        if step == 1:
            return batch
        advantages = batch.rollouts.advantages * math.nan
        return batch._replace(rollouts=dataclasses.replace(batch.rollouts, advantages=advantages))

    with monkeypatch.context() as patched:
        patched.setattr(BatchBuilder, "build", poisoned)
        assert run.train() == 1
    text = error(capfd)
    assert "update 2: loss nan" in text
    assert "the weights are unchanged" in text
    assert run.steps() == [0, 1]
    assert [record["step"] for record in run.records()] == [0, 1]
    assert run.train() == 0
    assert outcome(run) == outcome(whole)


@pytest.mark.medium
def test_diverging_weights_stop_the_run(quick: dict[str, Any], new_run: Callable[..., TinyRun], capfd: Capture) -> None:
    run = new_run(**{**quick, "optimizer__learning_rate": 1e30, "checkpoint__every": 0})
    assert run.train() == 1
    assert "log-probability nan; it must be finite and at most 0. Check the weights for NaN" in error(capfd)
    assert run.steps() == [0]


# Odd paths.


@pytest.mark.medium
def test_a_run_with_odd_paths_trains_resumes_and_is_shown(
    quick: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    name = "-x a b'\"$HOME ~*[x]{y}%20%s#?\\\ne\u0301 \U0001f600\u202e<&>;`touch x`$(touch y)!.."
    monkeypatch.chdir(tmp_path)
    folder = Path(name)
    folder.mkdir()
    (folder / name).write_text(CHAT_TEMPLATE)
    run = make_run(folder, **{**quick, "num_steps": 1, "tokenizer": {"chat_template": str(folder / name)}})
    assert run.train() == 0
    assert run.train() == 0
    assert [record["step"] for record in run.records()] == [0, 1]
    assert view.main(["--html", str(folder / "page.html"), "--", str(run.path)]) == 0
    assert evaluate.main(["--run", str(run.path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [line for line in "".join(capfd.readouterr()).splitlines() if "\u202e" in line] == []
