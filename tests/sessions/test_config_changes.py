# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Changes of a run's config; those of complete runs are in `test_changed_run`."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from levanter.optim.config import AdamConfig, CosineLrSchedule, InvLrSchedule, LionConfig

from marin_rl.config.command_line import parse_config
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.sections import EvaluationConfig
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.objectives.kl import LossKlConfig
from marin_rl.runs.run_directory import RunDirectory, create_or_open
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sessions.config_changes import (
    Change,
    changed_values,
    plan_changes,
    read_config_of_step,
    read_history,
    record_changes,
    refuse_moved_runs,
)
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, to_yaml
from tests.training.bare_run import make_config

ADAM = AdamConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0)
CONFIG = make_config(num_steps=20, optimizer=ADAM, evaluation=EvaluationConfig(every=5, samples=4, pass_at=(1, 2)))


def begun(folder: Path, step: int | None = 12, config: AbstractRunConfig = CONFIG) -> RunDirectory:
    """A run with records and perhaps a checkpoint."""
    directory = create_or_open(folder / "a run", to_yaml(config))
    directory.metrics.write_text("")
    if step is not None:
        (directory.checkpoints / f"step-{step:08d}").mkdir()
    return directory


def adam(**changes: Any) -> TrainConfig:
    return dataclasses.replace(CONFIG, optimizer=dataclasses.replace(ADAM, **changes))


def refusal(directory: RunDirectory, config: AbstractRunConfig, *named: str) -> str:
    before = directory.config.read_text()
    with pytest.raises(RunDirectoryError) as caught:
        plan_changes(directory, config, named)
    assert directory.config.read_text() == before
    assert "delete" not in str(caught.value)
    return str(caught.value)


CHANGES: list[tuple[TrainConfig, list[str]]] = [
    (dataclasses.replace(CONFIG, num_steps=40), ["num_steps 20 -> 40"]),
    (dataclasses.replace(CONFIG, num_steps=12), ["num_steps 20 -> 12"]),
    (adam(learning_rate=1e-4), ["optimizer.learning_rate 0.001 -> 0.0001"]),
    (adam(lr_schedule="linear"), ['optimizer.lr_schedule "cosine" -> "linear"']),
    (adam(max_grad_norm=0.5, beta1=0.8), ["optimizer.beta1 0.9 -> 0.8", "optimizer.max_grad_norm 1.0 -> 0.5"]),
    (
        adam(lr_schedule=CosineLrSchedule(exponent=2.0)),
        [
            'optimizer.lr_schedule "cosine" -> not set',
            'optimizer.lr_schedule.type not set -> "cosine"',
            "optimizer.lr_schedule.exponent not set -> 2.0",
        ],
    ),
    (adam(decay=0.5), ["optimizer.decay null -> 0.5"]),
    (adam(weight_decay=0.0), ["optimizer.weight_decay 0.1 -> 0.0"]),
    (adam(cycles=[4, 9]), ["optimizer.cycles null -> [4, 9]"]),
    (adam(weight_decay_modules="a -> 'b'\u2028"), ["optimizer.weight_decay_modules null -> \"a -> 'b'\\u2028\""]),
    (
        dataclasses.replace(CONFIG, evaluation=EvaluationConfig(every=5, tasks=64, samples=8, pass_at=(1, 8))),
        ["evaluation.tasks 512 -> 64", "evaluation.samples 4 -> 8", "evaluation.pass_at [1, 2] -> [1, 8]"],
    ),
]


@pytest.mark.parametrize(("config", "expected"), CHANGES)
def test_named_keys_may_change(tmp_path: Path, config: TrainConfig, expected: list[str]):
    directory = begun(tmp_path)
    keys = [text.split()[0] for text in expected]
    changes = plan_changes(directory, config, keys)
    assert sorted(map(str, changes)) == sorted(expected)
    assert {change.step for change in changes} == {12}
    assert plan_changes(directory, config, ["optimizer", "evaluation", "num_steps"]) == changes


