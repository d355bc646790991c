# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from levanter.models.lm_model import LmConfig
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.tracker import TrackerConfig

from marin_rl.config import levanter_description
from marin_rl.config.command_line import check_command_line, parse_arguments, parse_config
from marin_rl.config.draft_config import draft_class
from marin_rl.config.levanter_description import describe_installed, description_file
from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.levanter_line import OTHER, is_key_of_other_line
from marin_rl.utils.settings.decode import decode, encode
from marin_rl.utils.settings.section_types import ConfigError, field_types
from marin_rl.utils.settings.yaml_text import load_yaml
from tests.config.mistakes import BASE, MISTAKES, Mistake, write_files

EXPERIMENTS = sorted(Path("experiments").glob("*.yaml"))


def problems_of(check, *arguments) -> set[str]:
    with pytest.raises(ConfigError) as raised:
        check(*arguments)
    return set(raised.value.problems)


def without_order(described: Any) -> Any:
    """A part of a description with sorted unions: equal unions are one object, whose order is that of the first."""
    match described:
        case dict():
            return {key: without_order(item) for key, item in described.items()}
        case ["union", *kinds]:
            return ["union", *sorted(map(without_order, kinds), key=json.dumps)]
        case list():
            return [without_order(item) for item in described]
    return described


def test_description_is_that_of_the_installed_levanter():
    recorded, installed = json.loads(description_file().read_text()), json.loads(describe_installed())
    assert without_order(recorded) == without_order(installed), (
        "levanter or a model of this project was changed: run `python -m marin_rl.config.levanter_description`"
    )


def test_draft_has_the_settings_of_the_config():
    draft, complete = dataclasses.fields(draft_class()), dataclasses.fields(TrainConfig)
    assert [(field.name, field.metadata) for field in draft] == [(field.name, field.metadata) for field in complete]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_draft_decodes_configs_as_the_complete_class_does(file: Path):
    if "run_dir" not in (raw := load_yaml(file)):
        pytest.skip("part of a config")
    draft = draft_class(reads_files=False)
    kinds = field_types(TrainConfig)
    decoded, complete = decode(draft, raw), decode(TrainConfig, raw)
    for field in dataclasses.fields(draft):
        expected = encode(getattr(complete, field.name), kinds[field.name])
        assert encode(getattr(decoded, field.name), field_types(draft)[field.name]) == expected


SAME = {case: mistake for case, mistake in MISTAKES.items() if not mistake.only_early}


@pytest.mark.parametrize("mistake", SAME.values(), ids=SAME)
def test_complete_check_reports_the_same_mistakes(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("marin_rl.config.draft_config.left_to_levanter", lambda problem, is_imported: False)
    flags = {"dry_run": ""}
    assert problems_of(check_command_line, mistake.argv, flags) == problems_of(
        parse_config, TrainConfig, mistake.argv, flags
    )


def test_sections_of_an_undescribed_levanter_are_left_to_the_complete_check(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(levanter_description, "description_file", lambda: tmp_path / "levanter-0.json")
    draft_class.cache_clear()
    levanter_description.described_sections.cache_clear()
    try:
        arguments = ["--config", "base.yaml", "--model.hiden_dim", "1", "--optimizer.lr", "1"]
        check_command_line(arguments, {})
        assert problems_of(check_command_line, [*arguments, "--sede", "1", "--rollouts.group_size", "1"], {}) == {
            "unknown key sede; did you mean 'seed'?",
            "rollouts.group_size is 1, but advantage 'rloo' compares the rollouts of a prompt and needs at least 2; "
            "raise it, or use advantage: {type: reinforce}",
        }
    finally:
        draft_class.cache_clear()
        levanter_description.described_sections.cache_clear()


@dataclasses.dataclass(frozen=True)
class OwnAdamConfig(AdamConfig):
    own: float = 1.0


def test_types_that_user_code_registers_are_left_to_the_complete_check(tmp_path, monkeypatch):
    monkeypatch.setitem(OptimizerConfig.get_known_choices(), "own_adam", OwnAdamConfig)
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    own = ["--config", "base.yaml", "--optimizer.type", "own_adam", "--optimizer.own", "2"]
    check_command_line(own, {})
    assert parse_config(TrainConfig, own).config.optimizer == OwnAdamConfig(own=2.0)
    problems = problems_of(check_command_line, [*own, "--sede", "1"], {})
    assert problems == {"unknown key sede; did you mean 'seed'?"}


def of_other_line() -> dict[tuple[Any, str], dict[str, Any]]:
    """The default values of a section as a run of the other line records them, by registry and type."""
    (file,) = description_file().parent.glob(f"{OTHER}-*.json")
    description = json.loads(file.read_text())
    return {
        (registry, choice): {key: entry[1] for key, entry in description[name]["fields"].items() if len(entry) > 1}
        for registry in (LmConfig, OptimizerConfig, TrackerConfig)
        for choice, name in description[registry.__name__]["choices"].items()
        if choice in registry.get_known_choices()
    }


RECORDED = of_other_line()


@pytest.mark.parametrize(("section", "recorded"), RECORDED.items(), ids=[choice for _, choice in RECORDED])
def test_sections_recorded_by_the_other_line_are_read(section: tuple[Any, str], recorded: dict[str, Any]):
    registry, choice = section
    defaults = encode(decode(registry, {"type": choice}), registry)
    read = encode(decode(registry, {"type": choice, **recorded}), registry)
    assert read == {**defaults, **{key: value for key, value in recorded.items() if key in defaults}}


def test_a_setting_of_the_other_line_is_refused_by_name():
    of_one_line = [
        (registry, choice, key)
        for (registry, choice), recorded in RECORDED.items()
        for key in recorded.keys() - field_types(registry.get_choice_class(choice)).keys()
    ]
    assert of_one_line
    for registry, choice, key in of_one_line:
        assert is_key_of_other_line(registry.get_choice_class(choice), key)
        with pytest.raises(ConfigError) as raised:
            decode(registry, {"type": choice, key: "another value"})
        assert raised.value.problems == (
            f"unknown key {key}; it exists only with {OTHER} in place of the installed line of levanter",
        )


def test_a_config_from_a_pipe_is_read_once():
    reading, writing = os.pipe()
    os.write(writing, BASE.encode())
    os.close(writing)
    try:
        checked = check_command_line(["--config", f"/dev/fd/{reading}", "--seed", "3"], {})
        config = parse_arguments(TrainConfig, checked).config
    finally:
        os.close(reading)
    assert (config.run_dir, config.seed) == ("runs/test", 3)
