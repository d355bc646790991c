# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sandbox of the trainer: a pool of worker processes for user code and model-written programs.

```
trainer ── bubblewrap ── worker ── forkserver ── one child per call
```

The worker (trusted, never runs user code) enforces the limits on time, output, processes and threads. A separate
process loads the user's file, forks the forkserver and is killed, with every thread and process that the file started.
The forkserver is stopped between calls. The child runs one call, or several of a function that is declared stateless,
under the kernel's limits and exits. Answers are sent as JSON and validated here.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pydantic

from marin_rl.rewards.sandbox.config import SandboxConfig, worker_spec
from marin_rl.rewards.sandbox.functions import (
    EvaluateResult,
    RewardCallError,
    RewardFailure,
    RewardMode,
    RewardRequest,
    describe_invalid,
)
from marin_rl.rewards.sandbox.isolation import OLDEST_LANDLOCK, Isolation, find_holes, landlock_version, self_test
from marin_rl.rewards.sandbox.seccomp import seccomp_is_supported
from marin_rl.rewards.sandbox.worker_process import (
    WorkerLostError,
    WorkerProcess,
    answers_of_calls,
    failure_of,
    failure_of_function,
    validated,
)
from marin_rl.utils.errors import UserError
from marin_rl.utils.user_code import UserFileError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""Seconds to wait for a worker's answer after the worker's own deadline."""

BATCH_CALLS = 64
"""Maximum number of calls of a stateless function in one process."""

BATCH_SECONDS = 2.0
"""Time limit in seconds of a process of several calls. Calls that it does not answer run in separate processes."""

ATTEMPTS = 3
"""Attempts to run a call when workers die before they start it."""


class IsolationError(UserError):
    """The machine offers less isolation than required, or the sandbox is used before it was started."""


@dataclasses.dataclass(frozen=True)
class UserFunction:
    """Reference to a reward function in a user's file."""

    file: str
    """The Python file, absolute."""
    name: str
    """The function's name in it."""

    def __str__(self) -> str:
        path = Path(self.file)
        return f"{self.name!r} of {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"


