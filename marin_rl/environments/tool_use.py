# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Questions that may be answered with the help of tools."""

import asyncio
import dataclasses
import enum
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.environments.base import (
    CodeRunner,
    Environment,
    EnvironmentConfig,
    Episode,
    NoSandboxError,
    Split,
    Step,
    check_nested,
)
from marin_rl.environments.single_turn import CORRECT
from marin_rl.environments.tool_calls import ToolCall, describe_tools, find_calls, parse_call
from marin_rl.environments.tools import (
    CalculatorConfig,
    PythonTool,
    Tool,
    ToolConfig,
    ToolError,
    ToolTimeoutError,
    check_arguments,
    tool_schema,
)
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.failures import RewardCallError
from marin_rl.rewards.sandbox.pool import IsolationError
from marin_rl.types import Message, Task

logger = logging.getLogger(__name__)

TOOLS = "tools"
"""Reward component: what mistakes in calling tools cost."""


class ToolDescription(enum.StrEnum):
    """Who tells the policy of its tools."""

    MESSAGE = "message"
    """A system message, in the words that the templates of Qwen and Hermes have for tools: under every template the
    policy is told of the calls that are understood here."""
    TEMPLATE = "template"
    """The chat template, in its own words; a system message where it has none. For models that were trained on the
    calls that are understood here: those of Qwen, Hermes and Llama."""
    NONE = "none"
    """The questions' own prompt."""


@dataclasses.dataclass(frozen=True)
class ToolLimits:
    """How far calls may go."""

    max_calls: int = 4
    """Most calls in one reply; those beyond are not made, and the policy is told so."""
    max_seconds: float = 20.0
    """Most seconds that one call may take. It counts towards `rollouts.max_seconds` too."""
    max_output: int = 2000
    """Most characters of a tool's answer; what is beyond is cut off, and said to be."""

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_output"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.max_seconds > 0:
            raise ValueError(f"limits.max_seconds is {self.max_seconds}; it is a number of seconds above 0")


@EnvironmentConfig.register_subclass("tool_use")
@dataclasses.dataclass(frozen=True)
class ToolUseConfig(EnvironmentConfig):
    """Questions of another environment, and tools. A reply that calls no tool is the answer, and is graded there.

    Set `rollouts.max_turns` to one more than the rounds of calls that are allowed.
    """

    level: ClassVar[int] = 1

    questions: EnvironmentConfig
    """Where the questions come from, and who grades the final reply."""
    tools: tuple[ToolConfig, ...] = (CalculatorConfig(),)
    """The tools; their names must differ."""
    describe: ToolDescription = ToolDescription.MESSAGE
    """Who tells the policy of the tools: `message`, a system message; `template`, the chat template, where it can;
    `none`, the questions' own prompt."""
    limits: ToolLimits = ToolLimits()
    """How far calls may go."""
    error_reward: float = 0.0
    """Reward of each call that came to nothing (component `tools`): malformed, unknown, refused, failed or too slow;
    at most 0."""
    name: str | None = None
    """Name under which metrics are logged; the name of the questions' environment by default."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_nested(self, self.questions, "questions")
        if not self.tools:
            raise ValueError("tools is empty; name at least one, as tools: [{type: calculator}]")
        if self.error_reward > 0:
            raise ValueError(f"error_reward is {self.error_reward}; it must not pay for mistakes")

    def reward_components(self, environment: Environment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """The questions' own reward functions, and those given here."""
        assert isinstance(environment, ToolUseEnvironment)
        inner = environment.questions
        return {environment.name: (*self.questions.reward_components(inner)[inner.name], *self.rewards)}

    def build(self) -> Environment:
        """Make questions and tools.

        Raises:
            ValueError: if two tools share a name.
        """
        tools: dict[str, Tool] = {}
        for config in self.tools:
            tool = config.build()
            if tool.name in tools:
                raise ValueError(f"there are two tools named {tool.name!r}; the policy could not tell them apart")
            tools[tool.name] = tool
        questions = self.questions.build()
        name = questions.name if self.name is None else self.name
        # One message for all questions that share a system message.
        tell = functools.cache(lambda said: self._system_message(said, list(tools.values())))
        asked = {split: [(self._asked(task, name, tell), task) for task in questions.tasks(split)] for split in Split}
        return ToolUseEnvironment(
            name=name,
            questions=questions,
            tools=tools,
            limits=self.limits,
            error_reward=self.error_reward,
            splits={split: [task for task, _ in pairs] for split, pairs in asked.items()},
            originals={task.id: original for pairs in asked.values() for task, original in pairs},
        )

    def _asked(self, task: Task, name: str, tell: Callable[[str], Message]) -> Task:
        """A question as it is asked here: under this environment's name, its tools told of."""
        messages = task.messages
        if self.describe is not ToolDescription.NONE:
            has_system = messages[0]["role"] == "system"
            messages = (tell(messages[0]["content"]), *messages[1:]) if has_system else (tell(""), *messages)
        return dataclasses.replace(task, environment=name, messages=messages)

    def _system_message(self, said: str, tools: Sequence[Tool]) -> Message:
        """The system message of questions whose own says this."""
        words = describe_tools(tools)
        if self.describe is ToolDescription.TEMPLATE:
            schemas = [tool_schema(tool) for tool in tools]
            return Message(role="system", content=said, tools=schemas, tools_in_words=words)
        return Message(role="system", content=f"{said}\n\n{words}" if said else words)


