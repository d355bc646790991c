# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import itertools
import string
import subprocess
import sys
from pathlib import Path

import draccus
import pytest
import yaml
from levanter.models.lm_model import LmConfig
from levanter.models.qwen import Qwen3Config
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.tracker.json_logger import JsonLoggerConfig
from levanter.tracker.tracker import NoopConfig
from levanter.trainer import TrainerConfig

from marin_rl.config.command_line import ConfigError, from_yaml, merge, parse_config, parse_yaml, to_yaml


@dataclasses.dataclass(frozen=True)
class Advantage(draccus.ChoiceRegistry):
    """Advantage estimator."""


@Advantage.register_subclass("rloo")
@dataclasses.dataclass(frozen=True)
class Rloo(Advantage):
    normalize: str = "none"


@Advantage.register_subclass("grpo")
@dataclasses.dataclass(frozen=True)
class Grpo(Advantage):
    epsilon: float = 1e-6


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str
    model: LmConfig | None = None
    steps: int = 10
    verbose: bool = False
    lengths: tuple[int, ...] = ()
    advantage: Advantage = Rloo()
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)


DEFAULTS = {"trainer": {"tracker": [], "require_accelerator": False}}


def parse(*argv, defaults=DEFAULTS):
    return parse_config(RunConfig, argv, defaults, {"dry_run": "Only check."})


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_precedence_of_defaults_file_and_overrides(tmp_path):
    path = write(tmp_path, "name: file\nsteps: 20\ntrainer: {seed: 3, num_train_steps: 7}\n")
    parsed = parse("--config", path, "--steps", "30", "--trainer.seed=4")
    assert (parsed.config.name, parsed.config.steps) == ("file", 30)
    assert (parsed.config.trainer.seed, parsed.config.trainer.num_train_steps) == (4, 7)
    assert parsed.config.trainer.require_accelerator is False
    assert parsed.config.trainer.tracker == ()
    assert parsed.raw == {
        "name": "file",
        "steps": 30,
        "trainer": {"tracker": [], "require_accelerator": False, "seed": 4, "num_train_steps": 7},
    }
    assert parsed.config_path == Path(path)


def test_defaults_of_the_caller_are_not_modified(tmp_path):
    parse("--name", "a", "--trainer.require_accelerator", "true")
    assert DEFAULTS == {"trainer": {"tracker": [], "require_accelerator": False}}


@pytest.mark.parametrize("option", ["--config", "--config_path", "--config="])
def test_both_names_of_the_file_option(tmp_path, option):
    path = write(tmp_path, "name: a")
    arguments = [option + path] if option.endswith("=") else [option, path]
    assert parse(*arguments).config.name == "a"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--steps", "-1"], "steps", -1),
        (["--verbose", "true"], "verbose", True),
        (["--verbose=false"], "verbose", False),
        (["--lengths", "[1, 2]"], "lengths", (1, 2)),
        (["--name", "null-ish: no"], "name", None),
        (["--name="], "name", ""),
        (["--name", "a=b"], "name", "a=b"),
        (["--name=--x"], "name", "--x"),
        (["--steps", "1", "--steps", "2"], "steps", 2),
        (["--advantage", "{type: grpo}"], "advantage", Grpo()),
        (["--advantage.type", "grpo", "--advantage.epsilon", "1e-3"], "advantage", Grpo(1e-3)),
        (["--advantage.epsilon", "1e-3", "--advantage.type", "grpo"], "advantage", Grpo(1e-3)),
        (["--advantage", "{type: grpo}", "--advantage.epsilon", "2"], "advantage", Grpo(2.0)),
        (["--advantage.normalize", "group"], "advantage", Rloo("group")),
    ],
)
def test_overrides(arguments, key, value):
    if value is None:
        with pytest.raises(ConfigError, match=r"name is \{'null-ish': False\} \(dict\), but it takes text"):
            parse("--name", "x", *arguments)
        return
    assert getattr(parse("--name", "x", *arguments).config, key) == value


def test_flags_and_keys_are_distinguished():
    assert parse("--dry_run", "--name", "x").flags == {"dry_run"}
    assert parse("--name", "x", "--dry-run").flags == {"dry_run"}
    assert parse("--name", "x").flags == frozenset()


