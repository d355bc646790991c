# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors that code of users may raise, by name, with a part of their description."""

import asyncio
from typing import NoReturn


class Unreadable(Exception):
    """Its text cannot be read."""

    def __str__(self) -> NoReturn:
        raise KeyboardInterrupt

    __repr__ = __str__


class _Text(str):
    """A text with methods of its own."""

    def __getitem__(self, key: object) -> NoReturn:
        raise SystemExit

    encode = __len__ = __getitem__  # type: ignore[assignment]


class OfSubclass(Exception):
    """Its text is not a plain `str`."""

    def __str__(self) -> str:
        return _Text("odd")


HOSTILE_ERRORS: dict[str, tuple[BaseException, str]] = {
    "interrupt": (KeyboardInterrupt("stop"), "KeyboardInterrupt: stop"),
    "exit": (SystemExit(0), "SystemExit: 0"),
    "generator": (GeneratorExit(), "GeneratorExit"),
    "cancelled": (asyncio.CancelledError("mine"), "CancelledError: mine"),
    "iteration": (StopIteration(3), "StopIteration"),
    "async iteration": (StopAsyncIteration(), "StopAsyncIteration"),
    "group": (BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError()]), "BaseExceptionGroup: both (2"),
    "base": (BaseException("plain"), "BaseException: plain"),
    "unreadable": (Unreadable(), "Unreadable: <its message cannot be read: KeyboardInterrupt>"),
    "subclass": (OfSubclass(), "OfSubclass: odd"),
    "surrogate": (ValueError("half \ud83d"), "ValueError: half \\ud83d"),
    "long": (ValueError("x" * 10_000_000), "ValueError: xxx"),
    "escapes": (ValueError("\x1b]52;c;AAAA\x07\rdone"), "ValueError: \x1b]52"),
    "late": (TimeoutError("its own"), "TimeoutError: its own"),
}
"""`StopIteration` of a coroutine is a `RuntimeError` with its text."""
