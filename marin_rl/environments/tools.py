# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tools that a policy can call: what one is, how its arguments are checked, and those that come along."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import draccus

from marin_rl.environments.base import CodeRunner, NoSandboxError
from marin_rl.environments.calculator import CalculatorError, calculate
from marin_rl.environments.user_file import UserFileError, load_from_file
from marin_rl.rewards.failures import RewardFailure


class ToolError(Exception):
    """A call that cannot be answered; the policy is told the message."""


class ToolTimeoutError(ToolError):
    """A call that took too long."""


@runtime_checkable
class Tool(Protocol):
    """Something that a policy can call."""

    @property
    def name(self) -> str:
        """What the policy calls it by."""
        ...

    @property
    def description(self) -> str:
        """What it does, as the policy is told."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Its arguments, as a JSON schema of type `object`."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Answer a call whose arguments were checked.

        Raises:
            ToolError: if it cannot be answered; whatever else it raises counts as the same.
            RewardCallError: if that says nothing about the call, since something else failed; the rollout fails.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ToolConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses a tool by `type`."""

    @abc.abstractmethod
    def build(self) -> Tool:
        """Make the tool."""


def tool_schema(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a call: none missing, none unknown, each of its type.

    Args:
        schema: of type `object`; `properties`, `required` and each property's `type` are looked at.
        arguments: from the policy.

    Raises:
        ToolError: naming the first that is wrong.

    >>> check_arguments({"properties": {"x": {"type": "number"}}, "required": ["x"]}, {"x": 2})
    """
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            raise ToolError(f"argument {name!r} is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"there is no argument {name!r}; there is: {', '.join(properties) or 'none'}")
        kind = properties[name].get("type")
        # In Python, but not in JSON, true is a whole number.
        if kind in _TYPES and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
            raise ToolError(f"argument {name!r} is {value!r}; it must be of type {kind}")


@dataclasses.dataclass(frozen=True)
class CalculatorTool:
    """Works out an expression of numbers."""

    name: str = "calculator"
    description: str = (
        "Works out an arithmetic expression, such as (3 + 4) * 2 ** 5. It knows + - * / // % ** and abs, max, min, "
        "round, sqrt."
    )

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The expression."""
        return {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression."}},
            "required": ["expression"],
        }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The expression's value."""
        try:
            return calculate(arguments["expression"])
        except CalculatorError as error:
            raise ToolError(str(error)) from error


@ToolConfig.register_subclass("calculator")
@dataclasses.dataclass(frozen=True)
class CalculatorConfig(ToolConfig):
    """A calculator: bounded arithmetic, and nothing else."""

    def build(self) -> Tool:
        """Make the calculator."""
        return CalculatorTool()


@dataclasses.dataclass
class PythonTool:
    """Runs a program in the sandbox."""

    name: str = "python"
    description: str = "Runs a Python program and returns what it printed."
    runner: CodeRunner | None = None
    """Where programs run; None until it is connected."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The program."""
        return {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program. Print what is wanted."}},
            "required": ["code"],
        }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the program printed.

        Raises:
            ToolError: if the program failed, or ran into a limit; with what it printed before.
            RewardCallError: if the sandbox itself failed.
            NoSandboxError: if there is no sandbox to run it in.
        """
        if self.runner is None:
            raise NoSandboxError(f"the tool {self.name!r} has no sandbox to run in; connect one (connect_code_runner)")
        result = await self.runner.run_python(arguments["code"])
        if result.loss is not None and result.loss.cause is RewardFailure.WORKER:
            raise result.loss
        if result.loss is not None:
            kind = ToolTimeoutError if result.loss.cause is RewardFailure.TIMEOUT else ToolError
            raise kind(f"the program did not end well: {result.loss}. It printed:\n{result.stdout}")
        return result.stdout


@ToolConfig.register_subclass("python")
@dataclasses.dataclass(frozen=True)
class PythonConfig(ToolConfig):
    """Python in the run's sandbox."""

    def build(self) -> Tool:
        """Make the tool; its sandbox is connected later."""
        return PythonTool()


@ToolConfig.register_subclass("file")
@dataclasses.dataclass(frozen=True)
class FileToolConfig(ToolConfig):
    """A tool of one's own, from a Python file. It runs in the training process, unprotected."""

    path: str
    """The file; relative paths start at the working directory."""
    name: str
    """Name of a class or function in it that returns a tool."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Its arguments."""

    def build(self) -> Tool:
        """Import the file and make the tool.

        Raises:
            UserFileError: if that gives no tool.
        """
        where = f"{self.name!r} of {self.path}"
        try:
            tool = load_from_file(self.path, self.name)(**self.options)
        except TypeError as error:
            raise UserFileError(f"{where} refuses options {self.options}: {error}") from error
        if not isinstance(tool, Tool):
            raise UserFileError(
                f"{where} gave {type(tool).__name__}, which is no tool: it needs name, description, parameters and "
                "call(arguments)"
            )
        return tool
