# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Questions that the policy may answer with the help of tools."""

import asyncio
import dataclasses
import enum
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from marin_rl.environments.base import (
    CORRECT,
    AbstractEnvironment,
    AbstractSplitEnvironment,
    EnvironmentConfig,
    Episode,
    NoSandboxError,
    Split,
    Step,
    bounded_text,
)
from marin_rl.environments.tools import (
    CalculatorConfig,
    PythonTool,
    Tool,
    ToolCall,
    ToolConfig,
    ToolError,
    ToolTimeoutError,
    check_arguments,
    describe_schemas,
    parse_call,
    tool_schema,
)
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.reply_text import parse_reply
from marin_rl.rewards.sandbox.functions import RewardCallError
from marin_rl.rewards.sandbox.pool import IsolationError, Sandbox
from marin_rl.types import Message, Task
from marin_rl.utils.errors import describe, explain
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import nested_sections

logger = logging.getLogger(__name__)

TOOLS = "tools"
"""Reward component: penalty for failed tool calls."""


class ToolDescription(enum.StrEnum):
    """Source of the tool descriptions in the prompt."""

    MESSAGE = "message"
    """A system message with the text of the Qwen and Hermes templates, so that under every template the policy reads
    the call format that is parsed here."""
    TEMPLATE = "template"
    """The chat template's own text, or a system message if it has none. For models trained on the call formats that
    are parsed here: Qwen, Hermes and Llama."""
    NONE = "none"
    """The prompt of the questions."""


@dataclasses.dataclass(frozen=True)
class ToolLimits(ConfigSection):
    """Limits of tool calls."""

    max_calls: Annotated[int, Ge(1)] = 4
    """Maximum number of calls in one reply; further calls return an error."""
    max_seconds: Annotated[float, Gt(0)] = 20.0
    """Maximum duration of one call in seconds, without the wait for a worker of the sandbox. Both count towards
    `rollouts.max_seconds`."""
    max_output: Annotated[int, Ge(1)] = 2000
    """Maximum number of characters of a tool's output; the rest is replaced by a notice."""


@EnvironmentConfig.register_subclass("tool_use")
@dataclasses.dataclass(frozen=True)
class ToolUseConfig(EnvironmentConfig):
    """Questions of another environment with tools. That environment scores replies without a tool call.

    Set `rollouts.max_turns` to one more than the number of turns with calls.
    """

    level: ClassVar[int] = 1

    questions: EnvironmentConfig
    """Environment of the questions; it scores the final reply."""
    tools: tuple[ToolConfig, ...] = (CalculatorConfig(),)
    """The tools; their names must differ."""
    describe: ToolDescription = ToolDescription.MESSAGE
    """Source of the tool descriptions: `message`, a system message; `template`, the chat template if it supports tools;
    `none`, the questions' prompt."""
    limits: ToolLimits = ToolLimits()
    """Limits of tool calls."""
    error_reward: Annotated[float, Le(0), "or failed calls pay"] = 0.0
    """Reward of each failed call (component `tools`): malformed, unknown, rejected, raised or timed out."""
    name: str | None = None
    """Name for metrics; default: the name of the questions' environment."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_nested(self.questions, "questions")
        for key, section in nested_sections(self.questions, "questions"):
            if getattr(section, "runs_agents", False):
                raise ValueError(f"{key} runs agents, which call tools themselves; choose other questions")
        if not self.tools:
            raise ValueError("tools is empty; add at least one, as tools: [{type: calculator}]")

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of the questions and of this config."""
        return {environment.name: (*self.questions.rewards, *self.rewards)}

    def build(self) -> AbstractEnvironment:
        """Build questions and tools.

        Raises:
            ValueError: if two tools share a name.
        """
        tools: dict[str, Tool] = {}
        for config in self.tools:
            tool = config.build()
            if tool.name in tools:
                raise ValueError(f"two tools are named {tool.name!r}; tool names must differ")
            tools[tool.name] = tool
        questions = self.questions.build()
        name = questions.name if self.name is None else self.name
        # Questions with equal system messages share one message.
        system_message = functools.cache(functools.partial(self._system_message, list(tools.values())))
        splits: dict[Split, list[Task]] = {}
        originals: dict[str, Task] = {}
        for split in Split:
            splits[split] = []
            for task in questions.tasks(split):
                messages = task.messages
                if self.describe is not ToolDescription.NONE:
                    has_system = messages[0]["role"] == "system"
                    text = messages[0]["content"] if has_system else ""
                    messages = (system_message(text), *messages[has_system:])
                splits[split].append(dataclasses.replace(task, environment=name, messages=messages))
                originals[task.id] = task
        return ToolUseEnvironment(name, splits, questions, tools, self.limits, self.error_reward, originals)

    def _system_message(self, tools: Sequence[Tool], text: str) -> Message:
        """Describe the tools after `text`, the system message of the questions."""
        schemas = [tool_schema(tool) for tool in tools]
        words = describe_schemas(schemas)
        if self.describe is ToolDescription.TEMPLATE:
            return Message(role="system", content=text, tools=schemas, tools_in_words=words)
        return Message(role="system", content=f"{text}\n\n{words}" if text else words)


