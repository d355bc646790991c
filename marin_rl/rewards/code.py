# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward for model-written programs: runs them against tests that they cannot see.

The program runs alone. It receives input, or calls of its functions, and sends output, or return values as JSON; both
are compared here with the expected results, which never enter its process. Nothing that it sends is evaluated or
called: a result that is not of the protocol fails its test, and the work of a comparison is limited by the size of the
expected result. Printing "all passed", exiting with status 0, returning an object that is equal to everything, or
inspecting the interpreter's frames therefore gains nothing.
"""

import ast
import asyncio
import collections
import dataclasses
import enum
import functools
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic

from marin_rl.rewards import code_harness
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component_name
from marin_rl.rewards.reply_text import graded_text
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError, RewardRequest
from marin_rl.rewards.sandbox.pool import PythonResult, Sandbox
from marin_rl.types import RewardFailure, Task
from marin_rl.utils.settings.checks import check_fields

_HARNESS = Path(code_harness.__file__).read_text(encoding="utf-8")
MAX_NAMED = 20
"""Maximum number of tasks with invalid tests that an error names."""


class CodeTestsError(ValueError):
    """The tests of a task are invalid; the message names them and the remedy."""


class _Test(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


def _check_call(call: str) -> str:
    try:
        tree = ast.parse(call, mode="eval")
        compile(tree, "call.py", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{call[:200]!r} is not a Python expression: {error}") from error
    if not any(isinstance(node, ast.Call) for node in ast.walk(tree)):
        raise ValueError(f"{call[:200]!r} calls no function")
    return call


class Call(_Test):
    """Call of a function of the code, and the value that it must return."""

    call: Annotated[str, pydantic.AfterValidator(_check_call)]
    """Python expression that is evaluated after the code: `add(2, 3)`, `Solution().add((2, 3))` or `sorted(f({1}))`."""
    returns: Any
    """The expected value: JSON. A list equals a list or a tuple."""


class StdinCase(_Test):
    """Input and expected output of the whole program."""

    stdin: str
    """Standard input."""
    stdout: str
    """Expected standard output. Whitespace at the end of lines and empty lines at the end are ignored."""


class CodeTests(_Test):
    """Tests of one task, stored as JSON in its ground truth."""

    calls: tuple[Call, ...] = ()
    """Calls of functions."""
    cases: tuple[StdinCase, ...] = ()
    """Inputs and expected outputs of the whole program."""
    tolerance: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    """Relative or absolute error up to which floats are equal. By default returned floats are compared with a relative
    error of 1e-9, or an absolute one of 1e-12 where 0 is expected, and printed numbers as text."""


class CodeScore(enum.StrEnum):
    """Score of a reply."""

    ALL = "all"
    """1 if every test passes, else 0."""
    SHARE = "share"
    """Fraction of tests that pass."""


@RewardComponentConfig.register_subclass("code")
@dataclasses.dataclass(frozen=True)
class CodeRewardConfig(RewardComponentConfig):
    """Runs the reply's Python code against the tests in the ground truth: JSON with `calls`, `cases` or both."""

    name: str = "code"
    """Name under which its scores are logged."""
    weight: float = 1.0
    """Factor of its scores."""
    score: CodeScore = CodeScore.ALL
    """`all`: 1 if every test passes, else 0. `share`: the fraction of tests that pass."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_component_name(self.name)

    def build(self, sandbox: Sandbox) -> "CodeReward":
        """Build the component."""
        return CodeReward(self, sandbox)

    def check_answers(self, tasks: Iterable[Task]) -> None:
        """Check that the answers are tests.

        Raises:
            RewardConfigError: if any are not; the message names a task and its test, and up to 19 further tasks.
        """
        invalid = []
        for task in tasks:
            try:
                parse_tests(task.answer)
            except CodeTestsError as error:
                invalid.append((task, error))
            if len(invalid) == MAX_NAMED:
                break
        if invalid:
            task, error = invalid[0]
            question = task.messages[-1]["content"] if task.messages else ""
            others = ", ".join(repr(other.id) for other, _ in invalid[1:])
            raise RewardConfigError(
                f"reward {self.name!r}: task {task.id!r} of environment {task.environment!r}, with the question "
                f"{question[:100]!r}: {error}" + (f". Other tasks with invalid tests: {others}" if others else "")
            ) from error


class CodeReward:
    """Scores the code in the policy's last message."""

    def __init__(self, config: CodeRewardConfig, sandbox: Sandbox):
        self.name = config.name
        self.weight = config.weight
        self.scope: RewardScope | None = RewardScope.POINTWISE
        self.waits_for_group = False
        self._score = config.score
        self._sandbox = sandbox

    async def check(self) -> None:
        """Check that the sandbox can run programs."""
        try:
            result = await self._sandbox.run_python("print(6 * 7)")
        except RewardCallError as error:
            raise RewardConfigError(f"the sandbox cannot run programs: {error}") from error
        if result.stdout != "42\n":
            raise RewardConfigError(f"the sandbox cannot run programs: {result.failure}, {result.stderr}")

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult | RewardCallError]:
        """Return one result per rollout; rollouts with invalid tests have no valid score."""
        return list(await asyncio.gather(*(self._score_rollout(request) for request in requests)))

    async def close(self) -> None:
        """Do nothing: the caller closes the sandbox."""

    async def _score_rollout(self, request: RewardRequest) -> EvaluateResult | RewardCallError:
        try:
            tests = parse_tests(request.ground_truth)
        except CodeTestsError as error:
            return EvaluateResult(is_score_valid=False, error=f"task {request.task_id}: {error}")
        answer = graded_text(request.last_reply)
        try:
            outcomes = await run_tests(self._sandbox, answer or "", tests)
        except RewardCallError as error:
            return error
        counts = collections.Counter(outcomes)
        passed, unanswered = (
            counts[outcome] / len(outcomes) for outcome in (ProgramOutcome.PASSED, ProgramOutcome.UNANSWERED)
        )
        return EvaluateResult(
            score=passed if self._score is CodeScore.SHARE else float(passed == 1.0),
            metrics={"passed_share": passed, "unanswered_share": unanswered},
            reason=f"{counts[ProgramOutcome.PASSED]} of {len(outcomes)} tests passed, "
            f"{counts[ProgramOutcome.UNANSWERED]} without a result",
        )


