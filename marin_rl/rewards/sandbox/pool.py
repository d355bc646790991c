# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sandbox as the trainer sees it: a pool of warm workers for user code and model-written programs.

```
trainer ── bubblewrap ── worker ── forkserver ── one child a call
```

The worker (trusted, never runs user code) enforces time, output, processes and threads. A process of its own loads the
user's file, forks the forkserver and is ended, with every thread and process that the file started. The forkserver is
stopped between calls. The child runs one call under the kernel's limits and ends. Answers travel as JSON and are
validated here.
"""

import asyncio
import collections
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pydantic

from marin_rl.errors import UserError
from marin_rl.rewards.failures import RewardCallError, RewardFailure
from marin_rl.rewards.functions import (
    EvaluateResult,
    RewardFunctionError,
    RewardMode,
    RewardRequest,
    check_metric_names,
)
from marin_rl.rewards.sandbox.command import hidden_path, python_path, readable_paths
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.failure_reasons import failure_of
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.landlock import OLDEST_VERSION, landlock_version
from marin_rl.rewards.sandbox.seccomp import seccomp_is_known
from marin_rl.rewards.sandbox.self_test import SelfTest
from marin_rl.rewards.sandbox.spec import WorkerSpec
from marin_rl.rewards.sandbox.worker_process import WorkerLostError, WorkerProcess

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""How long after its own deadline a worker is waited for."""

ATTEMPTS = 3
"""How often a call is given to a worker that dies before it begins with it."""


class IsolationError(UserError):
    """A machine that offers less isolation than is required, or a use of the sandbox before it was started."""


class UserFileError(ValueError):
    """A user's file that cannot be loaded; the message names it."""


@dataclasses.dataclass(frozen=True)
class UserFunction:
    """A reward function by its place."""

    file: str
    """The Python file, absolute."""
    name: str
    """The function's name in it."""


class FunctionDescription(pydantic.BaseModel):
    """What a loaded file says about one of its reward functions."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    mode: RewardMode
    """What one call judges."""
    required: tuple[str, ...]
    """Options that it cannot do without."""


@dataclasses.dataclass(frozen=True)
class PythonResult:
    """How a model-written program ended."""

    stdout: str
    """What it printed, up to `output_kb`."""
    stderr: str
    """What it wrote to stderr, up to `output_kb`."""
    loss: RewardCallError | None
    """Why it ended before its time or with another status than 0; None where it ended well."""
    seconds: float
    """Wall-clock time from its start to its end."""


class _Answer(pydantic.BaseModel):
    """What a call's process writes."""

    model_config = pydantic.ConfigDict(extra="forbid")

    results: list[EvaluateResult] | None = None
    raised: str | None = None
    memory: bool = False


