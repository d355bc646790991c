# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.code import (
    Call,
    CodeReward,
    CodeRewardConfig,
    CodeScore,
    CodeTests,
    CodeTestsError,
    ProgramOutcome,
    StdinCase,
    parse_tests,
    run_tests,
)
from marin_rl.rewards.component import RewardConfigError
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import PythonResult, Sandbox
from marin_rl.types import RewardFailure, Task

PASSED, WRONG, UNANSWERED = ProgramOutcome
ADDS = CodeTests(
    calls=(
        Call(call="add(2, 3)", returns=5),
        Call(call="add(-1, 1)", returns=0),
        Call(call="add('a', 'b')", returns="ab"),
    )
)
SUMS = CodeTests(cases=(StdinCase(stdin="2 3\n", stdout="5\n"), StdinCase(stdin="10 -4\n", stdout="6\n")))


class Grading:
    """A started sandbox in an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.sandbox = Sandbox(
            SandboxConfig(require=Isolation.NONE, workers=2, wall_seconds=600.0, memory_mb=256, cpu_seconds=5.0)
        )
        self.wait(self.sandbox.start())

    def wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 300))

    def outcomes(self, code: str, tests: CodeTests) -> list[ProgramOutcome]:
        return self.wait(run_tests(self.sandbox, f"```python\n{code}\n```", tests))

    def passed(self, code: str, tests: CodeTests) -> list[bool]:
        return [outcome is PASSED for outcome in self.outcomes(code, tests)]


@pytest.fixture(scope="module")
def grading() -> Iterator[Grading]:
    grading = Grading()
    yield grading
    grading.wait(grading.sandbox.close())
    grading.loop.close()


def test_right_code_passes_and_partly_right_code_in_part(grading: Grading):
    assert grading.passed("def add(a, b):\n    return a + b", ADDS) == [True, True, True]
    assert grading.passed("print(sum(map(int, input().split())))", SUMS) == [True, True]
    assert grading.passed("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", SUMS) == [True, True]
    assert grading.passed("def add(a, b):\n    return 5 if a == 2 else 1", ADDS) == [True, False, False]
    assert grading.passed("print(5)", SUMS) == [True, False]
    # A program that did not end well has no output.
    code = "import atexit, os, sys\nprint('5'); sys.stdout.flush(); os._exit(1)"
    assert grading.passed(code, SUMS) == [False, False]


@pytest.mark.medium
@pytest.mark.parametrize(
    "code",
    [
        "",
        "def add(a, b",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import os; os._exit(117)",
        "import os\nos.mkdir('hidden', 0o300); open('hidden/file', 'w').close()\ndef add(a, b): return 7",
        "while True: pass",
        "x = [0] * 10**9",
        "def add(a, b): return None",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        # Prints forged results.
        "print('all passed'); print('5\\n0\\nab'); print('[true, true, true]')\ndef add(a, b): return 7",
        # Objects that are equal to everything.
        "class Equal:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "    def __repr__(self): return '5'\n    def __bool__(self): return True\n"
        "def add(a, b): return Equal()",
        "class Five(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Five(7)",
        "class Text(str):\n    def __eq__(self, other): return True\n    def __repr__(self): return '5'\n"
        "    __hash__ = str.__hash__\ndef add(a, b): return Text('x')",
        # Replaces functions of the checker.
        "import builtins, json\nbuiltins.all = lambda *a: True\njson.dumps = lambda *a: '[true, true, true]'\n"
        "def add(a, b): return 7",
        "import builtins\nbuiltins.eval = builtins.repr = lambda *a: 'True'\ndef add(a, b): return 7",
        # Answers that break the parser.
        "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
        "def add(a, b): return float('nan')",
        "def add(a, b): return 10**100000",
    ],
)  # fmt: skip
def test_wrong_code_fails(grading: Grading, code: str):
    assert grading.passed(code, ADDS) == [False, False, False]


# `send` writes to the channel of the answers, and ends the process.
SEND = r"""
import atexit, builtins, json, os, sys, threading
RIGHT = '[0, 5]\n[1, 0]\n[2, "ab"]\n'
def send(text, ends=True):
    os.write(3, text.encode("utf-8", "surrogatepass"))
    if ends: os._exit(0)