class ProgramOutcome(enum.Enum):
    """Outcome of a test."""

    PASSED = enum.auto()
    """The result is the expected one."""
    WRONG = enum.auto()
    """The result is another."""
    UNANSWERED = enum.auto()
    """There is no result: no code was found, it raised an error or exceeded a limit, or it sent something else."""


# The rollouts of a group use the same tests, which can have megabytes.
@functools.lru_cache(maxsize=16)
def parse_tests(ground_truth: str) -> CodeTests:
    """Parse the tests in a ground truth.

    Raises:
        CodeTestsError: if there are no tests, or any is invalid.
    """
    try:
        tests = CodeTests.model_validate_json(ground_truth)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise CodeTestsError(
            f"the ground truth {ground_truth[:200]!r} holds no valid tests; use JSON with `calls`, such as "
            """{"call": "f(2)", "returns": 4} for `assert f(2) == 4`, or `cases`, with stdin and stdout: """
            f"{where}{first['msg']}"
        ) from error
    if not tests.calls and not tests.cases:
        raise CodeTestsError(f"the ground truth {ground_truth[:200]!r} has no calls or cases; add some")
    return tests


async def run_tests(sandbox: Sandbox, reply: str, tests: CodeTests) -> list[ProgramOutcome]:
    """Run the tests of the program in a reply without thoughts. Outcomes are first those of calls, then of cases.

    Raises:
        RewardCallError: if the sandbox itself failed.
    """
    calls, cases = await asyncio.gather(_run_calls(sandbox, reply, tests), _run_cases(sandbox, reply, tests))
    return [*calls, *cases]


async def _run(sandbox: Sandbox, code: str, stdin: str = "") -> PythonResult:
    """Run a program; raise RewardCallError if the sandbox itself failed."""
    # A program that lost its worker is repeated, because the machine can be the reason. If that happens again, and an
    # empty program runs afterwards, the program is the reason; otherwise it could avoid a score of 0.
    result = await _attempt(sandbox, code, stdin)
    if _lost_worker(result):
        result = await _attempt(sandbox, code, stdin)
    if not _lost_worker(result):
        return result
    if (failure := (await _attempt(sandbox, "", "")).failure) is not None:
        raise failure
    # How much of the output was read depends on chance.
    return dataclasses.replace(result, stdout="")


async def _attempt(sandbox: Sandbox, code: str, stdin: str) -> PythonResult:
    try:
        return await sandbox.run_python(code, stdin)
    except RewardCallError as error:
        return PythonResult("", "", error, 0.0)


def _lost_worker(result: PythonResult) -> bool:
    return result.failure is not None and result.failure.cause is RewardFailure.WORKER


async def _run_calls(sandbox: Sandbox, reply: str, tests: CodeTests) -> list[ProgramOutcome]:
    if not tests.calls:
        return []
    calls = json.dumps([test.call for test in tests.calls])
    # The literals are ASCII: text of a reply can contain characters that UTF-8 cannot encode.
    result = await _run(sandbox, f"{_HARNESS}\nrun_calls({reply!a}, {calls!a})")
    # In a thread, because comparing a megabyte can take a second.
    return await asyncio.to_thread(_outcomes, tests, result.stdout)


