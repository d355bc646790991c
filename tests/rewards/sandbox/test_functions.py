# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any, cast

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards import EvaluateResult, StepOutput, reward_function
from marin_rl.rewards.sandbox.functions import (
    RewardFunctionError,
    RewardMode,
    describe_invalid,
    evaluate,
    required_options,
)
from marin_rl.types import MAX_REWARD

FINITE = st.floats(allow_nan=False, allow_infinity=False)
REWARDS = st.floats(-MAX_REWARD, MAX_REWARD)
SMALL_REWARDS = st.floats(-MAX_REWARD / 4, MAX_REWARD / 4)


@given(
    score=st.none() | REWARDS,
    steps=st.lists(st.builds(StepOutput, step_index=st.integers(0, 9), base_reward=SMALL_REWARDS), max_size=3),
    metrics=st.dictionaries(st.from_regex(r"[A-Za-z0-9_./-]{1,9}", fullmatch=True), FINITE, max_size=3),
    reason=st.none() | st.text(),
    is_score_valid=st.booleans(),
    error=st.none() | st.text(),
)
def test_results_survive_json(score, steps, metrics, reason, is_score_valid, error):
    result = EvaluateResult(
        score=score,
        step_outputs=tuple(steps),
        metrics=metrics,
        reason=reason,
        is_score_valid=is_score_valid,
        error=error,
    )
    assert EvaluateResult.model_validate_json(result.model_dump_json(), strict=True) == result


@pytest.mark.parametrize(
    "score", [math.nan, math.inf, -math.inf, 10**400, -(10**400), "1.0", [1.0], 1j, 1.1e30, -1e308]
)
def test_scores_are_finite_numbers(score):
    with pytest.raises(pydantic.ValidationError, match="score"):
        EvaluateResult(score=score)
    with pytest.raises(pydantic.ValidationError, match="base_reward"):
        StepOutput(step_index=0, base_reward=score)
    if score in (1.1e30, -1e308):
        # Too large for sums in float32. Metrics are only logged, so they have no bound.
        assert EvaluateResult(score=MAX_REWARD, metrics={"length": score}).metrics == {"length": score}
    else:
        with pytest.raises(pydantic.ValidationError, match="length"):
            EvaluateResult(score=1.0, metrics={"length": score})


STEPS = (StepOutput(step_index=3, base_reward=0.25), StepOutput(step_index=1, base_reward=0.5))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"score": 2.0}, 2.0),
        ({"score": 0.0, "step_outputs": STEPS}, 0.0),
        ({"step_outputs": STEPS}, 0.75),
        ({"score": None, "step_outputs": STEPS}, 0.75),
        ({"step_outputs": []}, 0.0),
    ],
)
def test_the_reward_is_the_score_or_the_sum_of_the_steps(given, expected):
    assert EvaluateResult(**given).total_score == expected


@pytest.mark.parametrize("given", [{}, {"score": None}, {"step_outputs": None, "reason": "?"}])
def test_a_valid_result_has_a_score_or_steps(given):
    with pytest.raises(pydantic.ValidationError, match="score and step_outputs are both None; set at least one"):
        EvaluateResult(**given)
    assert EvaluateResult(**given, is_score_valid=False).score is None


def test_sum_of_step_rewards_is_bounded():
    steps = [StepOutput(step_index=index, base_reward=0.75 * MAX_REWARD) for index in (1, 3)]
    with pytest.raises(pydantic.ValidationError, match=r"sum to 1\.5e\+30"):
        EvaluateResult(step_outputs=steps)
    assert EvaluateResult(score=0.0, step_outputs=steps).total_score == 0.0


@pytest.mark.parametrize("score", [1, True, np.float32(1.0), np.int64(1), np.float64(1.0), np.bool_(True), np.array(1)])
def test_scores_can_be_any_real_number(score):
    returns = reward_function(lambda messages, ground_truth, **kwargs: score)
    for found in (EvaluateResult(score=score).score, returns(messages=[], ground_truth="").score):
        assert (type(found), found) == (float, 1.0)


@pytest.mark.parametrize("index", [-1, 1.5, "1", None, True])
def test_step_indices_are_integers_from_zero(index):
    with pytest.raises(pydantic.ValidationError, match="step_index"):
        StepOutput(step_index=index, base_reward=0.0)
    with pytest.raises(pydantic.ValidationError, match="base_reward"):
        StepOutput(step_index=0, base_reward=None)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        EvaluateResult(score=1.0).score = 2.0


def test_pointwise_outside_the_sandbox(request_of):
    @reward_function
    def exact(messages, ground_truth, tolerance, **kwargs):
        """Doc."""
        given = {"task_id": "t1", "environment": "arithmetic", "status": "completed", "num_prompt_messages": 0}
        assert kwargs == given
        return abs(float(messages[-1]["content"]) - float(ground_truth)) <= tolerance

    assert (exact.name, exact.mode, exact.__doc__) == ("exact", RewardMode.POINTWISE, "Doc.")
    assert not exact.stateless
    assert reward_function(stateless=True)(exact.function).stateless
    both = reward_function(mode="batch", stateless=True)(exact.function)
    assert "stateless=True, which is for functions with mode 'pointwise'" in str(both.problem)
    assert required_options(exact) == ["tolerance"]
    requests = [request_of("46"), request_of("47")]
    assert [result.score for result in evaluate(exact, requests, {"tolerance": 0})] == [1.0, 0.0]


def test_batch_outside_the_sandbox(request_of):
    @reward_function(mode="batch")
    def shortest(messages, ground_truth, **kwargs):
        assert kwargs["task_id"] == ["t1", "t1"]
        lengths = [len(chat[-1]["content"]) for chat in messages]
        return [EvaluateResult(score=float(length == min(lengths))) for length in lengths]

    requests = [request_of("forty-six"), request_of("46")]
    assert [result.score for result in evaluate(shortest, requests, {})] == [0.0, 1.0]
    assert [result.score for result in shortest([[{"content": "a"}]] * 2, ["", ""], task_id=["t1", "t1"])] == [1.0, 1.0]