def test_another_type_drops_the_keys_of_the_old_one(tmp_path):
    path = write(tmp_path, "name: a\nadvantage: {type: rloo, normalize: batch}\n")
    assert parse("--config", path, "--advantage.type", "grpo").config.advantage == Grpo()
    assert parse("--config", path, "--advantage.type", "rloo").config.advantage == Rloo("batch")


def test_keys_given_without_a_type_are_not_dropped(tmp_path):
    path = write(tmp_path, "name: a\nadvantage: {normalize: batch}\n")
    assert parse("--config", path, "--advantage.type", "rloo").config.advantage == Rloo("batch")
    with pytest.raises(ConfigError, match=r"unknown key advantage\.normalize"):
        parse("--config", path, "--advantage.type", "grpo")


def test_type_is_an_ordinary_key_outside_of_choices():
    assert merge(dict[str, int], {"type": 1, "a": 2}, {"type": 3}) == {"type": 3, "a": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nmae", "x"], r"unknown key nmae; did you mean 'name'\?"),
        (["--name", "x", "--trainer.sede", "1"], r"unknown key trainer\.sede; did you mean 'seed'\?"),
        (
            ["--name", "x", "--num_train_steps", "1"],
            r"unknown key num_train_steps; did you mean trainer\.num_train_steps",
        ),
        (["--name", "x", "--learning_rte", "1"], r"unknown key learning_rte; did you mean optimizer\.learning_rate\?"),
        (
            ["--name", "x", "--advantage.epsilon", "1"],
            r"unknown key advantage\.epsilon; it belongs to another advantage\.type\. Valid here: type, normalize",
        ),
        (["--name", "x", "--model.type", "lama"], r"model\.type is 'lama'.*did you mean 'llama'\?"),
        (["--name", "x", "--trainer.seed", "x"], r"trainer\.seed is 'x' \(str\), but it takes an integer"),
        (["--name", "x", "--steps.a", "1"], r"steps is \{'a': 1\} \(dict\), but it takes an integer"),
        (["--name", "x", "--steps", "[1"], r"--steps: '\[1' is not valid YAML"),
        (["--name", "x", "--steps", "{a: 1, a: 2}"], r"--steps: .* key 'a' is given twice"),
        (["--name"], r"--name needs a value"),
        (["--name", "--steps", "1"], r"--name needs a value"),
        (["--name", "x", "--dryrun"], r"--dryrun needs a value; did you mean --dry_run\?"),
        (["--name", "x", "--dry_run=1"], r"--dry_run is a flag and takes no value, but '1' was given"),
        (["--name", "x", "--a..b", "1"], r"--a\.\.b is not a key"),
        (["name=x"], r"unexpected argument 'name=x'; write overrides as --key value"),
        (["--config", "a.yaml", "--config", "b.yaml"], r"two config files were given, 'a.yaml' and 'b.yaml'"),
        ([], r"name is missing"),
    ],
)
def test_invalid_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse(*arguments)