@dataclasses.dataclass(frozen=True)
class ToolUseEnvironment:
    """Questions with tools."""

    name: str
    """Name under which its metrics are logged."""
    questions: Environment
    """Grades the final replies."""
    tools: Mapping[str, Tool]
    """The tools, by name."""
    limits: ToolLimits
    """How far calls may go."""
    error_reward: float
    """Reward of each call that came to nothing."""
    splits: Mapping[Split, Sequence[Task]]
    """The tasks of each split."""
    originals: Mapping[str, Task]
    """The questions as their own environment knows them, by id."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, always in the same order."""
        return self.splits[split]

    async def start(self, task: Task, seed: int) -> Episode:
        """Begin an attempt.

        Raises:
            ValueError: if the task belongs to another environment.
            NoSandboxError: if a tool was never connected to the sandbox that it runs in.
        """
        if task.environment != self.name or task.id not in self.originals:
            raise ValueError(f"environment {self.name!r} has no question {task.id!r} of {task.environment!r}")
        for tool in self._running:
            self._require_sandbox(tool, tool.runner)
        return ToolUseEpisode(self, await self.questions.start(self.originals[task.id], seed))

    def connect_code_runner(self, runner: CodeRunner | None) -> bool:
        """Give the sandbox to the tools that run programs; whether there are any.

        Raises:
            NoSandboxError: if there are, and there is no sandbox.
        """
        for tool in self._running:
            self._require_sandbox(tool, runner)
            tool.runner = runner
        return bool(self._running)

    @property
    def _running(self) -> list[PythonTool]:
        """The tools that run programs."""
        return [tool for tool in self.tools.values() if isinstance(tool, PythonTool)]

    def _require_sandbox(self, tool: PythonTool, runner: CodeRunner | None) -> None:
        if runner is None:
            raise NoSandboxError(
                f"environment {self.name!r}: the tool {tool.name!r} runs programs that the policy writes, and there is "
                "no sandbox for them; call connect_code_runner(environment, sandbox) with one before it is played, or "
                f"leave {tool.name!r} out of the environment's tools"
            )


@dataclasses.dataclass
class ToolUseEpisode:
    """One question, and the calls that were made for it."""

    environment: ToolUseEnvironment
    """Has the tools."""
    question: Episode
    """Grades what calls no tool."""
    calls: int = 0
    """Calls so far."""
    errors: int = 0
    """Those that came to nothing, the slow ones included."""
    timeouts: int = 0
    """Those that took too long."""

    async def step(self, reply: str) -> Step:
        """Answer the calls in a reply, in order, a message each; grade a reply that calls nothing."""
        texts = find_calls(reply)
        errors = self.errors
        if not texts:
            step = await self.question.step(reply)
            success = {"success": float(step.rewards[CORRECT] >= 1)} if CORRECT in step.rewards else {}
            return dataclasses.replace(
                step, rewards={**step.rewards, TOOLS: 0.0}, metrics={**self._counts(), **success, **step.metrics}
            )
        limit = self.environment.limits.max_calls
        made = [await self._answer(text) for text in texts[:limit]]
        answers = [answer for answer, _ in made]
        if len(texts) > limit:
            self.calls += len(texts) - limit
            self.errors += len(texts) - limit
            answers.append(f"Error: of {len(texts)} calls the first {limit} were made; no reply may hold more.")
        return Step(
            rewards={TOOLS: self.environment.error_reward * (self.errors - errors)},
            messages=tuple(Message(role="tool", content=answer) for answer in answers),
            done=False,
            metrics={**self._counts(), "success": 0.0},
            info={"calls": [call for _, call in made]},
        )

    async def close(self) -> None:
        """Close the question's episode."""
        await self.question.close()

    def _counts(self) -> dict[str, float]:
        return {
            "tool_calls": float(self.calls),
            "tool_errors": float(self.errors),
            "tool_timeouts": float(self.timeouts),
        }

    async def _answer(self, text: str) -> tuple[str, dict[str, object]]:
        """The answer to one call, and its metadata: the tool's name, None if it cannot be read, and if it failed."""
        self.calls += 1
        name, arguments, failed = None, None, False
        start = time.perf_counter()
        try:
            call = parse_call(text)
            name, arguments = call.name, call.arguments
            answer = await self._call(call)
        except ToolError as error:
            self.errors += 1
            self.timeouts += isinstance(error, ToolTimeoutError)
            answer, failed = f"Error: {error}", True
        answer = self._cut(answer)
        if logger.isEnabledFor(logging.DEBUG):
            task = asyncio.current_task()
            logger.debug(
                "%s: tool %s called with %s, %.3f s, result %r",
                "rollout" if task is None else task.get_name(),
                name,
                text if arguments is None else arguments,
                time.perf_counter() - start,
                answer,
            )
        return answer, {"tool": name, "failed": failed}

    async def _call(self, call: ToolCall) -> str:
        tool = self.environment.tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; there is: {', '.join(self.environment.tools)}")
        check_arguments(tool.parameters, call.arguments)
        limit = asyncio.timeout(self.environment.limits.max_seconds)
        try:
            async with limit:
                return await tool.call(call.arguments)
        except (ToolError, RewardCallError, IsolationError):
            raise
        except Exception as error:
            if limit.expired():
                message = f"{tool.name} took longer than {self.environment.limits.max_seconds:g} seconds"
                raise ToolTimeoutError(message) from error
            logger.warning("tool %s raised %s: %s", tool.name, type(error).__name__, error)
            raise ToolError(f"{tool.name} failed: {type(error).__name__}: {error}") from error

    def _cut(self, text: str) -> str:
        limit = self.environment.limits.max_output
        # Half characters, which JSON can spell, are nothing that a tokenizer takes.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters]"
