# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trainers of scripts and notebooks, compared with the commands."""

import dataclasses
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import yaml
from levanter.optim.config import AdamConfig

from marin_rl import DPOTrainer, RLTrainer, SFTTrainer
from marin_rl.config.command_line import decode_layers
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import ArithmeticConfig
from marin_rl.rewards.component import FunctionRewardConfig, RewardConfigError
from marin_rl.rewards.grading import ExactConfig
from marin_rl.runs.run_directory import OutputExistsError
from marin_rl.utils.errors import RunDirectoryError, UserError
from tests.tiny_run import PROBLEMS, TINY, TinyRun, in_this_process, make_run, outcome

ROOT = Path(__file__).parent.parent
SETTINGS: dict[str, Any] = {
    **{name: TINY[name] for name in ("seed", "rollouts", "sampling", "optimizer", "trainer", "warm_start")},
    "environment": {"held_out": 0.3, "validation": 0.2, "name": "ones"},
    "evaluation": {"every": 2, "tasks": 8},
    "checkpoint": {"every": 1},
    "num_steps": 4,
}
MODEL = {**TINY["model"], "seq_len": 2048}
"""A model for settings that are only checked."""
REWARDS = """
from marin_rl.rewards import reward_function

@reward_function(stateless=True)
def ones(messages, ground_truth, **kwargs):
    return float(ground_truth in messages[-1]["content"])
"""


def ones(task: Any, reply: str) -> float:
    return float(task.answer in reply)


def threads() -> set[str]:
    """Names of the threads of this process; those of a pool, which may get a further one, are equal."""
    return {re.sub(r"_\d+$", "", thread.name) for thread in threading.enumerate()}


def trainer_of(folder: Path, reward: Any = ones, **changes: Any) -> RLTrainer:
    return RLTrainer(TINY["model"], PROBLEMS, reward, run_dir=folder, **{**SETTINGS, **changes})


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    with in_this_process():
        yield


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of the command with the same function in a file."""
    folder = tmp_path_factory.mktemp("command")
    run, rewards = make_run(folder), folder / "rewards.py"
    rewards.write_text(REWARDS)
    environment = {"type": "jsonl", "path": str(folder / "problems.jsonl"), "grader": {"type": "none"}}
    environment |= {"rewards": [{"type": "function", "path": str(rewards), "function": "ones"}]}
    environment |= SETTINGS["environment"]
    config = {**SETTINGS, "model": TINY["model"], "environment": environment, "run_dir": str(run.path)}
    run.config.write_text(yaml.safe_dump(config))
    assert run.train() == 0
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RLTrainer:
    """A trainer whose run was interrupted during its second step, and resumed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    calls = 0

    def interrupting(task: Any, reply: str) -> float:
        nonlocal calls
        calls += 1
        # Those of the warm start and its evaluations come before.
        if trainer.metrics and trainer.metrics[-1]["step"] == 1 and calls > 0:
            calls = -(10**9)
            os.kill(os.getpid(), signal.SIGINT)
        return ones(task, reply)

    trainer = trainer_of(folder, {"function": interrupting, "name": "ones"})
    with pytest.raises(KeyboardInterrupt, match="is saved"):
        trainer.train()
    assert len(trainer.metrics) < 5
    again = trainer_of(folder)
    again.train()
    return again


def results(folder: Path) -> dict[str, Any]:
    """The outcome of a run without the times of its rewards, and without the paths of its files."""
    return outcome(TinyRun(folder, folder / "config.yaml"))


@pytest.mark.medium
def test_an_interrupted_trainer_ends_as_the_command(trained: RLTrainer, command: TinyRun) -> None:
    assert results(Path(trained.config.run_dir)) == results(command.path)
    assert [record["step"] for record in trained.metrics] == [0, 1, 2, 3, 4]


@pytest.mark.medium
def test_a_trained_policy_is_evaluated_sampled_saved_and_plotted(trained: RLTrainer, tmp_path: Path) -> None:
    last = trained.metrics[-1]
    found = trained.evaluate(tasks=8)
    assert {name: found[name] for name in last if name.startswith("eval/")} == {
        name: value for name, value in last.items() if name.startswith("eval/")
    }
    assert trained.evaluate(tasks=4, split="train", greedy=False)["eval/ones/tasks"] == 4
    reply = trained.sample("3x3", seed=1)
    assert reply == trained.sample([{"role": "user", "content": "3x3"}], seed=1)
    assert len({trained.sample("3x3", seed=seed, temperature=0.0) for seed in range(3)}) == 1
    trained.save(tmp_path / "saved")
    weights = tmp_path / "saved" / "model.safetensors"
    assert weights.read_bytes() == (Path(trained.config.run_dir) / "hf" / "model.safetensors").read_bytes()
    with pytest.raises(OutputExistsError):
        trained.save(tmp_path / "saved")
    assert len(trained.plot().axes) >= 2


