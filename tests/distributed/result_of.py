# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def result_of(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("the coroutine waits")
