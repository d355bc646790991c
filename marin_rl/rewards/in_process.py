# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The reward component `in_process`: a function of the Python program that trains, called in that process.

It is for scripts and notebooks. Functions in files run in the sandbox, which limits and isolates them, and are compared
when a run resumes.
"""

import asyncio
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

from marin_rl.rewards.component import (
    RewardComponentConfig,
    RewardConfigError,
    RewardScope,
    check_component_name,
    resolve_scope,
)
from marin_rl.rewards.sandbox.functions import (
    EvaluateResult,
    RewardCallError,
    RewardFunction,
    RewardFunctionError,
    RewardMode,
    RewardRequest,
    evaluate,
    reward_function,
)
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import RewardFailure, Task
from marin_rl.utils.errors import explain
from marin_rl.utils.settings.checks import check_fields
from marin_rl.utils.user_code import UserFileError, shared_object


@RewardComponentConfig.register_subclass("in_process")
@dataclasses.dataclass(frozen=True)
class InProcessRewardConfig(RewardComponentConfig):
    """Scores rollouts with a function of the Python program that trains, without isolation."""

    is_in_process = True

    name: str
    """Name of the function, as of [`sharing`][marin_rl.utils.user_code.sharing], under which its scores are logged."""
    weight: float = 1.0
    """Factor of its scores."""
    scope: RewardScope | None = None
    """Rollouts per call, as of the component `function`."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_component_name(self.name)

    def build(self, sandbox: Sandbox) -> "InProcessReward":
        """Build the component; a call has the time `sandbox.wall_seconds`."""
        return InProcessReward(self, sandbox.config.wall_seconds)


_Outcome = list[EvaluateResult] | RewardCallError
"""The results of a call, or its failure."""


class InProcessReward:
    """Scores rollouts with a function of this process, one call at a time, in a thread.

    A thread cannot be ended: a call that exceeds its time goes on without effect.
    """

    waits_for_group = True

    def __init__(self, config: InProcessRewardConfig, seconds: float):
        self.name = config.name
        self.weight = config.weight
        self.scope = config.scope
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._function: RewardFunction | None = None

    async def check(self) -> None:
        """Find the function, and check its mode and parameters."""
        try:
            function = as_reward_function(shared_object(self.name))
        except (UserFileError, RewardFunctionError) as error:
            raise RewardConfigError(str(error)) from error
        self._function, self.scope = function, resolve_scope(self.scope, function.mode, "the function")

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
        """Score the rollouts with one call for each if the function is pointwise, else with one call for all."""
        calls = [[request] for request in requests] if self.scope is RewardScope.POINTWISE else [requests]
        outcomes: list[_Outcome] = []
        async with self._lock:
            while len(outcomes) < len(calls):
                outcomes += await self._run(calls[len(outcomes) :])
        if self.scope is RewardScope.POINTWISE:
            return [outcome if isinstance(outcome, RewardCallError) else outcome[0] for outcome in outcomes]
        [outcome] = outcomes
        if isinstance(outcome, RewardCallError):
            raise outcome
        return outcome

    async def _run(self, calls: Sequence[Sequence[RewardRequest]]) -> list[_Outcome]:
        """Make calls in one thread; return the outcomes of all, or of those up to the first that takes too long."""
        assert self._function is not None
        outcomes: list[_Outcome] = []
        is_abandoned = threading.Event()
        work = asyncio.to_thread(_make_calls, self._function, calls, outcomes, is_abandoned)
        thread = asyncio.create_task(work)
        while True:
            count = len(outcomes)
            await asyncio.wait([thread], timeout=self._seconds)
            if thread.done():
                return outcomes
            if len(outcomes) == count:
                is_abandoned.set()
                detail = f"it took longer than sandbox.wall_seconds = {self._seconds:g}; its thread still runs"
                return [*outcomes[:count], RewardCallError(RewardFailure.TIMEOUT, detail)]

    async def close(self) -> None:
        """Do nothing; there are no resources."""


def _make_calls(
    function: RewardFunction,
    calls: Sequence[Sequence[RewardRequest]],
    outcomes: list[_Outcome],
    is_abandoned: threading.Event,
) -> None:
    for requests in calls:
        if is_abandoned.is_set():
            return
        try:
            outcomes.append(evaluate(function, requests, {}))
        except RewardFunctionError as error:
            outcomes.append(RewardCallError(RewardFailure.INVALID_ANSWER, str(error)))
        except BaseException as error:
            outcomes.append(RewardCallError(RewardFailure.RAISED, explain(error)))


def as_reward_function(function: Callable[..., Any]) -> RewardFunction:
    """Return a callable as a reward function.

    If it is decorated, or has a parameter `messages`, it is called as the functions in files. Otherwise it is called
    with the `Task`, without its worked answer, and the text of the policy's last message.

    Raises:
        RewardFunctionError: if it has other parameters.
    """
    if not callable(function):
        raise RewardFunctionError(f"the reward is {function!r:.200}; give a function, as def reward(task, reply)")
    try:
        decorated = function if isinstance(function, RewardFunction) else reward_function(function)
        takes_messages = isinstance(function, type) or "messages" in inspect.signature(decorated.function).parameters
    except ValueError as error:
        raise RewardFunctionError(f"{error}; write def reward(task, reply), which calls it") from error
    if decorated is not function and not takes_messages and not inspect.iscoroutinefunction(function):
        return _with_task(function, decorated.name)
    if decorated.problem is not None:
        raise RewardFunctionError(f"{decorated.name} {decorated.problem}")
    return decorated


def _with_task(function: Callable[..., Any], name: str) -> RewardFunction:
    signature = inspect.signature(function)
    try:
        signature.bind("task", "reply")
    except TypeError:
        raise RewardFunctionError(
            f"{name} takes {signature}; it must take a task and a reply, as in def reward(task, reply), or messages, "
            "ground_truth and **kwargs"
        ) from None

    def score(messages: Any, ground_truth: str, num_prompt_messages: int, **others: Any) -> Any:
        prompt, replies = messages[:num_prompt_messages], messages[num_prompt_messages:]
        reply = next(message["content"] for message in reversed(replies) if message["role"] == "assistant")
        return function(Task(others["task_id"], others["environment"], tuple(prompt), ground_truth), reply)

    return RewardFunction(functools.update_wrapper(score, function), RewardMode.POINTWISE)
