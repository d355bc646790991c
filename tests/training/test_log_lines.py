# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lines that a run logs at each level."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marin_rl.config.sections import RolloutConfig
from marin_rl.environments import ArithmeticConfig, Split, ToolUseConfig
from marin_rl.environments.tool_use import ToolDescription
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives import AdvantageConfig, GaeConfig, GigpoConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig, ReinforceLossConfig
from marin_rl.rewards.component import RewardScope
from marin_rl.rewards.functions import EvaluateResult, RewardRequest, StepOutput
from marin_rl.rewards.pipeline import score_rollouts
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.rollouts.run_rollouts import run_tasks
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.utils.levanter_line import seq_len
from marin_rl.utils.logs import LogLevel, log_to, module_levels
from marin_rl.utils.timing import PhaseTimer
from tests.training.bare_run import ASSISTANT, END, MODEL, NEWEST, bare_builder, make_config, make_runner

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


class ConstantReward:
    """A reward component with step rewards: 0.25 for each reply."""

    name, weight, scope, waits_for_group = "calls", 2.0, RewardScope.POINTWISE, False

    async def check(self) -> None:
        pass

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        return [
            EvaluateResult(
                score=1.0,
                step_outputs=[
                    StepOutput(step_index=index, base_reward=0.25)
                    for index, message in enumerate(request.messages)
                    if message["role"] == "assistant"
                ],
            )
            for request in requests
        ]

    async def close(self) -> None:
        pass


class ConstantScorer(RewardFunctions):
    """Scores each rollout with the component, without a sandbox."""

    async def score_rollout(self, builder: RolloutBuilder) -> None:
        [results] = await score_rollouts([ConstantReward()], RewardScope.POINTWISE, [builder.reward_request()])
        builder.add_rewards(results)


def sampled_tokens(request: SampleRequest) -> Sequence[int]:
    """A tool call, then an answer."""
    return (*(CALL if request.prompt_tokens.count(ASSISTANT) == 1 else "42").encode(), END)


def log_step(file: Path, advantage: AdvantageConfig, **logged: Any) -> tuple[list[str], list[str]]:
    """Log lines of a step with one group of two rollouts, and the anchor hashes of the turns."""
    config = make_config(
        model=dataclasses.replace(MODEL, **seq_len(512)),
        rollouts=RolloutConfig(prompts_per_step=1, group_size=2, max_length=512, max_turns=2, row_length=512),
        sampling=SamplingConfig(max_new_tokens=100),
        advantage=advantage,
        critic=CriticConfig() if advantage.needs_critic else None,
        policy_loss=PpoClipLossConfig() if advantage.needs_critic else ReinforceLossConfig(),
        **logged,
    )
    questions = ArithmeticConfig(size=50)
    environment = ToolUseConfig(questions=questions, describe=ToolDescription.NONE).build()
    builder = bare_builder(config, values=lambda batch: np.full(batch.input_ids.shape, 0.5))
    runner = dataclasses.replace(make_runner(config, sampled_tokens, environment), reward_functions=ConstantScorer())
    with log_to(file, config.log_level.number, module_levels(config.logging)):
        [group] = run_tasks(
            runner, environment.tasks(Split.TRAIN)[:1], group_size=2, temperature=1.0, seed_parts=(0, "train", 1)
        )
        builder.build([group], NEWEST, 1, PhaseTimer())
    runner.loop.close()
    lines = [line.split(": ", 1)[1] for line in file.read_text(encoding="utf-8").splitlines()]
    return lines, [turn.anchor_state for rollout in group.rollouts for turn in rollout.turns]


@pytest.fixture(scope="module")
def question() -> str:
    [task, *_] = ArithmeticConfig(size=50).build().tasks(Split.TRAIN)
    return task.messages[-1]["content"]


def test_debug_logs_every_turn_of_an_episode(tmp_path: Path, question: str):
    lines, anchors = log_step(tmp_path / "log.txt", GigpoConfig(), log_level=LogLevel.DEBUG)
    messages = [{"role": "user", "content": question}]
    tokens = [*CALL.encode(), END]
    first = "rollout train-1-0-0 turn 0: "
    expected = [
        # The observation, and the raw and structured action with log-probabilities.
        f"{first}observation {messages}",
        f"{first}action {CALL!r}, stop reason stop, tokens {tokens}, log-probs [{', '.join(['-0.25'] * len(tokens))}]",
        f"{first}structured action {CALL!r}, rewards {{'tools': 0.0}}, done False, "
        "next [{'role': 'tool', 'content': '42'}]",
        # The anchor states that GiGPO groups by.
        f"{first}anchor state {messages}, hash {anchors[0]}",
        f"rollout train-1-0-0 turn 1: anchor state [{{'role': 'tool', 'content': '42'}}], hash {anchors[1]}",
        # Both rollouts are equal, so advantages are 0. Each step reward is 0.5. The last turn also has the rest of the
        # score, 1. The discount per turn is 0.95.
        f"{first}anchor hash {anchors[0]}, return 1.925, A_E 0, A_S 0, advantage [0]",
        f"rollout train-1-0-1 turn 1: anchor hash {anchors[1]}, return 1.5, A_E 0, A_S 0, advantage [0]",
        # The alignment of step rewards.
        "rollout train-1-0-0: reward 'calls', rewards by message [(1, 0.25), (3, 0.25)], "
        "rewards by turn [(0, 0.25), (1, 0.25)]",
    ]
    for line in expected:
        assert line in lines, line
    calls = [line for line in lines if "tool calculator" in line]
    pattern = r"rollout train-1-0-\d: tool calculator called with \{'expression': '6\*7'\}, \d+\.\d{3} s, result '42'"
    assert len(calls) == 2
    assert all(re.fullmatch(pattern, line) for line in calls)
    assert sorted(line[:19] for line in calls) == ["rollout train-1-0-0", "rollout train-1-0-1"]
    assert not any("values" in line for line in lines)


def test_debug_logs_the_values_of_a_critic(tmp_path: Path):
    lines, _ = log_step(tmp_path / "log.txt", GaeConfig(gamma=1.0, lam=1.0, whiten=False), log_level=LogLevel.DEBUG)
    # The return is 2, of which the second turn has 1.5; its value is 0.5.
    assert "rollout train-1-0-1 turn 1: values [0.5, 0.5, 0.5]" in lines
    assert "rollout train-1-0-1 turn 1: advantages [1, 1, 1]" in lines
    assert sum(": values [" in line for line in lines) == 4


def test_debug_logs_every_rollout(tmp_path: Path):
    lines, _ = log_step(tmp_path / "log.txt", GigpoConfig(), logging={"marin_rl.rollouts": "debug"})
    ends = [line for line in lines if " of task " in line]
    assert [line.split(" of task ")[0] for line in ends] == ["rollout train-1-0-0", "rollout train-1-0-1"]
    assert all(line.endswith(": completed, 2 turns, 85 tokens, reward 2") for line in ends), ends


def test_default_level_logs_nothing_about_single_rollouts(tmp_path: Path):
    """A large run has thousands of rollouts in a step, which are in the rollout store."""
    lines, _ = log_step(tmp_path / "log.txt", GigpoConfig())
    assert lines == []


def test_log_level_of_a_single_package(tmp_path: Path):
    lines, _ = log_step(tmp_path / "log.txt", GigpoConfig(), logging={"marin_rl.environments": "debug"})
    assert len(lines) == 2
    assert sum("tool calculator called" in line for line in lines) == 2
