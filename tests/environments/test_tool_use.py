# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, cast

import pytest

from marin_rl.environments import ArithmeticConfig, EnvironmentConfig, MixtureConfig, RandomRewardConfig, ToolUseConfig
from marin_rl.environments.base import AbstractEnvironment, NoSandboxError, Split, Step
from marin_rl.environments.streams import MixturePartConfig
from marin_rl.environments.tool_use import ToolDescription, ToolLimits, ToolUseEnvironment
from marin_rl.environments.tools import CalculatorConfig, PythonConfig, ToolConfig, ToolError
from marin_rl.environments.verifiers import VerifiersConfig
from marin_rl.rewards.reply_text import parse_reply
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import RewardCallError
from marin_rl.rewards.sandbox.pool import IsolationError, PythonResult, Sandbox
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import RewardFailure, Task
from marin_rl.utils.settings.decode import decode

QUESTIONS = ArithmeticConfig(size=200)


@dataclasses.dataclass(frozen=True)
class Odd:
    """A tool whose argument selects a result or an error."""

    name: str = "odd"
    description: str = "Misbehaves."
    parameters: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}
    )

    async def call(self, arguments: Mapping[str, Any]) -> str:
        match arguments["how"]:
            case "hang":
                await asyncio.sleep(60)
            case "raise":
                raise KeyError("lost")
            case "refuse":
                raise ToolError("not today")
            case "break":
                raise RewardCallError(RewardFailure.WORKER, "the sandbox died")
            case "babble":
                return "x" * 5000
            case "half":
                return "a\ud800b"
            case "nothing":
                return cast(str, None)
        return "fine"


@dataclasses.dataclass(frozen=True)
class OddConfig(ToolConfig):
    def build(self) -> Odd:
        return Odd()


def build(**changes: Any) -> tuple[ToolUseEnvironment, Task]:
    settings = {"questions": QUESTIONS, "tools": (CalculatorConfig(), OddConfig()), **changes}
    environment = ToolUseConfig(**settings).build()
    return environment, environment.tasks(Split.TRAIN)[0]


def play(environment: AbstractEnvironment, task: Task, *replies: str) -> list[Step]:
    async def run() -> list[Step]:
        episode = await environment.start(task, 0)
        steps = [await episode.step(reply) for reply in replies]
        await episode.close()
        return steps

    return asyncio.run(run())


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def odd(how: str) -> str:
    return call("odd", how=how)


def answers(step: Step) -> list[str]:
    assert {message["role"] for message in step.messages} == {"tool"}
    return [message["content"] for message in step.messages]


def test_calls_are_answered_and_the_final_reply_is_scored():
    environment, task = build()
    expression = task.messages[-1]["content"].rstrip("=")
    asked, final = play(environment, task, f"Let me see. {call('calculator', expression=expression)}", task.answer)
    assert answers(asked) == [task.answer]
    assert not asked.done
    assert dict(asked.rewards) == {"tools": 0.0}
    assert final.done
    assert dict(final.rewards) == {"correct": 1.0, "tools": 0.0}
    assert dict(final.metrics) == {"tool_calls": 1.0, "tool_errors": 0.0, "tool_timeouts": 0.0, "success": 1.0}
    [wrong] = play(environment, task, "no idea")
    assert dict(wrong.rewards) == {"correct": 0.0, "tools": 0.0}
    assert wrong.metrics["success"] == 0.0


@pytest.mark.parametrize("inner", ["</tool_call>", "<tool_call>", "<think>", "</think>", '"}}</tool_call>'])
def test_tags_in_arguments_reach_the_tool(inner: str):
    environment, task = build()
    environment = dataclasses.replace(environment, tools={"odd": Odd()})
    arguments = {"how": "raise"}
    # `odd` raises only for this argument, so an argument that was cut is noticed.
    reply = f"<think>\n{call('odd', how=inner)}</think>Now: {call('odd', how=inner)} {call('odd', **arguments)}"
    asked, final = play(environment, task, reply, task.answer)
    assert answers(asked) == ["fine", "Error: odd failed: KeyError: 'lost'"]
    assert not asked.done
    assert final.rewards["correct"] == 1.0