@pytest.mark.medium
def test_a_run_is_loaded_with_its_function(trained: RLTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained.config.run_dir
    loaded = RLTrainer.load(folder, ones=ones)
    assert loaded.config == trained.config
    loaded.train()
    assert "not compared with the earlier start, because they are of this program: ones" in capsys.readouterr().out
    assert loaded.evaluate(tasks=8) == trained.evaluate(tasks=8)
    with pytest.raises(RewardConfigError, match="'ones'"):
        RLTrainer.load(folder).evaluate()
    with pytest.raises(UserError, match=r"run of marin_rl\.train"):
        SFTTrainer.load(folder)
    with pytest.raises(RunDirectoryError):
        RLTrainer.load(f"{folder}-absent")


@pytest.mark.medium
def test_other_rows_are_not_trained_on_unless_they_are_accepted(tmp_path: Path) -> None:
    small = {"warm_start": {}, "evaluation": {"tasks": 0}, "num_steps": 1}
    trainer_of(tmp_path / "run", **small).train()
    rows, before = tmp_path / "run" / "rows.jsonl", threads()
    other = RLTrainer(TINY["model"], PROBLEMS[1:], ones, run_dir=tmp_path / "run", **{**SETTINGS, **small})
    text = rows.read_bytes()
    with pytest.raises(RunDirectoryError, match="other rows"):
        other.train()
    assert rows.read_bytes() == text
    for steps in range(2, 5):
        again = dataclasses.replace(other.config, num_steps=steps)
        other.config, other._named = again, frozenset({"num_steps"})
        other.train(accept_changes=True)
    assert [record["step"] for record in other.metrics] == [0, 1, 2, 3, 4]
    # Those of tests before this one may end meanwhile.
    assert threads() <= before


@pytest.mark.medium
def test_a_moved_run_has_its_rows(trained: RLTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(trained.config.run_dir, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    moved = RLTrainer.load("moved", ones=ones)
    assert moved.evaluate(tasks=8) == trained.evaluate(tasks=8)
    for folder in (tmp_path / "moved", "./moved/"):
        longer = trainer_of(folder, num_steps=5)  # type: ignore[arg-type]
        longer.train()
        assert longer.metrics[-1]["step"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": datasets.DatasetDict({"train": datasets.Dataset.from_list(PROBLEMS)})}, "is a DatasetDict"),
        ({"tasks": (problem for problem in PROBLEMS)}, "is a generator"),
        ({"tasks": [{"prompt": "\ud800"}]}, r"tasks\[0\]"),
        ({"environment": {"rewards": []}}, "both given"),
    ],
)
def test_ambiguous_and_unreadable_tasks_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"model": MODEL, "tasks": PROBLEMS, "reward": ones, **arguments}
    with pytest.raises(ValueError, match=message):
        RLTrainer(**given, run_dir=tmp_path)


def test_given_graders_stay_and_configs_of_rewards_are_taken(tmp_path: Path) -> None:
    tasks = {"type": "jsonl", "path": "own.jsonl", "grader": {"type": "exact"}}
    for reward in (ones, FunctionRewardConfig(path="r.py", function="f")):
        config: Any = RLTrainer(MODEL, tasks, reward, run_dir=tmp_path).config
        assert isinstance(config.environment.grader, ExactConfig)
        assert len(config.environment.rewards) == 1
    frame = pandas.DataFrame(PROBLEMS)
    assert RLTrainer(MODEL, frame, ones, run_dir=tmp_path)._rows == PROBLEMS


def test_few_tasks_are_all_trained_on(tmp_path: Path) -> None:
    few = RLTrainer(MODEL, PROBLEMS[:1], ones, run_dir=tmp_path, num_steps=1)
    assert isinstance(few.config, TrainConfig)
    assert few.config.evaluation.tasks == 0
    assert (few.config.environment.held_out, few.config.environment.validation) == (0.0, 0.0)
    many = RLTrainer(MODEL, PROBLEMS, ones, run_dir=tmp_path, num_steps=1)
    assert isinstance(many.config, TrainConfig)
    assert many.config.evaluation.tasks > 0


def raw(kind: type, **values: Any) -> Any:
    return decode_layers(kind, [{"model": MODEL, "run_dir": "runs/x", **values}])


def test_settings_are_those_of_the_command() -> None:
    expected = raw(
        TrainConfig,
        environment={"type": "arithmetic"},
        rollouts={"prompts_per_step": 3, "group_size": 5},
        optimizer={"type": "adam", "learning_rate": 0.5},
    )
    for model in (MODEL, expected.model):
        for environment in ({"type": "arithmetic"}, ArithmeticConfig()):
            for rollouts in ({"prompts_per_step": 3, "group_size": 5}, RolloutConfig(prompts_per_step=3, group_size=5)):
                for optimizer in ({"type": "adam", "learning_rate": 0.5}, AdamConfig(learning_rate=0.5)):
                    trainer = RLTrainer(model, environment, run_dir="runs/x", rollouts=rollouts, optimizer=optimizer)
                    assert trainer.config == expected


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ("data/own.jsonl", {"type": "jsonl", "path": "data/own.jsonl"}),
        (Path("own.jsonl.gz"), {"type": "jsonl", "path": "own.jsonl.gz"}),
        ("openai/gsm8k", {"type": "hf", "path": "openai/gsm8k"}),
    ],
)
def test_a_name_of_data_is_an_environment(tasks: Any, expected: dict[str, Any]) -> None:
    assert RLTrainer(MODEL, tasks, run_dir="runs/x").config == raw(TrainConfig, environment=expected)
    scored = RLTrainer(MODEL, tasks, {"type": "function", "path": "r.py", "function": "f"}, run_dir="runs/x")
    rewards = [{"type": "function", "path": "r.py", "function": "f"}]
    environment = {**expected, "grader": {"type": "none"}, "rewards": rewards}
    assert scored.config == raw(TrainConfig, environment=environment)


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize(("kind", "trainer"), [(SftConfig, SFTTrainer), (DpoConfig, DPOTrainer)])
def test_supervised_settings_are_those_of_the_command(kind: Any, trainer: Callable[..., Any], as_dataset: bool) -> None:
    rows = [{"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}]
    data = datasets.Dataset.from_list(rows) if as_dataset else rows
    expected = {kind.source_key: {"path": "runs/x/rows.jsonl"}, "batch": {"size": 2}}
    assert trainer(MODEL, data, run_dir="runs/x", batch={"size": 2}).config == raw(kind, **expected)
    expected = {kind.source_key: {"path": "own.jsonl", "held_out": 0.5}}
    given = trainer(MODEL, "own.jsonl", run_dir="runs/x", **{kind.source_key: {"held_out": 0.5}})
    assert given.config == raw(kind, **expected)


@pytest.mark.medium
def test_supervised_trainers_train(tmp_path: Path) -> None:
    settings = {name: SETTINGS[name] for name in ("seed", "optimizer", "trainer")} | {
        "batch": {"size": 8, "max_length": 16}
    }
    rows = [{"prompt": row["prompt"], "completion": row["worked_answer"]} for row in PROBLEMS]
    first = SFTTrainer(TINY["model"], rows, run_dir=tmp_path / "sft", num_steps=2, **settings)
    first.train()
    assert first.sample("3x3", max_new_tokens=2)
    pairs = [{"prompt": row["prompt"], "chosen": row["worked_answer"], "rejected": "0"} for row in PROBLEMS]
    second = DPOTrainer(tmp_path / "sft", pairs, run_dir=tmp_path / "dpo", num_steps=2, **settings)
    second.train()
    assert [record["step"] for record in second.metrics][-1] == 2
    assert json.loads((tmp_path / "dpo" / "rows.jsonl").read_text().splitlines()[0]) == pairs[0]


@pytest.mark.slow
def test_the_lines_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RLTrainer(
        MODEL, PROBLEMS, ones, run_dir="models/smollm2-135m-instruct", num_steps=0, evaluation={"tasks": 0}
    ).train()
    [lines] = re.findall(
        r"```python title=\"first.py\"\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    lines = lines.replace("num_steps=50", "num_steps=1")
    capsys.readouterr()
    exec(compile(lines, "README.md", "exec"), {"__name__": "readme"})
    assert "{'eval/tasks/tasks': 1.0" in capsys.readouterr().out
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "mine" / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 8}, r"unknown key group_size; did you mean rollouts\.group_size\?"),
        ({"rollouts": {"groupsize": 8}}, r"unknown key rollouts\.groupsize; did you mean 'group_size'\?"),
        ({"num_steps": "3"}, r"num_steps"),
        ({"num_steps": -1}, r"num_steps"),
        ({"tasks": "own.jsonl", "mode": "async"}, r"rewards\.0 is an object of this Python program"),
        ({"tasks": [3]}, r"tasks\[0\] is 3"),
        ({"tasks": [{"prompt": object()}]}, r"tasks\[0\]"),
        ({"tasks": [{"question": "a"}]}, r"tasks\[0\]: there is no column 'prompt'"),
        ({"tasks": {"type": "jsonl"}}, r"environment\.path is missing"),
        ({"tasks": None}, r"environment needs a type"),
        ({"model": None}, r"neither model nor initialize_from is set"),
        ({"model": {"type": "lama"}}, r"model\.type"),
        ({"reward": [ones, ones]}, r"two functions are called 'ones'"),
        ({"reward": {"function": ones, "wait": 1}}, r"unknown key environment\.rewards\.0\.wait"),
        ({"algorithm": "grp"}, r"algorithm"),
        ({"sandbox": 3}, r"sandbox"),
    ],
)
def test_mistakes_have_the_sentences_of_the_command(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"model": MODEL, "tasks": PROBLEMS, "reward": ones, "run_dir": tmp_path / "run", **settings}
    with pytest.raises(ValueError, match=message):
        RLTrainer(**given)
    assert not (tmp_path / "run").exists()
