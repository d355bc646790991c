# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions of the program that trains."""

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from marin_rl.rewards.component import RewardConfigError, RewardScope
from marin_rl.rewards.in_process import InProcessReward, InProcessRewardConfig, as_reward_function
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import (
    EvaluateResult,
    RewardCallError,
    RewardFunctionError,
    RewardRequest,
    reward_function,
)
from marin_rl.types import RewardFailure
from marin_rl.utils.event_loop import run_in_thread
from marin_rl.utils.user_code import sharing


def request(reply: str, answer: str = "4", number: int = 0) -> RewardRequest:
    """A rollout whose prompt has an example of a reply."""
    example = ({"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"})
    turns = ({"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": reply})
    messages = (*example, *turns, {"role": "user", "content": "thanks"})
    return RewardRequest(f"r{number}", messages, answer, "t", "sums", "completed", num_prompt_messages=3)


async def component(function: Any, seconds: float = 60.0, scope: RewardScope | None = None) -> InProcessReward:
    with sharing({"own": function}):
        built = InProcessRewardConfig("own", scope=scope).build(SandboxConfig(wall_seconds=seconds).build())
        await built.check()
    return built


def scores(function: Any, requests: Sequence[RewardRequest], **settings: Any) -> list[Any]:
    """The score of each rollout, or the cause of its failure."""

    async def run() -> list[Any]:
        results = await (await component(function, **settings)).score(requests)
        return [one.cause if isinstance(one, RewardCallError) else one.total_score for one in results]

    return run_in_thread(run())


class Grader:
    def __call__(self, task: Any, reply: str) -> float:
        return float(reply == task.answer)

    def grade(self, task: Any, reply: str, factor: float = 1.0) -> float:
        return factor * (reply == task.answer)


def exact(task: Any, reply: str) -> float:
    assert [message["content"] for message in task.messages] == ["1 + 1 =", "2", "2 + 2 ="]
    assert (task.id, task.environment, task.worked_answer) == ("t", "sums", None)
    return float(reply == task.answer)


def as_in_files(messages: list[dict], ground_truth: str, **kwargs: Any) -> float:
    assert kwargs["task_id"] == "t"
    return float(messages[3]["content"] == ground_truth)


@reward_function(mode="batch")
def best(messages: list[list[dict]], ground_truth: list[str], **kwargs: Any) -> list[float]:
    replies = [conversation[3]["content"] for conversation in messages]
    return [float(reply == max(replies)) for reply in replies]


FORMS: list[Callable[..., Any]] = [
    exact,
    as_in_files,
    reward_function(as_in_files),
    Grader(),
    Grader().grade,
    functools.partial(Grader().grade, factor=1.0),
    lambda task, reply: EvaluateResult(score=float(reply == task.answer), reason="why"),
    lambda *both: both[1] == both[0].answer,
]


@pytest.mark.parametrize("function", FORMS)
def test_every_form_of_a_function_scores_each_rollout(function: Callable[..., Any]) -> None:
    assert scores(function, [request("4"), request("5"), request("4", answer="7")]) == [1.0, 0.0, 0.0]


def test_a_batch_function_scores_rollouts_together() -> None:
    assert scores(best, [request("3"), request("5")]) == [0.0, 1.0]
    assert run_in_thread(component(best)).scope is RewardScope.GROUP
    assert run_in_thread(component(best, scope=RewardScope.BATCH)).scope is RewardScope.BATCH


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1.0,
        lambda reply: 1.0,
        lambda task, reply, more: 1.0,
        lambda *, task, reply: 1.0,
        lambda messages: 1.0,
        reward_function(lambda messages, ground_truth: 1.0),
        reward_function(lambda task, reply: 1.0),
        Grader,
        int,
        max,
        3,
        None,
        "rewards.py",
    ],
)
def test_what_cannot_be_called_is_refused(function: Any) -> None:
    with pytest.raises(RewardFunctionError):
        as_reward_function(function)


def test_coroutine_functions_are_refused() -> None:
    async def own(task: Any, reply: str) -> float:
        return 1.0

    with pytest.raises(RewardFunctionError, match="async"):
        as_reward_function(own)


def test_a_scope_must_fit_and_the_program_must_have_the_function() -> None:
    with pytest.raises(RewardConfigError, match="group or batch"):
        run_in_thread(component(best, scope=RewardScope.POINTWISE))
    built = InProcessRewardConfig("own").build(SandboxConfig().build())
    with pytest.raises(RewardConfigError, match="'own'"):
        run_in_thread(built.check())


def raising(error: BaseException) -> Callable[..., float]:
    def own(task: Any, reply: str) -> float:
        if reply == "4":
            return 1.0
        raise error

    return own


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        SystemExit(3),
        KeyboardInterrupt(),
        TimeoutError("own"),
        asyncio.CancelledError(),
        StopIteration(),
        ExceptionGroup("several", [ValueError("no")]),
        RecursionError(),
        GeneratorExit(),
    ],
)
def test_an_error_of_any_kind_concerns_its_rollout_only(error: BaseException) -> None:
    assert scores(raising(error), [request("5"), request("4")]) == [RewardFailure.RAISED, 1.0]


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 10**400, [1.0], 1j, object(), EvaluateResult])
def test_other_values_than_numbers_are_no_scores(value: Any) -> None:
    found = scores(lambda task, reply: 1.0 if reply == "4" else value, [request("5"), request("4")])
    assert found == [RewardFailure.INVALID_ANSWER, 1.0]


def test_a_call_that_hangs_fails_alone_and_later_calls_go_on() -> None:
    release = threading.Event()

    def own(task: Any, reply: str) -> float:
        if reply == "5":
            release.wait()
        return 1.0

    try:
        assert scores(own, [request("5"), request("4"), request("4")], seconds=0.5) == [RewardFailure.TIMEOUT, 1.0, 1.0]
    finally:
        release.set()


def test_calls_do_not_overlap() -> None:
    running, most = 0, 0

    def own(task: Any, reply: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        # Lets other threads run.
        sys.setswitchinterval(sys.getswitchinterval())
        threading.Event().wait(0.001)
        running -= 1
        return 1.0

    async def run() -> None:
        built = await component(own)
        await asyncio.gather(*(built.score([request("4")]) for _ in range(20)))

    run_in_thread(run())
    assert most == 1


def test_what_a_function_changes_in_its_arguments_is_not_seen_by_others() -> None:
    def own(messages: list[dict], ground_truth: str, **kwargs: Any) -> float:
        messages.pop()["content"] = "changed"
        return float(len(messages))

    asked = request("4")
    assert scores(own, [asked, asked]) == [4.0, 4.0]
    assert asked.messages[-1]["content"] == "thanks"