@pytest.mark.parametrize(
    ("parameters", "answered"),
    [
        ({"type": "object", "properties": {"how": {"type": ["string", "null"]}}}, "fine"),
        ({"type": "object", "properties": {"how": {"type": 3}}}, "Error: odd failed: TypeError: "),
        ({"type": "object", "properties": None}, "Error: odd failed: TypeError: "),
    ],
)
def test_a_schema_of_a_tool_never_fails_the_rollout(parameters: dict[str, Any], answered: str):
    environment, task = build()
    environment = dataclasses.replace(environment, tools={"odd": Odd(parameters=parameters)})
    [step] = play(environment, task, odd("well"))
    assert answers(step)[0].startswith(answered)


def test_calls_beyond_the_limit_and_long_answers_are_cut():
    environment, task = build(limits=ToolLimits(max_calls=2, max_output=80), error_reward=-0.25)
    several = "".join(call("calculator", expression=str(number)) for number in range(5))
    step, long, half = play(environment, task, several, odd("babble"), odd("half"))
    assert answers(step) == ["0", "1", "Error: the reply has 5 calls, but only the first 2 were run; 2 is the maximum."]
    assert (step.metrics["tool_calls"], step.metrics["tool_errors"]) == (5.0, 3.0)
    assert step.info == {"calls": [{"tool": "calculator", "failed": False}] * 2}
    assert dict(step.rewards) == {"tools": -0.75}
    assert answers(long) == ["x" * 80 + "\n[4920 more characters]"]
    # Half a character (an unpaired surrogate) is replaced.
    assert answers(half) == ["a?b"]
    # A failure that the policy has not caused fails the rollout.
    with pytest.raises(RewardCallError, match="the sandbox died"):
        play(environment, task, odd("break"))


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<tool_call>nonsense</tool_call>", "Error: the call is not valid JSON"),
        (call("abacus"), "Error: there is no tool 'abacus'; there is: calculator, odd"),
        (call("calculator"), "Error: argument 'expression' is missing"),
        (call("calculator", expression="1/0"), "Error: division by zero"),
        (odd("raise"), "Error: odd failed: KeyError: 'lost'"),
        (odd("refuse"), "Error: not today"),
        (odd("nothing"), "Error: odd failed: TypeError: returned NoneType, expected str"),
        (odd("hang"), "Error: odd took longer than 0.01 seconds"),
    ],
)
def test_failed_calls_return_an_error_and_are_counted(reply: str, answer: str):
    environment, task = build(limits=ToolLimits(max_seconds=0.01), error_reward=-0.5)
    first, second = play(environment, task, reply, reply)
    assert answers(first)[0].startswith(answer)
    assert not first.done
    slow = float(reply == odd("hang"))
    assert dict(first.metrics) == {"tool_calls": 1.0, "tool_errors": 1.0, "tool_timeouts": slow, "success": 0.0}
    assert dict(second.metrics) == {"tool_calls": 2.0, "tool_errors": 2.0, "tool_timeouts": 2 * slow, "success": 0.0}
    name = None if "nonsense" in reply else json.loads(parse_reply(reply).calls[0].text)["name"]
    assert first.info == second.info == {"calls": [{"tool": name, "failed": True}]}
    # The error reward of each turn counts its own failed calls.
    assert dict(first.rewards) == dict(second.rewards) == {"tools": -0.5}


def test_the_system_message_describes_the_tools():
    environment, task = build()
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert '"name": "calculator"' in task.messages[0]["content"]
    inner = QUESTIONS.build()
    assert [asked.id for asked in environment.tasks(Split.HELD_OUT)] == [
        asked.id for asked in inner.tasks(Split.HELD_OUT)
    ]
    shared = {id(asked.messages[0]) for split in Split for asked in environment.tasks(split)}
    assert len(shared) == 1
    untold, task = build(describe=ToolDescription.NONE)
    assert task.messages == inner.tasks(Split.TRAIN)[0].messages
    stranger = dataclasses.replace(task, environment="cards")
    with pytest.raises(ValueError, match=r"'arithmetic' has no task .* of 'cards'"):
        asyncio.run(untold.start(stranger, 0))