class Sandbox:
    """A pool of worker processes. Used from one event loop; `start` it first and `close` it at the end."""

    def __init__(self, config: SandboxConfig, strongest: Isolation = Isolation.FULL):
        """A sandbox that is not started yet.

        Args:
            config: limits, number of workers, and the isolation that is required.
            strongest: the strongest isolation to try; less than full is for tests of what other machines offer.
        """
        self.config = config
        self.losses: collections.Counter[RewardFailure] = collections.Counter()
        """Calls without an answer so far, by cause."""
        self._strongest = strongest
        self._isolation: Isolation | None = None
        self._missing: list[str] = []
        self._bubblewrap = shutil.which("bwrap")
        self._landlock = landlock_version()
        self._slots = asyncio.Semaphore(config.workers)
        self._idle: list[tuple[str | None, WorkerProcess]] = []
        self._workers: set[WorkerProcess] = set()
        self._starting = 0
        self._sources: dict[str, bytes] = {}

    async def __aenter__(self) -> Self:
        """Start it."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def start(self) -> None:
        """Find out by trying which isolation the machine offers, and say so in the log.

        Raises:
            IsolationError: if that is less than `require`.
        """
        levels = (Isolation.FULL, Isolation.PARTIAL, Isolation.NONE)
        for level in [level for level in levels if level.rank <= self._strongest.rank]:
            missing = await self._try(level)
            if missing is None:
                self._isolation = level
                break
            self._missing.append(f"{level.value} isolation: {missing}")
        if self.isolation.rank < self.config.require.rank:
            await self.close()
            raise IsolationError(
                f"sandbox.require is {self.config.require.value}, but here isolation is {self.isolation.value}. "
                f"{'; '.join(self._missing)}. Install bubblewrap, or set sandbox.require={self.isolation.value} if the "
                "code that will run is trusted that far"
            )
        log = logger.warning if self.isolation is Isolation.NONE else logger.info
        log("%s", self.describe())

    @property
    def isolation(self) -> Isolation:
        """The isolation in force.

        Raises:
            IsolationError: if the sandbox is not started.
        """
        if self._isolation is None:
            raise IsolationError("the sandbox is not started; await its start() first")
        return self._isolation

    @property
    def worker_pids(self) -> list[int]:
        """The processes that the pool has started and not ended."""
        return [worker.pid for worker in self._workers]

    def describe(self) -> str:
        """Which isolation is in force, and what the machine lacks for more, in one line."""
        force = {
            Isolation.FULL: "bubblewrap, seccomp"
            + (f", Landlock {self._landlock}" if self._landlock >= OLDEST_VERSION else ""),
            Isolation.PARTIAL: f"Landlock {self._landlock}, seccomp",
            Isolation.NONE: "nothing keeps user code apart from this machine",
        }[self.isolation]
        missing = f"; not in force: {'; '.join(self._missing)}" if self._missing else ""
        return f"sandbox: isolation {self.isolation.value} ({force}, limits on every call){missing}"

    async def functions(self, file: str) -> dict[str, FunctionDescription]:
        """The reward functions of a user's file, which a worker loads.

        Args:
            file: the Python file, absolute.

        Raises:
            UserFileError: if it cannot be loaded.
        """
        try:
            answer = await self._ask(file, {"kind": "load"})
            if "not_loaded" in answer:
                raise UserFileError(f"{file} cannot be loaded: {answer['not_loaded']}")
            return {
                name: FunctionDescription.model_validate(found, strict=False)
                for name, found in answer["loaded"].items()
            }
        except (RewardCallError, pydantic.ValidationError) as error:
            raise UserFileError(f"{file} cannot be loaded: {error}") from error

    async def call(
        self, function: UserFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
    ) -> list[EvaluateResult]:
        """Judge rollouts with a user's function.

        Args:
            function: what judges them.
            requests: the rollouts that it is given at once; one where it is pointwise.
            options: further keywords for it; JSON values.

        Returns:
            One result for each request, in their order.

        Raises:
            RewardCallError: if it brought no answer; the loss is counted.
        """
        try:
            return await self._call(function, requests, options)
        except RewardCallError as error:
            self.losses[error.cause] += 1
            raise

    async def run_python(self, code: str, stdin: str = "") -> PythonResult:
        """Run a program that a model wrote, as `python main.py` would.

        Args:
            code: the program.
            stdin: what it can read.

        Returns:
            What it printed and how it ended. What is printed is the program's own claim: it decides nothing.

        Raises:
            RewardCallError: if the sandbox itself failed; the loss is counted.
        """
        try:
            report = await self._ask(None, {"kind": "python", "code": code, "stdin": stdin})
        except RewardCallError as error:
            self.losses[error.cause] += 1
            raise
        loss = failure_of(report, self.config.cpu_seconds)
        return PythonResult(report["stdout"], report["stderr"], loss, report["seconds"])

    async def close(self) -> None:
        """End every process that the pool has started."""
        workers, self._workers = self._workers, set()
        self._idle.clear()
        await asyncio.gather(*(worker.close() for worker in workers))

    async def _call(
        self, function: UserFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
    ) -> list[EvaluateResult]:
        report = await self._ask(
            function.file,
            {
                "kind": "call",
                "function": function.name,
                "requests": [dataclasses.asdict(request) for request in requests],
                "options": dict(options),
            },
        )
        if "not_loaded" in report:
            raise RewardCallError(RewardFailure.WORKER, f"{function.file} cannot be loaded: {report['not_loaded']}")
        for stream in ("stdout", "stderr"):
            if report[stream]:
                logger.debug("%s wrote to %s: %s", function.name, stream, report[stream])
        loss = failure_of(report, self.config.cpu_seconds)
        if loss is not None:
            raise loss
        return _validated(report["answer"], len(requests))

    async def _ask(self, file: str | None, request: dict[str, Any]) -> dict[str, Any]:
        async with self._slots:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    worker = await self._take(file)
                except OSError as error:
                    raise RewardCallError(RewardFailure.WORKER, f"no worker could be started: {error}") from error
                try:
                    return await worker.ask(request, self._seconds(worker))
                except WorkerLostError as error:
                    if error.began or attempt == ATTEMPTS:
                        raise RewardCallError(RewardFailure.WORKER, str(error)) from error
                finally:
                    if worker.is_usable:
                        self._idle.append((file, worker))
                    else:
                        self._workers.discard(worker)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _seconds(self, worker: WorkerProcess) -> float:
        start = 0.0 if worker.is_loaded else self.config.start_seconds
        return start + self.config.wall_seconds + GRACE_SECONDS

    async def _take(self, file: str | None) -> WorkerProcess:
        for index, (loaded, worker) in enumerate(self._idle):
            if loaded == file:
                del self._idle[index]
                return worker
        # Counted before anything is awaited: calls that come meanwhile must see it.
        self._starting += 1
        try:
            if self._idle and len(self._workers) + self._starting > self.config.workers:
                # The one that has waited longest.
                _, oldest = self._idle.pop(0)
                self._workers.discard(oldest)
                await oldest.close()
            return await self._start_worker(file, self.isolation)
        finally:
            self._starting -= 1

    async def _start_worker(self, file: str | None, level: Isolation) -> WorkerProcess:
        has_namespaces = level is Isolation.FULL
        spec = WorkerSpec(
            file=file,
            scratch="",
            read=readable_paths(file, self.config.read_paths if file is not None else ()),
            python_path=python_path(file, self.config.read_paths if file is not None else ()),
            hidden_path=hidden_path(),
            has_namespaces=has_namespaces,
            landlock=self._landlock if level is not Isolation.NONE and self._landlock >= OLDEST_VERSION else 0,
            seccomp=level is not Isolation.NONE,
            start_seconds=float(self.config.start_seconds),
            limits=self.config.limits(),
        )
        source = b"" if file is None else self._source(file)
        worker = await WorkerProcess.start(spec, source, self._bubblewrap if has_namespaces else None)
        self._workers.add(worker)
        return worker

    def _source(self, file: str) -> bytes:
        """The content of a user's file when it was first loaded: all calls of a run use one version of it."""
        if file not in self._sources:
            self._sources[file] = Path(file).read_bytes()
        return self._sources[file]

    async def _try(self, level: Isolation) -> str | None:
        """What the machine lacks for a level; None where it was seen to hold."""
        lacking = self._lacking(level)
        if lacking is not None or level is Isolation.NONE:
            return lacking
        with tempfile.TemporaryDirectory(prefix="marin_rl_probe_") as folder:
            secret = Path(folder) / "outside"
            secret.write_text("readable", encoding="utf-8")
            probe = SelfTest(str(secret), self.config.processes, level is Isolation.FULL)
            worker = await self._start_worker(None, level)
            request = {"kind": "python", "code": probe.program, "stdin": ""}
            try:
                report = await worker.ask(request, self._seconds(worker))
            except WorkerLostError as error:
                self._workers.discard(worker)
                return f"it could not be started ({error})"
            holes = _holes(probe, report)
        if holes:
            self._workers.discard(worker)
            await worker.close()
            return f"a program in it {', '.join(holes)}"
        self._idle.append((None, worker))
        return None

    def _lacking(self, level: Isolation) -> str | None:
        if level is Isolation.NONE:
            return None
        if not seccomp_is_known():
            return f"seccomp is not known for {os.uname().sysname} on {os.uname().machine}"
        if level is Isolation.FULL and self._bubblewrap is None:
            return "bubblewrap (bwrap) is not installed"
        if level is Isolation.PARTIAL and self._landlock < OLDEST_VERSION:
            return f"the kernel offers Landlock {self._landlock}, and {OLDEST_VERSION} is needed"
        return None


def _holes(probe: SelfTest, report: Mapping[str, Any]) -> list[str]:
    try:
        return probe.holes(report["stdout"])
    except (KeyError, ValueError):
        return [f"did not run ({report.get('not_loaded') or report.get('stderr', '')[-300:]})"]


def _validated(answer: str, count: int) -> list[EvaluateResult]:
    if not answer:
        raise RewardCallError(RewardFailure.EXITED, "it ended its process without an answer")
    try:
        found = _Answer.model_validate_json(answer)
    except pydantic.ValidationError as error:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"{answer[:200]!r} is no answer: {error}") from error
    if found.memory:
        raise RewardCallError(RewardFailure.MEMORY, "more memory than sandbox.memory_mb")
    if found.raised is not None:
        raise RewardCallError(RewardFailure.RAISED, found.raised)
    if found.results is None or len(found.results) != count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"{answer[:200]!r} does not hold {count} results")
    try:
        check_metric_names(found.results)
    except RewardFunctionError as error:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, str(error)) from error
    return found.results
