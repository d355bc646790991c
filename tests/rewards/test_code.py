# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from marin_rl.rewards.code import (
    CodeReward,
    CodeRewardConfig,
    CodeScore,
    CodeTests,
    StdinCase,
    extract_code,
    parse_tests,
    run_tests,
)
from marin_rl.rewards.code_asserts import CodeTestsError
from marin_rl.rewards.functions import EvaluateResult
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox

ADDS = CodeTests(asserts=("assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"))
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

    def passed(self, code: str, tests: CodeTests) -> list[bool]:
        return self.wait(run_tests(self.sandbox, code, tests))


@pytest.fixture(scope="module")
def grading() -> Iterator[Grading]:
    grading = Grading()
    yield grading
    grading.wait(grading.sandbox.close())
    grading.loop.close()


def test_right_code_passes(grading: Grading):
    assert grading.passed("def add(a, b):\n    return a + b", ADDS) == [True, True, True]
    assert grading.passed("print(sum(map(int, input().split())))", SUMS) == [True, True]
    assert grading.passed("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", SUMS) == [True, True]


def test_partly_right_code_passes_in_part(grading: Grading):
    assert grading.passed("def add(a, b):\n    return 5 if a == 2 else 1", ADDS) == [True, False, False]
    assert grading.passed("print(5)", SUMS) == [True, False]


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
        "import builtins\nbuiltins.repr = lambda *a: '(' * 100000\ndef add(a, b): return 7",
        "import builtins\nbuiltins.repr = lambda *a: '__import__(\"os\")._exit(0)'\ndef add(a, b): return 7",
        "def add(a, b): return float('nan')",
        "def add(a, b): return 10**100000",
    ],
)  # fmt: skip
def test_wrong_code_fails(grading: Grading, code: str):
    assert grading.passed(code, ADDS) == [False, False, False]


@pytest.mark.parametrize(
    "value",
    [
        "float('inf')",
        "[1, (-float('inf'),)]",
        "7 ** 10_000",
        "{'a': [-(7 ** 10_000)]}",
        "[(), [], {}, set(), '', b'', None]",
        "((1,), [2.5], {3: True}, {'inf'}, 4j, 'é', b'x')",
        "(5e-324, 1.7976931348623157e308, 0.1)",
    ],
)
def test_plain_values_are_reported(grading: Grading, value: str):
    tests = CodeTests(asserts=(f"assert f() == {value}", f"assert f() != {value}"))
    assert grading.passed(f"def f(): return {value}", tests) == [True, False]


CONVERTED = [
    ("import collections\ndef f(): return collections.Counter('aab')", "f() == {'a': 2, 'b': 1}"),
    (
        "import collections\ndef f():\n    d = collections.defaultdict(list); d[1].append(2); return d",
        "f() == {1: [2]}",
    ),
    ("import collections\ndef f(): return collections.OrderedDict(a=1)", "f() == {'a': 1}"),
    ("import collections\nP = collections.namedtuple('P', 'a b')\ndef f(): return [P(1, 2)]", "f() == [(1, 2)]"),
    ("def f(): return frozenset([1, 2])", "f() == {1, 2}"),
    ("def f(): return frozenset()", "f() == set()"),
    ("def f(): return frozenset()", "isinstance(f(), frozenset)"),
    ("def f(): return {frozenset([1]): [{'frozenset('}, ()]}", "f() == {frozenset([1]): [{'frozenset('}, ()]}"),
    ("class L(list): pass\ndef f(): return L([1])", "f() == [1]"),
    ("import enum\nclass E(enum.IntEnum):\n    A = 3\ndef f(): return E.A", "f() == 3"),
    ("import enum\nclass E(enum.StrEnum):\n    A = 'a'\ndef f(): return E.A", "f() == 'a'"),
    ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "f() == 0.5"),
    ("from fractions import Fraction\ndef f(): return Fraction(2**70 + 1)", "f() == 2**70 + 1"),
    ("from decimal import Decimal\ndef f(): return Decimal('2.5')", "f() == 2.5"),
    ("def f(): yield from range(3)", "list(f()) == [0, 1, 2]"),
    ("def f(): return map(str, [1, 2])", "list(f()) == ['1', '2']"),
    ("import collections\ndef f(): return collections.deque([1])", "list(f()) == [1]"),
    ("def f(): return range(3)", "list(f()) == [0, 1, 2]"),
    ("def f(): return {'b': 1, 'a': 2}.keys()", "sorted(f()) == ['a', 'b']"),
    ("def f(): return bytearray(b'x')", "f() == b'x'"),
    ("def f(): return float('nan')", "math.isnan(f())"),
    ("def f(): return 'baa'", "Counter(f()) == Counter('aab')"),
    ("def f(): return 'a1b'", "re.sub('[0-9]', '', f()) == 'ab'"),
    ("import numpy as np\ndef f(): return np.all(np.arange(3) < 3)", "f() == True"),
    ("import numpy as np\ndef f(): return [np.int64(2), np.float64(0.5), np.arange(2)]", "f() == [2, 0.5, [0, 1]]"),
    (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def f(): return P(3).x",
        "f() == 3",
    ),
]


