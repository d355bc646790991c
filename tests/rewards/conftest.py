# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from typing import Any

import pytest

from marin_rl.rewards.sandbox.functions import RewardRequest


@pytest.fixture
def request_of() -> Any:
    """Function that builds a request for one reply."""

    def make(reply: str = "46", **changes: Any) -> RewardRequest:
        base = RewardRequest(
            rollout_id="r1",
            messages=({"role": "user", "content": "40+6="}, {"role": "assistant", "content": reply}),
            ground_truth="46",
            task_id="t1",
            environment="arithmetic",
            status="completed",
        )
        return dataclasses.replace(base, **changes)

    return make
