# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs with user-defined reward functions, from the file to the record of a step."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TinyRun

FUNCTIONS = """
    import os

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


    @reward_function
    def picky(messages, ground_truth, **kwargs):
        if "2" in messages[-1]["content"]:
            raise ValueError("I do not like twos")
        return 1.0


    @reward_function
    def deadly(messages, ground_truth, **kwargs):
        if "2" in messages[-1]["content"]:
            os._exit(7)
        return 1.0
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


@pytest.mark.medium
@pytest.mark.parametrize(
    ("function", "cause", "words"),
    [("picky", "raised", "ValueError: I do not like twos"), ("deadly", "exited", "its process exited with status 7")],
)
def test_failed_reward_affects_one_rollout_and_is_counted(
    functions_only: Callable[..., TinyRun], rewards: Any, function: str, cause: str, words: str
):
    run = functions_only(rewards(function), rewards("share"), seed=1)
    assert run.train() == 0
    records = run.records()[1:]
    losses = [record.get(f"rewards/{function}/failed_{cause}", 0.0) for record in records]
    assert losses == [record["rollouts/failed"] for record in records]
    assert sum(losses) > 0
    log = (run.path / "log.txt").read_text()
    assert words in log
    assert "sandbox: isolation" in log


@pytest.mark.medium
def test_accuracy_uses_reward_functions(functions_only: Callable[..., TinyRun], rewards: Any):
    run = functions_only(rewards("has_one", options={"bonus": 0.0}, name="correct"), num_steps=1)
    assert run.train() == 0
    assert 0.0 <= run.records()[-1]["eval/ones/accuracy_sampled"] < 1.0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"function": "nothing"},
            "'nothing' of .* does not exist; Its reward functions: deadly, has_one",
        ),
        ({"function": "has_one"}, "requires bonus; set it under options"),
        (
            {"function": "has_one", "options": {"bonus": 0}, "scope": "group"},
            "so scope must be pointwise",
        ),
        ({"function": "share", "path": "/nowhere/rewards.py"}, "'/nowhere/rewards.py', which does not exist"),
    ],
)
def test_invalid_reward_functions_are_rejected_at_start(
    functions_only: Callable[..., TinyRun], rewards: Any, entry: dict[str, Any], message: str, capfd: Any
):
    run = functions_only({**rewards("x"), **entry})
    assert run.train() == 1
    assert re.search(message, capfd.readouterr().err.replace("\n", " "))


def test_duplicate_component_names_are_rejected(functions_only: Callable[..., TinyRun], rewards: Any, capfd: Any):
    run = functions_only(rewards("share"), rewards("picky", name="share"))
    assert run.train() == 1
    assert "rewards: duplicate names share" in capfd.readouterr().err


def test_config_without_rewards_is_rejected(functions_only: Callable[..., TinyRun], capfd: Any):
    assert functions_only().train() == 1
    assert "replies would have no reward" in capfd.readouterr().err


def test_insufficient_isolation_is_rejected(
    functions_only: Callable[..., TinyRun], rewards: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("marin_rl.rewards.sandbox.pool.shutil.which", lambda name: None)
    assert functions_only(rewards("share"), sandbox__require="full").train() == 1
    assert "error: sandbox.require is full, but this machine offers" in capfd.readouterr().err


def test_sandbox_is_not_started_without_reward_functions(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch
):
    async def start(self: object) -> None:
        raise AssertionError("the sandbox was started")

    monkeypatch.setattr("marin_rl.rewards.sandbox.pool.Sandbox.start", start)
    assert new_run(num_steps=0, warm_start__max_steps=0).train() == 0
