# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollouts for tests of the store and the viewer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.objectives.advantage_inputs import TurnAdvantages
from marin_rl.runs.rollout_store import RolloutStore, RolloutStoreConfig, read_rollouts
from marin_rl.runs.stored_rollout import StoredAdvantages
from marin_rl.types import (
    Generation,
    Message,
    Observation,
    RewardResult,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
    TurnReward,
)
from tests.scripted_sampler import experts_of

END = 257
TASK = Task("t", "sums", ({"role": "user", "content": "2+3"},), "5")


def piece(token: int) -> bytes:
    """The bytes of the built-in tokenizer's tokens, without loading it."""
    return bytes([token]) if token < 256 else b"<|end|>" if token == END else f"<|{token}|>".encode()


def turn_of(question: str, reply: str, reward: float | None = None, **more: object) -> Turn:
    """A turn with a user message and a reply, tokenized to bytes."""
    tokens = (*reply.encode(), END)
    generation = Generation(tokens, tuple(-0.125 * (1 + i % 8) for i in range(len(tokens))), StopReason.STOP, 3, 3)
    messages: Sequence[Message] = ({"role": "user", "content": question}, {"role": "assistant", "content": reply})
    if reward is not None:
        more["rewards"] = {"correct": reward}
    return Turn((259, *question.encode(), END, 260), generation, tuple(messages), **{"starts_sequence": True, **more})


def rollout_of(
    id: str, group: str = "g", reply: str = "5", reward: float | None = 1.0, status: RolloutStatus | None = None, **more
) -> Rollout:
    """A rollout of one turn; without a reward, a failed rollout without turns."""
    if reward is None:
        failed_status = status or RolloutStatus.FAILED
        return Rollout(id, group, TASK, (), failed_status, {}, **{"error": "ValueError: no", **more})
    turns = (turn_of("2+3", reply, reward=reward),)
    status = status or RolloutStatus.COMPLETED
    return Rollout(id, group, TASK, **{"turns": turns, "status": status, "rewards": {"correct": reward}, **more})


def group_of(id: str, *rewards: float | None) -> RolloutGroup:
    """A group with these rewards; None for a failed rollout."""
    return RolloutGroup(id, [rollout_of(f"{id}-{index}", id, reward=reward) for index, reward in enumerate(rewards)])


def rich_rollout() -> Rollout:
    """Two turns, a last observation, reward components with a failed one, turn rewards, and text outside ASCII."""
    turns = (
        turn_of("2+3 — naïve?", "é", anchor_state="a0", action="say", rewards={"correct": 0.5, "style": -0.25}),
        turn_of(
            "wrong, try again", "5", starts_sequence=False, reward=1.0, anchor_state="a1", info={"tries": [1, None]}
        ),
    )
    steps = (TurnReward(0, 0.25, "half \u2028 right", {"chars": 2.0}), TurnReward(1, 1.0))
    return Rollout(
        "g-0",
        "g",
        TASK,
        turns,
        RolloutStatus.COMPLETED,
        {"correct": 1.0, "style": 0.5},
        evaluations=(
            RewardResult("correct", 1.0, 1.0, steps, {"length": 3.0}, "equal to the answer"),
            RewardResult("style", 0.5, 1.0),
            RewardResult("judge", 2.0, None, error="TimeoutError: 3 s", failure="timeout"),
        ),
        metrics={"retries": 1.0, "metrics": 4.0},
        seconds={"sample": 0.5, "environment": 0.25, "reward": 0.125},
        info={"map": "ü 4x4"},
        last_observation=Observation(({"role": "tool", "content": "46 ü"},), (261, *"46 ü".encode(), END, 260)),
    )


def with_experts(rollout: Rollout, layers: int = 2, per_token: int = 3, dtype: str = "uint8") -> Rollout:
    """The rollout with random chosen experts: of all tokens but the last of each sequence."""
    rng, turns = np.random.default_rng([5, *rollout.id.encode()]), []
    for turn in rollout.turns:
        shape = (turn.num_tokens - turn.starts_sequence, layers, per_token)
        experts = rng.integers(np.iinfo(dtype).max, size=shape).astype(dtype)
        turns.append(dataclasses.replace(turn, generation=dataclasses.replace(turn.generation, experts=experts)))
    return dataclasses.replace(rollout, turns=tuple(turns))


def check_experts(rollout: Rollout) -> None:
    """Check that each token has the experts that `experts_of` chose for it in its sequence, and nothing twice."""
    sequences: list[list[int]] = []
    for turn in rollout.turns:
        if turn.starts_sequence:
            sequences.append([])
        sequences[-1] += [*turn.observation_tokens, *turn.generation.token_ids]
    expected = [row for tokens in sequences for row in (*experts_of(tokens[:-1]).tolist(), [[255] * 3] * 2)]
    found = batch_rollouts([rollout], experts=True).experts
    assert (None if found is None else found.tolist()) == (expected or None)
    rows = [turn.generation.experts for turn in rollout.turns]
    assert sum(len(one) for one in rows if one is not None) == sum(len(tokens) - 1 for tokens in sequences)


def rich_signal() -> StoredAdvantages:
    """Advantages of the rich rollout: five tokens in two turns."""
    return StoredAdvantages(
        advantages=np.array([0.5, 0.5, 0.5, -0.25, -0.25]),
        learner_logprobs=np.array([-0.125, -0.25, -0.5, -0.125, -0.5]),
        reference_logprobs=np.array([-1.0, -1.0, -1.0, -2.0, -2.0]),
        values=np.array([0.5, 0.25, 0.75, -1.5, 2.0]),
        value_targets=np.array([1.0, 1.0, 1.0, 0.5, 0.5]),
        turn_advantages=TurnAdvantages(0.25, np.array([1.2, 1.0]), np.array([0.25, -0.5])),
    )


def write(
    folder: Path,
    step: int,
    groups: Sequence[RolloutGroup],
    signals: dict[str, StoredAdvantages] | None = None,
    purpose: str = "training",
    **config: object,
) -> None:
    """Store a step and wait for the file."""
    store = RolloutStore(folder, RolloutStoreConfig(**config), piece)
    store.write(step, groups, signals or {}, purpose)
    store.close()


def rows(folder: Path, **selection: Any) -> list[dict[str, Any]]:
    """Read the stored rollouts of a folder."""
    return [row for table in read_rollouts(folder, **selection) for row in table.to_pylist()]


def rich_group() -> RolloutGroup:
    """A group of a rollout with all fields and a failed one."""
    return RolloutGroup("g", [rich_rollout(), rollout_of("g-1", reward=None)])
