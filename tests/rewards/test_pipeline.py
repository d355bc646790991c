# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marin_rl.metrics import Metric, Reduction
from marin_rl.rewards.combine import evaluation_metrics, failure, weighted_rewards
from marin_rl.rewards.component import FunctionRewardConfig, RewardComponent, RewardConfigError, RewardScope
from marin_rl.rewards.failures import RewardCallError, RewardFailure
from marin_rl.rewards.functions import EvaluateResult, RewardRequest, StepOutput
from marin_rl.rewards.pipeline import RewardPipeline, build_pipeline
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import RewardResult, TurnReward


class Scripted:
    """A component with a scripted result."""

    def __init__(self, name: str, answer: Any, scope: RewardScope = RewardScope.POINTWISE, weight: float = 1.0):
        self.name, self.weight, self.scope = name, weight, scope
        self.answer = answer
        self.asked: list[list[str]] = []
        self.closed = 0

    async def check(self) -> None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        self.asked.append([request.rollout_id for request in requests])
        if isinstance(self.answer, RewardCallError):
            raise self.answer
        return [self.answer] * len(requests)

    async def close(self) -> None:
        self.closed += 1


TIMEOUT = RewardCallError(RewardFailure.TIMEOUT, "no answer")


def test_components_of_each_scope_are_called_once(request_of):
    parts = [Scripted(scope.value, EvaluateResult(score=1.0), scope) for scope in RewardScope]
    assert all(isinstance(part, RewardComponent) for part in parts)
    pipeline = RewardPipeline(parts)
    requests = [request_of(rollout_id=f"r{index}") for index in range(3)]

    async def run() -> list[Any]:
        ones = [await pipeline.score_rollout(request) for request in requests]
        results = [ones, await pipeline.score_group(requests), await pipeline.score_batch(requests)]
        await pipeline.close()
        return results

    for scope, results in zip(RewardScope, asyncio.run(run()), strict=True):
        assert results == [[RewardResult(scope.value, 1.0, 1.0)]] * 3
    assert [part.asked for part in parts] == [[["r0"], ["r1"], ["r2"]], [["r0", "r1", "r2"]], [["r0", "r1", "r2"]]]
    assert [part.closed for part in parts] == [1, 1, 1]
    assert all(pipeline.has(scope) for scope in RewardScope)


def test_result_of_a_component(request_of):
    result = EvaluateResult(
        score=0.5,
        step_outputs=(StepOutput(step_index=1, base_reward=2.0, reason="well said"),),
        metrics={"length": 2.0},
        reason="because",
    )
    pipeline = RewardPipeline([Scripted("style", result, weight=3.0)])
    assert asyncio.run(pipeline.score_rollout(request_of())) == [
        RewardResult(
            component="style",
            weight=3.0,
            score=0.5,
            steps=(TurnReward(0, 2.0, "well said"),),
            metrics={"length": 2.0},
            reason="because",
        )
    ]


@pytest.mark.parametrize(("score", "expected"), [(None, 2.0), (0.0, 0.0)])
def test_step_rewards_sum_to_the_score_without_one(request_of, score, expected):
    result = EvaluateResult(score=score, step_outputs=(StepOutput(step_index=1, base_reward=2.0),))
    pipeline = RewardPipeline([Scripted("style", result, weight=3.0)])
    [evaluation] = asyncio.run(pipeline.score_rollout(request_of()))
    assert (evaluation.score, evaluation.steps) == (expected, (TurnReward(0, 2.0),))
    assert weighted_rewards([evaluation]) == {"style": 3 * expected}
    assert evaluation_metrics([evaluation]) == {"rewards/style/score": Metric(expected)}


@pytest.mark.parametrize(
    ("answer", "cause", "said"),
    [
        (TIMEOUT, RewardFailure.TIMEOUT, "timeout: no answer"),
        (
            EvaluateResult(score=0.0, is_score_valid=False, error="parser down"),
            RewardFailure.INVALID_SCORE,
            "parser down",
        ),
        (EvaluateResult(score=0.0, is_score_valid=False), RewardFailure.INVALID_SCORE, "is_score_valid=False"),
        (
            EvaluateResult(score=1.0, step_outputs=(StepOutput(step_index=0, base_reward=1.0),)),
            RewardFailure.STEP_INDEX,
            "rollout r1: step_index 0 refers to a message of role 'user'; the indices of the policy's messages are 1",
        ),
    ],
)
def test_failed_score_fails_only_its_rollout(request_of, answer, cause, said):
    pipeline = RewardPipeline([Scripted("good", EvaluateResult(score=1.0)), Scripted("bad", answer)])
    good, bad = asyncio.run(pipeline.score_rollout(request_of()))
    assert (good.score, bad.score) == (1.0, None)
    assert said in str(bad.error)
    assert f"reward 'bad': {cause.value}: " in str(failure([good, bad]))
    assert bad.failure == cause.value
    assert evaluation_metrics([good, bad, bad]) == {
        "rewards/good/score": Metric(1.0),
        f"rewards/bad/failed_{cause.value}": Metric(2.0, weight=2.0, reduction=Reduction.SUM),
    }


