# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A user's reward function as a component: its calls run in the sandbox."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.rewards.component import RewardComponentConfig, RewardConfigError, RewardScope, check_component
from marin_rl.rewards.functions import GIVEN, EvaluateResult, RewardMode, RewardRequest
from marin_rl.rewards.sandbox.pool import FunctionDescription, Sandbox, UserFileError, UserFunction


@RewardComponentConfig.register_subclass("function")
@dataclasses.dataclass(frozen=True)
class FunctionRewardConfig(RewardComponentConfig):
    """A function of yours, in a file of yours."""

    path: str
    """The Python file, absolute or from the working directory."""
    function: str
    """The function's name in it; it is decorated with `@reward_function`."""
    name: str = ""
    """Under which its scores are logged; the function's name by default."""
    weight: float = 1.0
    """What its scores are multiplied by."""
    scope: RewardScope | None = None
    """`pointwise`, `group` or `batch`: what it is given at once. By default pointwise, or group for a function in batch
    mode."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keywords for the function; JSON values."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_component(self.component_name, self.weight)
        taken = sorted(set(self.options) & set(GIVEN))
        if taken:
            raise ValueError(
                f"rewards: options of {self.component_name!r} name {', '.join(taken)}, which every function is given; "
                "give them other names"
            )
        try:
            json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rewards: options of {self.component_name!r} are {self.options!r}; they must be JSON values: {error}"
            ) from error

    @property
    def component_name(self) -> str:
        """The name under which its scores are logged."""
        return self.name or self.function

    def build(self, sandbox: Sandbox) -> "FunctionReward":
        """Make the component; the file is not looked at before its `check`."""
        return FunctionReward(self, sandbox)


class FunctionReward:
    """RewardScorer with a user's function."""

    def __init__(self, config: FunctionRewardConfig, sandbox: Sandbox):
        self.name = config.component_name
        self.weight = config.weight
        self._config = config
        self._sandbox = sandbox
        self._function = UserFunction(str(Path(config.path).resolve()), config.function)
        self.scope: RewardScope | None = None

    async def check(self) -> None:
        """Load the file in a worker, and see whether the function is there and fits.

        Raises:
            RewardConfigError: if not.
        """
        if not Path(self._function.file).is_file():
            raise RewardConfigError(f"reward {self.name!r}: there is no file {self._function.file}; correct its path")
        try:
            functions = await self._sandbox.functions(self._function.file)
        except UserFileError as error:
            raise RewardConfigError(f"reward {self.name!r}: {error}") from error
        self.scope = _fitting_scope(self._config, functions)

    async def judge(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """One result for each rollout, all from one call.

        Raises:
            RewardCallError: if the call brought no answer.
        """
        return await self._sandbox.call(self._function, requests, self._config.options)

    async def close(self) -> None:
        """Nothing: the sandbox is not its own."""


def _fitting_scope(config: FunctionRewardConfig, functions: Mapping[str, FunctionDescription]) -> RewardScope:
    where = f"reward {config.component_name!r}: {config.function} in {config.path}"
    if config.function not in functions:
        there = ", ".join(sorted(functions)) or "none; decorate the function with @reward_function"
        raise RewardConfigError(f"{where} is no reward function; the reward functions there are: {there}")
    found = functions[config.function]
    missing = sorted(set(found.required) - set(config.options))
    if missing:
        raise RewardConfigError(f"{where} needs {', '.join(missing)}; give it under options")
    if config.scope is None:
        return RewardScope.POINTWISE if found.mode is RewardMode.POINTWISE else RewardScope.GROUP
    if (config.scope is RewardScope.POINTWISE) is not (found.mode is RewardMode.POINTWISE):
        fitting = "pointwise" if found.mode is RewardMode.POINTWISE else "group or batch"
        raise RewardConfigError(
            f"{where} has mode {found.mode.value}, so its scope is {fitting}, not {config.scope.value}"
        )
    return config.scope
