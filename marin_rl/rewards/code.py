# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward for model-written programs: runs them against tests that they cannot see.

Expected results never enter the process that runs the model's code. A program gets its input, and its output is
compared outside. A function is called with a test's arguments, and its return value is checked in a second process that
runs no code of the model. Printing "all passed", exiting with status 0, returning an object that is equal to
everything, or inspecting the interpreter's frames therefore gains nothing. An assert that passes an expected result to
a function of the code, such as `same(f(1), 2)`, can be deceived; those of well-known libraries are refused.
"""

import asyncio
import bisect
import dataclasses
import enum
import json
import re
import secrets
from collections.abc import Iterator, Sequence

import pydantic

from marin_rl.config_fields import convert_enum_fields
from marin_rl.rewards.code_asserts import CHECK, CodeTestsError, evaluation, split_assert
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.functions import EvaluateResult, RewardFailure, RewardRequest
from marin_rl.rewards.reply_text import graded_text
from marin_rl.rewards.sandbox.pool import PythonResult, Sandbox


class StdinCase(pydantic.BaseModel):
    """Input and expected output of the whole program."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    stdin: str
    """Standard input."""
    stdout: str
    """Expected standard output. Whitespace at the end of lines and empty lines at the end are ignored."""


class CodeTests(pydantic.BaseModel):
    """Tests of one task, stored as JSON in its ground truth."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    asserts: tuple[str, ...] = ()
    """Assert statements that call functions of the code: `assert add(2, 3) == 5`."""
    cases: tuple[StdinCase, ...] = ()
    """Inputs and expected outputs of the whole program."""


class CodeScore(enum.StrEnum):
    """Score of a reply."""

    ALL = "all"
    """1 if every test passes, else 0."""
    SHARE = "share"
    """Fraction of tests that pass."""


@RewardComponentConfig.register_subclass("code")
@dataclasses.dataclass(frozen=True)
class CodeRewardConfig(RewardComponentConfig):
    """Runs the reply's Python code against the tests in the ground truth: JSON with `asserts`, `cases` or both."""

    name: str = "code"
    """Name under which its scores are logged."""
    weight: float = 1.0
    """Factor of its scores."""
    score: CodeScore = CodeScore.ALL
    """`all`: 1 if every test passes, else 0. `share`: the fraction of tests that pass."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_component(self.name, self.weight)

    def build(self, sandbox: Sandbox) -> "CodeReward":
        """Build the component."""
        return CodeReward(self, sandbox)


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
        result = await self._sandbox.run_python("print(6 * 7)")
        if result.stdout != "42\n":
            raise RewardConfigError(
                f"reward {self.name!r}: the sandbox cannot run programs: {result.failure}, {result.stderr}"
            )

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """Return one result per rollout; rollouts with invalid tests have no valid score."""
        return list(await asyncio.gather(*(self._score_rollout(request) for request in requests)))

    async def close(self) -> None:
        """Do nothing: the caller closes the sandbox."""

    async def _score_rollout(self, request: RewardRequest) -> EvaluateResult:
        try:
            tests = parse_tests(request.ground_truth)
        except CodeTestsError as error:
            return EvaluateResult(is_score_valid=False, error=f"task {request.task_id}: {error}")
        answer = None if request.in_thoughts else graded_text(request.last_reply)
        code = extract_code(answer or "", is_program=bool(tests.cases))
        passed = await run_tests(self._sandbox, code, tests)
        share = sum(passed) / len(passed)
        return EvaluateResult(
            score=share if self._score is CodeScore.SHARE else float(all(passed)),
            metrics={"passed_share": share},
            reason=f"{sum(passed)} of {len(passed)} tests passed",
        )


# The first alternative matches fences within a line, which do not begin a block.
_OPENING = re.compile(r"```[^\n`]+```|(?P<indent>^[ \t]*)?```(?P<language>[^\n`]*)\n", re.MULTILINE)
_LINE_FENCE = re.compile(r"^[ \t]*```(?P<language>\w)?", re.MULTILINE)
_PYTHON = re.compile(r"py(thon)?[ ]?[\d.]*\b", re.IGNORECASE)


def extract_code(reply: str, *, is_program: bool = False) -> str:
    r"""Return the code of a reply: its Python blocks, else its last block without a language, else the whole reply.

    Several Python blocks are joined, because a later block can use functions of an earlier one. Of several programs the
    last counts.

    Args:
        reply: the reply, without thoughts.
        is_program: whether the code is run as a program, so that joined blocks would print twice.

    >>> extract_code("so:\n```python\nprint(1)\n```\ndone")
    'print(1)\n'
    """
    tagged, untagged = [], []
    for language, code in _blocks(reply):
        if not language:
            untagged.append(code)
        elif _PYTHON.match(language):
            tagged.append(code)
    if is_program:
        tagged = tagged[-1:]
    return "\n".join(tagged) if tagged else untagged[-1] if untagged else reply


def _blocks(reply: str) -> Iterator[tuple[str, str]]:
    """Yield language and code of the blocks of all languages.

    A block ends with a fence that starts a line, because code can contain fences in strings. If there is none before
    the next block, it ends with any fence, the next block or the reply. The time is linear in the length of the reply.
    """
    fences = list(_LINE_FENCE.finditer(reply))
    starts = [fence.start() for fence in fences]
    position = 0
    while (opening := _OPENING.search(reply, position)) is not None:
        begin = position = opening.end()
        if opening["language"] is None:
            continue
        index = bisect.bisect_left(starts, begin)
        if index < len(fences) and fences[index]["language"] is None:
            end, position = fences[index].span()
        else:
            limit = starts[index] if index < len(fences) else len(reply)
            end = reply.find("```", begin, limit)
            end, position = (end, end + 3) if end >= 0 else (limit, limit)
        lines = reply[begin:end].splitlines(keepends=True)
        yield opening["language"].strip(), "".join(line.removeprefix(opening["indent"] or "") for line in lines)


def parse_tests(ground_truth: str) -> CodeTests:
    """Parse the tests in a ground truth.

    Raises:
        CodeTestsError: if there are no tests, or a test cannot be checked outside the tested code's process.
    """
    try:
        tests = CodeTests.model_validate_json(ground_truth)
    except pydantic.ValidationError as error:
        raise CodeTestsError(
            f"the ground truth {ground_truth[:200]!r} holds no tests; use JSON with `asserts` (a list of assert "
            f"statements), `cases` (a list of objects with stdin and stdout) or both: {error}"
        ) from error
    if not tests.asserts and not tests.cases:
        raise CodeTestsError(f"the ground truth {ground_truth[:200]!r} has neither asserts nor cases; add some")
    for line in tests.asserts:
        split_assert(line)
    return tests


async def run_tests(sandbox: Sandbox, code: str, tests: CodeTests) -> list[bool]:
    """Run the tests of a program.

    Args:
        sandbox: sandbox to run the program in.
        code: the program.
        tests: its tests.

    Returns:
        Whether each test passes: first the asserts, then the cases.

    Raises:
        RewardCallError: if the sandbox itself failed.
    """
    asserts = await _run_asserts(sandbox, code, tests.asserts)
    cases = await asyncio.gather(*(_run_case(sandbox, code, case) for case in tests.cases))
    return [*asserts, *cases]


async def _run_case(sandbox: Sandbox, code: str, case: StdinCase) -> bool:
    result = await _run(sandbox, code, case.stdin)
    printed, expected = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (result.stdout, case.stdout)
    )
    return result.failure is None and printed == expected


async def _run(sandbox: Sandbox, code: str, stdin: str) -> PythonResult:
    result = await sandbox.run_python(code, stdin)
    if result.failure is not None and result.failure.cause is RewardFailure.WORKER:
        # The sandbox failed, not the program.
        raise result.failure
    return result


async def _run_asserts(sandbox: Sandbox, code: str, lines: Sequence[str]) -> list[bool]:
    if not lines:
        return []
    tests = [split_assert(line) for line in lines]
    expressions = [expression for test in tests for expression in test.expressions]
    token = secrets.token_hex(16)
    evaluated = await _run(sandbox, evaluation(code, expressions, token), "")
    answers = iter(_parse_answers(evaluated, token, len(expressions)))
    checks = [(test.condition, [next(answers) for _ in test.expressions]) for test in tests]
    checked = await _run(sandbox, CHECK, json.dumps(checks))
    if checked.failure is not None:
        # An answer that breaks the checking process, for example by its size, counts as no answer.
        return [False] * len(tests)
    return json.loads(checked.stdout)


def _parse_answers(result: PythonResult, token: str, count: int) -> list[str | None]:
    """Parse the untrusted values that the tested code reported; None for each missing value."""
    _, separator, text = result.stdout.rpartition(token)
    try:
        answers = json.loads(text) if separator and result.failure is None else None
    except (ValueError, RecursionError):
        answers = None
    if not isinstance(answers, list) or len(answers) != count:
        return [None] * count
    return [answer if isinstance(answer, str) else None for answer in answers]
