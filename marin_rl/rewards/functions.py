# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions: what a user writes, what it is given, and what it answers.

A user's file needs one import, `from marin_rl.rewards import EvaluateResult, StepOutput, reward_function`. The
decorated function works as a plain function in a notebook or a test; in training it runs in the sandbox.
"""

import dataclasses
import enum
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, overload

import pydantic

from marin_rl.types import MAX_REWARD, Message


class RewardMode(enum.StrEnum):
    """What one call of a reward function judges."""

    POINTWISE = "pointwise"
    """One rollout."""
    BATCH = "batch"
    """Several rollouts, which it may compare: lists in, a list of equal length out."""


def _to_float(value: Any) -> Any:
    # numpy's numbers are registered as real ones; a string that looks like a number is a mistake.
    if not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError as error:
        # pydantic makes one of its own of this error, and lets the other pass.
        raise ValueError("the number is too large for a float") from error


Number = Annotated[float, pydantic.BeforeValidator(_to_float), pydantic.Field(strict=True, allow_inf_nan=False)]
"""A finite number; numpy's scalars and booleans become floats, strings do not."""

MAX_METRICS = 64
"""Most names of metrics that the results of one call may hold together."""

MetricName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9_./-]+\z", max_length=100)]
"""A name to log a number under: letters, digits, `_`, `-`, `.` and `/`."""

Reward = Annotated[Number, pydantic.Field(ge=-MAX_REWARD, le=MAX_REWARD)]
"""A number that rewards may have."""


class StepOutput(pydantic.BaseModel):
    """What a reward function says about one step of a rollout."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    step_index: Annotated[int, pydantic.Field(strict=True, ge=0)]
    """Index in `messages` of the assistant message that this is about, from 0."""
    base_reward: Reward
    """Reward of the step alone; finite."""
    metrics: dict[MetricName, Number] = pydantic.Field(default_factory=dict)
    """Further numbers to log, by name; at most 64 names in the results of one call. A name has at most 100 letters,
    digits and characters of `_-./`."""
    reason: str | None = None
    """Why, in words; kept with the rollout."""


class EvaluateResult(pydantic.BaseModel):
    """The evaluation of one rollout: a score, step rewards, or both.

    Raises:
        pydantic.ValidationError: if neither `score` nor `step_outputs` is given for a valid result, if a number is
            not finite, or if the sum of the step rewards exceeds 1e30 in magnitude without a score.

    >>> EvaluateResult(step_outputs=[StepOutput(step_index=1, base_reward=0.5)]).total_score
    0.5
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    score: Reward | None = None
    """The rollout's reward, before the component's weight; finite. None: the sum of the step rewards."""
    step_outputs: tuple[StepOutput, ...] | None = None
    """Rewards of single steps, in any order, at most one a step; None: the score alone."""
    metrics: dict[MetricName, Number] = pydantic.Field(default_factory=dict)
    """Further numbers to log, by name; at most 64 names in the results of one call. A name has at most 100 letters,
    digits and characters of `_-./`."""
    reason: str | None = None
    """Why, in words; kept with the rollout."""
    is_score_valid: bool = True
    """False where no score could be found: the rollout then carries no signal, instead of a misleading 0."""
    error: str | None = None
    """What went wrong, where something did."""

    @pydantic.model_validator(mode="after")
    def _check_completeness(self) -> "EvaluateResult":
        if self.is_score_valid and self.score is None and self.step_outputs is None:
            raise ValueError(
                "score and step_outputs are both None; give at least one of them, or is_score_valid=False for a "
                "rollout that cannot be judged"
            )
        if not abs(self.total_score) <= MAX_REWARD:
            raise ValueError(
                f"the base rewards of step_outputs sum to {self.total_score:g}, which is the score if none is given; "
                f"at most {MAX_REWARD:g} in magnitude"
            )
        return self

    @property
    def total_score(self) -> float:
        """The rollout's reward before the weight: `score`, or the sum of the base rewards if `score` is None."""
        if self.score is not None:
            return self.score
        return math.fsum(step.base_reward for step in self.step_outputs or ())


@dataclasses.dataclass(frozen=True)
class RewardRequest:
    """One rollout to be judged."""

    rollout_id: str
    """Unique within the run."""
    messages: tuple[Message, ...]
    """The whole conversation: the prompt, then what the policy said and was told, the environment's last answer
    included."""
    ground_truth: str
    """The task's answer."""
    task_id: str
    """Unique within its environment; equal for the rollouts of one prompt."""
    environment: str
    """Name of the environment that made the task."""
    status: str
    """How the rollout ended: `completed` or `truncated`."""
    num_prompt_messages: int = 0
    """Number of messages in the prompt, which `messages` begins with; assistant messages among them are examples."""
    group_seed: int = 0
    """Seed derived from the run's seed and the group; equal for the rollouts of a group."""

    @property
    def last_reply(self) -> str:
        """The text of the policy's last message."""
        policy = self.messages[self.num_prompt_messages :]
        return next(message["content"] for message in reversed(policy) if message["role"] == "assistant")


class RewardFunctionError(TypeError):
    """A reward function that cannot be used as it is written; the message names it and the remedy."""


