# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import draccus
import pytest
from levanter.models.lm_model import LmConfig
from levanter.optim.config import AdamConfig, OptimizerConfig

from marin_rl.config.command_line import (
    ConfigError,
    merge,
    parse_config,
    run_command,
)
from marin_rl.sessions.command import check_command_line
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.output import escape
from marin_rl.utils.settings.option_parser import HelpShown
from marin_rl.utils.user_code import load_from_file
from tests.config.mistakes import BASE
from tests.hostile_errors import HOSTILE_ERRORS


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
    trainer: TrainerConfig = dataclasses.field(
        default_factory=lambda: TrainerConfig(tracker=(), require_accelerator=False)
    )


def parse(*argv):
    return parse_config(RunConfig, argv, {"dry_run": "Only check."})


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def files(folder: Path, *texts: str) -> list[str]:
    """Write config files; returns the options for them."""
    options = []
    for index, text in enumerate(texts):
        place = folder / str(index)
        place.mkdir()
        options += ["--config", write(place, text)]
    return options


def test_precedence_of_defaults_files_and_overrides(tmp_path):
    options = files(
        tmp_path,
        "name: base\nsteps: 20\ntrainer: {model_axis_size: 3, profiler_num_steps: 7, profiler_start_step: 2}\n",
        "name: own\ntrainer: {model_axis_size: 4}\n",
    )
    config = parse(*options, "--steps", "30", "--trainer.profiler_num_steps=8").config
    assert (config.name, config.steps) == ("own", 30)
    trainer = config.trainer
    assert (trainer.model_axis_size, trainer.profiler_num_steps, trainer.profiler_start_step) == (4, 8, 2)
    assert trainer.tracker == ()
    assert parse(*options[2:], *options[:2]).config.name == "base"


def test_given_defaults_have_the_lowest_precedence(tmp_path):
    defaults = {"name": "given", "steps": 5, "lengths": [1], "advantage": {"type": "grpo", "epsilon": 1.0}}
    argv = ["--config", write(tmp_path, "steps: 20\n"), "--advantage.type", "rloo"]
    config = parse_config(RunConfig, argv, defaults=defaults).config
    assert (config.name, config.steps, config.lengths, config.advantage) == ("given", 20, (1,), Rloo())
    assert defaults["steps"] == 5
    with pytest.raises(ConfigError, match="unknown key stesp"):
        parse_config(RunConfig, [], defaults={**defaults, "stesp": 1})


def test_another_type_in_a_later_file_drops_the_keys_of_the_old_one(tmp_path):
    options = files(tmp_path, "name: a\nadvantage: {type: rloo, normalize: batch}\n", "advantage: {type: grpo}\n")
    assert parse(*options).config.advantage == Grpo()


def test_keys_of_every_file_are_checked(tmp_path):
    with pytest.raises(ConfigError) as raised:
        parse(*files(tmp_path, "name: a\nstep: 1\n", "trainer: {sed: 1}\n"))
    assert len(raised.value.problems) == 2


def test_a_config_from_a_pipe_is_read_once():
    reading, writing = os.pipe()
    os.write(writing, BASE.encode())
    os.close(writing)
    try:
        checked = check_command_line(["--config", f"/dev/fd/{reading}", "--seed", "3"], {})
        config = checked.complete().config
    finally:
        os.close(reading)
    assert (config.run_dir, config.seed) == ("runs/test", 3)


def test_names_of_the_file_option(tmp_path):
    path = write(tmp_path, "name: a")
    for arguments in (["--config", path], [f"--config={path}"]):
        assert parse(*arguments).config.name == "a"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--steps", "-1"], "steps", -1),
        (["--verbose", "true"], "verbose", True),
        (["--lengths", "[1, 2]"], "lengths", (1, 2)),
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
    assert getattr(parse("--name", "x", *arguments).config, key) == value


