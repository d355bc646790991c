# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run progress: counters, task stream position, pending rollout requests and evaluation results."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Progress:
    """Host-side state of a run, saved as JSON in every checkpoint."""

    step: int = 0
    """Completed steps."""
    updates: int = 0
    """Completed weight updates; a step has several with epochs or minibatches."""
    tasks_drawn: int = 0
    """Training tasks drawn, without skipped ones."""
    prompts_skipped: int = 0
    """Training tasks skipped because their prompt is too long."""
    task_stream: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the task stream: position in each environment and curriculum statistics."""
    episodes: int = 0
    """Rollouts sampled for training."""
    orders: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the rollout scheduler: requested groups that are not complete."""
    worker_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Counters of rollout workers and their groups, accumulated over restarts."""
    sampled_tokens: int = 0
    """Tokens sampled for training."""
    trained_tokens: int = 0
    """Tokens trained on; each epoch counts a token again."""
    vocab_size: int = 0
    """Vocabulary size of the model, which may exceed the tokenizer's."""
    evaluations: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Held-out metrics by milestone: `before warm start`, `before RL` and the latest `after RL`."""
