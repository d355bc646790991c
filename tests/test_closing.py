# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import logging

import pytest

from marin_rl.closing import Closing


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