@pytest.mark.parametrize(("config", "expected"), CHANGES)
def test_unnamed_changes_are_refused_with_options_that_are_accepted(
    tmp_path: Path, config: TrainConfig, expected: list[str]
):
    directory = begun(tmp_path)
    message = refusal(directory, config)
    for text in expected:
        assert f"  {text.replace(' ', ': ', 1).replace(' -> ', ' there, ', 1)} now" in message
    file = tmp_path / "new.yaml"
    file.write_text(to_yaml(config))
    back, on = re.findall(r"add (.*?)(?: to the command line|$)", message)
    again = parse_config(TrainConfig, ["--config", str(file), *shlex.split(back)])
    assert again.config == CONFIG
    assert plan_changes(directory, again.config, again.named) == []
    changed = parse_config(TrainConfig, ["--config", str(file), *shlex.split(on)])
    assert changed.config == config
    assert sorted(map(str, plan_changes(directory, changed.config, changed.named))) == sorted(expected)


def test_a_new_type_of_a_schedule_is_named_with_its_keys(tmp_path: Path):
    directory = begun(tmp_path)
    file = tmp_path / "new.yaml"
    file.write_text(to_yaml(CONFIG))
    parsed = parse_config(TrainConfig, ["--config", str(file), "--optimizer.lr_schedule", "{type: cosine}"])
    changes = plan_changes(directory, parsed.config, parsed.named)
    assert len(changes) > 2
    record_changes(directory, changes, to_yaml(parsed.config), 12)
    assert read_config_of_step(directory, 12) == CONFIG
    assert read_config_of_step(directory, 13) == parsed.config


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (dataclasses.replace(CONFIG, seed=1), ["seed"]),
        (
            dataclasses.replace(CONFIG, sampling=SamplingConfig(max_new_tokens=6, temperature=0.5)),
            ["sampling.temperature"],
        ),
        (dataclasses.replace(CONFIG, kl=LossKlConfig(beta=0.1)), ["kl.type", "kl.beta"]),
        (
            dataclasses.replace(CONFIG, rollouts=dataclasses.replace(CONFIG.rollouts, prompts_per_step=8)),
            ["rollouts.prompts_per_step"],
        ),
        (dataclasses.replace(CONFIG, optimizer=LionConfig()), ["optimizer.type"]),
        (adam(max_grad_norm=None), ["optimizer.max_grad_norm"]),
        (adam(skip_bad_steps=True), ["optimizer.skip_bad_steps"]),
    ],
)
@pytest.mark.parametrize("step", [None, 12, 20])
def test_other_keys_are_refused_with_the_way_to_another_run(
    tmp_path: Path, config: TrainConfig, keys: list[str], step: int | None
):
    directory = begun(tmp_path, step)
    if step == 20:
        directory.hf.mkdir()
        (directory.hf / "config.json").write_text("{}")
        (directory.hf / "training_step.json").write_text('{"step": 20}')
    message = refusal(directory, config, *keys)
    for key in keys:
        assert re.search(rf"(?m)^  {key}: .* there, .* now$", message)
        assert re.search(rf"(?m)^.*{key}.* cannot change in a run.*choose another run_dir", message)
    way = f"--run_dir NEW --initialize_from {shlex.quote(str(directory.path))} --warm_start.max_steps 0"
    assert (way in message) == (step == 20)
    assert ("marin_rl.export --run" in message) == (step == 12)


def supervised(folder: Path, command: str) -> Any:
    source, settings = {"sft": ("data", SftConfig), "dpo": ("preferences", DpoConfig)}[command]
    shared = {"run_dir": str(folder), "initialize_from": "weights", "model": {"type": "llama"}, "num_steps": 20}
    return decode(settings, {**shared, source: {"path": "rows.jsonl"}})


