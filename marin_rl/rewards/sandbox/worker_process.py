# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trainer's side of a sandbox worker: its process and requests, and the results and failures of calls.

The answers that calls write are untrusted: they are parsed and validated here.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import tempfile
from typing import Any, Self

import pydantic

from marin_rl.rewards.sandbox import protocol
from marin_rl.rewards.sandbox.config import SCRATCH, SandboxConfig, worker_command, worker_environment
from marin_rl.rewards.sandbox.folders import remove
from marin_rl.rewards.sandbox.functions import (
    EvaluateResult,
    RewardCallError,
    RewardFunctionError,
    check_metric_names,
    describe_invalid,
)
from marin_rl.rewards.sandbox.protocol import WorkerSpec
from marin_rl.types import RewardFailure

logger = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Seconds to wait for a worker to exit by itself."""


class WorkerLostError(RuntimeError):
    """A worker did not answer; it has been killed."""

    def __init__(self, detail: str, began: bool):
        super().__init__(detail)
        self.began = began
        """Whether user code may have run."""


class WorkerProcess:
    """A running worker; handles one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, spec: WorkerSpec, source: bytes):
        self._process = process
        self._spec = spec
        self._source = source
        self.is_loaded = False
        """Whether it has answered a request, so that its file is loaded."""
        self._is_answer_pending = False

    @classmethod
    async def start(cls, spec: WorkerSpec, source: bytes, bubblewrap: str | None) -> Self:
        """Start a worker; `scratch` of its settings is filled in here.

        `source` is the content of the user's file, empty for a worker that runs programs. A worker that has namespaces
        needs the path of `bubblewrap`.
        """
        scratch = SCRATCH if spec.has_namespaces else tempfile.mkdtemp(prefix="marin_rl_calls_")
        spec = dataclasses.replace(spec, scratch=scratch)
        try:
            process = await asyncio.create_subprocess_exec(
                *worker_command(spec, bubblewrap if spec.has_namespaces else None),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=worker_environment(scratch),
                cwd="/" if spec.has_namespaces else scratch,
                # Ctrl-C in the terminal must not reach the worker: the trainer needs rewards to finish its step.
                start_new_session=True,
            )
        except BaseException:
            if not spec.has_namespaces:
                remove(scratch)
            raise
        return cls(process, spec, source)

    @property
    def file(self) -> str | None:
        """The user's file; None if the worker runs programs."""
        return self._spec.file

    @property
    def pid(self) -> int:
        """Id of the started process: bubblewrap's, or the worker's."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it can take a request: it is not known to have ended, and no answer is pending."""
        return self._process.returncode is None and not self._is_answer_pending

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request of JSON values and return the answer.

        Raises:
            WorkerLostError: if the worker does not answer.
        """
        began = False
        self._is_answer_pending = True
        if not self.is_loaded:
            request = {**request, "source": self._source.decode("latin-1")}
        try:
            async with asyncio.timeout(seconds):
                stdin = self._process.stdin
                assert stdin is not None
                stdin.write(protocol.encode(request))
                await stdin.drain()
                began = (await self._read()) == {"began": True}
                answer = await self._read()
        except TimeoutError:
            await self.end()
            raise WorkerLostError(f"the worker did not answer within {seconds:g} s", began) from None
        except (OSError, asyncio.IncompleteReadError):
            # The worker is already exiting, and a signal would hide the reason.
            await self._wait_or_kill()
            raise WorkerLostError(f"the worker died: {await self._death_reason()}", began) from None
        except ValueError:
            await self.end()
            raise WorkerLostError(f"the worker died: {await self._death_reason()}", began) from None
        except BaseException:
            # Cancelled before the answer was read, so the next request would receive it. The flag stays set, because a
            # second cancellation can interrupt `end`.
            await self.end()
            raise
        self._is_answer_pending = False
        self.is_loaded = True
        for warning in answer.get("warnings", []):
            logger.warning("sandbox: %s", warning)
        return answer

    async def close(self) -> None:
        """Ask the worker to exit, and kill it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._wait_or_kill()

    async def _wait_or_kill(self) -> None:
        await self._wait()
        await self.end()

    async def end(self) -> None:
        """Terminate the worker and all processes that it started, and remove its scratch folder."""
        # In namespaces all processes end with bubblewrap, which does not forward SIGTERM.
        signals = [signal.SIGKILL] if self._spec.has_namespaces else [signal.SIGTERM, signal.SIGKILL]
        for number in signals:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
                await self._wait()
        if not self._spec.has_namespaces:
            scratch = self._spec.scratch
            error = await asyncio.to_thread(remove, scratch)
            if error is not None:
                logger.warning("sandbox: could not remove %s, remove it yourself: %s", scratch, error)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        size = protocol.length(await stdout.readexactly(protocol.HEADER_BYTES))
        return json.loads(await stdout.readexactly(size))

    async def _death_reason(self) -> str:
        assert self._process.stderr is not None
        stderr = (await self._process.stderr.read()).decode("utf-8", errors="replace").strip()
        return stderr[-1000:] or f"it exited with status {self._process.returncode}"