class RewardFunction:
    """A decorated reward function. Call it with keywords, as the sandbox does."""

    def __init__(self, function: Callable[..., Any], mode: RewardMode):
        self.function = function
        """What the user wrote."""
        self.mode = mode
        """What one call judges."""
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the function answers, validated.

        Returns:
            An `EvaluateResult`, or in batch mode a list with one for each rollout.

        Raises:
            RewardFunctionError: if it answers something else; the message names the function and what it answered.
            pydantic.ValidationError: if a number is not finite or a key is unknown.
        """
        answer = self.function(*arguments, **keywords)
        if self.mode is RewardMode.POINTWISE:
            return self._result(answer)
        messages = keywords["messages"] if "messages" in keywords else arguments[0]
        if not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != len(messages):
            found = f"{len(answer)} results" if isinstance(answer, list | tuple) else type(answer).__name__
            raise RewardFunctionError(
                f"{self.name} answered {found} for {len(messages)} rollouts; in batch mode it returns a list with "
                "one result for each, in their order"
            )
        return [self._result(one) for one in answer]

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", "the reward function")

    def _result(self, answer: Any) -> EvaluateResult:
        if isinstance(answer, numbers.Real):
            return EvaluateResult(score=float(answer))
        if not isinstance(answer, EvaluateResult):
            raise RewardFunctionError(
                f"{self.name} answered {type(answer).__name__}; it returns an EvaluateResult or a number"
            )
        return answer


@overload
def reward_function(function: Callable[..., Any], /) -> RewardFunction: ...
@overload
def reward_function(*, mode: str = "pointwise") -> Callable[[Callable[..., Any]], RewardFunction]: ...


def reward_function(function: Callable[..., Any] | None = None, /, *, mode: str = "pointwise") -> Any:
    """Mark a function as a reward function.

    Pointwise, it is given the `messages` of one rollout and its `ground_truth`; in batch mode, lists of both, one
    entry a rollout. The other keywords are `task_id`, `environment`, `status`, `num_prompt_messages` (lists in batch
    mode) and the component's own options, so it ends in `**kwargs`. The policy's turns are the assistant messages from
    `messages[num_prompt_messages]` on.

    Args:
        function: the function, where the decorator is written without parentheses.
        mode: `pointwise` or `batch`.

    Raises:
        RewardFunctionError: if the mode is unknown or the signature does not fit.

    >>> @reward_function
    ... def short(messages, ground_truth, **kwargs):
    ...     return EvaluateResult(score=float(len(messages[-1]["content"]) < 5), reason="its length")
    >>> short(messages=[{"role": "assistant", "content": "46"}], ground_truth="46").score
    1.0
    """
    if function is None:
        return functools.partial(_decorate, mode=mode)
    return _decorate(function, mode=mode)


def _decorate(function: Callable[..., Any], mode: str) -> RewardFunction:
    name = getattr(function, "__name__", repr(function))
    if mode not in tuple(RewardMode):
        raise RewardFunctionError(f"{name}: mode is {mode!r}; it is 'pointwise' or 'batch'")
    if inspect.iscoroutinefunction(function):
        raise RewardFunctionError(f"{name} is async; write it with a plain def, calls run in processes of their own")
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        wanted
        for wanted in ("messages", "ground_truth")
        if wanted not in parameters or parameters[wanted].kind not in by_name
    ]
    if missing or not takes_any:
        raise RewardFunctionError(
            f"{name}{inspect.signature(function)} lacks {', '.join([*missing, *([] if takes_any else ['**kwargs'])])}; "
            "a reward function takes messages, ground_truth and **kwargs"
        )
    return RewardFunction(function, RewardMode(mode))


GIVEN = ("messages", "ground_truth", "task_id", "environment", "status", "num_prompt_messages")
"""The keywords that every reward function is given; a component's options have other names."""


def required_options(function: RewardFunction) -> list[str]:
    """The parameters that only a component's options can give.

    >>> @reward_function
    ... def near(messages, ground_truth, tolerance, steps=3, **kwargs): ...
    >>> required_options(near)
    ['tolerance']
    """
    return [
        name
        for name, parameter in inspect.signature(function.function).parameters.items()
        if name not in GIVEN
        and parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]


def evaluate(
    function: RewardFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
) -> list[EvaluateResult]:
    """Judge rollouts in this process.

    Args:
        function: what judges them.
        requests: one rollout in pointwise mode, one or more in batch mode.
        options: further keywords for the function.

    Returns:
        One result for each request, in their order.

    Raises:
        RewardFunctionError: if the results hold more than `MAX_METRICS` names of metrics.
    """
    if function.mode is RewardMode.POINTWISE:
        results = [function(**_keywords(request), **options) for request in requests]
    else:
        keywords = [_keywords(request) for request in requests]
        results = function(**{name: [one[name] for one in keywords] for name in GIVEN}, **options)
    check_metric_names(results)
    return results


def check_metric_names(results: Iterable[EvaluateResult]) -> None:
    """Check that the results of one call do not hold more than `MAX_METRICS` names of metrics.

    Raises:
        RewardFunctionError: if they do.
    """
    parts = (part for result in results for part in (result, *(result.step_outputs or ())))
    names = {name for part in parts for name in part.metrics}
    if len(names) > MAX_METRICS:
        raise RewardFunctionError(
            f"the results hold {len(names)} names of metrics, {', '.join(sorted(names)[:3])} and others; log at most "
            f"{MAX_METRICS}, and put what differs between rollouts into `reason`"
        )


def _keywords(request: RewardRequest) -> dict[str, Any]:
    return {"messages": [dict(message) for message in request.messages]} | {
        name: getattr(request, name) for name in GIVEN if name != "messages"
    }
