# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Agents as environments: functions and programs that request the policy's replies over OpenAI's API."""

import asyncio
import contextlib
import copy
import dataclasses
import inspect
import json
import math
import numbers
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from marin_rl.environments.base import (
    AbstractEnvironment,
    AbstractSplitEnvironment,
    AgentConnection,
    AgentEpisode,
    AgentResult,
    EnvironmentConfig,
)
from marin_rl.environments.splits import Split
from marin_rl.rewards.component import COMPONENT_NAME, RewardComponentConfig
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import MAX_REWARD, Task
from marin_rl.utils.errors import describe, explain
from marin_rl.utils.settings.checks import check_fields
from marin_rl.utils.settings.fields import LOCAL_FILE, NAMES_FILES
from marin_rl.utils.user_code import UserFileError, inherited_environment, load_function, require_extra

_MAX_OUTPUT = 8192
"""Last bytes of a program's output that an error message contains."""
_GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL, and for the rest of a program's output."""


REWARD = "reward"
"""Reward component of a reward without a name."""
MAX_REWARDS = 64
"""Maximum number of rewards of an episode or a reply."""
MAX_NAME = 128
"""Maximum characters of a reward's name."""


class AgentError(Exception):
    """An agent raised an error, ended with an error, or returned an invalid reward."""


@EnvironmentConfig.register_subclass("agent")
@dataclasses.dataclass(frozen=True)
class AgentConfig(EnvironmentConfig):
    """Tasks of another environment, played by an agent: a Python function or a program.

    The agent requests the policy's replies over OpenAI's API. It runs without isolation.
    """

    level: ClassVar[int] = 1
    runs_agents: ClassVar[bool] = True

    tasks: EnvironmentConfig
    """Environment of the tasks. Its rewards are not used, but its reward functions are."""
    path: str | None = dataclasses.field(default=None, metadata=LOCAL_FILE)
    """Path of the Python file with the agent's function, relative to the working directory."""
    function: str | None = None
    """Name of the function in the file, called with `task`, `base_url`, `api_key` and the `options`. It returns the
    reward, rewards by name, or None. It runs in a thread of its own in the process that samples; if it is async, with
    an event loop of its own."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Further keyword arguments of the function."""
    command: tuple[str, ...] = dataclasses.field(default=(), metadata=NAMES_FILES)
    """Program and arguments, instead of a function. It receives the task as JSON on its standard input, and
    `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `REWARD_URL` as environment variables."""
    pass_env: tuple[str, ...] = ()
    """Names of further environment variables that the program receives. By default it receives no secrets."""
    name: str | None = None
    """Name for metrics; default: the name of the tasks' environment."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_nested(self.tasks, "tasks")
        if bool(self.command) == (self.path is not None):
            raise ValueError(
                "an environment of type agent needs either path and function (a Python function) or command (a program)"
            )
        if (self.path is None) != (self.function is None):
            raise ValueError(
                f"path is {self.path!r} and function is {self.function!r}; a Python function needs both of them"
            )
        if self.command and self.options:
            raise ValueError("options are arguments of a function; give those of a program in command")
        if not self.command and self.pass_env:
            raise ValueError("pass_env is for programs; a function has the variables of the process that samples")

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of the tasks' environment and of this config."""
        return {environment.name: (*self.tasks.rewards, *self.rewards)}

    def build(self) -> AbstractEnvironment:
        """Build the tasks and import the function.

        Raises:
            MissingPackageError: if a package of the extra `serve` is missing.
            UserFileError: if there is no such program, or the file has no such function, or it does not take the
                arguments.
        """
        require_extra("serve", "environment.type: agent")
        if self.command and shutil.which(self.command[0]) is None:
            raise UserFileError(
                f"command is {list(self.command)}, but there is no program {self.command[0]!r} in PATH or at that path "
                "that may be executed; correct the path, install it, or change its permissions"
            )
        function = None if self.path is None else self._load(self.path, str(self.function))
        source = self.tasks.build()
        name = source.name if self.name is None else self.name
        splits = {
            split: [dataclasses.replace(task, environment=name) for task in source.tasks(split)] for split in Split
        }

        def start(task: Task, seed: int) -> AgentEpisode:
            # A copy, because functions may edit the messages in place.
            messages = copy.deepcopy(list(task.messages))
            values = {"id": task.id, "messages": messages, "answer": task.answer, "seed": seed}
            if function is None:
                return CommandEpisode(self.command, self.pass_env, values)
            return FunctionEpisode(function, f"{self.function} of {self.path}", self.options, values)

        return AgentEnvironment(name, splits, source, start)

    def _load(self, path: str, name: str) -> Callable[..., Any]:
        where = f"{name!r} of {path}"
        function = load_function(path, name, "a function")
        try:
            inspect.signature(function).bind(task={}, base_url="", api_key="", **self.options)
        except TypeError as error:
            options = "".join(f", {option}" for option in self.options)
            raise UserFileError(
                f"{where} is called with the keyword arguments task, base_url, api_key{options}, but {error}"
            ) from error
        return function


@dataclasses.dataclass(frozen=True)
class AgentEnvironment(AbstractSplitEnvironment):
    """Tasks that an agent plays."""

    source: AbstractEnvironment
    """Environment of the tasks."""
    make_episode: Callable[[Task, int], AgentEpisode]
    """Creates the episode of a task and a seed."""

    async def start(self, task: Task, seed: int) -> AgentEpisode:
        """Start an attempt.

        Raises:
            ValueError: if the task belongs to another environment.
        """
        self.require_own(task)
        return self.make_episode(task, seed)

    def connect_sandbox(self, sandbox: Sandbox | None) -> bool:
        """Connect the tasks' environment to the sandbox; return whether it runs programs."""
        return self.source.connect_sandbox(sandbox)


