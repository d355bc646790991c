# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import json
import math
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.environments.tools import (
    MAX_LENGTH,
    CalculatorConfig,
    CalculatorTool,
    FileToolConfig,
    PythonConfig,
    PythonTool,
    ToolCall,
    ToolError,
    ToolTimeoutError,
    calculate,
    check_arguments,
    describe_schemas,
    parse_call,
    tool_schema,
)
from marin_rl.rewards.reply_text import parse_reply
from marin_rl.rewards.sandbox.functions import RewardCallError
from marin_rl.rewards.sandbox.pool import PythonResult, Sandbox
from marin_rl.types import RewardFailure
from marin_rl.utils.user_code import UserFileError

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "anything": {},
        "always": True,
        "optional": {"type": ["string", "null"]},
        "either": {"type": ["integer", "boolean"]},
        "nothing": {"type": "null"},
        "unknown": {"type": ["date"]},
    },
    "required": ["text"],
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "", "count": 3, "share": 0.5, "flag": True, "list": [], "anything": None, "always": 1}, None),
        ({"text": "", "share": 1, "optional": "a", "either": True, "nothing": None, "unknown": 1}, None),
        ({"text": "", "optional": None, "either": 2}, None),
        ({}, "argument 'text' is missing"),
        ({"text": 3}, "argument 'text' is 3; it must be of type string"),
        ({"text": "", "tex": ""}, "there is no argument 'tex'; there is: text, count"),
        ({"text": "", "count": 1.5}, "'count' is 1.5; it must be of type integer"),
        ({"text": "", "count": True}, "'count' is True; it must be of type integer"),
        ({"text": "", "flag": 1}, "'flag' is 1; it must be of type boolean"),
        ({"text": "", "list": {}}, "'list' is {}; it must be of type array"),
        ({"text": "", "optional": 1}, "'optional' is 1; it must be of type string or null"),
        ({"text": "", "either": 1.5}, "'either' is 1.5; it must be of type integer or boolean"),
        ({"text": "", "nothing": False}, "'nothing' is False; it must be of type null"),
    ],
)
def test_arguments_must_fit_the_schema(arguments: dict, message: str | None):
    with contextlib.nullcontext() if message is None else pytest.raises(ToolError, match=message):
        check_arguments(SCHEMA, arguments)


class Runner(Sandbox):
    """Code runner without a sandbox."""

    def __init__(self, cause: RewardFailure | None = None) -> None:
        self.cause = cause
        self.ran: list[str] = []

    async def run_python(self, code: str, stdin: str = "", seconds: float = math.inf) -> PythonResult:
        self.ran.append(code)
        failure = None if self.cause is None else RewardCallError(self.cause, "so it was")
        return PythonResult(stdout="out", stderr="", failure=failure, seconds=0.1)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (None, None),
        (RewardFailure.TIMEOUT, ToolTimeoutError),
        (RewardFailure.EXITED, ToolError),
        (RewardFailure.WORKER, RewardCallError),
    ],
)
def test_python_returns_the_output_or_the_failure_of_a_program(
    cause: RewardFailure | None, kind: type[Exception] | None
):
    tool = PythonConfig().build()
    assert isinstance(tool, PythonTool)
    tool.sandbox = Runner(cause)
    if kind is None:
        assert asyncio.run(tool.call({"code": "x"})) == "out"
    else:
        with pytest.raises(kind, match="so it was") as caught:
            asyncio.run(tool.call({"code": "x"}))
        assert type(caught.value) is kind
    assert tool.sandbox.ran == ["x"]


def test_a_tool_from_a_file(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Echo:\n    name = 'echo'\n    description = 'Says it again.'\n"
        "    parameters = {'type': 'object', 'properties': {'text': {'type': 'string'}}}\n"
        "    def __init__(self, times=1):\n        self.times = times\n"
        "    async def call(self, arguments):\n        return arguments['text'] * self.times\n"
        "def nothing():\n    return 3\n"
    )
    tool = FileToolConfig(str(path), "Echo", {"times": 2}).build()
    assert asyncio.run(tool.call({"text": "ab"})) == "abab"
    with pytest.raises(UserFileError, match=r"'Echo' of .* with options {'x': 1} raised"):
        FileToolConfig(str(path), "Echo", {"x": 1}).build()
    with pytest.raises(UserFileError, match=r"'nothing' of .* returned int, which is not a tool"):
        FileToolConfig(str(path), "nothing").build()


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4)


@pytest.mark.medium
@given(
    before=st.text("abc \n<>/", max_size=10),
    calls=st.lists(st.tuples(st.text("abcde", min_size=1), st.dictionaries(st.text(max_size=4), JSON)), max_size=3),
)
def test_written_calls_are_parsed(before: str, calls: list):
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    reply = before + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    found = [parse_call(call.text) for call in parse_reply(reply).calls]
    assert [(call.name, call.arguments) for call in found] == calls