@dataclasses.dataclass(frozen=True)
class ToolUseEnvironment(AbstractSplitEnvironment):
    """Questions with tools."""

    questions: AbstractEnvironment
    """Environment that scores final replies."""
    tools: Mapping[str, Tool]
    """Tools by name."""
    limits: ToolLimits
    error_reward: float
    originals: Mapping[str, Task]
    """Tasks of the questions' environment by id."""

    async def start(self, task: Task, seed: int) -> Episode:
        """Start an attempt.

        Raises:
            ValueError: if the task belongs to another environment.
            NoSandboxError: if a tool is not connected to the sandbox that it needs.
        """
        self.require_own(task, self.originals)
        for tool in self._python_tools():
            self._require_sandbox(tool, tool.sandbox)
        question = await self.questions.start(self.originals[task.id], seed)
        assert isinstance(question, Episode), "environments of lower levels run no agents"
        return ToolUseEpisode(self, question)

    def connect_sandbox(self, sandbox: Sandbox | None) -> bool:
        """Connect the tools that run programs to the sandbox; return whether there are any.

        Raises:
            NoSandboxError: if there are, and `sandbox` is None.
        """
        for tool in self._python_tools():
            self._require_sandbox(tool, sandbox)
            tool.sandbox, tool.max_seconds = sandbox, self.limits.max_seconds
        return bool(self._python_tools())

    def _python_tools(self) -> list[PythonTool]:
        return [tool for tool in self.tools.values() if isinstance(tool, PythonTool)]

    def _require_sandbox(self, tool: PythonTool, sandbox: Sandbox | None) -> None:
        if sandbox is None:
            raise NoSandboxError(
                f"environment {self.name!r}: the tool {tool.name!r} runs programs that the policy writes, but there is "
                "no sandbox; call environment.connect_sandbox(sandbox) before the first rollout, or remove "
                f"{tool.name!r} from the environment's tools"
            )


@dataclasses.dataclass
class ToolUseEpisode:
    """One question with its tool calls."""

    environment: ToolUseEnvironment
    question: Episode
    """Scores a reply without calls."""
    calls: int = 0
    """Number of calls."""
    errors: int = 0
    """Number of failed calls, timeouts included."""
    timeouts: int = 0
    """Number of calls that timed out."""

    async def step(self, reply: str) -> Step:
        """Return one message for each call in a reply, in order; score a reply without calls."""
        texts = [call.text for call in parse_reply(reply).calls]
        if not texts:
            step = await self.question.step(reply)
            success = {"success": float(step.rewards[CORRECT] >= 1)} if CORRECT in step.rewards else {}
            return dataclasses.replace(
                step, rewards={**step.rewards, TOOLS: 0.0}, metrics={**self._counts(), **success, **step.metrics}
            )
        errors, limit = self.errors, self.environment.limits.max_calls
        results = [await self._answer(text) for text in texts[:limit]]
        answers = [answer for answer, _ in results]
        if len(texts) > limit:
            self.calls += len(texts) - limit
            self.errors += len(texts) - limit
            answers.append(
                f"Error: the reply has {len(texts)} calls, but only the first {limit} were run; {limit} is the maximum."
            )
        return Step(
            rewards={TOOLS: self.environment.error_reward * (self.errors - errors)},
            messages=tuple(Message(role="tool", content=answer) for answer in answers),
            done=False,
            metrics={**self._counts(), "success": 0.0},
            info={"calls": [call for _, call in results]},
        )

    async def close(self) -> None:
        """Close the question's episode."""
        await self.question.close()

    def _counts(self) -> dict[str, float]:
        counts = {"tool_calls": self.calls, "tool_errors": self.errors, "tool_timeouts": self.timeouts}
        return {name: float(count) for name, count in counts.items()}

    async def _answer(self, text: str) -> tuple[str, dict[str, object]]:
        """Answer one call; also return its metadata: the tool's name, None if unparseable, and whether it failed."""
        self.calls += 1
        call, failed = None, False
        start = time.perf_counter()
        try:
            call = parse_call(text)
            answer = await self._call(call)
        except ToolError as error:
            self.errors += 1
            self.timeouts += isinstance(error, ToolTimeoutError)
            answer, failed = f"Error: {error}", True
        # JSON can contain unpaired surrogates.
        answer = bounded_text(answer, self.environment.limits.max_output)
        if logger.isEnabledFor(logging.DEBUG):
            task = asyncio.current_task()
            logger.debug(
                "%s: tool %s called with %s, %.3f s, result %r",
                "rollout" if task is None else task.get_name(),
                None if call is None else call.name,
                text if call is None else call.arguments,
                time.perf_counter() - start,
                answer,
            )
        return answer, {"tool": None if call is None else call.name, "failed": failed}

    async def _call(self, call: ToolCall) -> str:
        tool = self.environment.tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; there is: {', '.join(self.environment.tools)}")
        # Programs wait for a worker of the sandbox, which limits their time.
        limit = asyncio.timeout(None if isinstance(tool, PythonTool) else self.environment.limits.max_seconds)
        try:
            # An invalid schema of the tool raises here too.
            check_arguments(tool.parameters, call.arguments)
            async with limit:
                answer = await tool.call(call.arguments)
            # Tools are other people's code.
            if not isinstance(answer, str):
                raise TypeError(f"returned {type(answer).__name__}, expected str")
            return answer
        except (ToolError, RewardCallError, IsolationError):
            raise
        except Exception as error:
            if limit.expired():
                message = f"{tool.name} took longer than {self.environment.limits.max_seconds:g} seconds"
                raise ToolTimeoutError(message) from error
            logger.warning("tool %s raised %s", tool.name, explain(error))
            raise ToolError(f"{tool.name} failed: {describe(error)}") from error
