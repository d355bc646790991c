# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import logging
import threading

import numpy as np
import pytest

from marin_rl.runs.rollout_store import (
    RolloutStore,
    RolloutStoreConfig,
    list_files,
    read_file,
    read_rollouts,
)
from marin_rl.runs.stored_rollout import StoredAdvantages
from marin_rl.types import RolloutGroup, RolloutStatus
from tests.rollouts.rollout_cases import group_of, piece, rich_group, rich_rollout, rich_signal, rollout_of, rows, write


def ids(folder, **selection):
    return [row["id"] for row in rows(folder, **selection)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_contains_all_fields_of_a_rollout(tmp_path, kind):
    write(tmp_path, 7, [rich_group()], {"g-0": rich_signal()}, format=kind)
    assert names(tmp_path) == [f"step-00000007.{kind}"]
    good, bad = rows(tmp_path)
    assert (good["step"], good["purpose"], good["status"], good["not_trained"]) == (7, "training", "completed", None)
    assert (good["reward"], good["rewards"]) == (1.5, [("correct", 1.0), ("style", 0.5)])
    assert (good["num_turns"], good["num_generated_tokens"], good["advantage"]) == (2, 5, 0.2)
    assert (
        good["num_tokens"] == rich_rollout().num_tokens == 5 + sum(len(t["observation_tokens"]) for t in good["turns"])
    )
    assert (json.loads(good["info"]), bad["info"]) == ({"map": "ü 4x4"}, None)
    assert good["metrics"] == [("retries", 1.0), ("metrics", 4.0)]
    assert dict(good["seconds"]) == {"sample": 0.5, "environment": 0.25, "reward": 0.125}
    correct, style, judge = good["evaluations"]
    assert correct["steps"][0] == {
        "turn": 0,
        "base_reward": 0.25,
        "reason": "half \u2028 right",
        "metrics": [("chars", 2.0)],
    }
    assert (correct["reason"], style["score"], judge["score"]) == ("equal to the answer", 1.0, None)
    assert (judge["failure"], judge["error"]) == ("timeout", "TimeoutError: 3 s")
    first, second = good["turns"]
    assert first["pieces"] == [b"\xc3", b"\xa9", b"<|end|>"]
    assert b"".join(first["observation_pieces"]).decode() == "<|259|>2+3 — naïve?<|end|><|260|>"
    assert first["token_ids"] == [0xC3, 0xA9, 257]
    assert first["logprobs"] == [-0.125, -0.25, -0.375]
    assert first["learner_logprobs"] == [-0.125, -0.25, -0.5]
    assert first["reference_logprobs"] == [-1.0] * 3
    assert first["loss_mask"] == [True] * 3
    assert (first["advantages"], second["advantages"]) == ([0.5] * 3, [-0.25] * 2)
    assert (first["values"], second["values"]) == ([0.5, 0.25, 0.75], [-1.5, 2.0])
    assert (first["value_targets"], second["value_targets"]) == ([1.0] * 3, [0.5] * 2)
    assert (first["episode_advantage"], first["step_return"], first["step_advantage"]) == (0.25, 1.2, 0.25)
    assert (second["step_return"], second["step_advantage"]) == (1.0, -0.5)
    assert (first["first_version"], first["last_version"], first["stop_reason"]) == (3, 3, "stop")
    assert (first["action"], first["anchor_state"], first["starts_sequence"]) == ("say", "a0", True)
    assert second["messages"][1] == {"role": "assistant", "content": "5", "more": None}
    assert (first["reward"], first["rewards"]) == (0.25, [("correct", 0.5), ("style", -0.25)])
    assert (first["info"], json.loads(second["info"])) == (None, {"tries": [1, None]})
    last = good["last_observation"]
    assert last["messages"] == [{"role": "tool", "content": "46 ü", "more": None}]
    assert b"".join(last["observation_pieces"]).decode() == "<|261|>46 ü<|end|><|260|>"
    assert (last["observation_tokens"], last["starts_sequence"]) == ([261, *"46 ü".encode(), 257, 260], False)
    assert (bad["status"], bad["error"], bad["reward"], bad["turns"]) == ("failed", "ValueError: no", None, [])
    assert bad["last_observation"] is None


@pytest.mark.parametrize("stale", [False, True])
def test_stale_groups_are_stored_if_configured(tmp_path, stale):
    store = RolloutStore(tmp_path, RolloutStoreConfig(stale=stale), piece)
    store.write(7, [group_of("g", 1.0)], {}, stale=[group_of("h", 1.0)])
    store.close()
    fates = {row["group_id"]: row["not_trained"] for row in rows(tmp_path)}
    assert fates == {"g": "filtered"} | ({"h": "stale"} if stale else {})


def test_why_a_rollout_was_not_trained_on(tmp_path):
    late = rollout_of("g-3", reward=None, status=RolloutStatus.TIMED_OUT)
    cut = rollout_of("g-4", status=RolloutStatus.TRUNCATED)
    rollouts = [rich_rollout(), rollout_of("g-1", reward=None), rollout_of("g-2"), late, cut]
    write(tmp_path, 1, [RolloutGroup("g", rollouts)], {"g-0": rich_signal(), "g-4": StoredAdvantages(None)})
    write(tmp_path, 1, [RolloutGroup("g", [rich_rollout()])], purpose="evaluation")
    stored = [(row["not_trained"], row["advantage"]) for row in rows(tmp_path)]
    assert stored == [
        (None, 0.2),
        *((why, None) for why in ("failed", "filtered", "timed_out", "masked", "evaluation")),
    ]
    [turn] = rows(tmp_path)[4]["turns"]
    assert (turn["loss_mask"], turn["advantages"]) == ([False, False], None)


def test_advantages_of_another_length_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="rollout g-0: advantages has length 5, expected 2"):
        write(tmp_path, 1, [group_of("g", 1.0)], {"g-0": StoredAdvantages(np.zeros(5))})


