# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from experiments.gigpo_rewards import ROLLOUTS, Example, compute_stages, report
from experiments.lake_rewards import wasted_moves
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import Split
from marin_rl.types import Message

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pages" / "objectives.md"


@pytest.fixture(scope="module")
def example() -> Example:
    return compute_stages(ROLLOUTS)


def test_every_stage_is_what_one_finds_by_hand(example: Example) -> None:
    """Worked out with pencil and paper: see the page."""
    assert [[step.base_reward for step in result.step_outputs or ()] for result in example.results] == [
        [-0.2, 0.0, 0.0],
        [0.0, -0.2, 0.0],
        [0.0, 0.0],
    ]
    assert [result.score for result in example.results] == [None] * 3
    assert [[step.turn for step in one.steps] for one in example.evaluations] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    assert [one.score for one in example.evaluations] == [-0.2, -0.2, 0.0]
    assert example.turn_rewards == [[-0.1, 0.0, 1.0], [0.0, -0.1, 0.0], [0.0, 1.0]]
    assert [sum(rewards.values()) for rewards in example.rewards] == [0.9, -0.1, 1.0]
    expected = [
        # A_E, G, A_S
        (0.3, [0.15, 0.5, 1.0], [-0.125, 0.225, 0.0]),
        (-0.7, [-0.05, -0.1, 0.0], [-0.325, -0.4, -0.3]),
        (0.4, [0.5, 1.0], [0.225, 0.7]),
    ]
    for token_advantages, (episode, returns, steps) in zip(example.token_advantages_list, expected, strict=True):
        assert token_advantages.turn_advantages is not None
        assert token_advantages.turn_advantages.episode_advantage == pytest.approx(episode)
        np.testing.assert_allclose(token_advantages.turn_advantages.returns, returns, rtol=1e-12)
        np.testing.assert_allclose(token_advantages.turn_advantages.step_advantages, steps, atol=1e-12)
        np.testing.assert_allclose(token_advantages.advantages, episode + np.array(steps), rtol=1e-12)


def test_the_page_shows_the_last_table_that_the_program_prints() -> None:
    [shown] = re.findall(r"```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown.startswith("4. GiGPO")
    assert report(ROLLOUTS).endswith(f"\n{shown}")


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    arguments = ["--config", str(ROOT / "experiments" / "gigpo_rewards.yaml")]
    return parse_config(TrainConfig, arguments).config


def test_the_function_finds_the_wasted_moves_of_the_experiments_game(config: TrainConfig) -> None:
    environment = config.environment.build()
    task = environment.tasks(Split.TRAIN)[0]

    async def play(moves: str) -> list[Message]:
        episode = await environment.start(task, seed=0)
        messages = list(task.messages)
        for move in moves:
            step = await episode.step(move)
            messages += [Message(role="assistant", content=move), *step.messages]
        await episode.close()
        return messages

    # The start is the upper left corner: the first two moves go into the border.
    messages = asyncio.run(play("lu"))
    result = wasted_moves(messages=messages, ground_truth=task.answer)
    assert [(step.step_index, step.base_reward) for step in result.step_outputs] == [(1, -0.2), (3, -0.2)]
    assert result.total_score == -0.4
