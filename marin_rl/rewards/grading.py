# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Graders and regular expressions: compare a reply with the correct answer, check its format, extract parts of it."""

import abc
import contextlib
import dataclasses
import json
import logging
import math
import os
import queue
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import draccus

from marin_rl.config_fields import check_finite
from marin_rl.rewards.math_worker import GroundTruthError


def check_pattern(field: str, pattern: str, groups: int = 0) -> None:
    """Validate a regular expression from a config.

    Args:
        field: name of the config field, for the message.
        pattern: the regular expression, in Python's syntax.
        groups: minimum number of groups.

    Raises:
        ValueError: if it does not compile or has too few groups; the message names field and pattern.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field}: {pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < groups:
        raise ValueError(
            f"{field}: {pattern!r} has {compiled.groups} groups but needs {groups}; "
            "put parentheses around the part to extract"
        )


def without_thoughts(reply: str) -> str:
    """Return the part of a reply after its last `</think>`; the whole reply if it has none.

    >>> without_thoughts("<think>Which?</think> 42")
    ' 42'
    """
    return reply.rpartition("</think>")[2]


def graded_text(reply: str) -> str | None:
    """Return the part of a reply after its thoughts, or None if a `<think>` is not closed, as in a truncated reply.

    >>> graded_text("<think>Is it 41? No.</think> 42"), graded_text("<think>Is it 42?")
    (' 42', None)
    """
    text = without_thoughts(reply)
    return None if "<think>" in text else text


def extract_last(pattern: str, text: str) -> str | None:
    r"""Return group 1 of the last match of `pattern` in `text`, or None if there is no match.

    The last match counts, because a reply that corrects itself ends with the final answer.

    >>> extract_last(r"#### (-?\d+)", "first #### 41, no: #### 42")
    '42'
    """
    result = None
    for match in re.finditer(pattern, text):
        result = match.group(1)
    return result


@dataclasses.dataclass(frozen=True)
class FormatConfig:
    """Reward for the format of a reply, independent of its correctness."""

    regex: str
    """Regular expression that the whole reply must match; start it with `(?s)` to let `.` cross lines."""
    weight: float = 1.0
    """Reward for a reply that matches; other replies get 0."""

    def __post_init__(self) -> None:
        check_pattern("format.regex", self.regex)
        check_finite(self, "weight", name="format")

    def reward(self, reply: str) -> float:
        """Return the reward component `format` of a reply.

        >>> FormatConfig(regex=r"-?[0-9]+", weight=0.5).reward("46")
        0.5
        """
        return self.weight if re.fullmatch(self.regex, reply) else 0.0


logger = logging.getLogger(__name__)

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
_WORKER = Path(__file__).with_name("math_worker.py")


@runtime_checkable
class Grader(Protocol):
    """Compares replies with ground truths. Thread-safe."""

    blocks: ClassVar[bool]
    """Whether grading can take long and should run in a thread."""

    def check(self, answer: str) -> None:
        """Check that an answer is a usable ground truth.

        Raises:
            GroundTruthError: if it is not; the message names the answer.
        """
        ...

    def grade(self, reply: str, answer: str) -> float:
        """Return 1 for a correct reply, 0 for any other text.

        Args:
            reply: the reply without its thoughts.
            answer: the ground truth.

        Raises:
            GroundTruthError: if the answer is not a usable ground truth.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GraderConfig(draccus.ChoiceRegistry, abc.ABC):
    """Config of a grader, chosen by `type`."""

    @abc.abstractmethod
    def build(self) -> Grader | None:
        """Build the grader, or return None if replies are not compared with the answer."""


def exact_match(reply: str, answer: str) -> bool:
    r"""Return whether reply and answer are equal, ignoring leading and trailing whitespace.

    >>> exact_match(" 46\n", "46"), exact_match("046", "46")
    (True, False)
    """
    return reply.strip() == answer.strip()


@GraderConfig.register_subclass("exact")
@dataclasses.dataclass(frozen=True)
class ExactConfig(GraderConfig):
    """The reply must equal the answer, except for leading and trailing whitespace."""

    ignore_case: bool = False
    """Whether to ignore case, so that `Paris` equals `paris`."""

    # Comparing two strings is fast.
    blocks: ClassVar[bool] = False

    def build(self) -> "ExactConfig":
        """Return the config itself, which is the grader."""
        return self

    def check(self, answer: str) -> None:
        """Check that the answer is not empty."""
        if not answer.strip():
            raise GroundTruthError(f"the ground truth {answer!r} is empty; correct the answer column or drop the row")

    def grade(self, reply: str, answer: str) -> float:
        """Return 1 if the reply equals the answer, else 0."""
        self.check(answer)
        if self.ignore_case:
            reply, answer = reply.casefold(), answer.casefold()
        return float(exact_match(reply, answer))


@GraderConfig.register_subclass("none")
@dataclasses.dataclass(frozen=True)
class NoGraderConfig(GraderConfig):
    """The reply is not compared with the answer; only the reward components in `rewards` score it."""

    def build(self) -> None:
        """Return None: there is no grader."""


@GraderConfig.register_subclass("math_verify")
@dataclasses.dataclass(frozen=True)
class MathVerifyConfig(GraderConfig):
    r"""The reply's result must equal the answer mathematically (`0.5` is `\frac{1}{2}`).

    The result is the last `\boxed{X}` or `final answer is X`; else the last X after the word `answer`, with a colon or
    without; else the last LaTeX expression or number.
    """

    timeout: float = 5.0
    """Seconds of CPU time for one reply; a reply that needs more counts as wrong."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"grader.timeout must be a finite number of seconds above 0, got {self.timeout}")

    def build(self) -> "MathVerifyGrader":
        """Build the grader; its processes start with the first replies that need them."""
        return MathVerifyGrader(self.timeout)


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
