# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions: the decorator, the arguments, the results and the failures of user-written functions.

A user's file needs one import, `from marin_rl.rewards import EvaluateResult, StepOutput, reward_function`. The
decorated function can be called like a plain function in a notebook or a test; in training it runs in the sandbox.
"""

import dataclasses
import enum
import functools
import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, SupportsFloat, overload

import pydantic

from marin_rl.types import MAX_REWARD, Message, RewardFailure


class RewardMode(enum.StrEnum):
    """Number of rollouts that one call of a reward function scores."""

    POINTWISE = "pointwise"
    """One rollout."""
    BATCH = "batch"
    """Several rollouts, which the function can compare: it takes lists and returns a list of equal length."""


def _to_float(value: Any) -> Any:
    # numpy scalars are registered as numbers.Real. Strings that look like numbers are rejected.
    if not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError as error:
        # pydantic converts a ValueError to a ValidationError, but not an OverflowError.
        raise ValueError("the number is too large for a float") from error


Number = Annotated[float, pydantic.BeforeValidator(_to_float), pydantic.Field(strict=True, allow_inf_nan=False)]
"""A finite number; numpy's scalars and booleans become floats, strings do not."""

MAX_METRICS = 64
"""Maximum number of distinct metric names in the results of one call."""

MetricName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9_./-]+\z", max_length=100)]
"""Name of a metric: at most 100 letters, digits, `_`, `-`, `.` and `/`."""

Reward = Annotated[Number, pydantic.Field(ge=-MAX_REWARD, le=MAX_REWARD)]
"""A finite number of at most `MAX_REWARD` in magnitude."""


class StepOutput(pydantic.BaseModel):
    """Reward of one step of a rollout."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    step_index: Annotated[int, pydantic.Field(strict=True, ge=0)]
    """Index in `messages` of the assistant message that is rewarded, from 0."""
    base_reward: Reward
    """Reward of this step, before the component's weight; finite."""
    metrics: dict[MetricName, Number] = pydantic.Field(default_factory=dict)
    """Further numbers to log, by name, like those of `EvaluateResult`."""
    reason: str | None = None
    """Explanation of the reward; stored with the rollout."""


class EvaluateResult(pydantic.BaseModel):
    """Result of a reward function for one rollout: a score, step rewards, or both.

    Raises:
        pydantic.ValidationError: if neither `score` nor `step_outputs` is set for a valid result, if a number is
            not finite, or if the sum of the step rewards exceeds 1e30 in magnitude without a score.

    >>> EvaluateResult(step_outputs=[StepOutput(step_index=1, base_reward=0.5)]).total_score
    0.5
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    score: Reward | None = None
    """Reward of the rollout, before the component's weight; finite. If None, it is the sum of the step rewards."""
    step_outputs: tuple[StepOutput, ...] | None = None
    """Rewards of single steps, in any order, at most one per step; None if there are only scores."""
    metrics: dict[MetricName, Number] = pydantic.Field(default_factory=dict)
    """Further numbers to log, by name; at most 64 names in the results of one call. A name has at most 100 letters,
    digits and characters of `_-./`."""
    reason: str | None = None
    """Explanation of the score; stored with the rollout."""
    is_score_valid: bool = True
    """False if no score could be determined. The rollout is then excluded from training instead of scored 0."""
    error: str | None = None
    """Error message, if any."""

    @pydantic.model_validator(mode="after")
    def _check_completeness(self) -> "EvaluateResult":
        if self.is_score_valid and self.score is None and self.step_outputs is None:
            raise ValueError(
                "score and step_outputs are both None; set at least one of them, or is_score_valid=False for a "
                "rollout that cannot be scored"
            )
        if not abs(self.total_score) <= MAX_REWARD:
            raise ValueError(
                f"the base rewards of step_outputs sum to {self.total_score:g}; without a score the sum must be at "
                f"most {MAX_REWARD:g} in magnitude"
            )
        return self

    @property
    def total_score(self) -> float:
        """Reward of the rollout before the weight: `score`, or the sum of the base rewards if `score` is None."""
        if self.score is not None:
            return self.score
        return math.fsum(step.base_reward for step in self.step_outputs or ())


