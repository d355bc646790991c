# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How fast an update was, and where its time went."""

from collections.abc import Mapping, Sequence

import jax
from levanter.models.lm_model import LmConfig
from levanter.utils.flop_utils import device_hardware_flops

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.types import RolloutGroup

PHASES = ("sample", "reward", "batch", "reference", "step", "transfer", "store", "wait")
"""The phases of an update; `wait` is what none of the others accounts for."""


def throughput_metrics(
    groups: Sequence[RolloutGroup], updates: Sequence[PackedBatch], seconds: Mapping[str, float], elapsed: float
) -> dict[str, float]:
    """Rates of one update; padding is never counted as a token.

    Args:
        groups: the rollouts that were sampled for it.
        updates: what was trained on; a token that is trained on twice counts twice.
        seconds: time by phase; without `sample` where others sample at the same time.
        elapsed: seconds from the first request to the published weights.
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
    """`mfu`: share of the devices' peak that the update's forward and backward passes used.

    `3 · flops_per_token · tokens / (seconds · peak)`, tokens without padding. Empty where the peak of the
    device is not known, as on a CPU.
    """
    peak = device_hardware_flops(jax.devices()[0])
    per_token = model.flops_per_token(vocab_size)
    if peak is None or per_token is None or not updates:
        return {}
    tokens = sum(packed.num_tokens for packed in updates)
    return {"mfu": 3 * per_token * tokens / (step_seconds * peak * jax.device_count())}
