# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trainer's side of a sandbox worker: starts the process, sends requests and handles its failure."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import subprocess
import tempfile
from typing import Any, Self

from marin_rl.rewards.sandbox import protocol
from marin_rl.rewards.sandbox.command import SCRATCH, worker_command, worker_environment
from marin_rl.rewards.sandbox.folders import remove
from marin_rl.rewards.sandbox.protocol import WorkerSpec

END_SECONDS = 5.0
"""Seconds to wait for a worker to exit by itself."""


logger = logging.getLogger(__name__)


class WorkerLostError(RuntimeError):
    """A worker did not answer; it has been killed."""

    def __init__(self, detail: str, began: bool):
        super().__init__(detail)
        self.began = began
        """Whether user code may have run."""


class WorkerProcess:
    """A running worker; handles one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, spec: WorkerSpec, source: bytes, own_scratch: str | None):
        self._process = process
        self._spec = spec
        self._source = source
        self._own_scratch = own_scratch
        self.is_loaded = False
        """Whether it has answered a request, so that its file is loaded."""
        self._is_answer_pending = False

    @classmethod
    async def start(cls, spec: WorkerSpec, source: bytes, bubblewrap: str | None) -> Self:
        """Start a worker.

        Args:
            spec: settings of the worker; `scratch` is filled in here.
            source: content of the user's file; empty for a worker that runs programs.
            bubblewrap: path of `bwrap`, or None to start the worker without it.
        """
        own_scratch = None if bubblewrap else tempfile.mkdtemp(prefix="marin_rl_calls_")
        spec = dataclasses.replace(spec, scratch=own_scratch or SCRATCH)
        process = await asyncio.create_subprocess_exec(
            *worker_command(spec, bubblewrap),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=worker_environment(spec.scratch),
            cwd=own_scratch or "/",
            # Ctrl-C in the terminal must not reach the worker: the trainer needs rewards to finish its step.
            start_new_session=True,
        )
        return cls(process, spec, source, own_scratch)

    @property
    def pid(self) -> int:
        """Id of the started process: bubblewrap's, or the worker's."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it can take a request: it is not known to have ended, and no answer is pending."""
        return self._process.returncode is None and not self._is_answer_pending

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            request: the request, as JSON values.
            seconds: time limit in seconds.

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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        await self.end()

    async def end(self) -> None:
        """Terminate the worker and all processes that it started, and remove its scratch folder."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is not None:
                break
            if self._own_scratch is None and number is signal.SIGTERM:
                # In namespaces all processes end with bubblewrap, which does not forward signals.
                continue
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await self._process.wait()
        if self._own_scratch is not None:
            error = await asyncio.to_thread(remove, self._own_scratch)
            if error is not None:
                logger.warning("sandbox: could not remove %s, remove it yourself: %s", self._own_scratch, error)

    async def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        size = protocol.length(await stdout.readexactly(protocol.HEADER_BYTES))
        return json.loads(await stdout.readexactly(size))

    async def _death_reason(self) -> str:
        assert self._process.stderr is not None
        stderr = (await self._process.stderr.read()).decode("utf-8", errors="replace").strip()
        return stderr[-1000:] or f"it exited with status {self._process.returncode}"
