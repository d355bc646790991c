# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Grades programs that a model wrote, by tests that the programs cannot see.

What decides never enters the process that runs the model's code. A program is given its input, and what it prints is
compared outside. A function is called with a test's arguments, and what it answered is judged in a second process,
where no line of the model's has run: so printing "all passed", leaving with status 0, an object that is equal to
everything, or a look through the interpreter's frames gain nothing.
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

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.failures import RewardFailure
from marin_rl.rewards.functions import EvaluateResult, RewardRequest
from marin_rl.rewards.sandbox.pool import PythonResult, Sandbox


class CodeTestsError(ValueError):
    """Tests that cannot be used; the message names them and the remedy."""


class StdinCase(pydantic.BaseModel):
    """A run of the whole program."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    stdin: str
    """What it can read."""
    stdout: str
    """What it must print; white space at the ends of lines, and empty lines at the end, aside."""


class CodeTests(pydantic.BaseModel):
    """The tests of one task, as its ground truth holds them in JSON."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    asserts: tuple[str, ...] = ()
    """Assert statements about functions that the code defines: `assert add(2, 3) == 5`."""
    cases: tuple[StdinCase, ...] = ()
    """Inputs and outputs of the whole program."""


class CodeScore(enum.StrEnum):
    """What a reply earns."""

    ALL = "all"
    """1 where every test passes, else 0."""
    SHARE = "share"
    """The share of tests that pass."""


@RewardComponentConfig.register_subclass("code")
@dataclasses.dataclass(frozen=True)
class CodeRewardConfig(RewardComponentConfig):
    """Runs the reply's Python against the tests in the ground truth: JSON with `asserts`, `cases` or both."""

    name: str = "code"
    """Under which its scores are logged."""
    weight: float = 1.0
    """What its scores are multiplied by."""
    score: CodeScore = CodeScore.ALL
    """`all` or `share`: what a reply earns that passes some tests."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_component(self.name, self.weight)

    def build(self, sandbox: Sandbox) -> "CodeReward":
        """Make the component."""
        return CodeReward(self, sandbox)


class CodeReward:
    """Grades the last message's code."""

    def __init__(self, config: CodeRewardConfig, sandbox: Sandbox):
        self.name = config.name
        self.weight = config.weight
        self.scope = RewardScope.POINTWISE
        self._score = config.score
        self._sandbox = sandbox

    async def check(self) -> None:
        """See whether the sandbox runs programs.

        Raises:
            RewardConfigError: if not.
        """
        ran = await self._sandbox.run_python("print(6 * 7)")
        if ran.stdout != "42\n":
            raise RewardConfigError(
                f"reward {self.name!r}: the sandbox does not run programs: {ran.loss}, {ran.stderr}"
            )

    async def judge(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """One result for each rollout; one whose tests cannot be used has no valid score.

        Raises:
            RewardCallError: if the sandbox itself failed.
        """
        return list(await asyncio.gather(*(self._judge_one(request) for request in requests)))

    async def close(self) -> None:
        """Nothing: the sandbox is not its own."""

    async def _judge_one(self, request: RewardRequest) -> EvaluateResult:
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


# First what is fenced within a line, which begins no block. Blocks of every language are found, so that the end of one
# is not taken for the beginning of another.
_FENCE = re.compile(r"```[^\n`]+```|```(?P<language>[^\n`]*)\n(?P<code>.*?)```", re.DOTALL)
_LANGUAGES = ("", "python", "py", "python3")


def extract_code(reply: str) -> str:
    r"""The last fenced block of a reply that is Python or of no named language, or all of it where there is none.

    >>> extract_code("so:\n```python\nprint(1)\n```\ndone")
    'print(1)\n'
    """
    blocks = [
        found["code"]
        for found in _FENCE.finditer(reply)
        if found["code"] is not None and found["language"].strip().lower() in _LANGUAGES
    ]
    return blocks[-1] if blocks else reply


def parse_tests(ground_truth: str) -> CodeTests:
    """The tests that a ground truth holds.

    Raises:
        CodeTestsError: if it holds none, or one that cannot be judged out of the tested code's reach.
    """
    try:
        tests = CodeTests.model_validate_json(ground_truth)
    except pydantic.ValidationError as error:
        raise CodeTestsError(
            f"the ground truth {ground_truth[:200]!r} is no tests; it is JSON with `asserts` (a list of assert "
            f"statements), `cases` (a list of objects with stdin and stdout) or both: {error}"
        ) from error
    if not tests.asserts and not tests.cases:
        raise CodeTestsError(f"the ground truth {ground_truth[:200]!r} has neither asserts nor cases; give some")
    for line in tests.asserts:
        split_assert(line)
    return tests


async def run_tests(sandbox: Sandbox, code: str, tests: CodeTests) -> list[bool]:
    """Which tests a program passes: asserts first, then cases.

    Raises:
        RewardCallError: if the sandbox itself failed.
    """
    asserts = await _run_asserts(sandbox, code, tests.asserts)
    cases = await asyncio.gather(*(_run_case(sandbox, code, case) for case in tests.cases))
    return [*asserts, *cases]


async def _run_case(sandbox: Sandbox, code: str, case: StdinCase) -> bool:
    ran = await _run(sandbox, code, case.stdin)
    return ran.loss is None and _lines(ran.stdout) == _lines(case.stdout)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def _run(sandbox: Sandbox, code: str, stdin: str) -> PythonResult:
    ran = await sandbox.run_python(code, stdin)
    if ran.loss is not None and ran.loss.cause is RewardFailure.WORKER:
        # Not the program's fault.
        raise ran.loss
    return ran


@dataclasses.dataclass(frozen=True)
class SplitAssert:
    """An assert statement in two parts, for two processes."""

    expressions: tuple[str, ...]
    """What the tested code is asked: calls of its functions. They hold arguments, never what is expected."""
    condition: str
    """What must hold, with `_0`, `_1`, … for the answers."""


_TRUSTED = frozenset(dir(builtins)) | {"math"}
_BINDS_NAMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr)