@dataclasses.dataclass(frozen=True)
class RewardRequest:
    """A rollout to score."""

    rollout_id: str
    """Unique within the run."""
    messages: tuple[Message, ...]
    """The whole conversation: the prompt, then the messages of policy and environment, including the environment's last
    answer. The policy's messages begin with what the generation prompt adds to its turn, such as `<think>`."""
    ground_truth: str
    """Correct answer of the task."""
    task_id: str
    """Unique within its environment; equal for the rollouts of one prompt."""
    environment: str
    """Name of the task's environment."""
    status: str
    """How the rollout ended: `completed` or `truncated`."""
    num_prompt_messages: int = 0
    """Number of prompt messages at the beginning of `messages`; assistant messages among them are examples."""
    group_seed: int = 0
    """Seed derived from the run's seed and the group; equal for the rollouts of a group."""

    @property
    def last_reply(self) -> str:
        """The text of the policy's last message."""
        policy = self.messages[self.num_prompt_messages :]
        return next(message["content"] for message in reversed(policy) if message["role"] == "assistant")


class RewardCallError(RuntimeError):
    """A call of a reward component failed."""

    def __init__(self, cause: RewardFailure, detail: str, metrics: Mapping[str, float] | None = None):
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause
        """Category of the failure."""
        self.detail = detail
        """Description of the failure."""
        self.metrics = dict(metrics or {})
        """Numbers to log for each rollout of the call, such as the tokens that it used."""


class RewardFunctionError(TypeError):
    """A reward function is invalid; the message names it and the remedy."""


def describe_invalid(error: pydantic.ValidationError) -> str:
    """Describe the invalid fields of a result in one sentence, with their values.

    >>> try:
    ...     EvaluateResult(score=math.nan)
    ... except pydantic.ValidationError as error:
    ...     print(describe_invalid(error))
    EvaluateResult with score nan: Input should be a finite number
    """
    problems = error.errors(include_url=False)
    shown = [
        f"{'.'.join(map(str, problem['loc'])) or 'fields'} {reprlib.repr(problem['input'])}: "
        + problem["msg"].removeprefix("Value error, ")
        for problem in problems[:3]
    ]
    more = f", and {len(problems) - 3} more problems" if len(problems) > 3 else ""
    return f"{error.title} with {', '.join(shown)}{more}"


class RewardFunction:
    """A decorated reward function, called with keyword arguments like in the sandbox."""

    def __init__(
        self, function: Callable[..., Any], mode: RewardMode, stateless: bool = False, problem: str | None = None
    ):
        self.function = function
        """The undecorated function."""
        self.mode = mode
        """Whether one call scores one rollout or several."""
        self.stateless = stateless
        """Whether several calls may run in one process."""
        self.problem = problem
        """Why it cannot be called, and the remedy; None if it can."""
        functools.update_wrapper(self, function)
        self.name = getattr(function, "__name__", "the reward function")
        """Name of the function."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function and validate its result.

        Returns:
            An `EvaluateResult`, or in batch mode a list with one per rollout.

        Raises:
            RewardFunctionError: if the function has a `problem`, or returns another value; the message names the
                function, the value and the remedy.
        """
        if self.problem is not None:
            raise RewardFunctionError(f"{self.name} {self.problem}")
        answer = self.function(*arguments, **keywords)
        if self.mode is RewardMode.POINTWISE:
            return self._result(answer)
        messages = keywords["messages"] if "messages" in keywords else arguments[0]
        if not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != len(messages):
            actual = f"{len(answer)} results" if isinstance(answer, list | tuple) else _shown(answer)
            raise RewardFunctionError(
                f"{self.name} returned {actual} for {len(messages)} rollouts; in batch mode it must return a list "
                "with one result per rollout, in their order"
            )
        return [self._result(item, f" for rollout {index}") for index, item in enumerate(answer)]

    def _result(self, answer: Any, place: str = "") -> EvaluateResult:
        if isinstance(answer, EvaluateResult):
            try:
                # `model_construct` and `model_copy` validate nothing.
                return EvaluateResult.model_validate(vars(answer))
            except pydantic.ValidationError as error:
                raise RewardFunctionError(f"{self.name} returned an invalid {describe_invalid(error)}{place}") from None
        number = _number(answer)
        if number is None:
            raise RewardFunctionError(
                f"{self.name} returned {_shown(answer)}{place}; it must return an EvaluateResult or a number, such as "
                "0.0 for a wrong reply"
            )
        if not abs(number) <= MAX_REWARD:
            raise RewardFunctionError(
                f"{self.name} returned {number}{place}; a reward must be finite and at most {MAX_REWARD:g} in "
                "magnitude: return 0.0 for a wrong reply, and raise an error if a rollout has no score"
            )
        return EvaluateResult(score=number)