class FunctionDescription(pydantic.BaseModel):
    """Description of a reward function in a loaded file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    mode: RewardMode
    """Whether one call scores one rollout or several."""
    required: tuple[str, ...]
    """Names of its required options."""
    stateless: bool
    """Whether several of its calls may run in one process."""
    problem: str | None
    """Why it cannot be called, and the remedy, continuing a sentence that begins with its name; None if it can."""


_FUNCTIONS = pydantic.TypeAdapter(dict[str, FunctionDescription])


@dataclasses.dataclass(frozen=True)
class PythonResult:
    """Result of a model-written program."""

    stdout: str
    """Its standard output, up to `output_kb`."""
    stderr: str
    """Its standard error, up to `output_kb`."""
    failure: RewardCallError | None
    """The reason, if it was terminated or exited with another status than 0; None if it succeeded."""
    seconds: float
    """Wall-clock time from its start to its end."""


class Sandbox:
    """A pool of worker processes. Used from one event loop; `start` it first and `close` it at the end."""

    def __init__(self, config: SandboxConfig, strongest: Isolation = Isolation.FULL):
        """Create a sandbox that is not started yet.

        `strongest` is the strongest isolation to try; tests use lower levels to simulate other machines.
        """
        self.config = config
        self.failures: collections.Counter[RewardFailure] = collections.Counter()
        """Number of failed calls so far, by cause."""
        self._strongest = strongest
        self._isolation: Isolation | None = None
        self._missing: list[str] = []
        self._bubblewrap = shutil.which("bwrap")
        self._landlock = landlock_version()
        self._slots = asyncio.Semaphore(config.workers)
        self._idle: list[WorkerProcess] = []
        self._workers: set[WorkerProcess] = set()
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()
        self._is_closed = False
        self._starting = 0
        self._sources: dict[str, bytes] = {}
        self._stateless: set[UserFunction] = set()
        self._loaded: dict[str, dict[str, FunctionDescription] | UserFileError] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Test which isolation the machine offers, and log it.

        Raises:
            IsolationError: if it is less than `require`.
        """
        for level in (Isolation.FULL, Isolation.PARTIAL, Isolation.NONE):
            if level.rank > self._strongest.rank:
                continue
            missing = None
            if level is not Isolation.NONE:
                missing = self._missing_requirement(level) or await self._test(level)
            if missing is None:
                self._isolation = level
                break
            self._missing.append(f"{level.value} isolation: {missing}")
        if self.isolation.rank < self.config.require.rank:
            await self.close()
            raise IsolationError(
                f"sandbox.require is {self.config.require.value}, but this machine offers {self.isolation.value}. "
                f"{'; '.join(self._missing)}. Install bubblewrap, or set sandbox.require={self.isolation.value} if the "
                "user code is trusted to that extent"
            )
        log = logger.warning if self.isolation is Isolation.NONE else logger.info
        log("%s", self.describe())

    @property
    def isolation(self) -> Isolation:
        """The active isolation level.

        Raises:
            IsolationError: if the sandbox is not started.
        """
        if self._isolation is None:
            raise IsolationError("the sandbox is not started; await its start() first")
        return self._isolation

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in self._workers]

    def describe(self) -> str:
        """Describe the active isolation and the missing requirements of stronger levels in one line."""
        mechanisms = {
            Isolation.FULL: "bubblewrap, seccomp"
            + (f", Landlock {self._landlock}" if self._landlock >= OLDEST_LANDLOCK else ""),
            Isolation.PARTIAL: f"Landlock {self._landlock}, seccomp",
            Isolation.NONE: "user code is not isolated from this machine",
        }[self.isolation]
        missing = f"; unavailable: {'; '.join(self._missing)}" if self._missing else ""
        return f"sandbox: isolation {self.isolation.value} ({mechanisms}, limits on every call){missing}"

    async def load(self, file: str) -> dict[str, FunctionDescription]:
        """Load a user's file, at an absolute path, in a worker and return its reward functions by name.

        Later calls return or raise the same.

        Raises:
            UserFileError: if the file cannot be loaded.
        """
        if file not in self._loaded:
            try:
                self._loaded[file] = await self._describe(file)
            except UserFileError as error:
                self._loaded[file] = error
        loaded = self._loaded[file]
        if isinstance(loaded, UserFileError):
            raise loaded
        return loaded

    async def _describe(self, file: str) -> dict[str, FunctionDescription]:
        try:
            answer = await self._ask(file, {"kind": "load"})
            if "not_loaded" in answer:
                raise UserFileError(f"{file} cannot be loaded: {answer['not_loaded']}")
            found = _FUNCTIONS.validate_python(answer["loaded"], strict=False)
        except RewardCallError as error:
            raise UserFileError(f"{file} cannot be loaded: {error.detail}") from error
        except pydantic.ValidationError as error:
            raise UserFileError(f"{file} cannot be loaded: it sent an invalid {describe_invalid(error)}") from error
        self._stateless |= {UserFunction(file, name) for name, one in found.items() if one.stateless}
        return found

    def batches_calls(self, function: UserFunction) -> bool:
        """Whether several calls of a function run in one process: if it is declared stateless, and is not slow.

        Its file must have been loaded by `load`.
        """
        return function in self._stateless

    async def call(
        self, function: UserFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
    ) -> list[EvaluateResult]:
        """Score rollouts with one call of a user's function, in a separate process.

        A pointwise function has one request. `options` are JSON values, passed as keyword arguments. There is one
        result for each request, in their order.

        Raises:
            RewardCallError: if the call failed; the failure is counted in `failures`.
        """
        with self._counting_failures(function):
            answer = await self._answer(function, {"kind": "call"}, requests, options)
            return validated(answer, len(requests), self.config)

    async def call_each(
        self, function: UserFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
    ) -> list[EvaluateResult | RewardCallError]:
        """Score rollouts with one call of a pointwise function for each.

        Each call has a separate process, or up to `BATCH_CALLS` have one if the function is declared stateless.
        `options` are JSON values, passed as keyword arguments.

        Returns:
            The result of each request, or the failure of its call, which is counted in `failures`.
        """
        count = math.ceil(len(requests) / BATCH_CALLS) if self.batches_calls(function) else len(requests)
        bounds = [len(requests) * batch // count for batch in range(count + 1)] if count else []
        batches = [requests[start:end] for start, end in itertools.pairwise(bounds)]
        outcomes = await asyncio.gather(*(self._call_batch(function, batch, options) for batch in batches))
        return [outcome for batch in outcomes for outcome in batch]

    async def _call_batch(
        self, function: UserFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
    ) -> list[EvaluateResult | RewardCallError]:
        """Make several calls in one process, and those that it does not answer in separate processes."""

        async def outcome(request: RewardRequest, answer: str | None) -> EvaluateResult | RewardCallError:
            try:
                if answer is None:
                    [result] = await self.call(function, [request], options)
                else:
                    with self._counting_failures(function):
                        [result] = validated(answer, 1, self.config)
            except RewardCallError as error:
                return error
            return result

        answers = await self._batch_answers(function, requests, options) if len(requests) > 1 else []
        missing = [None] * (len(requests) - len(answers))
        return await asyncio.gather(*map(outcome, requests, [*answers, *missing]))

    async def _batch_answers(
        self, function: UserFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
    ) -> list[str]:
        """Make several calls in one process, and return the untrusted answers; the last ones can be missing."""
        seconds = min(BATCH_SECONDS, self.config.wall_seconds)
        try:
            text = await self._answer(function, {"kind": "calls", "seconds": seconds}, requests, options)
            answers = answers_of_calls(text, len(requests))
        except RewardCallError as error:
            # A call can exceed a limit for all of them. Its own process will tell.
            answers = []
            if error.cause is not RewardFailure.TIMEOUT:
                return answers
        if len(answers) < len(requests) and function in self._stateless:
            self._stateless.discard(function)
            logger.info("sandbox: %s is slow: each call has its own process from now on", function.name)
        return answers

    async def _answer(
        self,
        function: UserFunction,
        request: dict[str, Any],
        rollouts: Sequence[RewardRequest],
        options: Mapping[str, Any],
    ) -> str:
        """Return the answer that a process wrote; raises a `RewardCallError` if the process failed."""
        arguments = {"requests": [vars(rollout) for rollout in rollouts], "options": dict(options)}
        report = await self._ask(function.file, {**request, "function": function.name, **arguments})
        if "not_loaded" in report:
            raise RewardCallError(RewardFailure.WORKER, f"its file cannot be loaded: {report['not_loaded']}")
        for stream in ("stdout", "stderr"):
            if report[stream]:
                logger.debug("%s wrote to %s: %s", function.name, stream, report[stream])
        failure = failure_of(report, self.config)
        if failure is not None:
            raise failure
        return report["answer"]

    async def run_python(self, code: str, stdin: str = "", seconds: float = math.inf) -> PythonResult:
        """Run a program that a model wrote, as `python main.py` would.

        `seconds` is the maximum duration, at most `wall_seconds` of the config; the wait for a worker does not count.
        The output is untrusted.

        Raises:
            RewardCallError: if the sandbox itself failed; the failure is counted in `failures`.
        """
        with self._counting_failures():
            limit = min(seconds, self.config.wall_seconds)
            report = await self._ask(None, {"kind": "python", "code": code, "stdin": stdin, "seconds": limit})
            if "not_loaded" in report:
                raise RewardCallError(RewardFailure.WORKER, f"programs cannot be started: {report['not_loaded']}")
        failure = failure_of(report, dataclasses.replace(self.config, wall_seconds=limit))
        return PythonResult(report["stdout"], report["stderr"], failure, report["seconds"])

    async def close(self) -> None:
        """End the calls in progress, which fail, and stop all workers and their processes."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        workers, self._workers = self._workers, set()
        self._idle.clear()
        await asyncio.gather(*(worker.close() for worker in workers))

    @contextlib.contextmanager
    def _counting_failures(self, function: UserFunction | None = None) -> Iterator[None]:
        """Count a failure, and complete its description to a sentence about the function."""
        try:
            yield
        except RewardCallError as error:
            self.failures[error.cause] += 1
            if function is None:
                raise
            raise RewardCallError(error.cause, failure_of_function(function, error)) from error

    async def _ask(self, file: str | None, request: dict[str, Any]) -> dict[str, Any]:
        """Return a worker's report; raises a `RewardCallError` if there is none, or if the sandbox is closed."""
        task = asyncio.current_task()
        assert task is not None
        if not self._is_closed:
            # A task of its own, which `close` can end without its caller.
            call = asyncio.create_task(self._ask_worker(file, request))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            try:
                return await call
            except asyncio.CancelledError:
                if task.cancelling():
                    raise
        raise RewardCallError(RewardFailure.WORKER, "the sandbox is closed")

    async def _ask_worker(self, file: str | None, request: dict[str, Any]) -> dict[str, Any]:
        async with self._slots:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    worker = await self._acquire_worker(file)
                except OSError as error:
                    raise RewardCallError(RewardFailure.WORKER, f"cannot start a worker: {error}") from error
                try:
                    return await worker.ask(request, self._timeout(worker))
                except WorkerLostError as error:
                    if error.began or attempt == ATTEMPTS:
                        raise RewardCallError(RewardFailure.WORKER, str(error)) from error
                finally:
                    if worker.is_usable:
                        self._idle.append(worker)
                    else:
                        self._workers.discard(worker)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _timeout(self, worker: WorkerProcess) -> float:
        start = 0.0 if worker.is_loaded else self.config.start_seconds
        return start + self.config.wall_seconds + GRACE_SECONDS

    async def _acquire_worker(self, file: str | None) -> WorkerProcess:
        for index, worker in enumerate(self._idle):
            if worker.file == file:
                return self._idle.pop(index)
        # Increment before the first await, so that concurrent calls see it.
        self._starting += 1
        try:
            if self._idle and len(self._workers) + self._starting > self.config.workers:
                # Close the worker that has been idle longest.
                oldest = self._idle.pop(0)
                self._workers.discard(oldest)
                await oldest.close()
            return await self._start_worker(file, self.isolation)
        finally:
            self._starting -= 1

    async def _start_worker(self, file: str | None, level: Isolation) -> WorkerProcess:
        # Each file is read once, so that all calls of a run use one version.
        if file is not None and file not in self._sources:
            self._sources[file] = Path(file).read_bytes()
        source = b"" if file is None else self._sources[file]
        spec = worker_spec(file, self.config, level, self._landlock)
        worker = await WorkerProcess.start(spec, source, self._bubblewrap)
        self._workers.add(worker)
        return worker

    def _missing_requirement(self, level: Isolation) -> str | None:
        if not seccomp_is_supported():
            return f"seccomp is not supported for {os.uname().sysname} on {os.uname().machine}"
        if level is Isolation.FULL and self._bubblewrap is None:
            return "bubblewrap (bwrap) is not installed"
        if level is Isolation.PARTIAL and self._landlock < OLDEST_LANDLOCK:
            return f"the kernel has Landlock {self._landlock}, but {OLDEST_LANDLOCK} is required"
        return None

    async def _test(self, level: Isolation) -> str | None:
        """Run the self-test at an isolation level; returns the forbidden actions that succeeded, or None."""
        with tempfile.TemporaryDirectory(prefix="marin_rl_probe_") as folder:
            secret = Path(folder) / "outside"
            secret.write_text("readable", encoding="utf-8")
            worker = await self._start_worker(None, level)
            request = {"kind": "python", "code": self_test(str(secret)), "stdin": ""}
            try:
                report = await worker.ask(request, self._timeout(worker))
            except WorkerLostError as error:
                self._workers.discard(worker)
                return f"its worker did not start ({error})"
        try:
            holes = find_holes(report["stdout"], self.config.processes, level is Isolation.FULL)
        except (KeyError, ValueError):
            holes = [f"did not run ({report.get('not_loaded') or report.get('stderr', '')[-300:]})"]
        if holes:
            self._workers.discard(worker)
            await worker.close()
            return f"a test program {', '.join(holes)}"
        self._idle.append(worker)
        return None
