# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.environments.tools import (
    CalculatorTool,
    PythonTool,
    ToolCall,
    ToolError,
    describe_tools,
    find_calls,
    parse_call,
)

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4)


@given(
    before=st.text("abc \n<>/", max_size=10),
    calls=st.lists(st.tuples(st.text("abcde", min_size=1), st.dictionaries(st.text(max_size=4), JSON)), max_size=3),
)
def test_written_calls_are_parsed(before: str, calls: list):
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    reply = before + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    found = [parse_call(text) for text in find_calls(reply)]
    assert [(call.name, call.arguments) for call in found] == calls


@given(st.text())
def test_any_text_is_a_call_or_raises_a_tool_error(text: str):
    with contextlib.suppress(ToolError):
        assert isinstance(parse_call(text), ToolCall)


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        ("4", []),
        ("<tool_call>a</tool_call>", ["a"]),
        ("<think><tool_call>a</tool_call></think> 4", []),
        ("<think>a</think><think>b</think><tool_call> b </tool_call>", ["b"]),
        ("so <tool_call>a</tool_call> and <tool_call>b", ["a", "b"]),
        ("<tool_call>", [""]),
        ("</tool_call>", []),
        ('<think>so</think> {"name": "a", "parameters": {}}\n', ['{"name": "a", "parameters": {}}']),
        (
            '{"type": "function", "name": "a", "parameters": {}}',
            ['{"type": "function", "name": "a", "parameters": {}}'],
        ),
        ('{"name": "a", "arguments": 3}', ['{"name": "a", "arguments": 3}']),
        # JSON answers and text about calls contain no calls.
        ('{"name": "Ada", "age": 36}', []),
        ('{"name": "Ada", "parameters": {}, "age": 36}', []),
        ('I call {"name": "a", "parameters": {}}', []),
        ('{"name": "a", "parameters": {}', []),
        ("[" * 100_000, []),
    ],
)
def test_positions_of_calls(reply: str, calls: list[str]):
    assert find_calls(reply) == calls


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
    told = describe_tools([CalculatorTool(), PythonTool()])
    schemas = told.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(schema)["function"]["name"] for schema in schemas] == ["calculator", "python"]
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in told