def split_assert(line: str) -> SplitAssert:
    """Take an assert statement apart.

    Raises:
        CodeTestsError: if it is none, asks the tested code nothing, or binds names around its calls.

    >>> split_assert("assert abs(area(2) - 12.566) < 0.01")
    SplitAssert(expressions=('area(2)',), condition='abs(_0 - 12.566) < 0.01')
    """
    try:
        body = ast.parse(line).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeTestsError(f"the test {line[:200]!r} is no Python: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise CodeTestsError(f"the test {line[:200]!r} is not one assert statement; write `assert f(1) == 2`")
    splitter = _Splitter()
    condition = splitter.visit(body[0].test)
    if any(isinstance(node, _BINDS_NAMES) for node in ast.walk(condition)):
        raise CodeTestsError(
            f"the test {line[:200]!r} cannot be judged out of the tested code's reach, for it binds names; write each "
            "call as an assert of its own"
        )
    if not splitter.expressions:
        raise CodeTestsError(f"the test {line[:200]!r} calls nothing of the tested code")
    return SplitAssert(tuple(splitter.expressions), ast.unparse(condition))


class _Splitter(ast.NodeTransformer):
    """Replaces what the tested code has to answer: the outermost calls and names that are not Python's own."""

    def __init__(self) -> None:
        self.expressions: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Subscript) and _root(node) not in _TRUSTED:
            self.expressions.append(ast.unparse(node))
            return ast.Name(f"_{len(self.expressions) - 1}", ast.Load())
        return self.generic_visit(node)


def _root(node: ast.AST) -> str:
    """The name that an expression starts with; a name of Python's own for one that starts with none."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case _:
                return "None"
    return node.id


# Runs with the model's code, which may take it apart: it knows what to ask, not what is right. Only Python's own
# plain values are told, so that no object of the model's takes part in the judgement.
_ASK = """
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
        # There is no word for infinity, but there are numbers that are read as it.
        return repr(value).replace("inf", "1e999")
    if kind is set and not value:
        return "set()"
    if kind is dict:
        pairs = (_literal(key, depth + 1) + ": " + _literal(item, depth + 1) for key, item in value.items())
        return "{" + "".join(pair + ", " for pair in pairs) + "}"
    opening, closing = {list: "[]", tuple: "()", set: "{}"}[kind]
    return opening + "".join(_literal(item, depth + 1) + ", " for item in value) + closing

def _ask(code, expressions, token):
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

# Runs where no code of the model's has run, with the answers as text.
_JUDGE = """
import ast, json, math, sys

def judge(condition, answers):
    try:
        space = {f"_{index}": ast.literal_eval(answer) for index, answer in enumerate(answers)}
        return bool(eval(condition, {"math": math} | space))
    except Exception:
        return False

given = json.loads(sys.stdin.read())
print(json.dumps([judge(condition, answers) for condition, answers in given]))
"""


async def _run_asserts(sandbox: Sandbox, code: str, lines: Sequence[str]) -> list[bool]:
    if not lines:
        return []
    tests = [split_assert(line) for line in lines]
    expressions = [expression for test in tests for expression in test.expressions]
    token = secrets.token_hex(16)
    asked = await _run(sandbox, f"{_ASK}\n_ask({code!r}, {expressions!r}, {token!r})", "")
    answers = iter(_answers(asked, token, len(expressions)))
    given = [(test.condition, [next(answers) for _ in test.expressions]) for test in tests]
    answered = [all(answer is not None for answer in said) for _, said in given]
    judged = await _run(sandbox, _JUDGE, json.dumps([pair for pair, full in zip(given, answered, strict=True) if full]))
    if judged.loss is not None:
        # An answer that breaks the judging process, by its size for instance, is none.
        return [False] * len(tests)
    verdicts = iter(json.loads(judged.stdout))
    return [full and next(verdicts) for full in answered]


def _answers(ran: PythonResult, token: str, count: int) -> list[str | None]:
    """What the tested code claims that its functions answered; None for each that it did not tell."""
    _, found, told = ran.stdout.rpartition(token)
    try:
        answers = json.loads(told) if found and ran.loss is None else None
    except (ValueError, RecursionError):
        answers = None
    if not isinstance(answers, list) or len(answers) != count:
        return [None] * count
    return [answer if isinstance(answer, str) else None for answer in answers]
