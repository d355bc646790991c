# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from marin_rl.config.sections import RolloutConfig
from marin_rl.distributed.make_runner import make_runner, open_reward_functions
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import EnvironmentConfig, Split, Step
from marin_rl.environments.dataset import JsonlConfig
from marin_rl.environments.random_reward import RandomRewardConfig
from marin_rl.environments.tool_use import ToolUseConfig
from marin_rl.environments.tools import PythonConfig
from marin_rl.event_loop import BackgroundLoop
from marin_rl.rewards.code import CodeRewardConfig
from marin_rl.rewards.component import FunctionRewardConfig, RewardConfigError
from marin_rl.rewards.grading import NoGraderConfig
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rollouts.attempt import Limits, default_state_hash
from marin_rl.rollouts.config import StateHashingConfig
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.sampling.config import SamplingConfig
from tests.scripted_sampler import ScriptedSampler
from tests.training.bare_run import TOKENIZER, make_config


def player_of(**rollouts: object) -> RolloutRunner:
    config = make_config(
        rollouts=RolloutConfig(prompts_per_step=4, group_size=4, max_length=64, **rollouts),
        sampling=SamplingConfig(max_new_tokens=6),
    )
    environment = ArithmeticConfig(digits=1, size=50).build()
    sampler = ScriptedSampler({}, stop_token_ids=[0])
    return make_runner(
        config, environment, TOKENIZER, sampler, BackgroundLoop(), RewardFunctions(), TOKENIZER.vocab_size
    )


def test_limits_are_the_configured_ones():
    found = player_of(row_length=64, max_turns=3, max_tokens=20, max_seconds=7.5).limits
    assert found == Limits(max_length=64, max_new_tokens=6, max_turns=3, max_tokens=20, max_seconds=7.5)


def test_custom_state_hash_replaces_the_default(tmp_path: Path):
    assert player_of().state_hash is default_state_hash
    path = tmp_path / "hashing.py"
    path.write_text("def count(messages, anchor_state):\n    return f'{len(messages)} {anchor_state}'\n")
    runner = player_of(state_hashing=StateHashingConfig(str(path), "count"))
    assert runner.state_hash((), "door") == "0 door"


def test_event_loop_closes_after_invalid_reward_function(tmp_path: Path):
    reward = FunctionRewardConfig(path=str(tmp_path / "gone.py"), function="length")
    config = make_config(
        environment=ArithmeticConfig(digits=1, size=50, rewards=(reward,)), sandbox=SandboxConfig(workers=1)
    )
    before = set(threading.enumerate())
    with (
        pytest.raises(RewardConfigError, match=r"the file .*gone\.py does not exist"),
        contextlib.ExitStack() as opened,
    ):
        open_reward_functions(config, config.environment.build(), opened)
    assert "episodes" not in {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, RandomRewardConfig, ToolUseConfig], ids=["direct", "random", "tools"]
)
def test_answers_of_all_tasks_are_checked(tmp_path: Path, wrap: Callable[[EnvironmentConfig], EnvironmentConfig]):
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "id": f"row{index}",
            "prompt": f"Write f{index}.",
            "answer": f'{{"calls": [{{"call": "f{index}(1)", "returns": 2}}]}}',
        }
        for index in range(200)
    ]
    rows[150]["answer"] = '{"calls": [{"call": "f(1", "returns": 2}]}'
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = JsonlConfig(str(path), grader=NoGraderConfig(), rewards=(CodeRewardConfig(),))
    config = make_config(environment=wrap(questions), sandbox=SandboxConfig(workers=1))
    with (
        pytest.raises(RewardConfigError, match=r"task 'row150' .*'f\(1' is not a Python expression"),
        contextlib.ExitStack() as opened,
    ):
        open_reward_functions(config, config.environment.build(), opened)


def test_tools_share_the_sandbox():
    environment = ToolUseConfig(
        questions=ArithmeticConfig(digits=1, size=50), tools=(PythonConfig(),), name="with_python"
    ).build()
    config = make_config(sandbox=SandboxConfig(workers=1))
    with contextlib.ExitStack() as opened:
        _, loop = open_reward_functions(config, environment, opened)
        call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'

        async def ask() -> Step:
            episode = await environment.start(environment.tasks(Split.TRAIN)[0], seed=0)
            return await episode.step(call)

        step = loop.submit(ask()).result()
    assert not step.done
    assert "42" in step.messages[-1]["content"]
