# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.code import same_value
from marin_rl.rewards.code_harness import candidates, choose_definitions, choose_program, to_json

ADD = "def add(a, b):\n    return a + b\n"
BROKEN = "def add(a, b:\n    return a + b\n"
WRONG = "def add(a, b):\n    return 0\n"
EXAMPLE = "from solution import add\nprint(add(2, 3))\n"


def block(code: str, language: str = "python", fence: str = "```") -> str:
    return f"{fence}{language}\n{code}{fence}\n"


DEFINES_ADD = {
    "a single block": f"Here it is:\n{block(ADD)}It adds.",
    "the prompt opened the fence": f"{ADD}```\nThis function adds two numbers.\n",
    "the prompt opened the fence, which ends in a line": f"{ADD.rstrip()}```\nThis adds two numbers.",
    "the prompt opened the fence, and an example follows": f"{ADD}```\nExample:\n```\nprint(add(1, 2))\n```\n",
    "the prompt opened the fence, and a tagged example follows": f"{ADD.rstrip()}```\n{block(EXAMPLE)}",
    "an unclosed block of tildes before it": f"~~~text\n{block(ADD)}",
    "the prompt opened the fence of a draft": f"{BROKEN}```\nBetter\n```\n{ADD}```\n",
    "a broken draft": f"{block(BROKEN)}Corrected:\n{block(ADD)}",
    "a wrong draft": f"{block(WRONG)}Corrected:\n{block(ADD)}",
    "a broken block after it": f"{block(ADD)}Or\n{block(BROKEN)}",
    "an example after it": f"{block(ADD)}Usage:\n{block('print(add(2, 3))')[:-4]}\n```\n",
    "an example with an import after it": block(ADD) + block(EXAMPLE),
    "a shell block after it": block(ADD) + block("python add.py\n", "bash"),
    "an untagged output after it": f"{block(ADD)}prints\n{block('5', '')}".replace("5```", "5\n```"),
    "an interactive session after it": block(ADD) + block(">>> add(2, 3)\n5\n"),
    "helpers after it": block(ADD) + block("def subtract(a, b):\n    return add(a, -b)\n"),
    "a truncated block after it": f"{block(ADD)}Shorter:\n```python\ndef add(a, b):\n    return 0",
    "another language after it": block(ADD) + block("add = lambda a, b: 0\n", "javascript"),
    "an unclosed shell block before it": f"```bash\npip install x\n{block(ADD)}",
    "a fence in a string": block('DOC = """\n```\nadd(1, 2)\n```\n"""\n' + ADD),
    "a definition in a string": block(f'{ADD}DOC = """\n{block(WRONG)}"""\n'),
    "a fence in a docstring": block('def add(a, b):\n    """\n    ```\n    1\n    ```\n    """\n    return a + b\n'),
    "a fence in a comment": block(ADD + "# ends with ```\n"),
    "a fence in a line of code": block("fence = '```'\n" + ADD),
    "tildes": block(ADD, "python", "~~~"),
    "backticks between tildes": block('DOC = """\n```\n"""\n' + ADD, "python", "~~~~"),
    "a longer fence": block('DOC = """\n```\n"""\n' + ADD, "python", "````"),
    "an indented block of a list": "1. Code:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
    "a block behind a list marker": "- ```python\n  def add(a, b):\n      return a + b\n  ```\n",
    "indented code": block("    def add(a, b):\n        return a + b\n"),
    "no fence": ADD,
    "a fence within a line": f"so: {block(ADD)}",
    "an end within a line": f"```python\n{ADD.rstrip()}```\nand more",
    "text after the end": f"```python\n{ADD}``` adds.\n{block('text', 'text')}",
    "no end between two blocks": f"```python\n{ADD}```python\nprint(1)\n```\n",
    "Windows line ends": block(ADD).replace("\n", "\r\n"),
    "inline code before it": f"Call ```add``` so:\n{block(ADD)}",
    "a class attribute and a loop": block(ADD) + block("class Add:\n    add = 0\nprint([add for add in ()])\n"),
    **{
        f"the tag {tag}": block(ADD, tag)
        for tag in ("py", "Python", "python3", "Python 3", "python3.11", " python", 'python title="a"', "{.python}", "")
    },
}  # fmt: skip


