# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.component import FunctionRewardConfig, RewardConfigError, RewardScope, check_component_name
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import EvaluateResult
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
def accuracy(messages, ground_truth, tolerance=0, **kwargs): return 1.0

@reward_function(stateless=True)
def shares(messages, ground_truth, **kwargs): return 1.0

@reward_function(mode="batch")
def shortest(messages, ground_truth, **kwargs): return [1.0 for _ in messages]

@reward_function
def needs(messages, ground_truth, model, **kwargs): ...
"""


@pytest.mark.medium
def test_function_components_are_checked_early(tmp_path: Path, request_of: Any):
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)

    async def run() -> None:
        sandbox_config = SandboxConfig(require=Isolation.NONE, workers=1, wall_seconds=600.0)
        async with Sandbox(sandbox_config, strongest=Isolation.NONE) as sandbox:
            for function, given, scope in [
                ("accuracy", None, RewardScope.POINTWISE),
                ("shares", None, RewardScope.POINTWISE),
                ("shortest", None, RewardScope.GROUP),
                ("shortest", RewardScope.BATCH, RewardScope.BATCH),
            ]:
                component = FunctionRewardConfig(path=str(file), function=function, scope=given).build(sandbox)
                assert component.scope is None
                await component.check()
                assert component.scope is scope
                # Calls of a function that share processes start when the group is complete.
                assert component.waits_for_group is (function == "shares")
                results = await component.score([request_of(), request_of()])
                assert [result.score for result in results if isinstance(result, EvaluateResult)] == [1.0, 1.0]
            for function, fields, message in [
                (
                    "acuracy",
                    {},
                    r"'acuracy' of .*my_rewards.py is not .*Did you mean 'accuracy'\? .*: accuracy, needs, s",
                ),
                ("needs", {}, "requires model; set it under options"),
                ("accuracy", {"scope": RewardScope.GROUP}, "mode pointwise, so scope must be pointwise, got group"),
                ("shortest", {"scope": RewardScope.POINTWISE}, "scope must be group or batch, got pointwise"),
                ("f", {"path": str(tmp_path / "none.py")}, "none.py does not exist"),
            ]:
                config = FunctionRewardConfig(**{"path": str(file), "function": function, **fields})
                with pytest.raises(RewardConfigError, match=message):
                    await config.build(sandbox).check()

    asyncio.run(run())


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
