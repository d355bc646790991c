# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marin_rl.rewards.sandbox.functions import EvaluateResult, StepOutput, reward_function

__all__ = ["EvaluateResult", "StepOutput", "reward_function"]


def __getattr__(name: str) -> Any:
    # Import lazily: sandbox workers import this package and must load only the standard library.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from marin_rl.rewards.sandbox import functions

    return getattr(functions, name)