def _number(value: Any) -> float | None:
    """Return a value as a float, infinite if it is too large for one; None if it is no number."""
    try:
        # Not `numbers.Real`, because numpy's booleans are none.
        return float(value) if isinstance(value, SupportsFloat) else None
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        # An array of several numbers, for example.
        return None


def _shown(value: Any) -> str:
    """Describe a value that a function returned, which may be of any class and size."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | bytes | list | tuple | dict | int | float | complex):
        return f"{reprlib.repr(value)} ({type(value).__name__})"
    return f"a value of type {type(value).__name__}"


@overload
def reward_function(function: Callable[..., Any], /) -> RewardFunction: ...
@overload
def reward_function(
    *, mode: str = "pointwise", stateless: bool = False
) -> Callable[[Callable[..., Any]], RewardFunction]: ...


def reward_function(
    function: Callable[..., Any] | None = None, /, *, mode: str = "pointwise", stateless: bool = False, **unknown: Any
) -> Any:
    """Decorate a reward function.

    In pointwise mode the function receives the `messages` of one rollout and its `ground_truth`; in batch mode, lists
    of both with one entry per rollout. The other keyword arguments are `task_id`, `environment`, `status`,
    `num_prompt_messages` (lists in batch mode) and the component's options, so the signature ends in `**kwargs`. The
    policy's turns are the assistant messages from `messages[num_prompt_messages]` on.

    Args:
        function: the function, if the decorator is used without parentheses.
        mode: `pointwise` or `batch`.
        stateless: let several calls of a pointwise function share a process in the sandbox, one after another, which
            saves milliseconds per call. Set it only if no call changes anything that a later one could notice, and the
            function does not run or unpickle text of the reply. By default every call has a separate process, which
            starts from the state after the import of the file.
        unknown: misspelled arguments, which are reported with the function.

    Returns:
        The `RewardFunction`, or a decorator if `function` is None.

    A function with an unknown mode, or a signature that lacks a required parameter, cannot be called: its `problem`
    describes the reason. So the other functions of its file can be used.

    Raises:
        RewardFunctionError: if the decorator is applied to another value than a function.

    >>> @reward_function
    ... def short(messages, ground_truth, **kwargs):
    ...     return EvaluateResult(score=float(len(messages[-1]["content"]) < 5), reason="its length")
    >>> short(messages=[{"role": "assistant", "content": "46"}], ground_truth="46").score
    1.0
    """
    if function is None:
        return functools.partial(_decorate, mode=mode, stateless=stateless, unknown=unknown)
    return _decorate(function, mode, stateless, unknown)


def _decorate(function: Callable[..., Any], mode: str, stateless: bool, unknown: Mapping[str, Any]) -> RewardFunction:
    if not callable(function):
        raise RewardFunctionError(
            f"@reward_function is applied to {_shown(function)}, which is not a function; write it above a `def`, and "
            "pass `mode` and `stateless` as keywords, as in @reward_function(mode='batch')"
        )
    problem = _problem(function, mode, stateless)
    if unknown:
        problem = f"has unknown arguments of @reward_function, {', '.join(unknown)}; it takes mode and stateless"
    return RewardFunction(function, RewardMode(mode if problem is None else "pointwise"), stateless, problem)


def _problem(function: Callable[..., Any], mode: str, stateless: bool) -> str | None:
    """Return the reason why a function cannot be a reward function, and the remedy; None if it can."""
    if isinstance(function, type):
        return "is a class; decorate a function with @reward_function"
    if mode not in tuple(RewardMode):
        return f"has mode {mode!r}; it must be 'pointwise' or 'batch'"
    if stateless and mode != RewardMode.POINTWISE:
        return (
            "has stateless=True, which is for functions with mode 'pointwise'; each call in mode 'batch' has its own "
            "process, so remove it"
        )
    if inspect.iscoroutinefunction(function):
        return "is async; use a plain def"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "is a generator function, because it contains `yield`; return the result instead"
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    by_name = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    missing = [name for name in ("messages", "ground_truth") if name not in by_name]
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        missing.append("**kwargs")
    if missing:
        return (
            f"takes {signature}, which lacks {', '.join(missing)}; it is called with keyword arguments, so it must "
            "take messages, ground_truth and **kwargs"
        )
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and parameter.default is inspect.Parameter.empty
    ]
    if positional:
        return f"takes {signature}, with {', '.join(positional)} before `/`; it is called with keyword arguments"
    return None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

STANDARD_KEYWORDS = ("messages", "ground_truth", "task_id", "environment", "status", "num_prompt_messages")
"""Keyword arguments that every reward function receives; a component's options must have other names."""


