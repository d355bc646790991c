# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward components: the weighted terms of a rollout's reward, chosen by `type` in the config.

The component `function` runs a user's reward function in the sandbox; `code` and `judge` contain the others.
"""

import abc
import dataclasses
import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import draccus

from marin_rl.rewards.sandbox.functions import (
    STANDARD_KEYWORDS,
    EvaluateResult,
    RewardCallError,
    RewardMode,
    RewardRequest,
)
from marin_rl.rewards.sandbox.pool import FunctionDescription, Sandbox, UserFunction
from marin_rl.types import Task
from marin_rl.utils.errors import UserError, nearest
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import LOCAL_FILE, NAMES_FILES
from marin_rl.utils.user_code import UserFileError


class RewardConfigError(UserError, ValueError):
    """The configuration of a reward component is not usable; the message names it and the remedy."""


class RewardScope(enum.StrEnum):
    """Set of rollouts that a component scores at once."""

    POINTWISE = "pointwise"
    """Each rollout on its own."""
    GROUP = "group"
    """All rollouts of one prompt."""
    BATCH = "batch"
    """All rollouts of a step."""


@runtime_checkable
class RewardComponent(Protocol):
    """Scores rollouts."""

    name: str
    """Name under which its scores are logged."""
    weight: float
    """Factor of its scores."""
    scope: RewardScope | None
    """Set of rollouts that it scores at once; None if `check` determines it."""

    @property
    def waits_for_group(self) -> bool:
        """Whether a pointwise component scores a rollout when its group is complete, not as soon as it has ended."""
        ...

    async def check(self) -> None:
        """Check that the component is usable, before any rollout is sampled; see `check_components`.

        Raises:
            RewardConfigError: if it is not; the message does not name the component.
        """
        ...

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
        """Return one result per rollout, in their order, or the failure of a call that concerns only that rollout.

        Raises:
            RewardCallError: if a call for all of the rollouts failed.
        """
        ...

    async def close(self) -> None:
        """Release its resources; the caller closes the sandbox."""
        ...


@dataclasses.dataclass(frozen=True)
class RewardComponentConfig(ConfigSection, draccus.ChoiceRegistry, abc.ABC):
    """Config of a reward component, chosen by `type`."""

    is_in_process: ClassVar[bool] = False
    """Whether it calls a function of this Python program, without the sandbox."""

    @abc.abstractmethod
    def build(self, sandbox: Sandbox) -> RewardComponent:
        """Build the component.

        `sandbox` is for user code and model-written code; it is started before the component's `check`.
        """

    def check_answers(self, tasks: Iterable[Task]) -> None:
        """Check the answers of tasks, before any rollout is sampled; by default every answer is valid.

        Raises:
            RewardConfigError: if the component cannot use an answer; the message names the task.
        """


COMPONENT_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_component_name(name: str) -> None:
    """Validate the name of a component.

    Raises:
        ValueError: if the name cannot be part of a metric name.
    """
    if not COMPONENT_NAME.fullmatch(name):
        raise ValueError(f"rewards: invalid name {name!r}; use letters, digits, '_', '-' and '.'")


@RewardComponentConfig.register_subclass("function")
@dataclasses.dataclass(frozen=True)
class FunctionRewardConfig(RewardComponentConfig):
    """Scores rollouts with a function in a Python file."""

    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """Path of the Python file, absolute or relative to the working directory."""
    function: str
    """Name of the function, which is decorated with `@reward_function`."""
    name: str = ""
    """Name under which its scores are logged; by default the function's name."""
    weight: float = 1.0
    """Factor of its scores."""
    scope: RewardScope | None = None
    """Rollouts per call: `pointwise` (one), `group` or `batch`. By default pointwise, or group for a function in batch
    mode."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Further keyword arguments of the function; JSON values."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_component_name(self.component_name)
        reserved = sorted(set(self.options) & set(STANDARD_KEYWORDS))
        if reserved:
            raise ValueError(
                f"rewards: options of {self.component_name!r} contain {', '.join(reserved)}, which every function "
                "receives; rename them"
            )
        try:
            json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rewards: options of {self.component_name!r} must be JSON values, got {self.options!r}: {error}"
            ) from error

    @property
    def component_name(self) -> str:
        """Name under which its scores are logged."""
        return self.name or self.function

    def build(self, sandbox: Sandbox) -> "FunctionReward":
        """Build the component; its `check` loads the file."""
        return FunctionReward(self, sandbox)


class FunctionReward:
    """Scores rollouts with a user's function."""

    def __init__(self, config: FunctionRewardConfig, sandbox: Sandbox):
        self.name = config.component_name
        self.weight = config.weight
        self._config = config
        self._sandbox = sandbox
        self._function = UserFunction(str(Path(config.path).expanduser().resolve()), config.function)
        self.scope: RewardScope | None = None
        self.is_undeclared = False
        """Whether it is pointwise, and not declared stateless."""

    async def check(self) -> None:
        """Load the file in a worker and check that it defines the function with a suitable mode and parameters."""
        file = Path(self._function.file)
        if not file.is_file():
            known = sorted(other.name for other in file.parent.glob("*.py") if other.is_file())
            problem = f"{self._config.path} is a folder" if file.exists() else f"the file {file} does not exist"
            raise RewardConfigError(f"{problem}; correct `path`: {nearest(file.name, known, 'Files there')}")
        try:
            functions = await self._sandbox.load(self._function.file)
        except UserFileError as error:
            raise RewardConfigError(str(error)) from error
        self.scope = _resolve_scope(self._config, functions)
        self.is_undeclared = self.scope is RewardScope.POINTWISE and not functions[self._config.function].stateless

    @property
    def waits_for_group(self) -> bool:
        """Whether its calls share processes, and so start when a group is complete."""
        return self.scope is RewardScope.POINTWISE and self._sandbox.batches_calls(self._function)

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
        """Score the rollouts with one call for each if the function is pointwise, else with one call for all."""
        if self.scope is RewardScope.POINTWISE:
            return await self._sandbox.call_each(self._function, requests, self._config.options)
        return await self._sandbox.call(self._function, requests, self._config.options)

    async def close(self) -> None:
        """Do nothing: the caller closes the sandbox."""


