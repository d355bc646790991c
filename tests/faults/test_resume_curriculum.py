# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exact resume of a curriculum of games with a warm start and per-turn credit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TinyRun, interrupted_after, outcome


def lake(name: str, size: int) -> dict[str, Any]:
    return {
        "type": "text_game",
        "id": "FrozenLake-v1",
        "name": name,
        "options": {"is_slippery": False, "size": size},
        "num_tasks": 40,
        "view": "compact",
        "held_out": 0.3,
        "validation": 0.2,
    }


@pytest.mark.slow
def test_curriculum_of_games_resumes_exactly(new_run: Callable[..., TinyRun], tmp_path: Path) -> None:
    parts = [
        # Eight rollouts fill the window and any score suffices, so the second part opens after two steps.
        {"environment": lake("lake3", 3), "window": 8, "unlock_at": 0.0},
        {"environment": lake("lake4", 4), "after": ["lake3"]},
    ]
    whole = new_run(
        environment={"type": "mixture", "parts": parts},
        model__seq_len=96,
        rollouts={"prompts_per_step": 2, "group_size": 2, "max_length": 96, "max_turns": 3},
        advantage={"type": "gigpo"},
        warm_start__max_steps=2,
        warm_start__check_every=2,
        num_steps=4,
        evaluation={"tasks": 2, "greedy": False},
        checkpoint={"every": 1, "keep_every": 1},
    )
    assert whole.train() == 0
    records = whole.records()[1:]
    assert [record["curriculum/lake4/open"] for record in records] == [0.0, 1.0, 1.0, 1.0]
    assert [record["environments/lake3/share"] for record in records[:2]] == [1.0, 1.0]
    assert any(record["environments/lake4/share"] > 0 for record in records[2:])
    assert records[-1]["eval/lake3/tasks"] == records[-1]["eval/lake4/tasks"] == 2.0
    for step in (1, 3):
        resumed = interrupted_after(whole, step, tmp_path / f"after {step}")
        assert resumed.train() == 0
        assert outcome(resumed) == outcome(whole)
