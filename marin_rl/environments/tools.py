# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tools for the policy: the interface, calls, argument validation; tools from files, Python and a calculator.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen) or an answer that consists of
`{"name": …, "parameters": {…}}` (Llama). `rewards/reply_text.py` finds the calls of a reply.
"""

import abc
import ast
import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import draccus

from marin_rl.rewards.reply_text import CALL_END, CALL_START
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import RewardFailure
from marin_rl.utils.settings.fields import LOCAL_FILE, NAMES_FILES
from marin_rl.utils.user_code import UserFileError, load_from_file, user_errors


class ToolError(Exception):
    """Raised if a call cannot be answered; the policy receives the message."""


class ToolTimeoutError(ToolError):
    """Raised if a call times out."""


@runtime_checkable
class Tool(Protocol):
    """A tool that the policy can call."""

    @property
    def name(self) -> str:
        """Name in calls."""
        ...

    @property
    def description(self) -> str:
        """Description for the policy."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Arguments as a JSON schema of type `object`."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Answer a call with validated arguments.

        Raises:
            ToolError: if the call has no answer; other exceptions are treated alike.
            RewardCallError: if the failure is not caused by the call; the rollout fails.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ToolConfig(draccus.ChoiceRegistry, abc.ABC):
    """Base of tool configs, selected by `type`."""

    @abc.abstractmethod
    def build(self) -> Tool:
        """Build the tool."""


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool for chat templates."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments, not validated."""


def parse_call(text: str) -> ToolCall:
    """Parse a call in JSON; the arguments may be named `parameters`, as in Llama's format.

    Raises:
        ToolError: if it is not a JSON object with a name and arguments; the message names the error.

    >>> parse_call('{"name": "calculator", "arguments": {"expression": "1 + 1"}}').name
    'calculator'
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # Numbers such as 1e999 and half a character (an unpaired surrogate) can be read, but not written again.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
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


def describe_schemas(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the system message that describes tools, with the exact text of the templates of Qwen and Hermes.

    The schemas are those of at least one tool, as `tool_schema` returns them.
    """
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{CALL_START}{CALL_END} XML tags:\n"
        f'{CALL_START}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
    )


_TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
"""Python types by type of a JSON schema."""


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Check that a call has all required arguments, no unknown ones, and the right types.

    Of the schema, which has the type `object`, only `properties`, `required` and the `type` of each property are used;
    a type may be a list of types.

    Raises:
        ToolError: for the first invalid argument.

    >>> check_arguments({"properties": {"x": {"type": "number"}}, "required": ["x"]}, {"x": 2})
    """
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            raise ToolError(f"argument {name!r} is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"there is no argument {name!r}; there is: {', '.join(properties) or 'none'}")
        # The schemas true and {} accept every value.
        kinds = properties[name].get("type", ()) if isinstance(properties[name], Mapping) else ()
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        if kinds and not any(_is_of_type(value, kind) for kind in kinds):
            raise ToolError(f"argument {name!r} is {value!r}; it must be of type {' or '.join(kinds)}")


def _is_of_type(value: object, kind: str) -> bool:
    """Return whether a value has a type of a JSON schema; unknown types accept every value."""
    if kind not in _TYPES:
        return True
    # bool is a subclass of int in Python, but not a number in JSON.
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


@ToolConfig.register_subclass("file")
@dataclasses.dataclass(frozen=True)
class FileToolConfig(ToolConfig):
    """User-defined tool from a Python file. It runs in the training process without isolation."""

    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """Path of the file, relative to the working directory."""
    name: str
    """Name of a class or function in the file that returns a tool."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Its arguments."""

    def build(self) -> Tool:
        """Import the file and build the tool.

        Raises:
            UserFileError: if the result is not a tool.
        """
        where = f"{self.name!r} of {self.path}"
        factory = load_from_file(self.path, self.name)
        with user_errors(f"{where} with options {self.options} raised"):
            tool = factory(**self.options)
        if not isinstance(tool, Tool):
            raise UserFileError(
                f"{where} returned {type(tool).__name__}, which is not a tool: it needs name, description, parameters "
                "and call(arguments)"
            )
        return tool


def text_parameter(name: str, description: str) -> dict[str, Any]:
    """Return the schema of a single argument of type string."""
    properties = {name: {"type": "string", "description": description}}
    return {"type": "object", "properties": properties, "required": [name]}


