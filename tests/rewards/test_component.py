# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.component import FunctionRewardConfig, RewardConfigError, RewardScope, check_component_name
from marin_rl.rewards.functions import EvaluateResult
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox


@pytest.mark.parametrize("name", ["style", "Style_2.b-c", "0"])
def test_valid_names(name: str):
    check_component_name(name)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\n", "größe", "a:b"])
def test_invalid_names_are_errors(name: str):
    with pytest.raises(ValueError, match=r"rewards: invalid name .*; use letters, digits") as raised:
        check_component_name(name)
    assert repr(name) in str(raised.value)


REWARDS = """
from marin_rl.rewards import reward_function

@reward_function
def accuracy(messages, ground_truth, tolerance=0, **kwargs): ...

@reward_function(mode="batch")
def shortest(messages, ground_truth, **kwargs): ...

@reward_function
def needs(messages, ground_truth, model, **kwargs): ...
"""


def checked(config: FunctionRewardConfig) -> RewardScope | None:
    async def run() -> RewardScope | None:
        async with Sandbox(SandboxConfig(require=Isolation.NONE, workers=1, wall_seconds=600.0)) as sandbox:
            component = config.build(sandbox)
            assert component.scope is None
            await component.check()
            return component.scope

    return asyncio.run(run())


@pytest.mark.medium
def test_function_components_are_checked_early(tmp_path: Path):
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)

    def config(function: str, **fields: Any) -> FunctionRewardConfig:
        return FunctionRewardConfig(path=str(file), function=function, **fields)

    assert checked(config("shortest")) is RewardScope.GROUP
    assert checked(config("shortest", scope=RewardScope.BATCH)) is RewardScope.BATCH
    assert checked(config("accuracy")) is RewardScope.POINTWISE
    for wrong, message in [
        (
            config("acuracy"),
            r"'acuracy' of .*my_rewards.py does not exist; did you mean 'accuracy'\?.*: accuracy, needs, shortest",
        ),
        (config("needs"), "requires model; set it under options"),
        (config("accuracy", scope=RewardScope.GROUP), "has mode pointwise, so scope must be pointwise, got group"),
        (config("shortest", scope=RewardScope.POINTWISE), "scope must be group or batch, got pointwise"),
        (FunctionRewardConfig(path=str(tmp_path / "none.py"), function="f"), "none.py does not exist"),
    ]:
        with pytest.raises(RewardConfigError, match=message):
            checked(wrong)
    file.write_text("def accuracy(messages, ground_truth, **kwargs): ...")
    with pytest.raises(RewardConfigError, match="write @reward_function above its `def`"):
        checked(config("accuracy"))


SHARING = """
from marin_rl.rewards import reward_function

@reward_function(stateless=True)
def shares(messages, ground_truth, **kwargs): return 1.0

@reward_function
def own(messages, ground_truth, **kwargs): return 1.0

@reward_function(mode="batch")
def batch(messages, ground_truth, **kwargs): return [1.0 for _ in messages]
"""


@pytest.mark.medium
def test_functions_whose_calls_share_processes_wait_for_the_group(tmp_path: Path, request_of: Any):
    file = tmp_path / "my_rewards.py"
    file.write_text(SHARING)
    names = ["shares", "own", "batch"]

    async def run() -> list[str]:
        sandbox_config = SandboxConfig(require=Isolation.NONE, workers=1, wall_seconds=600.0)
        async with Sandbox(sandbox_config, strongest=Isolation.NONE) as sandbox:
            components = [FunctionRewardConfig(path=str(file), function=name).build(sandbox) for name in names]
            for component in components:
                await component.check()
                results = await component.score([request_of(), request_of()])
                assert [result.score for result in results if isinstance(result, EvaluateResult)] == [1.0, 1.0]
            return [component.name for component in components if component.waits_for_group]

    assert asyncio.run(run()) == ["shares"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "my reward"}, "invalid name 'my reward'"),
        ({"options": {"status": 1, "task_id": 2}}, "contain status, task_id, which every function receives"),
        ({"options": {"a": float("inf")}}, "must be JSON values"),
        ({"options": {"a": object()}}, "must be JSON values"),
    ],
)
def test_function_configs_are_validated(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        FunctionRewardConfig(path="f.py", function="f", **fields)