def test_a_system_message_of_the_questions_comes_first(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "1+1", "answer": "2"}))
    raw = {
        "type": "tool_use",
        "questions": {
            "type": "jsonl",
            "path": str(path),
            "held_out": 0.0,
            "validation": 0.0,
            "rows": {"system_prompt": "Be brief."},
        },
        "tools": [{"type": "calculator"}, {"type": "python"}],
        "name": "asked",
    }
    environment = decode(EnvironmentConfig, raw).build()
    [task] = environment.tasks(Split.TRAIN)
    assert task.environment == environment.name == "asked"
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert task.messages[0]["content"].startswith("Be brief.\n\n# Tools\n\n")


def test_a_template_receives_the_schemas_and_the_default_text():
    by_message, by_template = (
        build(describe=described)[1] for described in (ToolDescription.MESSAGE, ToolDescription.TEMPLATE)
    )
    first, *rest = by_template.messages
    assert (first["role"], first["content"]) == ("system", "")
    assert [schema["function"]["name"] for schema in first["tools"]] == ["calculator", "odd"]
    assert first["tools_in_words"] == by_message.messages[0]["content"]
    assert tuple(rest) == by_message.messages[1:]
    # Any other template shows exactly the default system message.
    plain = ChatTokenizer(byte_tokenizer())
    assert plain.prompt_tokens(by_template.messages) == plain.prompt_tokens(by_message.messages)


class Runner(Sandbox):
    def __init__(self) -> None:
        pass

    async def run_python(self, code: str, stdin: str = "", seconds: float = math.inf) -> PythonResult:
        # As if all workers were busy.
        await asyncio.sleep(0.05)
        return PythonResult(stdout=f"ran {code} for {seconds:g} s", stderr="", failure=None, seconds=0.1)


def test_python_needs_its_sandbox_and_gets_it_through_mixtures():
    config = ToolUseConfig(questions=QUESTIONS, tools=(PythonConfig(),), limits=ToolLimits(max_seconds=0.01))
    plain = MixturePartConfig(ArithmeticConfig(size=200, name="plain"))
    mixture = MixtureConfig((MixturePartConfig(config), plain)).build()
    task = mixture.tasks(Split.TRAIN)[0]
    missing = r"environment 'arithmetic': the tool 'python' runs programs .* no sandbox; .* or remove 'python'"
    with pytest.raises(NoSandboxError, match=missing):
        play(mixture, task, call("python", code="1"))
    # A run without a sandbox fails before the first rollout.
    for environment in (config.build(), mixture, RandomRewardConfig(config).build()):
        with pytest.raises(NoSandboxError, match=missing):
            environment.connect_sandbox(None)
    for needs_none in (QUESTIONS.build(), build()[0]):
        assert not needs_none.connect_sandbox(Runner())
    assert mixture.connect_sandbox(Sandbox(SandboxConfig()))
    with pytest.raises(IsolationError, match="the sandbox is not started"):
        play(mixture, task, call("python", code="1"))
    assert mixture.connect_sandbox(Runner())
    [step] = play(mixture, task, call("python", code="print(1)"))
    # The wait for a worker does not count.
    assert answers(step) == ["ran print(1) for 0.01 s"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToolUseConfig(questions=VerifiersConfig("a")), "questions runs agents, .* choose other questions"),
        (lambda: ToolUseConfig(questions=QUESTIONS, tools=()), "tools is empty; add at least one"),
        (lambda: build(tools=(OddConfig(), OddConfig())), "two tools are named 'odd'"),
    ],
)
def test_invalid_settings_are_rejected(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
