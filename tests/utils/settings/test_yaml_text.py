# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path

import pytest
import yaml
from levanter.models.lm_model import LmConfig
from levanter.models.qwen import Qwen3Config
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.tracker.json_logger import JsonLoggerConfig
from levanter.tracker.tracker import NoopConfig

from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.settings import yaml_text
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, load_yaml, parse_value, parse_yaml, to_yaml


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str
    model: LmConfig | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)


def test_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "run.yaml").write_text("name: a")
    with pytest.raises(ConfigError, match=r"rnu\.yaml' does not exist; did you mean 'run\.yaml'"):
        load_yaml(tmp_path / "rnu.yaml")
    with pytest.raises(ConfigError, match=r"does not exist; neither does its folder '.*nowhere'"):
        load_yaml(tmp_path / "nowhere" / "run.yaml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"does not exist; there is no YAML file in"):
        load_yaml(tmp_path / "empty" / "run.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nsteps: 1\nname: b\n", r"run\.yaml:3:1: .*key 'name' is given twice, first in line 1"),
        ("trainer:\n  seed: 1\n  seed: 2\n", r"run\.yaml:3:3: .*key 'seed' is given twice, first in line 2"),
        ("- a\n", r"run\.yaml contains a list; a config must be a mapping"),
        ("name: !!python/object:os.system {}\n", r"run\.yaml:1:7: not valid YAML"),
        ("name: !!timestamp a\n", r"run\.yaml:1:7: not valid YAML"),
        # PyYAML raises errors of other types for these.
        ("name: !!float a\n", r"run\.yaml: not valid YAML: ValueError: could not convert .* 'a'"),
        ("name: !!bool maybe\n", r"run\.yaml: not valid YAML: KeyError: 'maybe'"),
        ("steps: " + "9" * 5000, r"run\.yaml: not valid YAML: ValueError"),
        ("steps: " + "[" * 5000 + "]" * 5000, r"run\.yaml: not valid YAML: RecursionError"),
        ("name: !!map [a]\n", r"run\.yaml:1:7: not valid YAML: the tag !!map needs keys and values"),
    ],
)
def test_broken_yaml_names_file_and_line(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "run.yaml")


def test_numbers_dates_and_anchors():
    text = "a: 1e-4\nb: 3E5\nc: 1.5e+3\nd: 2024-01-01\ne: &e {x: 1}\nf: {<<: *e, y: 2}\ng: 1_000\n"
    assert parse_yaml(text, "x") == {
        "a": 1e-4,
        "b": 3e5,
        "c": 1500.0,
        "d": "2024-01-01",
        "e": {"x": 1},
        "f": {"x": 1, "y": 2},
        "g": 1000,
    }
    assert parse_yaml("", "x") == {}


@pytest.mark.parametrize("text", ["0012", "2026_01_07", "1:30", "1_00", "0b11", "+", "08", "0x", "_1", "1__000"])
def test_forms_that_yaml_dropped_are_no_integers(text):
    assert parse_value(text) == text


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("-12", -12), ("+7", 7), ("1_234_567", 1234567), ("0x1F", 31)])
def test_integers(text, number):
    assert parse_value(text) == number


@pytest.mark.parametrize("name", ["1e-4", "no", "2024-01-01", "null", "12", "0012", "1_0", "a: b", "ä\n b", ""])
def test_text_remains_text_in_the_resolved_config(name):
    text = to_yaml(RunConfig(name))
    assert from_yaml(RunConfig, text, "x").name == name
    assert yaml.safe_load(text)["name"] == name


def test_resolved_config_round_trips_with_levanters_sections():
    config = RunConfig(
        "a",
        model=Qwen3Config(hidden_dim=64, num_layers=2, num_heads=4, num_kv_heads=2),
        optimizer=AdamConfig(learning_rate=1e-8, lr_schedule="constant"),
        trainer=TrainerConfig(tracker=(NoopConfig(), JsonLoggerConfig()), model_axis_size=8),
    )
    text = to_yaml(config)
    assert from_yaml(RunConfig, text, "x") == config
    assert to_yaml(from_yaml(RunConfig, text, "x")) == text


def test_invalid_resolved_config_names_its_file():
    with pytest.raises(ConfigError, match=r"runs/a/config\.yaml: unknown key nmae"):
        from_yaml(RunConfig, "name: a\nnmae: b\n", "runs/a/config.yaml")


DOUBLED = {
    "list": "[*l{0}, *l{0}]",
    "mapping": "{{a: *l{0}, b: *l{0}}}",
    "merge": "{{<<: [*l{0}, *l{0}]}}",
    "merge and key": "{{<<: *l{0}, x{0}: *l{0}}}",
    "list in a mapping": "{{a: [*l{0}], b: [*l{0}]}}",
}


@pytest.mark.parametrize("kind", DOUBLED)
def test_aliases_that_stand_for_too_many_values_are_refused(kind: str):
    def text(lines: int) -> str:
        first = "l0: &l0 [1]\n" if kind == "list" else "l0: &l0 {a: 1}\n"
        return first + "".join(f"l{i}: &l{i} {DOUBLED[kind].format(i - 1)}\n" for i in range(1, lines))

    assert len(parse_yaml(text(8), "a.yaml")) == 8
    with pytest.raises(
        ConfigError, match=r"a\.yaml:1:1: .*more than 100,000 values, with those that aliases stand for"
    ):
        parse_yaml(text(60), "a.yaml")


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a {b: *a}", "a: &a {<<: *a, b: 1}"])
def test_an_alias_of_itself_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"a\.yaml:1:"):
        parse_yaml(text, "a.yaml")


def test_a_device_without_an_end_is_no_config(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(yaml_text, "MAX_YAML_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"'/dev/zero' has more than"):
        load_yaml(Path("/dev/zero"))