@pytest.mark.medium
@given(st.text())
def test_any_text_is_a_call_or_raises_a_tool_error(text: str):
    with contextlib.suppress(ToolError):
        assert isinstance(parse_call(text), ToolCall)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the call is not valid JSON"),
        ("{'name': 'a'}", "the call is not valid JSON"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not a JSON number"),
        ("[" * 100_000, "the call is not valid JSON"),
        ("1" * 5000, "the call is not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", 'has no "name"'),
        ('{"name": 3}', 'has no "name"'),
        ('{"name": "a", "arguments": "b"}', '"arguments" are not a JSON object'),
    ],
)
def test_invalid_calls(text: str, message: str):
    with pytest.raises(ToolError, match=message):
        parse_call(text)
    assert parse_call('{"name": "a", "parameters": {"x": 1}}') == ToolCall("a", {"x": 1})
    assert parse_call('{"name": "a"}') == ToolCall("a", {})


def test_tools_are_described_as_json_schemas():
    told = describe_schemas([tool_schema(CalculatorTool()), tool_schema(PythonTool())])
    schemas = told.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(schema)["function"]["name"] for schema in schemas] == ["calculator", "python"]
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in told


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> str:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["0", "1", "2", "7", "12", "0.5", "3e2"]))
    left, right = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    return f"({left}{draw(st.sampled_from(['+', '-', '*', '/', '//', '%', '**']))}{right})"


@given(expression=expressions())
def test_values_match_python(expression: str):
    try:
        found = calculate(expression)
    except ToolError:
        return
    # eval is the oracle; the calculator has checked the size of the expression.
    value = eval(expression)
    if isinstance(value, int):
        assert found == str(value)
    else:
        assert math.isclose(float(found), value, rel_tol=1e-14)


@given(text=st.text(max_size=30) | st.text("0123456789+-*/%(). eEabsqrtmxin,_jl", max_size=30))
def test_any_text_has_a_value_or_an_error_without_a_warning(text: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(ToolError):
            assert isinstance(calculate(text), str)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" 2 ** 10 ", "1024"),
        ("-3 - -4", "1"),
        ("7 // 2 + 7 % 2", "4"),
        ("10 / 2", "5"),
        ("max(1, 2.5, -3) + abs(-2)", "4.5"),
        ("round(2.567, 1)", "2.6"),
        ("round(2.5)", "2"),
        ("round(1250, -2)", "1200"),
        ("2**4095", str(2**4095)),
        ("sqrt(1/9)", "0.333333333333333"),
    ],
)
def test_values(expression: str, value: str):
    assert asyncio.run(CalculatorConfig().build().call({"expression": expression})) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("2 ** 99999", "the power is too large"),
        ("10.0 ** 999", "the result is too large"),
        ("1e308 * 10", "not a real number"),
        ("(-8) ** 0.5", "not a real number"),
        ("*".join(["9" * 60] * 6) + "*2**3000", "the result is too large"),
        ("9" * 401, "401 characters; at most 400"),
        ("(" * 190 + "1" + ")" * 189, "not a valid expression"),
        ("-" * 100 + "1", "more than 60 levels"),
        ("", "may hold numbers"),
        (" ", "not a valid expression"),
        ("1 +", "not a valid expression"),
        ("2 ^ 3", "powers are"),
        ("__import__('os')", "may hold numbers"),
        ("open", "'open' is not known; functions are abs, max"),
        ("exec(1)", "'exec' is not known"),
        ("sqrt(-1)", "cannot compute sqrt"),
        ("sqrt(1, 2)", "cannot compute sqrt"),
        ("round(1, -10 ** 9)", "cannot compute round: .* at most 4096"),
        ("round(0.5, 10 ** 1000)", "cannot compute round: .* at most 4096"),
        ("round(2.5, 0.5)", "cannot compute round"),
        ("(1, 2)", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("max(*(1, 2))", "only numbers"),
    ],
)
def test_invalid_expressions(expression: str, message: str):
    with pytest.raises(ToolError, match=message):
        calculate(expression)


@pytest.mark.parametrize("unit", ["11+", "1.1 ", "11e11 ", "1 ", "a ", "1.", ".1", "(", "aa+11*"])
def test_the_check_of_the_characters_takes_linear_time(unit: str):
    # A pattern that matches digits in two ways would try them all for each number, and never end.
    with pytest.raises(ToolError):
        calculate((unit * MAX_LENGTH)[: MAX_LENGTH - 1] + "!")