def test_missing_file_names_the_nearest_one(tmp_path):
    write(tmp_path, "name: a")
    with pytest.raises(ConfigError, match=r"rnu\.yaml' does not exist; did you mean 'run\.yaml'"):
        parse("--config", str(tmp_path / "rnu.yaml"))
    with pytest.raises(ConfigError, match=r"does not exist; neither does its folder '.*nowhere'"):
        parse("--config", str(tmp_path / "nowhere" / "run.yaml"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"does not exist; there is no YAML file in"):
        parse("--config", str(tmp_path / "empty" / "run.yaml"))


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: .*[Ii]s a directory"):
        parse("--config", str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml' cannot be read"):
        parse("--config", str(tmp_path / "binary.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nsteps: [1\n", r"run\.yaml:3:1: not valid YAML"),
        ("name: a\n  steps: 1\n", r"run\.yaml:2:8: not valid YAML"),
        ("name: a\nsteps: 1\nname: b\n", r"run\.yaml:3:1: .*key 'name' is given twice, first in line 1"),
        ("trainer:\n  seed: 1\n  seed: 2\n", r"run\.yaml:3:3: .*key 'seed' is given twice, first in line 2"),
        ("- a\n", r"run\.yaml contains a list; a config must be a mapping"),
        ("name: !!python/object:os.system {}\n", r"run\.yaml:1:7: not valid YAML"),
        ("name: !!timestamp a\n", r"run\.yaml:1:7: not valid YAML"),
        ("name: !!float a\n", r"run\.yaml:1:7: .*not fit its tag .*:float': ValueError: could not convert .* 'a'"),
        # PyYAML raises errors of other types for these.
        ("name: !!int ''\n", r"run\.yaml:1:7: .*the value does not fit its tag .*:int': IndexError"),
        ("name: !!bool maybe\n", r"run\.yaml:1:7: .*the value does not fit its tag .*:bool': KeyError: 'maybe'"),
        ("name: !!map [a]\n", r"run\.yaml:1:7: not valid YAML: the tag !!map needs keys and values"),
        ('name: "\\ud800"\n', r"run\.yaml:1:7: .*surrogates not allowed"),
        ('"\\udfff": 3\n', r"run\.yaml:1:1: .*surrogates not allowed"),
        ("steps: 0x" + "f" * 100_000, r"run\.yaml:1:8: .*the integer '0xf{38}'\.\.\. does not fit into 64 bits"),
        ("steps: " + "9" * 5000, r"run\.yaml:1:8: .*'9{40}' is not an integer"),
        ("steps: " + "[" * 5000 + "]" * 5000, r"run\.yaml: not valid YAML: it is nested too deeply"),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        parse("--config", write(tmp_path, text))


@pytest.mark.parametrize("line", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merges"])
def test_exponential_aliases_are_refused(line):
    bomb = ["a: &a {x: 1}"]
    bomb += [
        f"{name}: &{name} " + line.format(", ".join([f"*{below}"] * 9))
        for below, name in itertools.pairwise(string.ascii_lowercase)
    ]
    with pytest.raises(ConfigError, match=r"^x: not valid YAML: its aliases expand to more than 100,000 values"):
        parse_yaml("\n".join(bomb), "x")


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {<<: *a}", "a: &a {b: {c: *a}}"])
def test_recursive_alias_is_refused(text):
    with pytest.raises(ConfigError, match="its aliases expand"):
        parse_yaml(text, "x")


def test_long_value_is_shortened_in_the_message(tmp_path):
    with pytest.raises(ConfigError) as refused:
        parse("--config", write(tmp_path, f"name: a\nsteps: {'x' * 100_000}\n"))
    assert str(refused.value) == f"steps is '{'x' * 199}... (str), but it takes an integer"


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


@pytest.mark.parametrize("name", ["1e-4", "no", "2024-01-01", "null", "12", "a: b", "ä\n b", ""])
def test_text_remains_text_in_the_resolved_config(name):
    text = to_yaml(RunConfig(name))
    assert from_yaml(RunConfig, text, "x").name == name
    assert yaml.safe_load(text)["name"] == name


def test_resolved_config_round_trips_with_levanters_sections(tmp_path):
    config = RunConfig(
        "a",
        model=Qwen3Config(hidden_dim=64, num_layers=2, num_heads=4, num_kv_heads=2),
        optimizer=AdamConfig(learning_rate=1e-8, lr_schedule="constant"),
        trainer=TrainerConfig(tracker=(NoopConfig(), JsonLoggerConfig()), train_batch_size=8),
    )
    text = to_yaml(config)
    assert from_yaml(RunConfig, text, "x") == config
    assert parse("--config", write(tmp_path, text), defaults={}).config == config
    assert to_yaml(from_yaml(RunConfig, text, "x")) == text


def test_invalid_resolved_config_names_its_file():
    with pytest.raises(ConfigError, match=r"runs/a/config\.yaml: unknown key nmae"):
        from_yaml(RunConfig, "name: a\nnmae: b\n", "runs/a/config.yaml")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--config", "absent.yaml", "--help"]])
def test_help_prints_and_exits(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "advantage.normalize" in printed
    assert "--dry_run" in printed


def test_help_of_a_section(capsys):
    with pytest.raises(SystemExit):
        parse("--help", "model.qwen3")
    printed = capsys.readouterr().out
    assert "model.hidden_dim" in printed
    assert "advantage" not in printed


def test_parsing_uses_no_device():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_command_line import parse, to_yaml, ConfigError\n"
        "from jax._src import xla_bridge\n"
        "to_yaml(parse('--name', 'x', '--model.type', 'llama', '--trainer.mp', 'bf16').config)\n"
        "try:\n    parse('--nmae', 'x')\nexcept ConfigError:\n    pass\n"
        "try:\n    parse('--help')\nexcept SystemExit:\n    pass\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True, stdout=subprocess.DEVNULL)