def test_failed_group_call_fails_the_whole_group(request_of):
    pipeline = RewardPipeline([Scripted("compare", TIMEOUT, RewardScope.GROUP)])
    results = asyncio.run(pipeline.score_group([request_of(rollout_id="a"), request_of(rollout_id="b")]))
    assert [[one.score for one in rollout] for rollout in results] == [[None], [None]]
    assert [one.failure for rollout in results for one in rollout] == ["timeout", "timeout"]


def test_other_errors_propagate(request_of):
    class Broken(Scripted):
        async def score(self, requests):
            raise ZeroDivisionError

    pipeline = RewardPipeline([Broken("broken", None)])
    with pytest.raises(ZeroDivisionError):
        asyncio.run(pipeline.score_rollout(request_of()))


def test_names_are_unique():
    with pytest.raises(RewardConfigError, match="duplicate names style"):
        RewardPipeline([Scripted("style", None), Scripted("style", None)])


def test_no_rollouts_call_no_component():
    part = Scripted("compare", TIMEOUT, RewardScope.BATCH)
    assert asyncio.run(RewardPipeline([part]).score_batch([])) == []
    assert part.asked == []


REWARDS = """
from marin_rl.rewards import EvaluateResult, StepOutput, reward_function

@reward_function
def accuracy(messages, ground_truth, tolerance=0, **kwargs):
    reply = messages[-1]["content"]
    if reply == "crash":
        raise RuntimeError("cannot judge this")
    return EvaluateResult(
        score=float(abs(float(reply) - float(ground_truth)) <= tolerance),
        step_outputs=[StepOutput(step_index=len(messages) - 1, base_reward=0.25)],
    )

@reward_function(mode="batch")
def shortest(messages, ground_truth, **kwargs):
    lengths = [len(chat[-1]["content"]) for chat in messages]
    return [float(length == min(lengths)) for length in lengths]
"""


def test_rewards_of_a_user_file(request_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    configs = [
        FunctionRewardConfig(path="my_rewards.py", function="accuracy", weight=2.0, options={"tolerance": 1}),
        FunctionRewardConfig(path="my_rewards.py", function="accuracy", name="exact"),
        FunctionRewardConfig(path="my_rewards.py", function="shortest", weight=0.5),
    ]
    replies = ["46", "47.0", "crash"]

    async def run() -> tuple[list[list[RewardResult]], list[list[RewardResult]]]:
        async with Sandbox(SandboxConfig(require=Isolation.NONE)) as sandbox:
            pipeline = build_pipeline(configs, sandbox)
            await pipeline.start()
            assert pipeline.has(RewardScope.GROUP)
            assert not pipeline.has(RewardScope.BATCH)
            requests = [request_of(reply, rollout_id=f"r{index}") for index, reply in enumerate(replies)]
            ones = await asyncio.gather(*(pipeline.score_rollout(request) for request in requests))
            return list(ones), await pipeline.score_group(requests)

    ones, group = asyncio.run(run())
    assert weighted_rewards([*ones[0], *group[0]]) == {"accuracy": 2.0, "exact": 1.0, "shortest": 0.5}
    assert weighted_rewards([*ones[1], *group[1]]) == {"accuracy": 2.0, "exact": 0.0, "shortest": 0.0}
    assert ones[0][0].steps == (TurnReward(0, 0.25),)
    assert "RuntimeError: cannot judge this" in str(failure(ones[2]))
    assert [[one.failure for one in rollout] for rollout in ones] == [[None, None], [None, None], ["raised", "raised"]]


LIST_TYPES = """
import json
from marin_rl.rewards.pipeline import RewardComponentConfig
print(json.dumps(sorted(RewardComponentConfig.get_known_choices())))
"""


def test_all_component_types_are_registered():
    # Runs in a separate process, because other tests have registered the types here.
    done = subprocess.run([sys.executable, "-c", LIST_TYPES], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["code", "function", "llm_judge"]