"""
NOT_OF_THE_PROTOCOL = [
    r"send('')", r"send('[]\n')", r"send('5\n0\nab\n')", r"send('null\n' * 3)", r"send(RIGHT[:6])",
    r"send('[true, true, true]\n')", r"send(RIGHT + '[3, 1]\n')", r"send(RIGHT * 2)", r"send('[0, 5]\n' * 4)",
    r"send(RIGHT, ends=False); return 7", r"send('[0.0, 5]\n[true, 0]\n[null, 1]\n')",
    r"send('[1, 5]\n[2, 0]\n[0, 1]\n')", r"send('[0, 5, 5]\n' * 3)",
    r"send(json.dumps({'0': 5, '1': 0, '2': 'ab'}) + '\n')", r"send(RIGHT.replace('\n', ' '))",
    r"send('[' * 500_000 + '\n')", r"send('[0, ' + '1' * 500_000 + ']\n')",
    r"send('[0, ' + '[' * 400 + ']' * 400 + ']\n')", r"send('[0, NaN]\n[1, Infinity]\n[2, -Infinity]\n')",
    r"send('[0, 1e999]\n[1, \ud800]\n')", r"send('\0' * 1000 + '\n\r\n\x85\u2028\n')", r"send('\n' * 3)",
    r"send('x' * 3_000_000)", "os.close(3); return 7", "os.closerange(0, 10); return 7", "os.dup2(2, 3); return 7",
    "os._exit(0)", "sys.exit(0)", "exit(0)", "raise KeyboardInterrupt", "raise GeneratorExit", "raise BaseException",
    "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})", "raise RecursionError", "raise MemoryError",
    "return add(a, b)", "return [0] * 10**9", "return 10**1_000_000", "return '5' * 3_000_000",
    "x = []; x.append(x); return x", "x = {}; x[0] = x; return x", "return (i for i in [5])", "return object()",
    "return type('I', (int,), {'__eq__': lambda *_: True, '__index__': lambda _: 5, '__int__': lambda _: 5})(7)",
    "return type('S', (str,), {'__eq__': lambda *_: True, '__str__': lambda _: 'ab'})('x')",
    "return type('L', (list,), {'__iter__': lambda _: 1 / 0})()",
    "return type('O', (), {'__class__': int, '__eq__': lambda *_: True, '__reduce__': lambda _: (int, (5,))})()",
    "return type('F', (float,), {'__eq__': lambda *_: True, '__repr__': lambda _: '5'})(7)",
    "json.dumps = lambda *_: 5", "json.dumps = lambda *_: RIGHT", "json.dumps = lambda *_: 1 / 0",
    "builtins.print = builtins.all = builtins.isinstance = lambda *_: True; return 7",
    "builtins.len = builtins.zip = builtins.type = None; return 7",
    "sys.modules['__main__'].encode = lambda *_: '5'; return 7",
    "sys.modules['numpy'] = sys.modules['numbers'] = type('M', (), {'generic': object, 'Real': object}); return 7",
    "atexit.register(send, RIGHT); return 7",
    "threading.Thread(target=send, args=(RIGHT * 3,)).start(); threading.Event().wait(0.1); return 7",
    "print(RIGHT); sys.stderr.write(RIGHT); return 7",
    "sys.setrecursionlimit(10**9); sys.stdout = sys.stderr = None; return 7",
]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("body", NOT_OF_THE_PROTOCOL)
def test_results_that_are_not_of_the_protocol_are_counted(grading: Grading, body: str):
    outcomes = grading.outcomes(f"{SEND}\ndef add(a, b): {body}", ADDS)
    assert len(outcomes) == 3
    assert PASSED not in outcomes


def test_right_answers_count_wherever_they_come_from(grading: Grading):
    # Only a program that knows the right values can send them.
    assert grading.passed(f"{SEND}\ndef add(a, b): send(RIGHT)", ADDS) == [True, True, True]


@pytest.mark.parametrize("call", ["eval(f(4))", "f(4)(24)", "str(f(4))", "f(4)", "sorted(f(4))"])
@pytest.mark.parametrize(
    "body",
    [
        "import builtins as b; b.eval = b.str = b.sorted = lambda value: Equal(); return lambda _: Equal()",
        "global eval, str, sorted; eval = str = sorted = lambda value: Equal(); return lambda _: Equal()",
        "return Equal()",
        "return '24 == 24'",
        "return 'returns'",
    ],
)
def test_a_program_cannot_choose_the_expected_value(grading: Grading, call: str, body: str):
    equal = "class Equal:\n    def __eq__(self, other): return True\n    def __iter__(self): return iter([self])\n"
    code = f"{equal}def f(x):\n    {body}"
    assert PASSED not in grading.outcomes(code, CodeTests(calls=(Call(call=call, returns=24),)))


def test_failing_calls_cost_their_own_tests(grading: Grading):
    tests = CodeTests(calls=tuple(Call(call=f"f({value})", returns=value + 1) for value in range(4)))
    code = "import sys, os\ndef f(x):\n    if x == 1: {}\n    return x + 1"
    for failure in ("raise ValueError", "sys.exit()", "1 / 0", "return object()"):
        assert grading.outcomes(code.format(failure), tests) == [PASSED, UNANSWERED, PASSED, PASSED]
    # After the end of the process there are no more answers.
    for failure in ("os._exit(0)", "os.kill(os.getpid(), 9)", "print('x' * 3_000_000); x = y"):
        assert grading.outcomes(code.format(failure), tests)[:2] == [PASSED, UNANSWERED]
    assert grading.outcomes(code.format("return 0"), tests) == [PASSED, WRONG, PASSED, PASSED]


RETURNED: list[tuple[str, Any]] = [
    ("import collections\ndef f(): return collections.Counter('aab')", {"a": 2, "b": 1}),
    ("import collections\ndef f():\n    d = collections.defaultdict(list); d['1'].append(2); return d", {"1": [2]}),
    ("import collections\nP = collections.namedtuple('P', 'a b')\ndef f(): return [P(1, 2)]", [[1, 2]]),
    ("class L(list): pass\ndef f(): return L([1])", [1]),
    ("import enum\nclass E(enum.IntEnum):\n    A = 3\ndef f(): return E.A", 3),
    ("import enum\nclass E(enum.StrEnum):\n    A = 'a'\ndef f(): return E.A", "a"),
    ("from fractions import Fraction\ndef f(): return [Fraction(1, 2), Fraction(2**70 + 1)]", [0.5, 2**70 + 1]),
    ("from decimal import Decimal\ndef f(): return Decimal('2.5')", 2.5),
    ("def f(): return float('nan')", float("nan")),
    ("def f(): return 7 ** 2000", 7**2000),
    ("def f(): return '\\ud800'", "\ud800"),
    ("import numpy as np\ndef f(): return np.all(np.arange(3) < 3)", True),
    ("import numpy as np\ndef f(): return [np.int64(2), np.float64(0.5), np.arange(2)]", [2, 0.5, [0, 1]]),
    ("def f(): print('noise'); return 1", 1),
    ("import sys\ndef f(): print('x' * 2_000_000); sys.stderr.write('x' * 2_000_000); return 1", 1),
    ("def f(a: List[int] = ()) -> Optional[Node]: x: List[int] = [1]; return x", [1]),
    ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: List[int]\ndef f(): return P(3).x", 3),
    ("import sys\nsys.stdout.close()\nsys.stdout = None\ndef f(): return 1", 1),
    ("import os\nos.close(1)\ndef f(): return 1", 1),
    ("if __name__ == '__main__': raise ValueError\ndef f(): return 1", 1),
    ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
     "def f(): return P(3).x", 3),
    ("def sum(): return 6\ndef f(): return sum()", 6),
    ("import json\njson.dumps = list = str = len = None\ndef f(): return [1]", None),
    ("def f(): return {'a', 'b'}", None),
    ("def f(): return {1: 2}", None),
    ("def f(): return b'a'", None),
    ("def f(): return 1j", None),
    ("def f(): return {'b': 1, 'a': 2}.keys()", None),
    ("def f(): return range(1)", None),
    ("def f(): yield 1", None),
    ("async def f(): return 1", None),
    ("raise SystemExit\ndef f(): return 1", None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "value"), RETURNED)
def test_returned_values_are_compared_as_json(grading: Grading, code: str, value: Any):
    expected = 1 if value is None else value
    tests = CodeTests(calls=(Call(call="f()", returns=expected), Call(call="f()", returns=[expected])))
    assert grading.outcomes(code, tests) == ([UNANSWERED, UNANSWERED] if value is None else [PASSED, WRONG])


def test_calls_are_python_expressions(grading: Grading):
    calls = [
        {"call": "Solution().two_sum([2, 7], 9)", "returns": [0, 1]},
        {"call": "Solution().two_sum(nums=[3, 3], target=6)", "returns": [0, 1]},
        {"call": "Solution().two_sum([])", "returns": None},
        {"call": "Solution().two_sum([1], 1)", "returns": None},
        {"call": "sorted(common((1, 2, 3), {2, 3}))  # a tuple, and a set", "returns": [2, 3]},
        {"call": "common(*[(1,)] * 2)", "returns": [1]},
        {"call": "[len(common((x,), (1, 2))) for x in range(3)]", "returns": [0, 1, 1]},
        {"call": "missing(1)", "returns": 1},
    ]
    code = (
        "class Solution:\n    def two_sum(self, nums, target):\n"
        "        nums.append(None)\n        return (0, 1) if target > 5 else None\n"
        "def common(a, b):\n    return {hash(a) and x for x in a} & {*b}"
    )
    outcomes = [PASSED, PASSED, UNANSWERED, PASSED, PASSED, UNANSWERED, PASSED, UNANSWERED]
    assert grading.outcomes(code, parse_tests(json.dumps({"calls": calls}))) == outcomes


INSPECTS_FRAMES = """
import gc, sys

