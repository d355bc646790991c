# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Every error class of the package is printed as one line, except errors that no command raises."""

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

import marin_rl
from marin_rl.utils.errors import MAX_FRAMES, USER_ERRORS, Closing, brief, explain
from marin_rl.utils.user_code import UserFileError, load_from_file

INTERNAL = {
    # Reported to the policy, agents or clients.
    *("ToolError", "ToolTimeoutError", "EpisodeEndedError", "ApiError", "RequestError"),
    *("EnvironmentFault", "ForeignError", "AgentError", "GameError", "OpenEnvServerError"),  # fail a rollout
    *("NoAnswerError", "RewardCallError", "RewardFunctionError", "_RetryableError", "VerdictError", "WorkerLostError"),
    *("NoResponseError", "RecordedError", "_LooksAheadError"),  # become another error, or another way to go on
    *("OutputError", "HelpShown", "StopRequestedError"),  # end a command, a check or a step
}
"""Errors that are handled before they reach the command line."""


MODULES_OF_IRIS = {
    f"marin_rl.{name}" for name in ("distributed.iris_workers", "pods.iris_jobs", "pods.task", "utils.iris_hosts")
}
"""Modules that need Python 3.12."""


def errors_of_the_package() -> dict[str, type[BaseException]]:
    classes = {}
    for module in pkgutil.walk_packages(marin_rl.__path__, "marin_rl."):
        if module.name in MODULES_OF_IRIS and importlib.util.find_spec("iris") is None:
            continue
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, BaseException) and kind.__module__ == module.name:
                classes[f"{module.name}.{name}"] = kind
    return classes


def test_all_other_errors_are_printed_as_one_line() -> None:
    classes = errors_of_the_package()
    assert len(classes) > 30
    printed = {name for name, kind in classes.items() if issubclass(kind, USER_ERRORS)}
    assert {name.rpartition(".")[2] for name in classes.keys() - printed} == INTERNAL


USER_CODE = """
import asyncio, dataclasses, json

def plain(value): return 1 / value

def library(text): return json.loads(text)

def chained(text):
    try:
        return float(text)
    except ValueError as error:
        raise RuntimeError("cannot parse") from error

def handled(text):
    try:
        return float(text)
    except ValueError:
        return {}[text]

def hidden(text):
    try:
        return float(text)
    except ValueError:
        raise RuntimeError("cannot parse") from None

def quoted(text):
    try:
        return float(text)
    except ValueError as error:
        raise KeyError(f"{type(error).__name__}: {error}") from error

def deep(level): return deep(level + 1)

def runs(code): return eval(code)

class Agent:
    async def play(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fails("first"))
            group.create_task(self.fails("second"))

    async def fails(self, name): raise OSError(name)

def group(value): asyncio.run(Agent().play())

class Unreadable(Exception):
    def __str__(self): raise SystemExit
    @property
    def __cause__(self): raise SystemExit

def unreadable(value): raise Unreadable

@dataclasses.dataclass
class Config:
    size: int
    def __post_init__(self): raise ValueError("no size")

def generated(value): Config(value)
"""
CHAINED = 'raise RuntimeError("cannot parse") from error'


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [
        ("plain", 0, ["ZeroDivisionError: division by zero", "4, in plain: def plain(value): return 1 / value"]),
        ("library", "{", ["JSONDecodeError: Exp", "6, in library: def library(text): return json.loads(text)"]),
        ("chained", "x", ["RuntimeError: can", f"12, in chained: {CHAINED}", "caused by ValueError: c", "10, in ch"]),
        ("handled", "x", ["KeyError: 'x'", "18, in handled: return", "while handling ValueError: c", "16, in h"]),
        ("hidden", "x", ["RuntimeError: cannot parse", "24, in hidden: raise RuntimeError"]),
        ("quoted", "x", ['KeyError: "ValueError: could not', "30, in quoted", "caused by ValueError", "28, in quoted"]),
        ("runs", "1 / 0", ["ZeroDivisionError: division by zero", "34, in runs: def runs(code)", "<string>:1"]),
        ("runs", "1 +", ["SyntaxError: invalid syntax (<string>, line 1)", "34, in runs: def runs(code)"]),
        (
            "group",
            None,
            [
                *("ExceptionGroup: unhandled errors", "44, in group", "38, in Agent.play: async with"),
                *("containing OSError: first", "42, in Agent.fails", "containing OSError: second", "42, in Agent.f"),
            ],
        ),
        ("generated", 1, ["ValueError: no size", "58, in generated: def", "56, in Config.__post_init__: def"]),
        ("unreadable", None, ["Unreadable: <its message cannot be read: SystemExit>", "51, in unreadable"]),
    ],
)
def test_errors_are_explained_by_the_frames_of_the_user(
    tmp_path: Path, name: str, argument: object, expected: list[str]
):
    path = tmp_path / "mine.py"
    path.write_text(USER_CODE)
    with pytest.raises(BaseException) as raised:  # noqa: PT011  it has many types
        load_from_file(str(path), name)(argument)
    lines = [line for line in explain(raised.value).split("\n") if __file__ not in line]
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith(f"  {path}:{part}") or line.strip().startswith(part)


def test_explanations_of_deep_errors_are_short_and_name_the_place_of_an_invalid_syntax(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(USER_CODE)
    with pytest.raises(RecursionError) as raised:
        load_from_file(str(path), "deep")(0)
    lines = explain(raised.value).split("\n")
    assert len(lines) == 1 + MAX_FRAMES + 1
    assert lines[1 + MAX_FRAMES // 2].endswith("more frames ...")
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ny = (\n")
    with pytest.raises(UserFileError) as refused:
        load_from_file(str(broken), "x")
    assert str(refused.value).endswith(f"SyntaxError: '(' was never closed (broken.py, line 2)\n  {broken}:2: y = (")


@pytest.mark.parametrize(
    ("failing", "error", "raised", "logged"),
    [
        ([], None, None, []),
        (["third", "first"], ValueError("at work"), "at work", ["third", "first"]),
        (["third", "first"], KeyboardInterrupt("at work"), "at work", ["third", "first"]),
        (["third", "second"], None, "third does not close", ["second"]),
    ],
)
def test_all_resources_are_closed_and_the_first_error_is_raised(
    failing: list[str],
    error: BaseException | None,
    raised: str | None,
    logged: list[str],
    caplog: pytest.LogCaptureFixture,
):
    closed: list[str] = []

    def close(name: str) -> None:
        closed.append(name)
        if name in failing:
            raise OSError(f"{name} does not close")

    def work() -> None:
        with contextlib.ExitStack() as opened:
            for name in ("first", "second", "third"):
                opened.enter_context(Closing(lambda name=name: close(name)))
            if error is not None:
                raise error

    with contextlib.nullcontext() if raised is None else pytest.raises(type(error or OSError()), match=raised):
        work()
    assert closed == ["third", "second", "first"]
    assert [str(record.exc_info[1]).split()[0] for record in caplog.records if record.exc_info] == logged


def test_an_interrupt_while_closing_propagates():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Closing(interrupt):
        raise ValueError("at work")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a " * 500, "a " * 500),
        ("x" * 200, "x" * 200),
        (f"the key '{'k' * 10**6}' is unknown; remove it", f"the key '{'k' * 200}…' is unknown; remove it"),
        ("k " * 10**6, "k " * 2000 + "…"),
        ("one\ntwo\n", "one\ntwo\n"),
        (f"{'k ' * 3000}\nb", "k " * 2000 + "…\nb"),
    ],
)
def test_names_and_lines_of_messages_are_cut(text: str, expected: str):
    assert brief(text) == expected