class PythonTool:
    """Runs Python programs in a sandbox.

    Attributes:
        sandbox: must be set before the first call.
        max_seconds: maximum duration of a program; the wait for a worker of the sandbox does not count.
    """

    name: str = "python"
    description: str = "Runs a Python program and returns what it printed."
    parameters: Mapping[str, Any] = text_parameter("code", "The program. Print what is wanted.")

    sandbox: Sandbox | None = None
    max_seconds: float = math.inf

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the output of the program.

        Raises:
            ToolError: if the program fails or exceeds a limit; the message includes its output.
            RewardCallError: if the sandbox itself fails.
        """
        assert self.sandbox is not None
        result = await self.sandbox.run_python(arguments["code"], seconds=self.max_seconds)
        if result.failure is None:
            return result.stdout
        if result.failure.cause is RewardFailure.WORKER:
            raise result.failure
        kind = ToolTimeoutError if result.failure.cause is RewardFailure.TIMEOUT else ToolError
        raise kind(f"the program failed: {result.failure}. It printed:\n{result.stdout}")


@ToolConfig.register_subclass("python")
@dataclasses.dataclass(frozen=True)
class PythonConfig(ToolConfig):
    """Python programs in the run's sandbox."""

    def build(self) -> Tool:
        """Build the tool; its sandbox is connected later."""
        return PythonTool()


class CalculatorTool:
    """Evaluates arithmetic expressions."""

    name: str = "calculator"
    description: str = (
        "Works out an arithmetic expression, such as (3 + 4) * 2 ** 5. It knows + - * / // % ** and abs, max, min, "
        "round, sqrt."
    )
    parameters: Mapping[str, Any] = text_parameter("expression", "The expression.")

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the value of the expression."""
        return calculate(arguments["expression"])


@ToolConfig.register_subclass("calculator")
@dataclasses.dataclass(frozen=True)
class CalculatorConfig(ToolConfig):
    """Calculator with bounded arithmetic."""

    def build(self) -> Tool:
        """Build the calculator."""
        return CalculatorTool()


MAX_LENGTH = 400
"""Maximum number of characters of an expression."""
MAX_DEPTH = 60
"""Maximum nesting depth of an expression."""
MAX_BITS = 4096
"""Maximum number of bits of an integer, about 1,200 digits."""

Number = int | float


def calculate(expression: str) -> str:
    """Evaluate an expression. It has numbers, brackets, `+ - * / // % **`, and `abs`, `max`, `min`, `round`, `sqrt`.

    Returns:
        The value: integers exactly, other numbers to 15 digits.

    Raises:
        ToolError: if the expression is invalid, has no value, or is too large.

    >>> calculate("(3 + 4) * 2 ** 5")
    '224'
    >>> calculate("1 / 3")
    '0.333333333333333'
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    if _WORDS.fullmatch(expression) is None:
        raise ToolError("the expression may hold numbers, brackets, + - * / // % ** and functions; powers are **")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"not a valid expression: {error}") from error
    try:
        value = _value(tree.body, 0)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error
    return str(value) if isinstance(value, int) else format(value, ".15g")


# Python accepts a letter directly after a number in some places, with a warning.
# The digits match in one way only; otherwise the time would be exponential in the number of numbers.
_WORDS = re.compile(r"(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|[a-z]+(?!\w)|[-+*/%(),\s])++")


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression has more than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_value(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_value(argument, depth + 1) for argument in arguments])
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ToolError(f"{name!r} is not known; functions are {', '.join(_FUNCTIONS)}")
    raise ToolError("only numbers, + - * / // % ** and the listed functions are supported")


def _bounded(value: object) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ToolError("the result is too large")
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        raise ToolError("the result is not a real number")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * math.log2(max(abs(base), 1)) > MAX_BITS:
        raise ToolError("the power is too large")
    return _bounded(base**exponent)


def _call(name: str, arguments: list[Number]) -> Number:
    try:
        return _bounded(_FUNCTIONS[name](*arguments))
    except (TypeError, ValueError) as error:
        raise ToolError(f"cannot compute {name}: {error}") from error


def _round(number: Number, digits: Number | None = None) -> Number:
    if digits is None:
        return round(number)
    # Python computes the power of ten for rounding an integer.
    if not isinstance(digits, int) or abs(digits) > MAX_BITS:
        raise ValueError(f"the number of digits must be a whole one and at most {MAX_BITS}")
    return round(number, digits)


_SIGNS: Mapping[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATIONS: Mapping[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": _round,
    "sqrt": math.sqrt,
}