def required_options(function: RewardFunction) -> list[str]:
    """Return the names of parameters that the component's options must provide.

    >>> @reward_function
    ... def near(messages, ground_truth, tolerance, steps=3, **kwargs): ...
    >>> required_options(near)
    ['tolerance']
    """
    return [
        name
        for name, parameter in inspect.signature(function.function).parameters.items()
        if name not in STANDARD_KEYWORDS and parameter.default is inspect.Parameter.empty and parameter.kind in _BY_NAME
    ]


def evaluate(
    function: RewardFunction, requests: Sequence[RewardRequest], options: Mapping[str, Any]
) -> list[EvaluateResult]:
    """Score rollouts in this process.

    Args:
        function: the reward function.
        requests: the rollouts; in batch mode one call scores all of them.
        options: further keyword arguments of the function.

    Returns:
        One result per request, in their order.

    Raises:
        RewardFunctionError: if the results hold more than `MAX_METRICS` distinct metric names.
    """
    if function.mode is RewardMode.POINTWISE:
        results = [function(**_keywords(request), **options) for request in requests]
    else:
        keywords = [_keywords(request) for request in requests]
        results = function(**{name: [values[name] for values in keywords] for name in STANDARD_KEYWORDS}, **options)
    check_metric_names(results)
    return results


def check_metric_names(results: Iterable[EvaluateResult]) -> None:
    """Check that the results of one call hold at most `MAX_METRICS` distinct metric names.

    Raises:
        RewardFunctionError: if they do.
    """
    parts = (part for result in results for part in (result, *(result.step_outputs or ())))
    names = {name for part in parts for name in part.metrics}
    if len(names) > MAX_METRICS:
        raise RewardFunctionError(
            f"returned results with {len(names)} metric names ({', '.join(sorted(names)[:3])}, ...); use at most "
            f"{MAX_METRICS}, and put details of single rollouts into `reason`"
        )


def _keywords(request: RewardRequest) -> dict[str, Any]:
    return {"messages": [dict(message) for message in request.messages]} | {
        name: getattr(request, name) for name in STANDARD_KEYWORDS if name != "messages"
    }
