# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sandboxes at every isolation level of the machine, each in a separate event loop."""

import asyncio
import functools
import shutil
import subprocess
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError, RewardRequest
from marin_rl.rewards.sandbox.isolation import OLDEST_LANDLOCK, Isolation, landlock_version
from marin_rl.rewards.sandbox.pool import Sandbox, UserFunction
from marin_rl.rewards.sandbox.processes import list_descendants
from marin_rl.types import RewardFailure

HOSTILE = str(Path(__file__).with_name("hostile_rewards.py"))
REQUEST = RewardRequest(
    rollout_id="rollout",
    messages=({"role": "user", "content": "40+6="}, {"role": "assistant", "content": "46"}),
    ground_truth="46",
    task_id="task",
    environment="arithmetic",
    status="completed",
)


def descendants(root: int) -> dict[int, int]:
    """Return the process group of each living descendant of a process, by process id."""
    return {number: process.group for number, process in list_descendants(root).items() if not process.has_ended}


class Attack:
    """A started sandbox with helpers for tests."""

    def __init__(self, level: Isolation, config: SandboxConfig):
        self.level = level
        self.loop = asyncio.new_event_loop()
        self.sandbox = Sandbox(config, strongest=level)
        self.wait(self.sandbox.start())

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout=900))

    def call(self, name: str, file: str = HOSTILE, **options: Any) -> EvaluateResult:
        """Return the result of a function of `file`, or of an attack."""
        if file == HOSTILE and name != "honest":
            name, options = "attack", {"name": name, "options": options}
        [result] = self.wait(self.sandbox.call(UserFunction(file, name), [REQUEST], options))
        return result

    def failure(self, name: str, **options: Any) -> RewardCallError:
        """Return the error of a failing call, after checking that it is counted once and the next call succeeds."""
        before = self.sandbox.failures.copy()
        with pytest.raises(RewardCallError) as raised:
            self.call(name, **options)
        before[raised.value.cause] += 1
        assert self.sandbox.failures == before
        self.is_well()
        return raised.value

    def is_well(self) -> None:
        result = None
        while result is None:
            try:
                result = self.call("honest")
            except RewardCallError as error:
                # On a slow machine it may exceed a short limit too.
                if error.cause is not RewardFailure.TIMEOUT or self.sandbox.config.wall_seconds >= 60:
                    raise
        assert result == EvaluateResult(score=1.0, metrics={"calls": 1.0})

    def cause(self, name: str, **options: Any) -> RewardFailure:
        return self.failure(name, **options).cause

    def close(self) -> None:
        self.wait(self.sandbox.close())
        # Subprocess transports finish closing in callbacks.
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@functools.cache
def missing_requirement(level: Isolation) -> str | None:
    """Return the missing requirement of a level, independent of the code under test, so that bugs do not skip tests."""
    if level is Isolation.FULL:
        bubblewrap = shutil.which("bwrap")
        if bubblewrap is None:
            return "bubblewrap is not installed"
        command = [bubblewrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.stderr if result.returncode else None
    if level is Isolation.PARTIAL and landlock_version() < OLDEST_LANDLOCK:
        return f"the kernel has Landlock {landlock_version()}"
    return None


def require(level: Isolation) -> None:
    """Skip a test if the machine does not offer the isolation level."""
    missing = missing_requirement(level)
    if missing is not None:
        pytest.skip(f"no {level.value} isolation on this machine: {missing}")


TIGHT: dict[str, Any] = {"wall_seconds": 600.0, "cpu_seconds": 60.0, "memory_mb": 256, "file_mb": 1, "output_kb": 64}
"""Generous time limits for slow machines, and tight limits on everything else."""

LENIENT: dict[str, Any] = {"wall_seconds": 600.0, "processes": 4}

LEVELS = list(Isolation)
CONFINED_LEVELS = [Isolation.FULL, Isolation.PARTIAL]


class Attacks:
    """Sandboxes of a test session, each started on first use."""

    def __init__(self) -> None:
        self._started: dict[SandboxConfig, Attack] = {}

    def at(self, level: Isolation, **settings: Any) -> Attack:
        require(level)
        config = SandboxConfig(require=level, workers=1, **settings)
        if config not in self._started:
            self._started[config] = Attack(level, config)
        return self._started[config]

    def close(self) -> None:
        for attack in self._started.values():
            attack.close()


@pytest.fixture(scope="session")
def attacks() -> Iterator[Attacks]:
    attacks = Attacks()
    yield attacks
    attacks.close()


@pytest.fixture(params=LEVELS)
def attack(request: pytest.FixtureRequest, attacks: Attacks) -> Attack:
    return attacks.at(request.param, **TIGHT)


@pytest.fixture(params=CONFINED_LEVELS)
def confined(request: pytest.FixtureRequest, attacks: Attacks) -> Attack:
    """A sandbox at a level that restricts files, network and signals."""
    return attacks.at(request.param, **TIGHT)


@pytest.fixture(params=LEVELS)
def lenient(request: pytest.FixtureRequest, attacks: Attacks) -> Attack:
    """A sandbox that lets calls start a few processes."""
    return attacks.at(request.param, **LENIENT)
