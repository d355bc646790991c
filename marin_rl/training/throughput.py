# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Throughput metrics: rollout and token rates, seconds per phase and model FLOPs utilization."""

from collections.abc import Mapping, Sequence

import jax
from levanter.models.lm_model import LmConfig
from levanter.utils.flop_utils import device_hardware_flops

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.types import RolloutGroup

PHASES = ("sample", "reward", "batch", "reference", "step", "transfer", "store", "wait")
"""The phases of a step; `wait` is the time outside all other phases."""


def throughput_metrics(
    groups: Sequence[RolloutGroup], updates: Sequence[PackedBatch], seconds: Mapping[str, float], elapsed: float
) -> dict[str, float]:
    """Compute the rates of one step; padding does not count as tokens.

    Args:
        groups: rollouts sampled for the step.
        updates: batches of the step's updates; a token trained on twice counts twice.
        seconds: seconds by phase; `sample` is absent when workers sample concurrently.
        elapsed: seconds from the first request to the published weights.

    Returns:
        Rates and seconds by metric name.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = sum(rollout.num_generated_tokens for rollout in rollouts)
    trained = sum(packed.num_loss_tokens for packed in updates)
    slots = sum(packed.num_positions for packed in updates)
    accounted = sum(seconds.get(phase, 0.0) for phase in PHASES)
    return {
        "eps": len(rollouts) / elapsed,
        "tokens/sampled_per_second": sampled / max(seconds.get("sample", elapsed), 1e-9),
        "tokens/trained_per_second": trained / max(seconds.get("step", 0.0), 1e-9),
        "batch/packing_efficiency": sum(packed.num_tokens for packed in updates) / max(slots, 1),
        "batch/microbatches": float(sum(len(packed.microbatches) for packed in updates)),
        **{f"seconds/{phase}": seconds.get(phase, 0.0) for phase in PHASES if phase != "wait"},
        "seconds/wait": max(elapsed - accounted, 0.0),
        "seconds/total": elapsed,
    }


def model_flops_utilization(
    model: LmConfig, vocab_size: int, updates: Sequence[PackedBatch], step_seconds: float
) -> dict[str, float]:
    """Compute the model FLOPs utilization of a step's forward and backward passes.

    `mfu = 3 · flops_per_token · tokens / (seconds · peak FLOPS of all devices)`, without padding tokens.

    Args:
        model: architecture.
        vocab_size: vocabulary size of the model.
        updates: batches of the step's updates.
        step_seconds: duration of all updates.

    Returns:
        `mfu`, or nothing if the peak FLOPS of the device is unknown (for example on a CPU) or there was no update.
    """
    peak = device_hardware_flops(jax.devices()[0])
    per_token = model.flops_per_token(vocab_size)
    if peak is None or per_token is None or not updates:
        return {}
    tokens = sum(packed.num_tokens for packed in updates)
    return {"mfu": 3 * per_token * tokens / (step_seconds * peak * jax.device_count())}