def find(backwards):
    found, frame = [], sys._getframe()
    while frame is not None:
        found.append(repr(frame.f_locals) + repr(frame.f_globals) + repr(frame.f_code.co_consts))
        frame = frame.f_back
    found.extend(repr(thing) for thing in gc.get_objects() if isinstance(thing, (list, dict, tuple)))
    return backwards[::-1] in "".join(found)
"""


def test_code_cannot_find_expected_results(grading: Grading):
    # The search works: it finds the arguments of other calls in an outer frame.
    tests = CodeTests(
        calls=(
            Call(call="find('64_DETCEPXE')", returns=False),
            Call(call="find('46_TNEMUGRA')", returns=True),
            Call(call="find('x')", returns="EXPECTED_46"),
            Call(call="find('ARGUMENT_64')", returns=1),
        )
    )
    assert grading.passed(INSPECTS_FRAMES, tests) == [True, True, False, False]


def test_a_program_that_kills_its_worker_has_no_answers():
    async def outcomes(end: str) -> list[ProgramOutcome]:
        async with Sandbox(SandboxConfig(require=Isolation.NONE, workers=1), strongest=Isolation.NONE) as sandbox:
            calls = await run_tests(sandbox, f"import os\n{end}\ndef add(a, b): return a + b", ADDS)
            return calls + await run_tests(sandbox, f"import os\n{end}\nprint(sum(map(int, input().split())))", SUMS)

    assert asyncio.run(outcomes("os.kill(os.getppid(), 9)")) == [UNANSWERED] * 5
    assert asyncio.run(outcomes("")) == [PASSED] * 5


class FailingSandbox:
    """A sandbox whose first workers die."""

    def __init__(self, failures: int, raises: bool):
        self.failures = failures
        self.raises = raises

    async def run_python(self, code: str, stdin: str = "") -> PythonResult:
        self.failures -= 1
        failure = RewardCallError(RewardFailure.WORKER, "the worker died") if self.failures >= 0 else None
        if failure and self.raises:
            raise failure
        return PythonResult("[0, 5]\n[1, 0]\n" if code else "", "", failure, 0.1)


@pytest.mark.parametrize("raises", [False, True])
def test_failures_of_the_machine_are_no_outcome(raises: bool):
    tests = CodeTests(calls=ADDS.calls[:2])

    def outcomes(failures: int) -> list[ProgramOutcome]:
        sandbox: Any = FailingSandbox(failures, raises)
        return asyncio.run(run_tests(sandbox, "", tests))

    assert outcomes(failures=1) == [PASSED, PASSED]
    assert outcomes(failures=2) == [UNANSWERED, UNANSWERED]
    with pytest.raises(RewardCallError, match="the worker died"):
        outcomes(failures=3)


def test_output_can_have_a_tolerance(grading: Grading):
    case = StdinCase(stdin="1 3\n", stdout="0.333333\n")
    code = "a, b = map(int, input().split())\nprint(a / b)"
    assert grading.outcomes(code, CodeTests(cases=(case,))) == [WRONG]
    assert grading.outcomes(code, CodeTests(cases=(case,), tolerance=1e-5)) == [PASSED]
    assert grading.outcomes(code + "\n1 / 0", CodeTests(cases=(case,), tolerance=1e-5)) == [UNANSWERED]


@pytest.mark.parametrize(
    "ground_truth",
    [
        "", "46", "[]", "{}", '{"calls": []}', '{"calls": [], "cases": []}', '{"asserts": ["assert f(2) == 4"]}',
        '{"tests": []}', '{"cases": [{"stdin": ""}]}', '{"calls": ["f(1)"]}', '{"calls": [{"call": "f(1)"}]}',
        '{"calls": [{"call": 1, "returns": 1}]}', '{"calls": [{"function": "f", "args": [1], "returns": 1}]}',
        '{"calls": [{"call": "f(1)", "returns": 1}], "tolerance": -1}',
        '{"cases": [{"stdin": "\\ud800", "stdout": ""}]}',
    ],
)  # fmt: skip
def test_ground_truths_without_tests(ground_truth: str):
    with pytest.raises(
        CodeTestsError,
        match=r"""ground truth .*\{"call": "f\(2\)", "returns": 4\} for `assert f\(2\) == 4`|has no calls or cases""",
    ):
        parse_tests(ground_truth)


@pytest.mark.parametrize(
    "call",
    ["", "f(1", " f(1)", "f(1); g(1)", "import os", "assert f(1) == 2", "f('\0')", "await f(1)",
     "f(" + "1" * 5000 + ")",
     "f(" + "[" * 5000, "-" * 3000 + "f(1)", "f", "1 + 1"],
)  # fmt: skip
def test_invalid_calls_are_refused(call: str):
    problem = "calls no function" if call in ("f", "1 + 1") else "is not a Python expression"
    with pytest.raises(CodeTestsError, match=problem):
        parse_tests(json.dumps({"calls": [{"call": call, "returns": 1}]}))


def test_a_call_is_not_evaluated_by_the_trainer(tmp_path: Path):
    path = tmp_path / "written"
    parse_tests(json.dumps({"calls": [{"call": f"open({str(path)!r}, 'w')", "returns": None}]}))
    assert not path.exists()


def test_deeply_nested_values(grading: Grading):
    def tests(depth: int) -> CodeTests:
        return parse_tests(f'{{"calls": [{{"call": "f({depth})", "returns": {"[" * depth + "]" * depth}}}]}}')

    code = "def f(depth):\n    value = []\n    for _ in range(depth - 1): value = [value]\n    return value"
    assert grading.outcomes(code, tests(150)) == [PASSED]
    with pytest.raises(CodeTestsError, match="recursion limit exceeded"):
        tests(250)


def test_answers_are_checked_before_the_run():
    def task(ground_truth: str, name: str = "row_7") -> Task:
        return Task(name, "arithmetic", ({"role": "user", "content": "Write f."},), ground_truth)

    good, bad = '{"calls": [{"call": "f(1)", "returns": 2}]}', '{"calls": [{"call": "f(1", "returns": 2}]}'
    CodeRewardConfig().check_answers([task(good)])
    with pytest.raises(RewardConfigError, match=r"(?s)task 'row_7' .*'Write f.'.*'f\(1' is not a Python expression"):
        CodeRewardConfig().check_answers([task(good), task(bad)])
    # One start finds all of them.
    with pytest.raises(RewardConfigError, match=r"(?s)task 'row_1'.*: 'row_2', 'row_4'$"):
        CodeRewardConfig().check_answers(
            task(tests, f"row_{number}") for number, tests in enumerate((good, bad, bad, good, "{}"))
        )


REPLY = "```python\ndef add(a, b): return a + b\n```"


THOUGHTS = "<think>```python\ndef add(a, b): return 0\n```</think>"


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("def add(a, b): return a + b\n```\nThis adds two numbers.", 1.0),
        ("```python\ndef add(a, b) return a\n```\nNo:\n" + REPLY + "\n```python\nprint(add(1, 2))\n```", 1.0),
        (REPLY + "\n```python\ndef add(a, b): return 0", 1.0),
        (REPLY + "\n```python\ndef add(a, b): return 0\n```", 0.0),
        ("\ud800" + REPLY, 1.0),
        ("```python\n\ud800\n```\n" + REPLY, 1.0),
        ("```python\n\0\n```", 0.0),
        ("", 0.0),
        (THOUGHTS + "def add(a, b): return a + b", 1.0),
        (THOUGHTS + REPLY, 1.0),
        (f"<think>\nMaybe\n{REPLY}\nor", 0.0),
    ],
)
def test_the_last_block_with_the_function_is_run(grading: Grading, request_of: Any, reply: str, score: float):
    component = CodeReward(CodeRewardConfig(), grading.sandbox)
    request = request_of(reply, ground_truth=ADDS.model_dump_json())
    [result] = grading.wait(component.score([request]))
    assert result.score == score


@pytest.mark.medium
@pytest.mark.parametrize(("score", "expected"), [(CodeScore.ALL, 0.0), (CodeScore.SHARE, 1 / 3)])
def test_scores(grading: Grading, request_of: Any, score: CodeScore, expected: float):
    component = CodeReward(CodeRewardConfig(score=score), grading.sandbox)
    grading.wait(component.check())
    reply = "```python\ndef add(a, b):\n    return 5 if a == 2 else 1\n```"
    request = request_of(reply, ground_truth=ADDS.model_dump_json())
    # The program is the policy's last reply, even if a message of the environment follows.
    request = dataclasses.replace(request, messages=(*request.messages, {"role": "tool", "content": "no program"}))
    broken = request_of(reply, ground_truth="46")
    found, invalid = grading.wait(component.score([request, broken]))
    assert found == EvaluateResult(
        score=expected,
        metrics={"passed_share": 1 / 3, "unanswered_share": 0.0},
        reason="1 of 3 tests passed, 0 without a result",
    )
    assert not invalid.is_score_valid
    assert "task t1: the ground truth '46' holds no valid tests" in str(invalid.error)
    assert str(invalid.error).endswith("Input should be an object")
