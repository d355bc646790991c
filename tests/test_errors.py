# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Every error class of the package is printed as one line, except errors that no command raises."""

import contextlib
import importlib
import inspect
import logging
import pkgutil

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

import marin_rl
from marin_rl.errors import USER_ERRORS, Closing

INTERNAL = {
    "ToolError": "reported to the policy",
    "ToolTimeoutError": "reported to the policy",
    "EnvironmentFault": "fails a rollout",
    "ForeignError": "fails a rollout",
    "NoAnswerError": "gives a reply no points",
    "OutputError": "ends a command whose output cannot be written",
    "HelpShown": "ends a command that has printed its help",
    "RewardCallError": "fails a reward",
    "RetryableError": "makes a judge ask again",
    "WorkerLostError": "makes the sandbox start another worker",
    "RewardFunctionError": "reported by the sandbox worker that loads the user's file",
    "ApiError": "answered to a client of the server",
    "EngineError": "answered to a client of the server",
    "AgentError": "fails a rollout",
    "GameError": "fails a rollout",
    "OpenEnvServerError": "fails a rollout",
    "InvalidFieldError": "ends a check that reads an invalid setting",
    "EpisodeEndedError": "answered to an agent",
    "StopRequestedError": "ends the step; the training loop saves and stops",
}
"""Errors that are handled before they reach the command line."""


def errors_of_the_package() -> dict[str, type[BaseException]]:
    classes = {}
    for module in pkgutil.walk_packages(marin_rl.__path__, "marin_rl."):
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, BaseException) and kind.__module__ == module.name:
                classes[f"{module.name}.{name}"] = kind
    return classes


def test_all_other_errors_are_printed_as_one_line() -> None:
    classes = errors_of_the_package()
    assert len(classes) > 30
    printed = {name for name, kind in classes.items() if issubclass(kind, USER_ERRORS)}
    assert {name.rpartition(".")[2] for name in classes.keys() - printed} == set(INTERNAL)


def work(closed: list[str], *failing: str, error: BaseException | None = None) -> None:
    """Open three resources, optionally raise `error`, and close them; closing the resources in `failing` raises."""

    def close(name: str) -> None:
        closed.append(name)
        if name in failing:
            raise OSError(f"{name} does not close")

    with contextlib.ExitStack() as opened:
        for name in ("first", "second", "third"):
            opened.enter_context(Closing(lambda name=name: close(name)))
        if error is not None:
            raise error


def test_resources_are_closed_in_reverse_order():
    closed: list[str] = []
    work(closed)
    assert closed == ["third", "second", "first"]


@pytest.mark.parametrize("error", [ValueError("at work"), KeyboardInterrupt("at work")])
def test_the_first_error_is_raised_and_later_errors_are_logged(error: BaseException, caplog: pytest.LogCaptureFixture):
    closed: list[str] = []
    with pytest.raises(type(error), match="at work") as raised:
        work(closed, "third", "first", error=error)
    assert raised.value is error
    assert closed == ["third", "second", "first"]
    assert [record.getMessage() for record in caplog.records] == [
        f"closing after an error ({type(error).__name__}: at work) failed too"
    ] * 2
    assert "OSError: third does not close" in caplog.text
    assert "OSError: first does not close" in caplog.text


def test_an_error_of_close_is_raised_if_it_is_the_first(caplog: pytest.LogCaptureFixture):
    closed: list[str] = []
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="third does not close"):
        work(closed, "third", "second")
    assert closed == ["third", "second", "first"]
    assert "second does not close" in caplog.text


def test_an_interrupt_while_closing_propagates():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Closing(interrupt):
        raise ValueError("at work")
