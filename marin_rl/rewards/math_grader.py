# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Grading of mathematical answers by math-verify, in processes with a time limit."""

import contextlib
import json
import logging
import os
import queue
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar

from marin_rl.rewards.math_worker import GroundTruthError

logger = logging.getLogger(__name__)

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
_WORKER = Path(__file__).with_name("math_worker.py")
MATH_WORKERS = max(2, min(8, os.cpu_count() or 1))
"""Number of processes that grade at the same time."""


class MathVerifyGrader:
    """Grades with `math_verify_match` in separate processes, which are killed if a reply takes too long.

    A reply such as `9**9**9**9` makes sympy compute without end or run out of memory, inside one C call that no signal
    handler interrupts. Only killing the process helps. The processes are reused for later replies.
    """

    # A reply can take its whole time limit.
    blocks: ClassVar[bool] = True

    def __init__(self, timeout: float):
        self._timeout = timeout
        # Last in, first out: a further process starts only if all others are busy.
        self._idle: queue.LifoQueue[_MathWorker] = queue.LifoQueue()
        for _ in range(MATH_WORKERS):
            self._idle.put(_MathWorker(timeout))

    def check(self, answer: str) -> None:
        """Check that math-verify can parse the answer."""
        if not _PLAIN_NUMBER.fullmatch(answer):
            self._ask({"answer": answer})

    def grade(self, reply: str, answer: str) -> float:
        """Return 1 if reply and answer are mathematically equal, else 0.

        A reply that exceeds the time limit or the worker's memory scores 0 and is logged as a warning.
        """
        if _PLAIN_NUMBER.fullmatch(answer) and reply == answer:
            return 1.0
        return float(self._ask({"reply": reply, "answer": answer}))

    def _ask(self, request: dict[str, str]) -> bool:
        worker = self._idle.get()
        try:
            line = worker.ask(json.dumps(request))
        finally:
            self._idle.put(worker)
        if not line:
            if "reply" not in request:
                raise GroundTruthError(
                    f"math_verify needs more than {self._timeout} s or too much memory for the ground truth "
                    f"{request['answer']!r}; correct it, or use `grader: {{type: exact}}`"
                )
            logger.warning("math_verify gave up on a reply, graded 0: %.200r", request["reply"])
            return False
        response = json.loads(line)
        if "ground_truth_error" in response:
            raise GroundTruthError(response["ground_truth_error"])
        return response["match"]


class _MathWorker:
    """A process that grades, which starts with its first request. Used by one thread at a time."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._stop: weakref.finalize | None = None

    def ask(self, request: str) -> str:
        """Send a request and return the answer; empty if the process ended."""
        try:
            line = self._exchange(request)
        except BaseException:
            # Interrupted before the answer was read: the next request would receive it.
            self._close()
            raise
        if not line:
            self._close()
        return line

    def _exchange(self, request: str) -> str:
        if self._process is not None and self._process.poll() is not None:
            # The process ended between two requests, so neither request is the cause.
            self._close()
        process = self._process if self._process is not None else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request + "\n")
        process.stdin.flush()
        return process.stdout.readline()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            # -P keeps the folder of the worker's file off the Python path, where it could shadow other modules.
            [sys.executable, "-P", str(_WORKER), str(self._timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # Ctrl-C in the terminal must not reach the worker: the trainer needs grades to finish its step.
            start_new_session=True,
        )
        self._process = process
        self._stop = weakref.finalize(self, _end, process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(
                f"the math_verify process did not start (exit status {process.wait()}); the error is printed above. "
                "Check that `math-verify` is installed for " + sys.executable
            )
        return process

    def _close(self) -> None:
        """Kill the process; the next request starts another."""
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdout.close()
    # Closing flushes requests that the process did not read before it was killed.
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()