@pytest.mark.parametrize("reply", DEFINES_ADD.values(), ids=DEFINES_ADD.keys())
def test_the_last_complete_block_with_the_called_function_is_chosen(reply: str):
    code = choose_definitions(reply, {"add"})
    assert code is not None
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["add"](2, 3) == 5


@pytest.mark.parametrize(
    "reply",
    ["", "I cannot.", block(BROKEN), "```python\n" + ADD, block(ADD, "json"), block("add(1, 2)\n"), "x = add", "``` "],
)
def test_replies_without_the_function_have_no_code(reply: str):
    assert choose_definitions(reply, {"add"}) is None


@pytest.mark.parametrize(
    "code",
    [
        "async def add(a, b): return a",
        "add = lambda a, b: a + b",
        "add: object = max",
        "subtract, (add, *rest) = max, (min, abs)",
        "class add: pass",
        "try:\n    from fast import add\nexcept ImportError:\n    def add(a, b): return a",
        "if True:\n    def add(a, b): return a",
        "from operator import add",
        "import operator as add",
    ],
)
def test_definitions(code: str):
    assert choose_definitions(block("print(1)\n") + block(code + "\n"), {"add", "Other"}) == code + "\n"


def test_a_block_with_more_of_the_functions_is_preferred():
    both, one = "def f(): pass\ndef g(): pass\n", "def g(): return 1\n"
    assert choose_definitions(block(both) + block(one), {"f", "g", "sorted"}) == both
    assert choose_definitions(block(both) + block(one), {"g"}) == one
    assert choose_definitions(block("class S: pass\n") + block("f = 1\n"), {"S"}) == "class S: pass\n"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (block("print(1)\n") + block("print(2)\n"), "print(2)\n"),
        (block("print(1)\n") + block("print(2)\n", ""), "print(1)\n"),
        (block("print(1)\n", "") + block("print(2)\n", ""), "print(2)\n"),
        (block("print(1)\n") + block("5 \n"), "print(1)\n"),
        (block("print(input())\n") + block("total = sum(a)\n"), "print(input())\n"),
        (block("print(input())\n") + block("print(solve([1, 2]))\n"), "print(input())\n"),
        (block("print(input())\n", "") + block("n = int(input())\n"), "print(input())\n"),
        (block("print(input())\n") + block("n = input()\nprint(n)\n"), "n = input()\nprint(n)\n"),
        (block("n = input()\n") + block("from sys import stdin, stdout\nstdout.write(next(stdin))\n"),
         "from sys import stdin, stdout\nstdout.write(next(stdin))\n"),
        (block("import sys\nsys.stdout.write(open(0).read())\n") + block("print(1)\n"),
         "import sys\nsys.stdout.write(open(0).read())\n"),
        (block("print(1)\n") + block("print(2\n"), "print(1)\n"),
        (block("print(1)\n") + block("echo 1\n", "sh"), "print(1)\n"),
        ("print(1)\n```\nThis prints one.\n", "print(1)\n"),
        ("print(1)\n```\nSample:\n```\n1\n```\n", "print(1)\n"), ("print(1)", "print(1)\n"),
        (block("x = 1\n"), "x = 1\n"), ("It prints one.", None), ("```python\nprint(1)\n", None), ("", None),
        (block("# nothing\n"), None),
    ],
)  # fmt: skip
def test_the_last_program_is_chosen(reply: str, code: str | None):
    assert choose_program(reply) == code


@pytest.mark.medium
@pytest.mark.parametrize(
    "reply",
    [
        "```\n" * 20_000, "```python\n" * 20_000, "`" * 200_000 + " x`", "```python\n" + "(" * 100_000 + "\n```",
        "```python\n" + "-" * 100_000 + "1\n```", "```python\n\0\n```", "```python\n'\ud800'\n```",
        " " * 200_000 + "```", "~~~`" * 50_000, "1." * 50_000 + "```python",
    ],
)  # fmt: skip
def test_hostile_replies_are_searched(reply: str):
    assert all(len(candidate.code) < len(reply) + 2 for candidate in candidates(reply))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(min_value=2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(value=JSON)
def test_json_values_are_sent_unchanged(value: object):
    assert same_value(value, json.loads(json.dumps(to_json(value))))


def test_values_that_are_not_json_are_refused():
    for value in (object(), iter([1]), range(3), len, {1}, {1: 2}, {None: 2}, b"a", 1j, [{(): 1}]):
        with pytest.raises(TypeError):
            to_json(value)
