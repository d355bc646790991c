# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json

import pytest

from marin_rl.rollouts.store import write_rollouts
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

TASK = Task("t", "sums", ({"role": "user", "content": "2+3"},), "5")


def group() -> RolloutGroup:
    generation = Generation((53, 257), (-0.5, -0.25), StopReason.STOP, 3, 3)
    said = {"role": "assistant", "content": "5 — naïve"}
    turn = Turn((259, 50, 257, 260), generation, (*TASK.messages, said), 1.0, starts_sequence=True)
    good = Rollout("g-0", "g", TASK, (turn,), RolloutStatus.COMPLETED, {"correct": 1.0})
    bad = Rollout("g-1", "g", TASK, (), RolloutStatus.FAILED, {}, "ValueError: no")
    return RolloutGroup("g", [good, bad])


def test_every_rollout_is_a_line_that_holds_what_was_sampled(tmp_path):
    path = write_rollouts(tmp_path, 7, [group()], {"g-0": 0.5, "g-1": 0.0})
    good, bad = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.name == "step-00000007.jsonl"
    assert good["turns"][0]["token_ids"] == [53, 257]
    assert good["turns"][0]["logprobs"] == [-0.5, -0.25]
    assert good["turns"][0]["messages"][-1]["content"] == "5 — naïve"
    assert (good["advantage"], good["rewards"], good["status"]) == (0.5, {"correct": 1.0}, "completed")
    assert (bad["status"], bad["error"], bad["turns"]) == ("failed", "ValueError: no", [])


def test_a_rollout_that_was_left_out_has_an_advantage_of_zero(tmp_path):
    path = write_rollouts(tmp_path, 7, [group()], {})
    assert [json.loads(line)["advantage"] for line in path.read_text(encoding="utf-8").splitlines()] == [0.0, 0.0]


def test_a_write_that_fails_leaves_no_file_under_the_name(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_rollouts(tmp_path, 7, [group()], {"g-0": 0.5, "g-1": 0.0})
    assert not (tmp_path / "step-00000007.jsonl").exists()
    write_rollouts(tmp_path, 7, [group()], {"g-0": 0.5, "g-1": 0.0})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007.jsonl"]