_LIMITS = {
    RewardFailure.TIMEOUT: "gave no answer within {0.wall_seconds:g} s; make it faster, or raise sandbox.wall_seconds",
    RewardFailure.CPU: "used over {0.cpu_seconds:g} s of CPU time; make it faster, or raise sandbox.cpu_seconds",
    RewardFailure.MEMORY: "requested over {0.memory_mb} MiB of memory; use less, or raise sandbox.memory_mb",
    RewardFailure.FILE_SIZE: "wrote over {0.file_mb} MiB to a file, or too much in all; raise sandbox.file_mb",
    RewardFailure.OUTPUT: "printed or returned over {0.output_kb} KiB; print less, or raise sandbox.output_kb",
    RewardFailure.PROCESSES: "started over {0.processes} processes; start fewer, or raise sandbox.processes",
    RewardFailure.THREADS: "started over {0.threads} threads; start fewer, or raise sandbox.threads",
}
_SIGNALS = {signal.SIGXCPU: RewardFailure.CPU, signal.SIGXFSZ: RewardFailure.FILE_SIZE}


def _exceeded(cause: RewardFailure, config: SandboxConfig) -> RewardCallError:
    return RewardCallError(cause, _LIMITS[cause].format(config))


def failure_of(report: dict[str, Any], config: SandboxConfig) -> RewardCallError | None:
    """Return the reason for which a call failed, or None if its process exited with status 0."""
    if report["violation"] is not None:
        return _exceeded(RewardFailure(report["violation"]), config)
    if report["status"] is None:
        return RewardCallError(RewardFailure.WORKER, "the forkserver of the loaded file died")
    code = os.waitstatus_to_exitcode(report["status"])
    stderr = report["stderr"][-500:]
    if code >= 0 and not report["confined"]:
        return RewardCallError(RewardFailure.WORKER, f"the call could not be confined and was not run: {stderr}")
    if code == 0:
        return None
    if code > 0:
        return RewardCallError(RewardFailure.EXITED, f"its process exited with status {code}: {stderr}")
    if -code in _SIGNALS:
        return _exceeded(_SIGNALS[signal.Signals(-code)], config)
    if -code == signal.SIGKILL and report["cpu"] >= config.cpu_seconds:
        return _exceeded(RewardFailure.CPU, config)
    known = {number.value: number.name for number in signal.Signals}
    return RewardCallError(RewardFailure.SIGNAL, f"terminated by {known.get(-code, f'signal {-code}')}")


def failure_of_function(function: object, error: RewardCallError) -> str:
    """Describe the failure of a function's call in a sentence. `function` is the name and file of the function.

    >>> failure_of_function("'f' of f.py", RewardCallError(RewardFailure.RAISED, "raised KeyError: 'k'"))
    "'f' of f.py raised KeyError: 'k'"
    """
    if error.cause in (*_LIMITS, RewardFailure.RAISED, RewardFailure.INVALID_ANSWER):
        return f"{function} {error.detail}"
    return f"{function} failed: {error.detail.rstrip(': ')}"


class _Answer(pydantic.BaseModel):
    """Answer of a call's process, as it writes it."""

    model_config = pydantic.ConfigDict(extra="forbid")

    results: list[EvaluateResult] | None = None
    raised: str | None = None
    invalid: str | None = None
    memory: bool = False


def validated(answer: str, count: int, config: SandboxConfig) -> list[EvaluateResult]:
    """Parse the untrusted answer of a call, which scored `count` rollouts.

    Raises:
        RewardCallError: if it does not hold `count` valid results.
    """
    if not answer:
        raise RewardCallError(RewardFailure.EXITED, "its process exited without an answer")
    try:
        parsed = _Answer.model_validate_json(answer)
    except pydantic.ValidationError as error:
        raise RewardCallError(
            RewardFailure.INVALID_ANSWER, f"sent the answer {answer[:200]!r}, an invalid {describe_invalid(error)}"
        ) from error
    if parsed.memory:
        raise _exceeded(RewardFailure.MEMORY, config)
    if parsed.raised is not None:
        raise RewardCallError(RewardFailure.RAISED, parsed.raised)
    if parsed.invalid is not None:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, parsed.invalid)
    if parsed.results is None or len(parsed.results) != count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"sent {answer[:200]!r} instead of {count} results")
    try:
        check_metric_names(parsed.results)
    except RewardFunctionError as error:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, str(error)) from error
    return parsed.results


_ANSWERS = pydantic.TypeAdapter(list[str])


def answers_of_calls(text: str, count: int) -> list[str]:
    """Parse the untrusted answers of a process that made several calls.

    `text` is a JSON list of `count` answers.

    Returns:
        The untrusted answer of each call that was made, in order.

    Raises:
        RewardCallError: if the text is not a list of at most `count` answers.
    """
    try:
        answers = _ANSWERS.validate_json(text)
    except pydantic.ValidationError as error:
        raise RewardCallError(
            RewardFailure.INVALID_ANSWER, f"sent {text[:200]!r} instead of a list of answers"
        ) from error
    if len(answers) > count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"sent {len(answers)} answers of {count} calls")
    return answers
