# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Graders: is this reply the right answer?"""

import abc
import contextlib
import dataclasses
import json
import logging
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Protocol, runtime_checkable

import draccus

from marin_rl.rewards.math_worker import GroundTruthError

logger = logging.getLogger(__name__)

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
_WORKER = Path(__file__).with_name("math_worker.py")


@runtime_checkable
class Grader(Protocol):
    """Compares replies with ground truths. Safe to use from any thread."""

    @property
    def blocks(self) -> bool:
        """Whether a grade may take long, and so belongs into a thread."""
        ...

    def check(self, answer: str) -> None:
        """Check that an answer can serve as ground truth.

        Raises:
            GroundTruthError: if not; the message names the answer.
        """
        ...

    def grade(self, reply: str, answer: str) -> float:
        """1 for a right reply, 0 for any other text.

        Raises:
            GroundTruthError: if the answer cannot serve as ground truth.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GraderConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses a grader by `type`."""

    @abc.abstractmethod
    def build(self) -> Grader | None:
        """Make the grader; None where replies are not compared with the answer at all."""


def exact_match(reply: str, answer: str) -> bool:
    r"""Whether the reply is the answer, character for character, white space around both aside.

    >>> exact_match(" 46\n", "46"), exact_match("046", "46")
    (True, False)
    """
    return reply.strip() == answer.strip()


@GraderConfig.register_subclass("exact")
@dataclasses.dataclass(frozen=True)
class ExactConfig(GraderConfig):
    """The reply must be the answer, white space around it aside."""

    ignore_case: bool = False
    """Whether `Paris` and `paris` are equal."""

    def build(self) -> "ExactGrader":
        """Make the grader."""
        return ExactGrader(self.ignore_case)


@dataclasses.dataclass(frozen=True)
class ExactGrader:
    """Grades with [`exact_match`][marin_rl.rewards.grading.exact_match]."""

    ignore_case: bool
    """Whether upper and lower case are equal."""

    @property
    def blocks(self) -> bool:
        """No: a comparison of two strings takes no time."""
        return False

    def check(self, answer: str) -> None:
        """Any answer will do, but an empty one.

        Raises:
            GroundTruthError: if it is empty.
        """
        if not answer.strip():
            raise GroundTruthError(f"the ground truth {answer!r} is empty; mend the answer column or drop the row")

    def grade(self, reply: str, answer: str) -> float:
        """1 where reply and answer are equal, else 0."""
        self.check(answer)
        if self.ignore_case:
            reply, answer = reply.casefold(), answer.casefold()
        return float(exact_match(reply, answer))


@GraderConfig.register_subclass("none")
@dataclasses.dataclass(frozen=True)
class NoGraderConfig(GraderConfig):
    """The reply is not compared with the answer; reward functions (`rewards`) judge it alone."""

    def build(self) -> None:
        """Nothing."""


@GraderConfig.register_subclass("math_verify")
@dataclasses.dataclass(frozen=True)
class MathVerifyConfig(GraderConfig):
    r"""The last expression of the reply must equal the answer mathematically (`0.5` is `\frac{1}{2}`)."""

    timeout: float = 5.0
    """Seconds of processor time for one reply; a reply that needs more counts as wrong."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"grader.timeout is {self.timeout}; it is a number of seconds above 0")

    def build(self) -> "MathVerifyGrader":
        """Make the grader; its process starts with the first reply that needs it."""
        return MathVerifyGrader(self.timeout)


class MathVerifyGrader:
    """Grades with `math_verify_match`, in a process of its own that is ended where a reply takes too long.

    A reply such as `9**9**9**9` keeps sympy busy, or out of memory, for ever, inside one C call that no
    signal handler interrupts: only ending a process helps. The process is kept between replies.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None
        self._stop: weakref.finalize | None = None

    @property
    def blocks(self) -> bool:
        """Yes: a reply may take all of its time limit."""
        return True

    def check(self, answer: str) -> None:
        """Check that math-verify can parse the answer.

        Raises:
            GroundTruthError: if it cannot.
        """
        if not _PLAIN_NUMBER.fullmatch(answer):
            self._ask({"answer": answer})

    def grade(self, reply: str, answer: str) -> float:
        """1 where reply and answer are mathematically equal, else 0.

        A reply that exceeds the time limit or the worker's memory is 0, and a warning in the log.

        Raises:
            GroundTruthError: if the answer cannot be parsed.
        """
        if _PLAIN_NUMBER.fullmatch(answer) and reply == answer:
            return 1.0
        return float(self._ask({"reply": reply, "answer": answer}))

    def _ask(self, request: dict[str, str]) -> bool:
        with self._lock:
            try:
                line = self._exchange(json.dumps(request))
            except BaseException:
                # Interrupted between question and answer: the next answer would be this one's.
                self.close()
                raise
            if not line:
                self.close()
        if not line:
            if "reply" not in request:
                raise GroundTruthError(
                    f"math_verify needs more than {self._timeout} s or too much memory for the ground truth "
                    f"{request['answer']!r}; mend it, or use `grader: {{type: exact}}`"
                )
            logger.warning("math_verify gave up on a reply, graded 0: %.200r", request["reply"])
            return False
        response = json.loads(line)
        if "ground_truth_error" in response:
            raise GroundTruthError(response["ground_truth_error"])
        return response["match"]

    def _exchange(self, request: str) -> str:
        if self._worker is not None and self._worker.poll() is not None:
            # It ended between two requests, so neither is to blame.
            self.close()
        worker = self._worker if self._worker is not None else self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(request + "\n")
        worker.stdin.flush()
        return worker.stdout.readline()

    def _start(self) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            # -P: the folder of the worker's file must not hide other modules.
            [sys.executable, "-P", str(_WORKER), str(self._timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # A Ctrl-C in the terminal is the trainer's business: it still needs grades to finish its step.
            start_new_session=True,
        )
        self._worker = worker
        self._stop = weakref.finalize(self, _end, worker)
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise RuntimeError(
                f"the math_verify process did not start (exit status {worker.wait()}); the reason is printed above. "
                "Check that `math-verify` is installed for " + sys.executable
            )
        return worker

    def close(self) -> None:
        """End the process; the next reply starts another."""
        if self._stop is not None:
            self._stop()
        self._worker = self._stop = None


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdout.close()
    # What was not read before it ended cannot be flushed.
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()
