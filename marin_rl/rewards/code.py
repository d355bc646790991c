# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward for model-written programs: runs them against tests that they cannot see.

Expected results never enter the process that runs the model's code. A program gets its input, and its output is
compared outside. A function is called with a test's arguments, and its return value is checked in a second process that
runs no code of the model. Printing "all passed", exiting with status 0, returning an object that is equal to
everything, or inspecting the interpreter's frames therefore gains nothing.
"""

import ast
import asyncio
import builtins
import dataclasses
import enum
import json
import re
import secrets
from collections.abc import Sequence

import pydantic

from marin_rl.config_fields import convert_enum_fields
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.functions import EvaluateResult, RewardFailure, RewardRequest
from marin_rl.rewards.sandbox.pool import PythonResult, Sandbox


class CodeTestsError(ValueError):
    """The tests of a task are invalid; the message names them and the remedy."""


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
        passed = await run_tests(self._sandbox, extract_code(request.last_reply), tests)
        share = sum(passed) / len(passed)
        return EvaluateResult(
            score=share if self._score is CodeScore.SHARE else float(all(passed)),
            metrics={"passed_share": share},
            reason=f"{sum(passed)} of {len(passed)} tests passed",
        )


# The first alternative matches fences within a line, which do not begin a block. Blocks of all languages are matched,
# so that the end of one is not mistaken for the beginning of another.
_FENCE = re.compile(r"```[^\n`]+```|```(?P<language>[^\n`]*)\n(?P<code>.*?)```", re.DOTALL)
_LANGUAGES = ("", "python", "py", "python3")


def extract_code(reply: str) -> str:
    r"""Return the last fenced block that is Python or has no language, or the whole reply if there is no such block.

    >>> extract_code("so:\n```python\nprint(1)\n```\ndone")
    'print(1)\n'
    """
    blocks = [
        match["code"]
        for match in _FENCE.finditer(reply)
        if match["code"] is not None and match["language"].strip().lower() in _LANGUAGES
    ]
    return blocks[-1] if blocks else reply


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


@dataclasses.dataclass(frozen=True)
class SplitAssert:
    """An assert statement split into two parts, for two processes."""

    expressions: tuple[str, ...]
    """Calls of the tested functions, with their arguments but without expected results."""
    condition: str
    """Condition to check, with `_0`, `_1`, … for the values of the expressions."""


_TRUSTED = frozenset(dir(builtins)) | {"math"}
_BINDS_NAMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr)


def split_assert(line: str) -> SplitAssert:
    """Split an assert statement into calls of the tested code and a condition on their values.

    Raises:
        CodeTestsError: if it is not an assert statement, does not use the tested code, or binds names around its calls.

    >>> split_assert("assert abs(area(2) - 12.566) < 0.01")
    SplitAssert(expressions=('area(2)',), condition='abs(_0 - 12.566) < 0.01')
    """
    try:
        body = ast.parse(line).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeTestsError(f"the test {line[:200]!r} is not valid Python: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise CodeTestsError(f"the test {line[:200]!r} is not one assert statement; write `assert f(1) == 2`")
    splitter = _Splitter()
    condition = splitter.visit(body[0].test)
    if any(isinstance(node, _BINDS_NAMES) for node in ast.walk(condition)):
        raise CodeTestsError(
            f"the test {line[:200]!r} binds names, so it cannot be checked outside the tested code's process; write "
            "each call as a separate assert"
        )
    if not splitter.expressions:
        raise CodeTestsError(f"the test {line[:200]!r} does not use the tested code; call one of its functions")
    return SplitAssert(tuple(splitter.expressions), ast.unparse(condition))


class _Splitter(ast.NodeTransformer):
    """Replaces the outermost calls and names that are not builtins, which the tested code has to evaluate."""

    def __init__(self) -> None:
        self.expressions: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Subscript) and _root(node) not in _TRUSTED:
            self.expressions.append(ast.unparse(node))
            return ast.Name(f"_{len(self.expressions) - 1}", ast.Load())
        return self.generic_visit(node)


def _root(node: ast.AST) -> str:
    """Return the name that an expression starts with, or a trusted name if it starts with none."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case _:
                return "None"
    return node.id


# Runs in the process of the model's code, which can inspect it, so it contains calls but no expected results. It
# reports only plain Python values, so that no object of the model takes part in the comparison.
_EVALUATE = """
def _literal(value, depth=0):
    kind = type(value)
    if depth > 50:
        raise ValueError("nested too deeply")
    if kind in (bool, str, bytes, complex, type(None)):
        return repr(value)
    if kind is int:
        # The number of hexadecimal digits is not limited.
        return hex(value)
    if kind is float and value == value:
        # Python has no literal for infinity, but evaluates larger numbers to it.
        return repr(value).replace("inf", "1e999")
    if kind is set and not value:
        return "set()"
    if kind is dict:
        pairs = (_literal(key, depth + 1) + ": " + _literal(item, depth + 1) for key, item in value.items())
        return "{" + "".join(pair + ", " for pair in pairs) + "}"
    opening, closing = {list: "[]", tuple: "()", set: "{}"}[kind]
    return opening + "".join(_literal(item, depth + 1) + ", " for item in value) + closing

def _evaluate(code, expressions, token):
    import json
    space = {"__name__": "solution"}
    exec(compile(code, "solution.py", "exec"), space)
    answers = []
    for expression in expressions:
        try:
            answers.append(_literal(eval(expression, space)))
        except Exception:
            answers.append(None)
    print("\\n" + token + json.dumps(answers))
"""

# Runs in a separate process without code of the model, with the answers as text.
_CHECK = """
import ast, json, math, sys

def check(condition, answers):
    try:
        space = {f"_{index}": ast.literal_eval(answer) for index, answer in enumerate(answers)}
        return bool(eval(condition, {"math": math} | space))
    except Exception:
        return False

print(json.dumps([check(condition, answers) for condition, answers in json.loads(sys.stdin.read())]))
"""


async def _run_asserts(sandbox: Sandbox, code: str, lines: Sequence[str]) -> list[bool]:
    if not lines:
        return []
    tests = [split_assert(line) for line in lines]
    expressions = [expression for test in tests for expression in test.expressions]
    token = secrets.token_hex(16)
    evaluated = await _run(sandbox, f"{_EVALUATE}\n_evaluate({code!r}, {expressions!r}, {token!r})", "")
    answers = iter(_parse_answers(evaluated, token, len(expressions)))
    checks = [(test.condition, [next(answers) for _ in test.expressions]) for test in tests]
    complete = [all(answer is not None for answer in values) for _, values in checks]
    pending = [check for check, is_complete in zip(checks, complete, strict=True) if is_complete]
    checked = await _run(sandbox, _CHECK, json.dumps(pending))
    if checked.failure is not None:
        # An answer that breaks the checking process, for example by its size, counts as no answer.
        return [False] * len(tests)
    verdicts = iter(json.loads(checked.stdout))
    return [is_complete and next(verdicts) for is_complete in complete]


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
