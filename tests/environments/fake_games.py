# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A game that misbehaves on request, for tests of game processes."""

import os
import random
import re
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

    def unserializable(self) -> Any:
        return object()


class BrokenGame:
    """Cannot be created."""

    @staticmethod
    def prepare() -> None:
        """Do nothing."""

    def __init__(self) -> None:
        raise RuntimeError("no board")
