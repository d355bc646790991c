# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer's end of a worker: it starts one, asks it, and does without it when it fails."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import subprocess
import tempfile
from typing import Any, Self

from marin_rl.rewards.sandbox import frames
from marin_rl.rewards.sandbox.command import SCRATCH, worker_command, worker_environment
from marin_rl.rewards.sandbox.folders import remove
from marin_rl.rewards.sandbox.spec import WorkerSpec

END_SECONDS = 5.0
"""Seconds that a worker gets to end by itself."""


logger = logging.getLogger(__name__)


class WorkerLostError(RuntimeError):
    """A worker that did not answer; it has been ended."""

    def __init__(self, detail: str, began: bool):
        super().__init__(detail)
        self.began = began
        """Whether the request reached user code."""


class WorkerProcess:
    """A running worker. It takes one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, spec: WorkerSpec, source: bytes, own_scratch: str | None):
        self._process = process
        self._spec = spec
        self._source = source
        self._own_scratch = own_scratch
        self.is_loaded = False
        """Whether it has answered a request, so that its file is loaded."""
        self._owes_answer = False

    @classmethod
    async def start(cls, spec: WorkerSpec, source: bytes, bubblewrap: str | None) -> Self:
        """Start a worker.

        Args:
            spec: what it is told; its `scratch` is filled in.
            source: content of the user's file; empty for a worker that runs programs.
            bubblewrap: path of `bwrap`, or None to start it without.
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
            # A Ctrl-C in the terminal is the trainer's business: it still needs rewards to finish its step.
            start_new_session=True,
        )
        return cls(process, spec, source, own_scratch)

    @property
    def pid(self) -> int:
        """The process that was started: bubblewrap's, or the worker's own."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it can be asked: it has not ended, as far as is known, and owes no answer."""
        return self._process.returncode is None and not self._owes_answer

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer to a request.

        Args:
            request: what to do.
            seconds: how long to wait for it.

        Raises:
            WorkerLostError: if it does not answer.
        """
        began = False
        self._owes_answer = True
        if not self.is_loaded:
            request = {**request, "source": self._source.decode("latin-1")}
        try:
            async with asyncio.timeout(seconds):
                stdin = self._process.stdin
                assert stdin is not None
                stdin.write(frames.encode(request))
                await stdin.drain()
                began = (await self._read()) == {"began": True}
                answer = await self._read()
        except TimeoutError:
            await self.end()
            raise WorkerLostError(f"the worker did not answer within {seconds:g} s", began) from None
        except (OSError, asyncio.IncompleteReadError):
            # Its end is already on the way, and a signal to it now would hide how it came.
            await self._let_end()
            raise WorkerLostError(f"the worker died: {await self._last_words()}", began) from None
        except ValueError:
            await self.end()
            raise WorkerLostError(f"the worker died: {await self._last_words()}", began) from None
        except BaseException:
            # Cancelled between question and answer: the next answer would be this one's. A second cancellation can
            # come before it has ended.
            await self.end()
            raise
        self._owes_answer = False
        self.is_loaded = True
        for warning in answer.get("warnings", []):
            logger.warning("sandbox: %s", warning)
        return answer

    async def close(self) -> None:
        """Let it end, and end it where it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._let_end()

    async def _let_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        await self.end()

    async def end(self) -> None:
        """End it and all that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is not None:
                break
            if self._own_scratch is None and number is signal.SIGTERM:
                # In namespaces everything ends with the process that was started, which passes no signal on.
                continue
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await self._process.wait()
        if self._own_scratch is not None:
            why_not = await asyncio.to_thread(remove, self._own_scratch)
            if why_not is not None:
                logger.warning("sandbox: remove %s yourself: %s", self._own_scratch, why_not)

    async def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        size = frames.length(await stdout.readexactly(frames.HEADER_BYTES))
        return json.loads(await stdout.readexactly(size))

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        words = (await self._process.stderr.read()).decode("utf-8", errors="replace").strip()
        return words[-1000:] or f"it ended with status {self._process.returncode}"
