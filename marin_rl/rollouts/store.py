# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollouts at rest: what was asked, what was answered, what it earned."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.types import Rollout, RolloutGroup


def write_rollouts(folder: Path, step: int, groups: Sequence[RolloutGroup], advantages: Mapping[str, float]) -> Path:
    """Write the rollouts of one update to `step-NNNNNNNN.jsonl`, one JSON object a line; whole, or not at all.

    Args:
        folder: the run directory's `rollouts/`.
        step: the update they trained.
        groups: all of its groups, failed rollouts included.
        advantages: by rollout id; one that failed or was left out has none, which is written as 0.

    Returns:
        The file.
    """
    target = folder / f"step-{step:08d}.jsonl"
    partial = folder / f".{target.name}.partial"
    with partial.open("w", encoding="utf-8") as file:
        for group in groups:
            for rollout in group.rollouts:
                line = json.dumps(_as_json(rollout, advantages.get(rollout.id, 0.0)), ensure_ascii=False)
                file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    return target


def _as_json(rollout: Rollout, advantage: float) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "group_id": rollout.group_id,
        "task_id": rollout.task.id,
        "environment": rollout.task.environment,
        "answer": rollout.task.answer,
        "status": rollout.status.value,
        "error": rollout.error,
        "rewards": dict(rollout.rewards),
        "advantage": advantage,
        "turns": [
            {
                "messages": list(turn.messages),
                "reward": turn.reward,
                "starts_sequence": turn.starts_sequence,
                "observation_tokens": list(turn.observation_tokens),
                "token_ids": list(turn.generation.token_ids),
                "logprobs": list(turn.generation.logprobs),
                "stop_reason": turn.generation.stop_reason.value,
                "versions": [turn.generation.first_version, turn.generation.last_version],
            }
            for turn in rollout.turns
        ],
    }
