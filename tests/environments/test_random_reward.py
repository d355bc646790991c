# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import dataclasses
from pathlib import Path

import pytest

from marin_rl.environments import (
    ArithmeticConfig,
    MixtureConfig,
    RandomRewardConfig,
    Split,
    TextGameConfig,
)
from marin_rl.environments.streams import MixturePartConfig
from marin_rl.rewards.component import FunctionRewardConfig
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.utils.event_loop import BackgroundLoop
from tests.rollouts.test_run_rollouts import run, runner, says

INNER = ArithmeticConfig(size=2000)


def rewards(probability: float, seed: int = 0, attempt: int = 0) -> list[float]:
    """Rewards of one attempt at each training task."""
    config = RandomRewardConfig(environment=INNER, probability=probability)
    environment = config.build()
    random_rewards = config.random_rewards(environment)
    drawn = [random_rewards.draw(task, seed, f"training-{attempt}") for task in environment.tasks(Split.TRAIN)]
    assert all(reward is not None and reward.keys() == {"random"} for reward in drawn)
    return [reward["random"] for reward in drawn if reward is not None]


def test_the_share_of_rewards_is_the_probability():
    drawn = rewards(0.3)
    assert set(drawn) == {0.0, 1.0}
    # Four standard deviations of 1,700 draws.
    assert sum(drawn) / len(drawn) == pytest.approx(0.3, abs=0.045)
    for probability in (0.0, 1.0):
        assert set(rewards(probability)) == {probability}


def test_rewards_depend_on_task_seed_and_attempt():
    assert rewards(0.5) == rewards(0.5)
    assert rewards(0.5, seed=0) != rewards(0.5, seed=1)
    assert rewards(0.5, attempt=0) != rewards(0.5, attempt=1)


def test_the_environment_is_the_inner_one():
    for inner in (INNER, MixtureConfig((MixturePartConfig(INNER),))):
        environment, control = inner.build(), RandomRewardConfig(environment=inner).build()
        assert (type(control), control.name) == (type(environment), environment.name)
        assert [control.tasks(split) for split in Split] == [environment.tasks(split) for split in Split]


@pytest.mark.parametrize("max_turns", [1, 3, 9])
def test_a_rollout_has_one_random_reward_whatever_ends_it(max_turns: int):
    """The goal of the game is three steps away, and its true reward is -0.1 per step."""
    options = {"is_slippery": False, "desc": ["SFFG"]}
    game = TextGameConfig(
        id="FrozenLake-v1", options=options, num_tasks=1, step_reward=-0.1, held_out=0.0, validation=0.0
    )
    config = RandomRewardConfig(environment=game)
    environment = config.build()
    rollout_runner = dataclasses.replace(
        runner(says(*["right"] * 3), environment, Limits(4000, 200, max_turns=max_turns)),
        reward_functions=RewardFunctions(random_rewards=config.random_rewards(environment)),
    )
    [group] = run(rollout_runner, environment.tasks(Split.TRAIN), group_size=16)
    for rollout in group.rollouts:
        assert rollout.rewards.keys() == {"random"}
        assert [dict(turn.rewards) for turn in rollout.turns[:-1]] == [{"random": 0.0}] * (min(max_turns, 3) - 1)
        assert rollout.turns[-1].rewards == rollout.rewards
    assert {rollout.rewards["random"] for rollout in group.rollouts} == {0.0, 1.0}


TRUE_REWARDS = """
from marin_rl.rewards import reward_function

@reward_function
def each(messages, ground_truth, **kwargs):
    return 7.0

@reward_function(mode="batch")
def group(messages, ground_truth, **kwargs):
    return [5.0] * len(messages)
"""


@pytest.mark.medium
def test_reward_functions_score_validation_and_held_out_tasks_only(tmp_path: Path):
    path = tmp_path / "true_rewards.py"
    path.write_text(TRUE_REWARDS)
    each, group = (FunctionRewardConfig(path=str(path), function=name) for name in ("each", "group"))
    one = ArithmeticConfig(size=200, name="one", rewards=(each,))
    two = ArithmeticConfig(size=200, digits=1, terms=3, name="two", rewards=(group,))
    plain = ArithmeticConfig(size=200, digits=3, name="plain")
    inners = (one, MixtureConfig(tuple(map(MixturePartConfig, (one, two, plain)))))
    expected = {"one": {"each": 7.0}, "two": {"group": 5.0}, "plain": {}}
    loop = BackgroundLoop()
    for inner in inners:
        config = RandomRewardConfig(environment=inner)
        environment = config.build()
        sandbox = Sandbox(SandboxConfig(require=Isolation.NONE, workers=1))
        random_rewards = config.random_rewards(environment)
        components = config.reward_components(environment)
        with contextlib.closing(RewardFunctions(components, sandbox, loop, random_rewards=random_rewards)) as functions:
            for split in Split:
                tasks = {task.environment: task for task in environment.tasks(split)}
                rollout_runner = runner(says("wrong"), environment, Limits(4000, 200, max_turns=1))
                rollout_runner = dataclasses.replace(rollout_runner, reward_functions=functions, loop=loop)
                for [rollout] in (result.rollouts for result in run(rollout_runner, list(tasks.values()))):
                    if split is Split.TRAIN:
                        assert rollout.rewards.keys() == {"random"}
                        assert not rollout.evaluations
                    else:
                        assert rollout.rewards == {"correct": 0.0, **expected[rollout.task.environment]}
    loop.close()


def test_reward_functions_of_the_control_itself_are_refused():
    rewards = (FunctionRewardConfig(path="rewards.py", function="score"),)
    with pytest.raises(ValueError, match=r"1 reward functions in rewards, .*; move them to environment\.rewards"):
        RandomRewardConfig(environment=INNER, rewards=rewards)