def test_every_selects_steps_and_all_evaluations(tmp_path):
    for step in range(1, 7):
        write(tmp_path, step, [group_of("g", 1.0)], every=3)
        write(tmp_path, step, [group_of("g", 1.0)], every=0)
    write(tmp_path, 4, [group_of("g", 1.0)], purpose="evaluation", every=3)
    write(tmp_path, 5, [group_of("g", 1.0)], purpose="evaluation", every=0)
    assert names(tmp_path) == ["eval-00000004.parquet", "step-00000003.parquet", "step-00000006.parquet"]
    assert [file.step for file in list_files(tmp_path)] == [3, 4, 6]


def test_the_oldest_files_are_removed_first(tmp_path, caplog):
    write(tmp_path, 1, [group_of("g", 1.0, 0.0)])
    size = (tmp_path / "step-00000001.parquet").stat().st_size
    store = RolloutStore(tmp_path, RolloutStoreConfig(max_mb=3.5 * size / 1e6), piece)
    with caplog.at_level(logging.INFO, "marin_rl"):
        for step in (2, 3, 4, 5):
            store.write(step, [group_of("g", 1.0, 0.0)], {})
        store.close()
    assert names(tmp_path) == [f"step-0000000{step}.parquet" for step in (3, 4, 5)]
    assert "removed 1 files (steps 2 to 2) to stay within rollout_store.max_mb" in caplog.messages[-1]
    write(tmp_path, 6, [group_of("g", 1.0)], max_mb=1e-9)
    assert names(tmp_path) == ["step-00000006.parquet"]


def test_truncate_removes_steps_after_the_checkpoint(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step, [group_of("g", 1.0)])
        write(tmp_path, step, [group_of("g", 1.0)], purpose="evaluation", format="jsonl")
    (tmp_path / ".step-00000005.parquet.partial").write_bytes(b"half")
    store = RolloutStore(tmp_path, RolloutStoreConfig(), piece)
    store.truncate(2)
    store.close()
    assert names(tmp_path) == [
        *("eval-00000001.jsonl", "eval-00000002.jsonl", "step-00000001.parquet", "step-00000002.parquet")
    ]


def test_the_next_call_raises_a_write_error_and_no_file_remains(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    store = RolloutStore(tmp_path, RolloutStoreConfig(), piece)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        store.write(7, [group_of("g", 1.0)], {})
        with pytest.raises(OSError, match="No space left"):
            store.flush()
    assert list_files(tmp_path) == []
    store.write(7, [group_of("g", 1.0)], {})
    store.close()
    assert names(tmp_path) == ["step-00000007.parquet"]


def test_writing_runs_in_the_background_and_close_waits(tmp_path):
    proceed, begun = threading.Event(), threading.Event()

    def slow(token: int) -> bytes:
        begun.set()
        assert proceed.wait(600)
        return piece(token)

    store = RolloutStore(tmp_path, RolloutStoreConfig(), slow)
    store.write(1, [group_of("g", 1.0)], {})
    assert begun.wait(600)
    assert list_files(tmp_path) == []
    proceed.set()
    store.close()
    assert names(tmp_path) == ["step-00000001.parquet"]


def test_files_are_read_lazily_and_may_disappear(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, [group_of(f"g{step}", 1.0)])
    tables = read_rollouts(tmp_path, columns=["id"])
    assert next(tables).column_names == ["id"]
    (tmp_path / "step-00000002.parquet").unlink()
    assert [table.to_pylist() for table in tables] == [[{"id": "g3-0"}]]


def test_steps_and_columns_are_selected(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, [group_of(f"g{step}", 1.0)], format="jsonl" if step == 2 else "parquet")
    result = rows(tmp_path, steps=range(2, 9), columns=["reward", "id"])
    assert result == [{"reward": 1.0, "id": "g2-0"}, {"reward": 1.0, "id": "g3-0"}]


def test_missing_files_are_empty(tmp_path):
    assert rows(tmp_path) == rows(tmp_path / "missing") == []
    assert read_file(tmp_path / "step-00000001.parquet") is None
