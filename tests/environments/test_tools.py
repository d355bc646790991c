# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.environments.calculator import CalculatorTool
from marin_rl.environments.tools import (
    FileToolConfig,
    PythonConfig,
    PythonTool,
    ToolCall,
    ToolError,
    ToolTimeoutError,
    check_arguments,
    describe_schemas,
    parse_call,
    tool_schema,
)
from marin_rl.rewards.functions import RewardCallError, RewardFailure
from marin_rl.rewards.reply_text import parse_reply
from marin_rl.rewards.sandbox.pool import PythonResult, Sandbox
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
    "more",
    [
        {},
        {"count": 3},
        {"share": 0.5},
        {"share": 1},
        {"flag": True},
        {"list": []},
        {"anything": None},
        {"always": 1},
        {"optional": "a"},
        {"optional": None},
        {"either": True},
        {"either": 2},
        {"nothing": None},
        {"unknown": 1},
    ],
)
def test_valid_arguments_pass(more: dict):
    check_arguments(SCHEMA, {"text": "", **more})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "argument 'text' is missing"),
        ({"text": 3}, "argument 'text' is 3; it must be of type string"),
        ({"text": "", "tex": ""}, "there is no argument 'tex'; there is: text, count"),
        ({"text": "", "count": 1.5}, "'count' is 1.5; it must be of type integer"),
        ({"text": "", "count": True}, "'count' is True; it must be of type integer"),
        ({"text": "", "flag": 1}, "'flag' is 1; it must be of type boolean"),
        ({"text": "", "share": "1"}, "'share' is '1'; it must be of type number"),
        ({"text": "", "list": {}}, "'list' is {}; it must be of type array"),
        ({"text": None}, "'text' is None; it must be of type string"),
        ({"text": "", "optional": 1}, "'optional' is 1; it must be of type string or null"),
        ({"text": "", "either": 1.5}, "'either' is 1.5; it must be of type integer or boolean"),
        ({"text": "", "nothing": False}, "'nothing' is False; it must be of type null"),
    ],
)
def test_errors_name_the_invalid_argument(arguments: dict, message: str):
    with pytest.raises(ToolError, match=message):
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


def test_python_runs_in_the_connected_runner():
    tool = PythonConfig().build()
    assert isinstance(tool, PythonTool)
    tool.sandbox = Runner()
    assert asyncio.run(tool.call({"code": "print(1)"})) == "out"
    assert tool.sandbox.ran == ["print(1)"]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (RewardFailure.TIMEOUT, ToolTimeoutError),
        (RewardFailure.EXITED, ToolError),
        (RewardFailure.WORKER, RewardCallError),
    ],
)
def test_python_reports_the_failure_of_a_program(cause: RewardFailure, kind: type[Exception]):
    tool = PythonTool()
    tool.sandbox = Runner(cause)
    with pytest.raises(kind, match="so it was") as caught:
        asyncio.run(tool.call({"code": "x"}))
    assert type(caught.value) is kind


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


@given(st.text())
def test_any_text_is_a_call_or_raises_a_tool_error(text: str):
    with contextlib.suppress(ToolError):
        assert isinstance(parse_call(text), ToolCall)


def test_llama_calls_name_their_arguments_parameters():
    assert parse_call('{"name": "a", "parameters": {"x": 1}}') == ToolCall("a", {"x": 1})
    assert parse_call('{"name": "a"}') == ToolCall("a", {})


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


def test_tools_are_described_as_json_schemas():
    told = describe_schemas([tool_schema(CalculatorTool()), tool_schema(PythonTool())])
    schemas = told.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(schema)["function"]["name"] for schema in schemas] == ["calculator", "python"]
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in told
