# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run the examples of the page on rewards."""

import asyncio
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from marin_rl.rewards.code import parse_tests
from marin_rl.rewards.component import RewardScope
from marin_rl.rewards.judge import LlmJudgeConfig
from marin_rl.rewards.pipeline import (
    RewardComponentConfig,
    build_components,
    check_components,
    score_rollouts,
    turn_rewards,
    weighted_rewards,
)
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import RewardRequest
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import RewardFailure, RewardResult
from marin_rl.utils.settings.decode import decode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "authoring_rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}(?: title=\"[^\"]*\")?\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for title, code in re.findall(r"```python title=\"([^\"]*)\"\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / title).write_text(code)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "convert_asserts.py",
        "my_rewards.py",
        "try_my_rewards.py",
        "turn_rewards.py",
    ]
    return tmp_path


def configs() -> list[list[RewardComponentConfig]]:
    sections = [yaml.safe_load(text) for text in blocks("yaml")]
    return [
        decode(list[RewardComponentConfig], section["environment"]["rewards"], ("environment", "rewards"))
        for section in sections
        if "environment" in section
    ]


def test_the_function_works_outside_training(folder: Path):
    # Run in the root, so that the package under test is imported; the file's folder is on the path.
    command = [sys.executable, str(folder / "try_my_rewards.py")]
    subprocess.run(command, check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


async def score_all(
    chosen: list[RewardComponentConfig], requests: list[RewardRequest]
) -> tuple[list[list[RewardResult]], list[list[RewardResult]]]:
    """Results of the pointwise components, and of those for the group, by rollout."""
    async with Sandbox(SandboxConfig(require=Isolation.NONE, wall_seconds=600.0)) as sandbox:
        components = build_components(chosen, sandbox)
        await check_components(components)
        ones = await score_rollouts(components, RewardScope.POINTWISE, requests)
        return ones, await score_rollouts(components, RewardScope.GROUP, requests)


def test_the_config_works(folder: Path, monkeypatch: pytest.MonkeyPatch, request_of: Any):
    monkeypatch.chdir(folder)
    ones, group = asyncio.run(score_all(configs()[0], [request_of("46.001"), request_of("forty-six")]))
    assert [weighted_rewards([*one, *others]) for one, others in zip(ones, group, strict=True)] == [
        {"accuracy": 1.0, "short_turns": 0.1, "shortest_of_group": 0.2},
        {"accuracy": 0.0, "short_turns": 0.1, "shortest_of_group": 0.0},
    ]
    assert [step.base_reward for step in ones[0][1].steps] == [1.0]


def conversation(*texts: str) -> tuple[dict[str, str], ...]:
    """Messages of the roles u(ser), a(ssistant) and t(ool), written as `a: 46`."""
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    return tuple({"role": roles[text[0]], "content": text[3:]} for text in texts)


def test_the_examples_with_steps_work(folder: Path, monkeypatch: pytest.MonkeyPatch, request_of: Any):
    monkeypatch.chdir(folder)
    example = conversation("u: 1+1", "a: call", "t: 2", "a: 2")
    good = conversation("u: q", "a: call", "t: 46", "t: Error: no such tool", "a: call", "t: 46", "a: 46")
    bad = conversation("u: q", "a: call", "t: Error: bad", "a: 47")
    requests = [request_of(messages=(*example, *messages), num_prompt_messages=5) for messages in (good, bad)]
    ones, group = asyncio.run(score_all(configs()[1], requests))
    # Half of the tool calls of the first message succeeded, and all of the second's.
    assert [weighted_rewards([*one, *others]) for one, others in zip(ones, group, strict=True)] == [
        {"tool_success": 0.75, "rare_actions": 0.0},
        {"tool_success": 0.0, "rare_actions": 0.0},
    ]
    steps = [{step.turn: step.base_reward for step in one[0].steps} for one in (*ones, *group)]
    # Both rollouts began with the same call; all other actions occur once.
    assert steps == [{0: 0.25, 1: 0.5}, {0: 0.0}, {0: 0.5, 1: 1.0, 2: 1.0}, {0: 0.5, 1: 1.0}]
    of_turns = turn_rewards([*ones[0], *group[0]], 3)
    assert [sum(by_name.values()) for by_name in of_turns] == pytest.approx([0.3, 0.6, 0.1])


def test_the_other_sections_can_be_read():
    _, _, [judge], [grading], [comparing], [code] = configs()
    assert type(judge).__name__ == "LlmJudgeConfig"
    assert isinstance(grading, LlmJudgeConfig)
    assert [criterion.name for criterion in grading.rubric] == ["correct", "reasoned"]
    assert isinstance(comparing, LlmJudgeConfig)
    assert comparing.scope is RewardScope.GROUP
    assert type(code).__name__ == "CodeRewardConfig"
    [sandbox] = [yaml.safe_load(text)["sandbox"] for text in blocks("yaml") if text.startswith("sandbox")]
    assert decode(SandboxConfig, sandbox, ("sandbox",)).require is Isolation.FULL


def test_the_tests_can_be_read():
    [tests] = [text for text in blocks("text") if text.startswith("{")]
    assert len(parse_tests(json.dumps(json.loads(tests))).calls) == 3


ASSERTS = [
    ("assert f((1, 2), {3: 'a'}) == (4, 5)", {"call": "f((1, 2), {3: 'a'})", "returns": [4, 5]}),
    ("assert f(1) == -0.5, 'message'", {"call": "f(1)", "returns": -0.5}),
    ("assert set(f(1)) == set((2, 1))", {"call": "sorted(set(f(1)))", "returns": [1, 2]}),
    ("assert f(1) == {2, 1}", {"call": "sorted(f(1))", "returns": [1, 2]}),
    ("assert f(1) == {2: 'b', 1: 'a'}", {"call": "sorted(f(1).items())", "returns": [[1, "a"], [2, "b"]]}),
    ("assert f(1) == None", {"call": "f(1)", "returns": None}),
]


def test_the_converter_of_asserts_works(folder: Path):
    answer = runpy.run_path(str(folder / "convert_asserts.py"))["answer"]
    converted = parse_tests(answer([line for line, _ in ASSERTS]))
    assert [call.model_dump() for call in converted.calls] == [call for _, call in ASSERTS]
    for line in (
        "assert not f(1)",
        "assert f(1)",
        "assert f(1) == g(1)",
        "f(1) == 2",
        "assert f(1) == b'a'",
        "assert f(1) == [{1: 2}]",
        "assert f(1) == [{1, 2}]",
    ):
        with pytest.raises((ValueError, TypeError)):
            answer([line])


def test_page_lists_all_failures():
    assert re.findall(r"^\| `(\w+)` \| ", PAGE.split("| cause |")[1].split("##")[0], re.MULTILINE) == list(
        RewardFailure
    )


def test_page_lists_default_limits():
    table = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE))
    config = SandboxConfig()
    assert {name: float(value) for name, value in table.items()} == {name: getattr(config, name) for name in table}
    assert len(table) == 8