@pytest.mark.parametrize(("former", "new"), [("sft", "dpo"), ("dpo", "sft"), ("dpo", "train"), ("train", "sft")])
def test_a_run_of_another_command_is_refused_by_the_names_of_both(tmp_path: Path, former: str, new: str):
    of_former, of_new = (CONFIG if name == "train" else supervised(tmp_path, name) for name in (former, new))
    message = refusal(begun(tmp_path, 12, of_former), of_new)
    assert f"belongs to a run of marin_rl.{former}, but the command is marin_rl.{new}; choose" in message
    assert "there," not in message


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_the_way_to_another_run_has_only_options_of_its_command(tmp_path: Path, command: str):
    config = supervised(tmp_path, command)
    directory = begun(tmp_path, 20, config)
    other = dataclasses.replace(config, batch=dataclasses.replace(config.batch, size=5))
    (options,) = re.findall(r"--run_dir NEW --initialize_from .*", refusal(directory, other, "batch.size"))
    file = tmp_path / "new.yaml"
    file.write_text(to_yaml(other))
    assert parse_config(type(config), ["--config", str(file), *shlex.split(options)]).config.run_dir == "NEW"


def test_a_run_cannot_end_before_its_completed_steps(tmp_path: Path):
    message = refusal(begun(tmp_path), dataclasses.replace(CONFIG, num_steps=11), "num_steps")
    assert "num_steps is 11, but the run has done 12 steps; --num_steps 20 goes on as before" in message
    assert "--num_steps 12 ends the run" in message


def test_the_way_back_from_a_longer_run_restores_all_keys(tmp_path: Path):
    directory = begun(tmp_path)
    short = dataclasses.replace(CONFIG, num_steps=11, optimizer=dataclasses.replace(ADAM, learning_rate=0.5))
    message = refusal(directory, short, "num_steps")
    for end, num_changes in (("goes on as before", 0), ("ends the run", 1)):
        (options,) = re.findall(rf"(--num_steps [^;,]*) {end}", message)
        file = tmp_path / "short.yaml"
        file.write_text(to_yaml(short))
        parsed = parse_config(TrainConfig, ["--config", str(file), *shlex.split(options)])
        assert len(plan_changes(directory, parsed.config, parsed.named)) == num_changes


def test_all_refused_keys_are_reported_together(tmp_path: Path):
    config = dataclasses.replace(CONFIG, num_steps=2, seed=1, optimizer=dataclasses.replace(ADAM, learning_rate=0.5))
    message = refusal(begun(tmp_path), config)
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:4]] == [
        "seed",
        "num_steps",
        "optimizer.learning_rate",
    ]


@pytest.mark.medium
def test_the_history_has_each_change_and_restores_the_config_of_each_step(tmp_path: Path):
    directory, former = begun(tmp_path), CONFIG
    configs = {12: CONFIG}
    for step, (config, _) in zip(range(12, 12 + len(CHANGES)), CHANGES, strict=True):
        changes = plan_changes(
            directory, dataclasses.replace(config, num_steps=99), ["num_steps", "optimizer", "evaluation"]
        )
        history = record_changes(directory, changes, to_yaml(dataclasses.replace(config, num_steps=99)), step)
        assert [(change.key, change.old, change.new) for change in history if change.step == step] == [
            (change.key, change.old, change.new) for change in changes
        ]
        former = dataclasses.replace(config, num_steps=99)
        configs[step + 1] = former
    assert from_yaml(TrainConfig, directory.config.read_text(), "file") == former
    for step, config in configs.items():
        assert read_config_of_step(directory, step) == config


def test_a_run_that_falls_back_moves_its_later_changes_to_that_step(tmp_path: Path):
    directory = begun(tmp_path)
    config = dataclasses.replace(CONFIG, num_steps=40)
    record_changes(directory, plan_changes(directory, config, ["num_steps"]), to_yaml(config), 12)
    before = directory.config.read_bytes()
    assert record_changes(directory, [], to_yaml(config), 12) == [Change(12, "num_steps", "20", "40")]
    assert directory.config.read_bytes() == before
    # The checkpoint of step 12 is damaged.
    assert record_changes(directory, [], to_yaml(config), 10) == [Change(10, "num_steps", "20", "40")]
    assert changed_values(read_history(directory.config.read_text()), 10) == {"config/num_steps": 40.0}