@pytest.mark.parametrize(("code", "condition"), CONVERTED)
def test_values_of_derived_types_are_reported(grading: Grading, code: str, condition: str):
    tests = CodeTests(asserts=(f"assert {condition}", f"assert not ({condition})"))
    assert grading.passed(code, tests) == [True, False]


@pytest.mark.parametrize("value", ["iter([1])", "(i for i in [1])", "range(1, 2)", "{1: 2}.keys()", "object()"])
def test_iterables_are_not_lists(grading: Grading, value: str):
    assert grading.passed(f"def f(): return {value}", CodeTests(asserts=("assert f() == [1]",))) == [False]


def test_functions_can_have_names_of_builtins(grading: Grading):
    tests = CodeTests(asserts=("assert solution.sum(10, 15) == 6", "assert solution.sum(2, 3) == 5"))
    assert grading.passed("def sum(a, b): return 6", tests) == [True, False]
    assert grading.passed("", tests) == [False, False]


def test_exit_in_one_call_costs_one_test(grading: Grading):
    code = "import sys\ndef f(x):\n    if x < 0: sys.exit('bad')\n    return x + 1"
    tests = CodeTests(asserts=("assert f(1) == 2", "assert f(-1) == 0", "assert f(2) == 3"))
    assert grading.passed(code, tests) == [True, False, True]


def test_calls_that_fail_count_only_if_the_condition_uses_them(grading: Grading):
    code = "def f(x):\n    if x == 0: raise ValueError\n    return x"
    tests = CodeTests(
        asserts=(
            "assert f(1) == 1 or f(0) == 0",
            "assert f(1) == 2 or f(0) == 0",
            "assert f(0) is None",
            "assert not f(0)",
        )
    )
    assert grading.passed(code, tests) == [True, False, False, False]


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
    expected_is_hidden = "assert find('64_DETCEPXE') == ('EXPECTED_46' == '')"
    # The search works: it finds the evaluating function in an outer frame.
    search_works = "assert find('etaulave_') == True"
    tests = CodeTests(asserts=(expected_is_hidden, search_works))
    assert grading.passed(INSPECTS_FRAMES, tests) == [True, True]


def test_early_exit_is_no_answer(grading: Grading):
    code = "import atexit, os, sys\nprint('5'); sys.stdout.flush(); os._exit(1)"
    assert grading.passed(code, SUMS) == [False, False]


@pytest.mark.parametrize("printed", ["5\n", "5", "5  \n", "5\n\n\n"])
def test_trailing_whitespace_is_ignored(grading: Grading, printed: str):
    case = CodeTests(cases=(StdinCase(stdin="", stdout="5\n"),))
    assert grading.passed(f"import sys; sys.stdout.write({printed!r})", case) == [True]


@pytest.mark.parametrize("printed", [" 5", "5 5", "\n5", "55", ""])
def test_other_white_space_counts(grading: Grading, printed: str):
    case = CodeTests(cases=(StdinCase(stdin="", stdout="5\n"),))
    assert grading.passed(f"import sys; sys.stdout.write({printed!r})", case) == [False]


