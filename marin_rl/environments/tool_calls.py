# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parsing of tool calls in replies, and the system message that describes tools.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen); a reply may contain several. A reply
that consists of `{"name": …, "parameters": {…}}` (Llama) is one call. Text before the last `</think>` is ignored.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from marin_rl.environments.tools import Tool, ToolError, tool_schema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments, not validated."""


def find_calls(reply: str) -> list[str]:
    """Return the texts of the calls in a reply, in order; a call that is not closed extends to the end of the reply.

    >>> find_calls("Let me see. <tool_call>{}</tool_call>")
    ['{}']
    """
    _, _, answer = reply.rpartition("</think>")
    calls = [match[1].strip() for match in _CALL.finditer(answer)]
    return calls or ([answer.strip()] if _is_call(answer) else [])


def _is_call(text: str) -> bool:
    """Return whether the text is only a call: JSON with exactly the keys of a call. Other JSON is an answer."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() - {"type"} in ({"name", "parameters"}, {"name", "arguments"})


_CALL = re.compile(rf"{_OPEN}(.*?)(?:{_CLOSE}|\Z)", re.DOTALL)


def parse_call(text: str) -> ToolCall:
    """Parse a call.

    Args:
        text: JSON; the arguments may be named `parameters`, as in Llama's format.

    Raises:
        ToolError: if it is not a JSON object with a name and arguments; the message names the error.

    >>> parse_call('{"name": "calculator", "arguments": {"expression": "1 + 1"}}').name
    'calculator'
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the call is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ToolError('the call is not a JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str):
        raise ToolError('the call has no "name"')
    if not isinstance(arguments, dict):
        raise ToolError('the call\'s "arguments" are not a JSON object')
    return ToolCall(name, arguments)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def describe_tools(tools: Sequence[Tool]) -> str:
    """Return the system message that describes tools, with the exact text of the templates of Qwen and Hermes.

    Args:
        tools: at least one tool.
    """
    schemas = "\n".join(json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{_OPEN}{_CLOSE} XML tags:\n"
        f'{_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{_CLOSE}'
    )