def lacks_messages(ground_truth, **kwargs): ...
def lacks_ground_truth(messages, **kwargs): ...
def lacks_kwargs(messages, ground_truth): ...
def takes_positions(messages, ground_truth, /, **kwargs): ...
def takes_a_position(judge, /, messages, ground_truth, **kwargs): ...
async def late(messages, ground_truth, **kwargs): ...
def yields(messages, ground_truth, **kwargs):
    yield 1.0


class Scorer: ...


def takes_stars(*messages, ground_truth, **kwargs): ...


@pytest.mark.parametrize(
    ("function", "lacking"),
    [
        (lacks_messages, "lacks messages;"),
        (lacks_ground_truth, "lacks ground_truth;"),
        (lacks_kwargs, r"lacks \*\*kwargs;"),
        (takes_positions, "lacks messages, ground_truth;"),
        (takes_a_position, "with judge before `/`"),
        (takes_stars, "lacks messages;"),
        (late, "is async"),
        (yields, "is a generator function"),
        (Scorer, "is a class"),
    ],
)
def test_functions_that_cannot_be_called_keep_the_reason(function, lacking):
    decorated = reward_function(function)
    assert re.search(lacking, str(decorated.problem))
    with pytest.raises(RewardFunctionError, match=f"{function.__name__} .*{lacking}"):
        decorated(messages=[], ground_truth="")


def test_wrong_arguments_of_the_decorator():
    def exact(messages, ground_truth, **kwargs): ...

    assert reward_function(exact).problem is None
    assert "has mode 'pairwise'; it must be" in str(reward_function(mode="pairwise")(exact).problem)
    misspelled: Any = {"state_less": True}
    assert "unknown arguments of @reward_function, state_less;" in str(reward_function(**misspelled)(exact).problem)
    with pytest.raises(RewardFunctionError, match=r"applied to 'batch' \(str\), which is not .*mode='batch'"):
        reward_function(cast(Any, "batch"))


INFINITE = "a reward must be finite and at most 1e+30"


@pytest.mark.parametrize(
    ("mode", "answer", "problem"),
    [
        *(("pointwise", answer, f"returned {answer!r}") for answer in ("1.0", None, [1.0], {"score": 1.0})),
        *(("pointwise", answer, INFINITE) for answer in (math.nan, -math.inf, np.float32("nan"), np.array(math.nan))),
        *(("pointwise", answer, INFINITE) for answer in (1e31, 10**400)),
        *(("batch", [1.0, answer], f"for rollout 1; {INFINITE}") for answer in (math.nan, 1e31, 10**400)),
        *(("batch", answer, "for 2 rollouts") for answer in ([], [1.0], [1.0, 2.0, 3.0], 1.0, "ab", None, {"a": 1.0})),
        # `model_construct` validates nothing.
        ("pointwise", EvaluateResult.model_construct(score=math.nan), "an invalid EvaluateResult with score nan"),
    ],
)
def test_other_values_than_results_are_named(request_of, mode, answer, problem):
    @reward_function(mode=mode)
    def wrong(messages, ground_truth, **kwargs):
        return answer

    with pytest.raises(RewardFunctionError, match=f"wrong returned .*{re.escape(problem)}|wrong {re.escape(problem)}"):
        evaluate(wrong, [request_of(), request_of()], {})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"score": math.nan}, "EvaluateResult with score nan: Input should be a finite number"),
        ({"scor": 1.0, "score": 1.0}, "EvaluateResult with scor 1.0: Extra inputs are not permitted"),
        ({"score": 1.0, "metrics": {"a b": 1.0}}, "with metrics.a b.[key] 'a b': String should match pattern"),
        (
            {"score": "x" * 500},
            "EvaluateResult with score 'xxxxxxxxxxxx...xxxxxxxxxxxxx': Input should be a valid number",
        ),
        ({}, "EvaluateResult with fields {}: score and step_outputs are both None; set at least one"),
        (
            {"step_outputs": [{"base_reward": 1.0}]},
            "with step_outputs.0.step_index {'base_reward': 1.0}: Field required",
        ),
        ({"step_outputs": [1.0] * 5}, "and 2 more problems"),
    ],
)
def test_invalid_fields_are_described_in_a_sentence(fields, expected):
    with pytest.raises(pydantic.ValidationError) as raised:
        EvaluateResult(**fields)
    text = describe_invalid(raised.value)
    assert expected in text
    assert "\n" not in text


def test_functions_cannot_change_messages_of_others(request_of):
    @reward_function
    def rude(messages, ground_truth, **kwargs):
        messages[-1]["content"] = "46"
        messages.clear()
        return 1.0

    request = request_of("47")
    evaluate(rude, [request], {})
    assert request.messages[-1]["content"] == "47"


def test_last_reply_is_the_last_policy_message(request_of):
    request = request_of("46")
    tool, example = {"role": "tool", "content": "42"}, {"role": "assistant", "content": "an example"}
    cut = dataclasses.replace(request, messages=(example, *request.messages, tool), num_prompt_messages=2)
    assert (request.last_reply, cut.last_reply) == ("46", "46")


def test_importing_is_light():
    code = (
        "import sys; from marin_rl.rewards import reward_function, EvaluateResult, StepOutput\n"
        "heavy = {'jax', 'numpy', 'draccus', 'transformers', 'asyncio', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import marin_rl.rewards.sandbox.functions\n"
        "from marin_rl.rewards import reward_function as again\n"
        "assert again is reward_function"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
