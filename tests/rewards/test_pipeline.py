# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.code import CodeRewardConfig
from marin_rl.rewards.component import RewardComponent, RewardConfigError, RewardScope
from marin_rl.rewards.pipeline import (
    StepIndexError,
    align_steps,
    build_components,
    failure,
    score_rollouts,
    turn_rewards,
    weighted_rewards,
)
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError, RewardRequest, StepOutput
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.metrics import reward_metrics
from marin_rl.types import Message, RewardFailure, RewardResult, TurnReward


class Scripted:
    """A component with a scripted result."""

    waits_for_group = False

    def __init__(self, name: str, answer: Any, scope: RewardScope = RewardScope.POINTWISE, weight: float = 1.0):
        self.name, self.weight, self.scope = name, weight, scope
        self.answer = answer
        self.asked: list[list[str]] = []

    async def check(self) -> None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
        self.asked.append([request.rollout_id for request in requests])
        if isinstance(self.answer, RewardCallError):
            raise self.answer
        return [self.answer] * len(requests)

    async def close(self) -> None: ...


def score_one(components: Sequence[RewardComponent], request: RewardRequest) -> list[RewardResult]:
    """Results of the pointwise components for one rollout."""
    [results] = asyncio.run(score_rollouts(components, RewardScope.POINTWISE, [request]))
    return results


TIMEOUT = RewardCallError(RewardFailure.TIMEOUT, "no answer")


def test_components_of_each_scope_are_called_once(request_of):
    parts = [Scripted(scope.value, EvaluateResult(score=1.0), scope) for scope in RewardScope]
    assert all(isinstance(part, RewardComponent) for part in parts)
    requests = [request_of(rollout_id=f"r{index}") for index in range(3)]

    async def run() -> list[Any]:
        ones = [await score_rollouts(parts, RewardScope.POINTWISE, [request]) for request in requests]
        group, batch = [
            await score_rollouts(parts, scope, requests) for scope in (RewardScope.GROUP, RewardScope.BATCH)
        ]
        return [[results for [results] in ones], group, batch]

    for scope, results in zip(RewardScope, asyncio.run(run()), strict=True):
        assert results == [[RewardResult(scope.value, 1.0, 1.0)]] * 3
    assert [part.asked for part in parts] == [[["r0"], ["r1"], ["r2"]], [["r0", "r1", "r2"]], [["r0", "r1", "r2"]]]


def test_result_of_a_component(request_of):
    steps = (StepOutput(step_index=1, base_reward=2.0, reason="well said", metrics={"moves": 2.0}),)
    result = EvaluateResult(step_outputs=steps, metrics={"length": 2.0}, reason="because")
    turns = (TurnReward(0, 2.0, "well said", {"moves": 2.0}),)
    # Without a score it is the sum of the step rewards.
    expected = RewardResult("style", weight=3.0, score=2.0, steps=turns, metrics={"length": 2.0}, reason="because")
    assert score_one([Scripted("style", result, weight=3.0)], request_of()) == [expected]