def test_a_type_that_is_changed_and_changed_back_before_a_step_leaves_no_keys(tmp_path: Path):
    cosine, inverse = CosineLrSchedule(exponent=0.5), InvLrSchedule()
    first = adam(lr_schedule=cosine)
    directory = begun(tmp_path, 12, first)
    for step, schedule in ((12, inverse), (12, cosine), (14, inverse), (14, "linear")):
        config = adam(lr_schedule=schedule)
        changes = plan_changes(directory, config, ["optimizer.lr_schedule", "optimizer.lr_schedule.type"])
        assert changes
        record_changes(directory, changes, to_yaml(config), step)
    assert read_config_of_step(directory, 12) == first
    assert read_config_of_step(directory, 14) == first
    assert read_config_of_step(directory, 15) == adam(lr_schedule="linear")


@pytest.mark.parametrize("comment", ["\n", "# mine\n\n", "   \n#\n"])
def test_comments_and_empty_lines_of_a_user_keep_the_history(tmp_path: Path, comment: str):
    directory = begun(tmp_path)
    longer = dataclasses.replace(CONFIG, num_steps=30)
    record_changes(directory, plan_changes(directory, longer, ["num_steps"]), to_yaml(longer), 12)
    directory.config.write_text(comment + directory.config.read_text(), encoding="utf-8")
    create_or_open(directory.path, to_yaml(longer))
    assert record_changes(directory, [], to_yaml(longer), 12) == [Change(12, "num_steps", "20", "30")]
    assert record_changes(directory, [], to_yaml(longer), 10) == [Change(10, "num_steps", "20", "30")]
    assert read_config_of_step(directory, 10) == CONFIG
    assert read_config_of_step(directory, 11) == longer


def test_numbers_that_changed_are_metrics():
    new = {"a": "3", "b": "0.5", "c": "true", "d": '"text"', "e": "null", "f": "[1]", "g": "not set"}
    history = [
        Change(2, "a", "1", "2"),
        *(Change(2, key, "1", value) for key, value in new.items()),
        Change(3, "h", "1", "2"),
    ]
    assert changed_values(history, 2) == {"config/a": 3.0, "config/b": 0.5}


@pytest.mark.parametrize(
    "line",
    [
        "# a comment",
        "# after step x: a 1 -> 2",
        "# after step 1: a {1 -> 2",
        "# after step 1: a 1 -> {",
        "# after step 1: a",
    ],
)
def test_other_comments_are_no_history(line: str):
    assert read_history(f"{line}\n# after step 1: a 1 -> 2\nb: 1\n# after step 2: a 2 -> 3\n") == [
        Change(1, "a", "1", "2")
    ]


def test_the_config_of_a_moved_run_names_its_folder(tmp_path: Path):
    directory = begun(tmp_path)
    config = dataclasses.replace(CONFIG, run_dir=str(directory.path))
    directory.config.write_text(to_yaml(config))
    refuse_moved_runs([directory.config], config.run_dir)
    moved = RunDirectory(directory.path.rename(tmp_path / "moved"))
    with pytest.raises(
        RunDirectoryError, match=f"its run_dir is .*give --run_dir {moved.path} to resume the run there"
    ):
        refuse_moved_runs([moved.config], config.run_dir)
    refuse_moved_runs([moved.config], "new")


def test_the_config_of_another_version_is_refused_with_a_remedy(tmp_path: Path):
    directory = begun(tmp_path)
    directory.config.write_text(directory.config.read_text() + "old_key: 1\n")
    for read in (lambda: read_config_of_step(directory, 1), lambda: plan_changes(directory, CONFIG)):
        with pytest.raises(ConfigError, match=r"unknown key old_key(.|\n)*use the version that wrote the run"):
            read()


def test_keys_that_a_former_version_did_not_have_count_with_their_defaults(tmp_path: Path):
    directory = begun(tmp_path)
    text = directory.config.read_text()
    directory.config.write_text(text.replace("logprob_block_size: null\n", ""))
    assert directory.config.read_text() != text
    assert plan_changes(directory, CONFIG) == []
    assert "logprob_block_size: null there, 64 now" in refusal(
        directory, dataclasses.replace(CONFIG, logprob_block_size=64)
    )
