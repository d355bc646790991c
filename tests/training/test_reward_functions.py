# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs with user-defined reward functions, from the file to the record of a step."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TinyRun

FUNCTIONS = """
    from marin_rl.rewards import EvaluateResult, StepOutput, reward_function


    @reward_function
    def has_one(messages, ground_truth, bonus, **kwargs):
        reply = messages[-1]["content"]
        steps = [StepOutput(step_index=len(messages) - 1, base_reward=float("1" in reply), reason="it has a 1")]
        return EvaluateResult(
            score=float(ground_truth in reply) + bonus, step_outputs=steps, metrics={"characters": len(reply)}
        )


    @reward_function(mode="batch")
    def shortest(messages, ground_truth, **kwargs):
        lengths = [len(one[-1]["content"]) for one in messages]
        return [float(length == min(lengths)) for length in lengths]


    @reward_function(mode="batch")
    def share(messages, ground_truth, **kwargs):
        return [1 / len(messages)] * len(messages)

"""


@pytest.fixture
def rewards(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    file = tmp_path / "my_rewards.py"
    file.write_text(textwrap.dedent(FUNCTIONS))

    def entry(function: str, **fields: Any) -> dict[str, Any]:
        return {"type": "function", "path": str(file), "function": function, **fields}

    return entry


@pytest.fixture
def functions_only(new_run: Callable[..., TinyRun]) -> Callable[..., TinyRun]:
    """A run of two steps without a built-in grader."""

    def make(*entries: dict[str, Any], **changes: Any) -> TinyRun:
        defaults = {
            "environment__grader": {"type": "none"},
            "environment__format": None,
            "environment__reply_regex": None,
            "environment__rewards": list(entries),
            "num_steps": 2,
            "warm_start__max_steps": 0,
            "sandbox__workers": 1,
        }
        return new_run(**{**defaults, **changes})

    return make


@pytest.mark.medium
def test_components_are_weighted_and_logged_by_name(functions_only: Callable[..., TinyRun], rewards: Any):
    run = functions_only(
        rewards("has_one", weight=2.0, options={"bonus": 0.5}, name="one"),
        rewards("shortest", weight=0.25),
        rewards("share", scope="batch", weight=16.0),
    )
    assert run.train() == 0
    for record in run.records()[1:]:
        # Each of the 16 rollouts gets 1/16; each group of four has at least one shortest reply.
        assert record["reward/share/mean"] == pytest.approx(1.0)
        assert 0.25 / 4 <= record["reward/shortest/mean"] <= 0.25
        assert record["reward/one/mean"] >= 1.0
        assert record["rewards/one/score"] == pytest.approx(record["reward/one/mean"] / 2)
        parts = sum(record[f"reward/{name}/mean"] for name in ("one", "shortest", "share"))
        assert record["train/rewards"] == pytest.approx(parts)
        assert 0 < record["rewards/one/characters"] <= 3
        assert record["rollouts/failed"] == 0