@pytest.mark.parametrize(
    ("answer", "cause", "said"),
    [
        (TIMEOUT, RewardFailure.TIMEOUT, "no answer"),
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
    good, bad = score_one([Scripted("good", EvaluateResult(score=1.0)), Scripted("bad", answer)], request_of())
    assert (good.score, bad.score) == (1.0, None)
    assert said in str(bad.error)
    assert failure([good, bad]) == f"reward 'bad': {bad.error}"
    assert bad.failure == cause.value
    assert reward_metrics([good, bad, bad]) == {
        "rewards/good/score": 1.0,
        f"rewards/bad/failed_{cause.value}": 2.0,
    }


def test_other_errors_propagate(request_of):
    class Broken(Scripted):
        async def score(self, requests):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        score_one([Broken("broken", None)], request_of())


def test_single_rollouts_and_whole_groups_can_fail(request_of):
    class Partial(Scripted):
        async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
            return [self.answer if request.rollout_id == "r1" else TIMEOUT for request in requests]

    requests = [request_of(rollout_id=f"r{index}") for index in range(3)]
    good = RewardResult("style", 1.0, 0.5)
    failed = RewardResult("style", 1.0, score=None, error="no answer", failure="timeout")
    for part, results in (
        (Partial("style", EvaluateResult(score=0.5), RewardScope.GROUP), [failed, good, failed]),
        (Scripted("style", TIMEOUT, RewardScope.GROUP), [failed] * 3),
    ):
        assert asyncio.run(score_rollouts([part], RewardScope.GROUP, requests)) == [[result] for result in results]
        assert asyncio.run(score_rollouts([part], RewardScope.GROUP, [])) == []


def test_names_are_unique():
    same = [CodeRewardConfig(name="style"), CodeRewardConfig(name="style", weight=2.0)]
    with pytest.raises(RewardConfigError, match="duplicate names style"):
        build_components(same, object.__new__(Sandbox))


ROLES = ("system", "user", "assistant", "user", "assistant", "tool", "assistant")


def chat(roles) -> list[Message]:
    return [Message(role=role, content="") for role in roles]


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        ([1], "step_index 1 refers to a message of role 'user'"),
        ([7], "step_index 7 is out of range for 7 messages"),
        ([4, 6, 4], "step_index 4 is repeated"),
        ([2], "step_index 2 refers to an example in the prompt, which has 3 messages"),
    ],
)
def test_wrong_indices_are_named(indices, problem):
    steps = [StepOutput(step_index=index, base_reward=0.0) for index in indices]
    with pytest.raises(StepIndexError) as raised:
        align_steps("rollout-17", chat(ROLES), steps, 3)
    assert str(raised.value) == f"rollout rollout-17: {problem}; the indices of the policy's messages are 4, 6"
    with pytest.raises(StepIndexError, match=r"none \(it has no messages\)"):
        align_steps("r1", chat(["user"]), steps)


@given(
    roles=st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=12),
    first=st.integers(0, 12),
    data=st.data(),
)
def test_each_policy_message_is_one_turn(roles, first, data):
    messages = chat(roles)
    # The oracle counts the policy's messages.
    turns, count = {}, 0
    for index, role in enumerate(roles):
        if index >= first and role == "assistant":
            turns[index] = count
            count += 1
    chosen = data.draw(st.lists(st.sampled_from(sorted(turns)), unique=True)) if turns else []
    steps = [StepOutput(step_index=index, base_reward=float(index)) for index in chosen]
    found = align_steps("r1", messages, steps, first)
    assert {turn: step.base_reward for turn, step in found.items()} == {turns[index]: float(index) for index in chosen}
    assert list(found) == sorted(found)


CORRECT = RewardResult(
    "correct",
    weight=2.0,
    score=1.0,
    steps=(TurnReward(0, 0.5), TurnReward(2, 0.0)),
)
SHORT = RewardResult("short", weight=-0.5, score=0.5, steps=(TurnReward(2, 4.0),))
LOST = RewardResult("judge", weight=1.0, score=None, error="no answer", failure="timeout")


def test_rewards_are_weighted():
    assert weighted_rewards([CORRECT, SHORT]) == {"correct": 2.0, "short": -0.25}
    assert failure([CORRECT, SHORT]) is None
    assert turn_rewards([CORRECT, SHORT], 3) == [{"correct": 1.0}, {}, {"correct": 0.0, "short": -2.0}]
    with pytest.raises(IndexError):
        turn_rewards([CORRECT], 2)
    assert failure([CORRECT, LOST]) == "reward 'judge': no answer"
    with pytest.raises(ValueError, match="'judge': no answer"):
        weighted_rewards([CORRECT, LOST])


LIST_TYPES = """
import json
from marin_rl.rewards.pipeline import RewardComponentConfig
print(json.dumps(sorted(RewardComponentConfig.get_known_choices())))
"""


def test_all_component_types_are_registered():
    # Runs in a separate process, because other tests have registered the types here.
    done = subprocess.run([sys.executable, "-c", LIST_TYPES], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["code", "function", "in_process", "llm_judge"]