@pytest.mark.parametrize(
    "ground_truth",
    ["", "46", "[]", "{}", '{"asserts": []}', '{"asserts": [1]}', '{"tests": []}', '{"cases": [{"stdin": ""}]}'],
)
def test_ground_truths_without_tests(ground_truth: str):
    with pytest.raises(CodeTestsError, match="ground truth"):
        parse_tests(ground_truth)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("first\n```\na\n```\nbetter\n```py\nb\nc\n```\nbye", "b\nc\n"),
        ("print(1)", "print(1)"),
        ("```Python\na = '`'\n```", "a = '`'\n"),
        ("", ""),
        ("```bash\npip install a\n```\nThen:\n```python\nb\n```\ndone", "b\n"),
        ("```python\na\n```\nIt prints\n```text\n7\n```\n", "a\n"),
        ("Call ```f``` so:\n```python\na\n```", "a\n"),
        ("so: ```python\na```", "a"),
        ("```json\n{}\n```", "```json\n{}\n```"),
        ("```python\na\n```\nIt prints:\n```\n2\n```\n", "a\n"),
        ("```python\na\n```\nand\n```python\nb\n```", "a\n\nb\n"),
        ("```\na\n```\nbetter\n```\nb\n```", "b\n"),
        ("```python\ns = '```'\nt = 1\n```\ndone", "s = '```'\nt = 1\n"),
        ('```python title="a.py"\na\n```', "a\n"),
        ("```Python 3\na\n```", "a\n"),
        ("```python3.11\na\n```", "a\n"),
        ("```pytb\na\n```\n```py\nb\n```", "b\n"),
        ("1. Code:\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("```python\r\na\r\nb\r\n```", "a\r\nb\r\n"),
        ("```python\na\nb", "a\nb"),
        ("```python\n```\n", ""),
        ("so: ```python\na``` and", "a"),
        ("so: ```python\na``` and\n```py\nb\n```", "a\nb\n"),
        ("```python\na\n```python\nb\n``` end", "a\n\nb\n"),
    ],
)
def test_code_is_extracted_from_replies(reply: str, code: str):
    assert extract_code(reply) == code


def test_the_last_of_several_programs_counts():
    reply = "```python\nprint(1)\n```\nBetter:\n```python\nprint(2)\n```"
    assert extract_code(reply, is_program=True) == "print(2)\n"
    assert extract_code(reply) == "print(1)\n\nprint(2)\n"


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<think>```python\ndef add(a, b): return 0\n```</think>def add(a, b): return a + b", 1.0),
        ("<think>```python\ndef add(a, b): return 0\n```</think>```python\ndef add(a, b): return a + b\n```", 1.0),
        ("<think>Maybe\n```python\ndef add(a, b): return a + b\n```\nor", 0.0),
    ],
)
def test_thoughts_are_not_run(grading: Grading, request_of: Any, reply: str, score: float):
    component = CodeReward(CodeRewardConfig(), grading.sandbox)
    request = request_of(reply, ground_truth=json.dumps({"asserts": list(ADDS.asserts)}))
    [result] = grading.wait(component.score([request]))
    assert result.score == score


def test_thoughts_that_the_template_opened_are_not_run(grading: Grading, request_of: Any):
    component = CodeReward(CodeRewardConfig(), grading.sandbox)
    reply = "Maybe\n```python\ndef add(a, b): return a + b\n```\nor"
    request = request_of(reply, ground_truth=json.dumps({"asserts": list(ADDS.asserts)}), in_thoughts=True)
    [result] = grading.wait(component.score([request]))
    assert result.score == 0.0


@pytest.mark.parametrize(("score", "expected"), [(CodeScore.ALL, 0.0), (CodeScore.SHARE, 1 / 3)])
def test_scores(grading: Grading, request_of: Any, score: CodeScore, expected: float):
    component = CodeReward(CodeRewardConfig(score=score), grading.sandbox)
    grading.wait(component.check())
    reply = "```python\ndef add(a, b):\n    return 5 if a == 2 else 1\n```"
    request = request_of(reply, ground_truth=json.dumps({"asserts": list(ADDS.asserts)}))
    # The program is the policy's last reply, even if a message of the environment follows.
    request = dataclasses.replace(request, messages=(*request.messages, {"role": "tool", "content": "no program"}))
    broken = request_of(reply, ground_truth="46")
    found, invalid = grading.wait(component.score([request, broken]))
    assert found == EvaluateResult(score=expected, metrics={"passed_share": 1 / 3}, reason="1 of 3 tests passed")
    assert not invalid.is_score_valid
    assert "task t1: the ground truth '46' holds no tests" in str(invalid.error)
