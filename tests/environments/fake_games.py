# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A game that misbehaves on request, for tests of game processes."""

import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any


class FakeGame:
    """Its methods are the requests of the tests."""

    def __init__(self) -> None:
        self.count = 0

    prepared: tuple[str, ...] = ()

    @classmethod
    def prepare(cls, *arguments: str) -> None:
        """Keep the arguments."""
        cls.prepared = arguments

    def arguments(self) -> list[str]:
        return list(self.prepared)

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def draw(self) -> float:
        return random.random()

    def order(self) -> list[str]:
        """Order of a set, which depends on the hash seed."""
        return list({f"word{index}" for index in range(20)})

    def processes(self) -> tuple[int, int]:
        """Ids of this process and of its server."""
        return os.getpid(), os.getppid()

    def text(self) -> str:
        return "line\none \ud800"

    def fail(self) -> None:
        raise KeyError("missing")

    def leave(self) -> None:
        raise SystemExit(3)

    def crash(self) -> None:
        os.abort()

    def hang(self) -> None:
        """Run a regular expression without end, which no other thread of the process can interrupt."""
        re.match(r"(a+)+$", "a" * 64 + "b")

    def clean_up(self, folder: str) -> None:
        """Wait for SIGTERM, and then remove the folder `started`, which it creates."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        started = Path(folder, "started")
        started.mkdir()
        try:
            signal.pause()
        finally:
            started.rmdir()

    def ignore_end(self) -> None:
        """Ignore SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def unserializable(self) -> Any:
        return object()


class BrokenGame:
    """Cannot be created."""

    @staticmethod
    def prepare() -> None:
        """Do nothing."""

    def __init__(self) -> None:
        raise RuntimeError("no board")