def _resolve_scope(config: FunctionRewardConfig, functions: Mapping[str, FunctionDescription]) -> RewardScope:
    subject = f"{config.function!r} of {config.path}"
    function = functions.get(config.function)
    if function is None:
        known = nearest(config.function, sorted(functions), "Its reward functions") if functions else "It has none"
        raise RewardConfigError(
            f"{subject} is not a reward function of the file; correct the name, or write @reward_function above its "
            f"`def`. {known[0].upper()}{known[1:]}"
        )
    if function.problem is not None:
        raise RewardConfigError(f"{subject} {function.problem}")
    missing = sorted(set(function.required) - set(config.options))
    if missing:
        raise RewardConfigError(f"{subject} requires {', '.join(missing)}; set it under options")
    return resolve_scope(config.scope, function.mode, subject)


def resolve_scope(scope: RewardScope | None, mode: RewardMode, subject: str) -> RewardScope:
    """Return the scope of a function, by default that of its mode; `subject` names it for the error message.

    Raises:
        RewardConfigError: if the scope does not fit the mode.
    """
    if scope is None:
        return RewardScope.POINTWISE if mode is RewardMode.POINTWISE else RewardScope.GROUP
    if (scope is RewardScope.POINTWISE) is not (mode is RewardMode.POINTWISE):
        valid = "pointwise" if mode is RewardMode.POINTWISE else "group or batch"
        raise RewardConfigError(f"{subject} has mode {mode.value}, so scope must be {valid}, got {scope.value}")
    return scope
