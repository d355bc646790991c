# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How far a run is: counters, the place in the task stream, orders that are out, and what was measured."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Progress:
    """The host's share of a run's state; saved in every checkpoint, as JSON."""

    step: int = 0
    """Steps done."""
    updates: int = 0
    """Updates of the weights; several in a step with epochs or minibatches."""
    tasks_drawn: int = 0
    """Training tasks drawn, skipped ones not counted."""
    prompts_skipped: int = 0
    """Training tasks skipped because their prompt is too long."""
    task_stream: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where the next step goes on drawing tasks, in each environment, and what a curriculum has seen."""
    episodes: int = 0
    """Rollouts sampled for training."""
    orders: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Groups that were ordered and have not come."""
    worker_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """What became of rollout workers and their groups."""
    sampled_tokens: int = 0
    """Tokens sampled for training."""
    trained_tokens: int = 0
    """Tokens trained on; twice where there are two epochs."""
    vocab_size: int = 0
    """The model's vocabulary, which may be larger than the tokenizer's."""
    evaluations: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Held-out accuracy at the run's landmarks: `before warm start`, `before RL`, and `after RL`, the latest."""
