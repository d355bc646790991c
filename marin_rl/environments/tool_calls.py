# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tool calls in text: what the policy writes, and how it is told to.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen have it; a reply may hold several.
A reply that is `{"name": …, "parameters": {…}}` and nothing else, as Llama has it, is one call. What stands before the
last `</think>` is thinking, and calls nothing.
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
    """What the policy asked for."""

    name: str
    """The tool's name."""
    arguments: Mapping[str, Any]
    """Its arguments, not checked yet."""


def find_calls(reply: str) -> list[str]:
    """The texts of the calls in a reply, in order; one that is not closed goes on to the reply's end.

    >>> find_calls("Let me see. <tool_call>{}</tool_call>")
    ['{}']
    """
    _, _, said = reply.rpartition("</think>")
    found = [match[1].strip() for match in _CALL.finditer(said)]
    return found or ([said.strip()] if _is_call(said) else [])


def _is_call(text: str) -> bool:
    """Whether a text is a call and nothing else. Answers in JSON are not, unless they have just the keys of one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() - {"type"} in ({"name", "parameters"}, {"name", "arguments"})


_CALL = re.compile(rf"{_OPEN}(.*?)(?:{_CLOSE}|\Z)", re.DOTALL)


def parse_call(text: str) -> ToolCall:
    """Read a call.

    Args:
        text: JSON; the arguments may be called `parameters`, as Llama has it.

    Raises:
        ToolError: if it is not a JSON object with a name and arguments; the message says what is wrong.

    >>> parse_call('{"name": "calculator", "arguments": {"expression": "1 + 1"}}').name
    'calculator'
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the call is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ToolError('the call is not a JSON object with "name" and "arguments"')
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
    if not isinstance(name, str):
        raise ToolError('the call has no "name"')
    if not isinstance(arguments, dict):
        raise ToolError('the call\'s "arguments" are not a JSON object')
    return ToolCall(name, arguments)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def describe_tools(tools: Sequence[Tool]) -> str:
    """How a system message tells the policy of its tools: word for word what the templates of Qwen and Hermes write.

    Args:
        tools: at least one.
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
