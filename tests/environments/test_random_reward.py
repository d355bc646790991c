# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
from pathlib import Path

import draccus
import pytest

from marin_rl.environments import (
    ArithmeticConfig,
    CurriculumConfig,
    EnvironmentConfig,
    MixtureConfig,
    RandomRewardConfig,
    Split,
)
from marin_rl.environments.base import Step
from marin_rl.environments.random_reward import RandomRewardEpisode
from marin_rl.environments.streams import LessonConfig, MixturePartConfig
from marin_rl.event_loop import BackgroundLoop
from marin_rl.rewards.component import FunctionRewardConfig
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.reward_functions import RewardFunctions
from tests.one_reply import answer
from tests.rollouts.test_run_rollouts import run, runner, says

INNER = ArithmeticConfig(size=2000)


def rewards(probability: float, seed: int = 0) -> list[float]:
    environment = RandomRewardConfig(environment=INNER, probability=probability).build()
    return [answer(environment, task, task.answer, seed).rewards["random"] for task in environment.tasks(Split.TRAIN)]


@pytest.mark.parametrize("split", [Split.VALIDATION, Split.HELD_OUT])
def test_other_splits_keep_their_true_rewards(split: Split):
    environment = RandomRewardConfig(environment=INNER).build()
    for task in environment.tasks(split):
        assert answer(environment, task, task.answer).rewards == {"correct": 1.0}
        assert answer(environment, task, "wrong").rewards == {"correct": 0.0}


def test_training_rewards_depend_on_the_probability_and_not_the_answer():
    environment = RandomRewardConfig(environment=INNER, probability=0.3).build()
    tasks = environment.tasks(Split.TRAIN)
    for reply_of in (lambda task: task.answer, lambda task: "wrong"):
        given = [answer(environment, task, reply_of(task), 1).rewards for task in tasks]
        assert all(set(reward) == {"random"} for reward in given)
        # Four standard deviations of 1,700 draws.
        assert sum(reward["random"] for reward in given) / len(given) == pytest.approx(0.3, abs=0.045)


@pytest.mark.medium
def test_rewards_are_deterministic_and_depend_on_the_seed():
    assert rewards(0.5) == rewards(0.5)
    assert rewards(0.5, seed=0) != rewards(0.5, seed=1)


def test_rewards_depend_on_the_reply():
    environment = RandomRewardConfig(environment=INNER).build()
    task = environment.tasks(Split.TRAIN)[0]
    assert {answer(environment, task, str(reply)).rewards["random"] for reply in range(64)} == {0.0, 1.0}


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_probabilities_zero_and_one(probability: float):
    assert set(rewards(probability)) == {probability}


def test_tasks_and_name_are_those_of_the_inner_environment():
    inner, control = INNER.build(), RandomRewardConfig(environment=INNER).build()
    assert control.name == inner.name
    assert [control.tasks(split) for split in Split] == [inner.tasks(split) for split in Split]


def test_the_return_does_not_depend_on_the_number_of_replies_before_a_limit():
    class Dialogue:
        async def step(self, reply: str) -> Step:
            return Step({"correct": 0.0}, messages=({"role": "user", "content": reply},), done=False)

        async def close(self) -> None:
            pass

    async def rewards(replies: str) -> list[float]:
        episode = RandomRewardEpisode(Dialogue(), probability=0.5, key="k")
        steps = [await episode.step(reply) for reply in replies]
        assert [step.messages[0]["content"] for step in steps] == list(replies)
        return [step.rewards["random"] for step in steps]

    replies = "abcdefgh"
    returns = [sum(asyncio.run(rewards(replies[:end]))) for end in range(1, 9)]
    assert returns == [asyncio.run(rewards(reply))[0] for reply in replies]
    assert set(returns) == {0.0, 1.0}


TRUE_REWARDS = """
from marin_rl.rewards import reward_function

@reward_function
def each(messages, ground_truth, **kwargs):
    return 7.0

@reward_function(mode="batch")
def group(messages, ground_truth, **kwargs):
    return [5.0] * len(messages)
"""


def test_reward_functions_score_validation_and_held_out_tasks_only(tmp_path: Path):
    path = tmp_path / "true_rewards.py"
    path.write_text(TRUE_REWARDS)
    each, group = (FunctionRewardConfig(path=str(path), function=name) for name in ("each", "group"))
    one = ArithmeticConfig(size=200, name="one", rewards=(each,))
    two = ArithmeticConfig(size=200, digits=1, terms=3, name="two", rewards=(group,))
    plain = ArithmeticConfig(size=200, digits=3, name="plain")
    three = (one, two, plain)
    inners = (
        one,
        MixtureConfig(tuple(map(MixturePartConfig, three))),
        CurriculumConfig(tuple(LessonConfig(lesson.name, lesson) for lesson in three)),
    )
    expected = {"one": {"each": 7.0}, "two": {"group": 5.0}, "plain": {}}
    loop = BackgroundLoop()
    try:
        for inner in inners:
            config = RandomRewardConfig(environment=inner)
            environment = config.build()
            sandbox = Sandbox(SandboxConfig(require=Isolation.NONE, workers=1))
            reward_functions = RewardFunctions(config.reward_components(environment), sandbox, loop)
            try:
                for split in Split:
                    tasks = {task.environment: task for task in environment.tasks(split)}
                    rollout_runner = runner(says("wrong"), environment, Limits(4000, 200, max_turns=1))
                    rollout_runner = dataclasses.replace(rollout_runner, reward_functions=reward_functions, loop=loop)
                    for result in run(rollout_runner, list(tasks.values())):
                        [rollout] = result.rollouts
                        true = expected[rollout.task.environment]
                        if split is Split.TRAIN:
                            assert rollout.total_reward == rollout.rewards["random"]
                            assert rollout.rewards.keys() == {"random", *true}
                        else:
                            assert rollout.rewards == {"correct": 0.0, **true}
            finally:
                reward_functions.close()
    finally:
        loop.close()


def test_reward_functions_of_the_control_itself_are_refused():
    rewards = (FunctionRewardConfig(path="rewards.py", function="score"),)
    with pytest.raises(ValueError, match=r"1 reward functions in rewards, .*; move them to environment\.rewards"):
        RandomRewardConfig(environment=INNER, rewards=rewards)


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_probability_is_checked(probability: float):
    with pytest.raises(ValueError, match="probability must be in \\[0, 1\\]"):
        RandomRewardConfig(environment=INNER, probability=probability)


def test_config_round_trip():
    raw = {
        "type": "random_control",
        "environment": {"type": "arithmetic", "digits": 1, "size": 50},
        "probability": 0.25,
    }
    config = draccus.decode(EnvironmentConfig, raw)
    assert config == RandomRewardConfig(environment=ArithmeticConfig(digits=1, size=50), probability=0.25)
    assert draccus.decode(EnvironmentConfig, draccus.encode(config, EnvironmentConfig)) == config
