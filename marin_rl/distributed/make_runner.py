# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout runner of a run, for trainer and workers: limits and reward functions."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.environments.random_reward import RandomRewardConfig
from marin_rl.errors import Closing
from marin_rl.event_loop import BackgroundLoop
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.attempt import Limits, default_state_hash
from marin_rl.rollouts.episode import ConnectAgent
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.sampling.sampler import Sampler
from marin_rl.tokenization.chat import ChatTokenizer


def make_runner(
    config: TrainConfig,
    environment: AbstractEnvironment,
    tokenizer: ChatTokenizer,
    sampler: Sampler,
    loop: BackgroundLoop,
    reward_functions: RewardFunctions,
    vocab_size: int,
) -> RolloutRunner:
    """Make a rollout runner with the configured limits.

    Args:
        config: limits and state hashing.
        environment: environment of the rollouts.
        tokenizer: chat tokenizer of the policy.
        sampler: sampler of the policy.
        loop: event loop of environments and reward functions.
        reward_functions: scores finished rollouts.
        vocab_size: vocabulary size of the policy, which may be larger than the tokenizer's.

    Returns:
        The runner.
    """
    hashing = config.rollouts.state_hashing
    state_hash = default_state_hash if hashing is None else hashing.build()
    limits = make_limits(config)
    return RolloutRunner(
        environment,
        tokenizer,
        sampler,
        limits,
        state_hash,
        reward_functions,
        loop,
        connect=make_gateway(tokenizer, limits, vocab_size, has_stop_texts=bool(config.sampling.stop)),
    )


def make_gateway(
    tokenizer: ChatTokenizer, limits: Limits, vocab_size: int, *, has_stop_texts: bool = False
) -> ConnectAgent:
    """Return the function that serves the policy to agents; its server starts with the first agent.

    Args:
        tokenizer: chat tokenizer of the policy.
        limits: limits of every rollout.
        vocab_size: vocabulary size of the policy.
        has_stop_texts: whether `sampling.stop` ends replies.
    """

    @functools.cache
    def gateway() -> Any:
        # Imported here because the extra `serve` is optional.
        from marin_rl.serving.gateway import Gateway

        return Gateway(tokenizer, limits, vocab_size, has_stop_texts=has_stop_texts)

    return lambda recorder: gateway().connect(recorder)


def make_limits(config: TrainConfig) -> Limits:
    """Return the limits of every rollout of a run."""
    return Limits(
        max_length=config.rollouts.max_length,
        max_new_tokens=config.sampling.max_new_tokens,
        max_turns=config.rollouts.max_turns,
        max_tokens=config.rollouts.max_tokens,
        max_seconds=config.rollouts.max_seconds,
        max_prompt_length=config.rollouts.max_prompt_length,
        long_prompts=config.rollouts.long_prompts,
    )


def open_reward_functions(
    config: TrainConfig,
    environment: AbstractEnvironment,
    opened: contextlib.ExitStack,
    replace: Callable[[RewardComponentConfig], RewardComponentConfig] = lambda component: component,
) -> tuple[RewardFunctions, BackgroundLoop]:
    """Start and check the reward functions of the configured environment, and the event loop that runs them.

    Tools of the environment share the sandbox of the reward functions.

    Args:
        config: reward functions and sandbox.
        environment: the environment that the config built.
        opened: closes both.
        replace: returns the component to build in the place of a configured one.

    Returns:
        Reward functions and event loop.

    Raises:
        RewardConfigError: if a function is invalid, or cannot use the answer of a task.
        IsolationError: if the machine provides less isolation than the sandbox requires.
    """
    loop = BackgroundLoop()
    opened.enter_context(Closing(loop.close))
    sandbox = Sandbox(config.sandbox)
    runs_programs = environment.connect_sandbox(sandbox)
    components = {
        name: tuple(map(replace, configured))
        for name, configured in config.environment.reward_components(environment).items()
    }
    check_answers(components, environment)
    random_rewards = None
    if isinstance(config.environment, RandomRewardConfig):
        random_rewards = config.environment.random_rewards(environment)
    reward_functions = RewardFunctions(
        components, sandbox, loop, runs_programs=runs_programs, random_rewards=random_rewards
    )
    opened.enter_context(Closing(reward_functions.close))
    return reward_functions, loop


def check_answers(components: Mapping[str, Sequence[RewardComponentConfig]], environment: AbstractEnvironment) -> None:
    """Check that the reward functions can use the answers of all tasks.

    Args:
        components: reward functions by environment name.
        environment: the environment of the tasks.

    Raises:
        RewardConfigError: if one cannot use an answer; the message names the task.
    """
    for name, configs in components.items():
        for config in configs:
            tasks = (task for split in Split for task in environment.tasks(split))
            config.check_answers(task for task in tasks if task.environment == name)