@dataclasses.dataclass(frozen=True)
class FunctionEpisode(AgentEpisode):
    """A call of an agent's function."""

    function: Callable[..., Any]
    where: str
    """Name and file of the function, for messages."""
    options: Mapping[str, Any]
    task: Mapping[str, Any]
    """The `task` argument."""

    async def play(self, connection: AgentConnection) -> AgentResult:
        """Call the function in a separate thread, so that blocking code delays no other episode.

        If it is async, cancellation cancels it; a thread that blocks is abandoned.

        Raises:
            AgentError: if it raises anything, or its reward is invalid.
        """
        arguments = {"task": dict(self.task), "base_url": connection.base_url, "api_key": connection.api_key}
        call = _Call(self.function, {**self.options, **arguments}, self.where)
        try:
            result = await asyncio.to_thread(call.run)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if isinstance(result, AgentError):
            raise result
        return result


class _Call:
    """A call of a plain or async function in a thread."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
        self._function, self._arguments, self._where = function, arguments, where
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._is_cancelled = False

    def run(self) -> AgentResult | AgentError:
        """Return the result, or the error: in this thread, because to describe it may run code of the agent."""
        try:
            reward = self._function(**self._arguments)
            if inspect.iscoroutine(reward):
                reward = asyncio.run(self._wait(reward))
        except BaseException as error:
            return AgentError(f"{self._where} raised {explain(error)}")
        try:
            return AgentResult(named_rewards(reward))
        except BaseException as error:
            return AgentError(
                f"{self._where} returned an invalid reward: {describe(error).removeprefix('ValueError: ')}"
            )

    def cancel(self) -> None:
        """Cancel the function if it is async. Thread-safe."""
        self._is_cancelled = True
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # The loop is closed if the function has ended.
                loop.call_soon_threadsafe(task.cancel)

    async def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        if self._is_cancelled:
            task.cancel()
        return await work


@dataclasses.dataclass(frozen=True)
class CommandEpisode(AgentEpisode):
    """A run of an agent's program."""

    command: Sequence[str]
    pass_env: Sequence[str]
    """Names of further environment variables that it receives."""
    task: Mapping[str, Any]
    """Its standard input, as JSON."""

    async def play(self, connection: AgentConnection) -> AgentResult:
        """Run the program until it ends; its process group ends with it.

        Raises:
            AgentError: if it cannot be started, or its exit status is not 0.
        """
        given = inherited_environment(*self.pass_env)
        given |= {"OPENAI_BASE_URL": connection.base_url, "OPENAI_API_KEY": connection.api_key}
        given["REWARD_URL"] = connection.reward_url
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(self.task).encode())
            stdin.seek(0)
            try:
                transport, program = await asyncio.get_running_loop().subprocess_exec(
                    _Program,
                    *self.command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=given,
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentError(f"cannot start {self.command[0]!r}: {error}") from error
        # A process that left the group can keep its output open.
        with contextlib.closing(transport):
            try:
                await program.has_ended.wait()
            except asyncio.CancelledError:
                await _end_group(transport.get_pid(), program, signal.SIGTERM)
                raise
            finally:
                await _end_group(transport.get_pid(), program, signal.SIGKILL)
                await _wait(program.is_silent)
        status = transport.get_returncode()
        if status:
            end = f"signal {-status}" if status < 0 else f"exit status {status}"
            text = program.output.decode(errors="replace").strip()
            raise AgentError(f"{' '.join(self.command)} ended with {end}\n{text}".strip())
        return AgentResult()


class _Program(asyncio.SubprocessProtocol):
    """Last output and end of a program."""

    def __init__(self) -> None:
        self.output = bytearray()
        self.has_ended = asyncio.Event()
        self.is_silent = asyncio.Event()
        """Set if all output was read, also that of its children."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output += data
        del self.output[:-_MAX_OUTPUT]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.is_silent.set()

    def process_exited(self) -> None:
        self.has_ended.set()


async def _end_group(group: int, program: _Program, number: signal.Signals) -> None:
    """Send a signal to the process group of a program, and wait for the program."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    await _wait(program.has_ended)


async def _wait(event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), _GRACE_SECONDS)


def named_rewards(reward: object) -> dict[str, float]:
    """Return the rewards that an agent gave, by component. `reward` is a number, rewards by name, or None.

    Raises:
        ValueError: if it is neither, or a name or reward is invalid.
    """
    if reward is None:
        return {}
    given = reward if isinstance(reward, Mapping) else {REWARD: reward}
    if len(given) > MAX_REWARDS:
        raise ValueError(f"there are {len(given)} rewards; give at most {MAX_REWARDS}, each of which is a metric")
    return {name: check_reward(name, value) for name, value in given.items()}


def check_reward(name: object, value: object) -> float:
    """Check a reward of an agent and the name of its component; return it as a float.

    Raises:
        ValueError: if the name cannot be part of a metric's name, or the reward is not a finite number.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME or not COMPONENT_NAME.fullmatch(name):
        raise ValueError(
            f"invalid reward name {name!r:.200}; use letters, digits, '_', '-' and '.', at most {MAX_NAME} of them"
        )
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        raise ValueError(
            f"reward {name!r} is {value!r:.200}; it must be a finite number, at most {MAX_REWARD:g} in magnitude"
        )
    return number