def _outcomes(tests: CodeTests, output: str) -> list[ProgramOutcome]:
    """Compare the untrusted output of the process of the calls: a line for each call, until the process ended."""
    # The last line may be incomplete. Lines in excess do not belong to any call.
    lines = output.split("\n")[:-1]
    if len(lines) > len(tests.calls):
        return [ProgramOutcome.UNANSWERED] * len(tests.calls)
    answered = zip(tests.calls, lines, strict=False)
    outcomes = [_outcome(test, line, number, tests.tolerance) for number, (test, line) in enumerate(answered)]
    return outcomes + [ProgramOutcome.UNANSWERED] * (len(tests.calls) - len(outcomes))


def _outcome(test: Call, line: str, number: int, tolerance: float | None) -> ProgramOutcome:
    """Compare an untrusted line: JSON of the number of the call and its value, if it has one."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return ProgramOutcome.UNANSWERED
    if not isinstance(answer, list) or len(answer) != 2 or type(answer[0]) is not int or answer[0] != number:
        return ProgramOutcome.UNANSWERED
    return ProgramOutcome.PASSED if same_value(test.returns, answer[1], tolerance) else ProgramOutcome.WRONG


async def _run_cases(sandbox: Sandbox, reply: str, tests: CodeTests) -> list[ProgramOutcome]:
    if not tests.cases:
        return []
    chosen = await _run(sandbox, f"{_HARNESS}\nprint_program({reply!a})")
    code = None if chosen.failure else json.loads(chosen.stdout)
    if code is None:
        return [ProgramOutcome.UNANSWERED] * len(tests.cases)

    async def run(case: StdinCase) -> ProgramOutcome:
        result = await _run(sandbox, code, case.stdin)
        if result.failure is not None:
            return ProgramOutcome.UNANSWERED
        is_same = await asyncio.to_thread(same_output, case.stdout, result.stdout, tests.tolerance)
        return ProgramOutcome.PASSED if is_same else ProgramOutcome.WRONG

    return await asyncio.gather(*map(run, tests.cases))


def same_value(expected: Any, answer: Any, tolerance: float | None = None) -> bool:
    """Return whether a JSON value that a program returned is the expected one.

    `answer` is untrusted, as decoded JSON. `tolerance` is the maximum relative or absolute error where a float is
    expected. None is a relative error of 1e-9, or an absolute one of 1e-12 where 0 is expected, which has no relative
    error.

    >>> same_value([0.3, 1], [0.1 + 0.2, 1.0]), same_value(1, True), same_value(1.0, 1.1, tolerance=0.1)
    (True, False, True)
    """
    if expected is None or isinstance(expected, bool):
        return answer is expected
    if isinstance(expected, str):
        return isinstance(answer, str) and answer == expected
    if isinstance(expected, int | float):
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        return is_number and _same_number(expected, answer, tolerance)
    if isinstance(expected, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(expected)
            and all(same_value(*pair, tolerance) for pair in zip(expected, answer, strict=True))
        )
    return (
        isinstance(answer, dict)
        and answer.keys() == expected.keys()
        and all(same_value(item, answer[key], tolerance) for key, item in expected.items())
    )


def _same_number(expected: int | float, answer: int | float, tolerance: float | None) -> bool:
    if isinstance(expected, int):
        return answer == expected
    if math.isnan(expected):
        return answer != answer
    # Results can be tiny, so the default has no absolute error.
    relative, absolute = (1e-9, 0.0 if expected else 1e-12) if tolerance is None else (tolerance, tolerance)
    try:
        return math.isclose(expected, answer, rel_tol=relative, abs_tol=absolute)
    except OverflowError:
        # The answer is an integer beyond the floats.
        return False


MAX_DIGITS = 64
"""Maximum length of printed numbers that are compared with a tolerance."""

_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def same_output(expected: str, printed: str, tolerance: float | None = None) -> bool:
    r"""Return whether a program printed the expected output, as programming contests compare it.

    `tolerance` is the maximum relative or absolute error of numbers with a decimal point or exponent; the outputs are
    then compared word by word. None compares lines, ignoring white space at their ends and empty lines at the end.

    >>> same_output("0.5\n", "0.5 \n\n"), same_output("0.5", "0.50"), same_output("0.5", "0.50", tolerance=1e-6)
    (True, False, True)
    """
    if tolerance is None:
        lines, printed_lines = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, printed))
        return lines == printed_lines
    words, printed_words = expected.split(), printed.split()
    return len(words) == len(printed_words) and all(
        _same_word(*pair, tolerance) for pair in zip(words, printed_words, strict=True)
    )


def _same_word(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed:
        return True
    texts = expected, printed
    if not all(len(text) <= MAX_DIGITS and _DECIMAL.fullmatch(text) for text in texts):
        return False
    if all(text.lstrip("+-").isdigit() for text in texts):
        return int(expected) == int(printed)
    return math.isclose(float(expected), float(printed), rel_tol=tolerance, abs_tol=tolerance)