def test_flags_and_keys_are_distinguished():
    assert parse("--dry_run", "--name", "x").flags == {"dry_run"}
    assert parse("--name", "x", "--dry-run").flags == {"dry_run"}
    assert parse("--name", "x").flags == frozenset()


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
        (
            ["--name", "x", "--profiler_num_steps", "1"],
            r"unknown key profiler_num_steps; did you mean trainer\.profiler_num_steps",
        ),
        # A key of another section is named, and the keys of this one.
        (["--name", "x", "--advantage.learning_rate", "1"], r"did you mean optimizer\.learning_rate\? .*normalize"),
        (["--name", "x", "--learning_rte", "1"], r"unknown key learning_rte; did you mean optimizer\.learning_rate\?$"),
        (
            ["--name", "x", "--advantage.epsilon", "1"],
            r"unknown key advantage\.epsilon; it belongs to advantage\.type grpo, but advantage\.type is rloo",
        ),
        (["--name", "null-ish: no"], r"name is \{'null-ish': False\} \(dict\), but it takes text: .* quotes"),
        (["--name", "x", "--steps.a", "1"], r"steps is \{'a': 1\} \(dict\), but it takes an integer"),
        (["--name", "x", "--steps", "{a: 1, a: 2}"], r"--steps: .* key 'a' is given twice"),
        (["--name"], r"--name needs a value"),
        (["--name", "--steps", "1"], r"--name needs a value"),
        ([], r"name is missing.*; give it with --name$"),
        # A value that JSON does not have.
        (["--name", "!!binary aGk=", "--sede", "1"], r"name is b'hi' \(bytes\), but it takes text"),
    ],
)
def test_invalid_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse(*arguments)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--config", "absent.yaml", "--help"]])
def test_help_prints_and_exits(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "advantage.normalize" in printed
    assert "--dry_run" in printed
    with pytest.raises(SystemExit):
        parse(*arguments[:-1], "--help=model.qwen3")
    printed = capsys.readouterr().out
    assert "model.hidden_dim" in printed
    assert "advantage" not in printed


@pytest.mark.medium
def test_parsing_uses_no_device():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_command_line import parse, ConfigError\n"
        "from jax._src import xla_bridge\n"
        "parse('--name', 'x', '--model.type', 'llama', '--trainer.mp', 'bf16')\n"
        "try:\n    parse('--nmae', 'x')\nexcept ConfigError:\n    pass\n"
        "try:\n    parse('--help')\nexcept SystemExit:\n    pass\n"
        "from marin_rl.config.train_config import TrainConfig\n"
        "from marin_rl.config.command_line import parse_config\n"
        "parse_config(TrainConfig, ['--run_dir=x', '--environment.type=arithmetic', '--model.type=llama'])\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True, stdout=subprocess.DEVNULL)


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def command(argv: Sequence[str]) -> int:
        raise error

    return command


@pytest.mark.parametrize("name", ["exit", "generator", "cancelled", "group", "base"])
def test_a_command_does_not_end_silently(name: str, capsys: pytest.CaptureFixture[str]):
    """`sys.exit()` in a user's file would otherwise look like a complete run."""
    error, text = HOSTILE_ERRORS[name]
    assert run_command(raising(error), []) == 1
    assert f"error: code that the config names raised {text}" in capsys.readouterr().err


def test_ctrl_c_and_help_end_a_command():
    assert run_command(raising(KeyboardInterrupt()), []) == 130
    with pytest.raises(HelpShown):
        run_command(raising(HelpShown(0)), [])


PLAIN = [
    "a #b",
    " a ",
    "a\nb\r\n",
    "\ufeffa",
    "&x y",
    "a\x85b",
    "-x",
    "a:b",
    "$HOME",
    "~x",
    "a\\nb",
    "a%s [b]{c}*",
    "a'b\"",
    "a|b",
]


@pytest.mark.parametrize("text", PLAIN)
def test_unquoted_text_is_taken_as_it_is(text):
    for arguments in (["--name", text], [f"--name={text}"]):
        assert parse(*arguments).config.name == text


@pytest.mark.parametrize(
    ("text", "value"), [("'a #b'", "a #b"), ('"a\\tb"', "a\tb"), ("!!str 5", "5"), ("'#x' # note", "#x")]
)
def test_quoted_text_is_read_as_yaml(text, value):
    assert parse("--name", text).config.name == value


def test_text_that_is_not_utf8_is_refused_by_option():
    with pytest.raises(ConfigError, match=r"--name: 'a\\udcff' is not UTF-8 text; rename the file or folder"):
        parse("--name", os.fsdecode(b"a\xff"))


def test_too_few_threads_are_reported(monkeypatch, capsys):
    begin, begun = threading.Thread.start, []

    def start(thread):
        if len(begun) == 5:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert run_command(lambda _: 0, []) == 1
    assert "error: this user can start only 5 more threads and processes here" in capsys.readouterr().err
    assert not any(thread.is_alive() for thread in begun)


def test_errors_of_the_users_code_have_the_frames_of_that_code(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def fail(kind): raise kind('no such game')\n")

    def command(kind):
        load_from_file(str(path), "fail")(kind)

    for kind, sentence in ((KeyError, "code that the config names raised KeyError: "), (ValueError, "no such game")):
        assert run_command(lambda _, kind=kind: command(kind), []) == 1
        shown = capsys.readouterr().err
        assert shown.startswith(f"error: {sentence}")
        assert shown.endswith(f"  {path}:1, in fail: def fail(kind): raise kind('no such game')\n")
        assert "marin_rl/" not in shown


UNHANDLED = {
    "command": ("fail()", 1),
    "thread": ("import threading; thread = threading.Thread(target=fail); thread.start(); thread.join()", 0),
    "finalizer": ("type('Object', (), {'__del__': lambda self: fail()})()", 0),
    "task": (
        "import asyncio\n"
        "    async def failing(): fail()\n"
        "    async def main(): asyncio.create_task(failing()); await asyncio.sleep(0); await asyncio.sleep(0)\n"
        "    asyncio.run(main())",
        0,
    ),
}


@pytest.mark.parametrize("place", UNHANDLED)
def test_an_error_that_nothing_handles_does_not_control_the_terminal(place: str):
    statements, status = UNHANDLED[place]
    code = (
        "from marin_rl.config.command_line import run_command\n"
        "def fail(): raise RuntimeError('\\x1b]52;c;AAAA\\x07\\x9b2J\\u202e\\rreply')\n"
        f"def command(argv):\n    {statements}\n    return 0\n"
        "raise SystemExit(run_command(command, []))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600)
    shown = ended.stderr.decode()
    assert ended.returncode == status
    assert "RuntimeError: \\x1b]52;c;AAAA\\x07\\x9b2J\\u202e\\rreply\n" in shown
    assert shown == escape(shown)


@pytest.mark.parametrize("text", ["1_000", "1.10", "yes", "0x10", "-5", ".nan", "# 1", "#### (-?[0-9]+)"])
def test_keys_that_take_text_have_it_as_it_was_written(text: str):
    assert parse("--name", text).config.name == text


def test_numbers_of_the_command_line_are_numbers_elsewhere():
    assert parse("--name", "x", "--steps", "1_000", "--verbose", "yes").config == RunConfig(
        "x", steps=1000, verbose=True
    )
