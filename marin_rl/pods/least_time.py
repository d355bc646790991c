# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Least seconds of the phases of a step: arithmetic from the config and the peak rates of a chip.

Nothing is measured. Source: Williams, Waterman and Patterson 2009, Roofline; Austin et al. 2025, How to Scale Your
Model, chapters 1 and 4.
"""

import math
from typing import Any, NamedTuple, cast

import equinox as eqx

from marin_rl.models.flops import forward_flops
from marin_rl.pods.chips import Chip
from marin_rl.pods.compiling import chip_bytes
from marin_rl.pods.programs import RunShapes


class StepSize(NamedTuple):
    """Rollouts of a step, all of one length."""

    groups: int
    """Number of prompts, or of rows of data."""
    rollouts: int
    """Number of rollouts, or of sequences of data."""
    prompt_tokens: int
    """Tokens of a prompt; 0 for data."""
    answer_tokens: int
    """Sampled tokens of a rollout, or tokens of a sequence of data, all with loss."""
    microbatches: int
    """Microbatches of all updates of a step."""
    updates: int
    """Updates of a step."""


def trainer_seconds(run: RunShapes, step: StepSize, chip: Chip) -> dict[str, float]:
    """Return the least seconds of `update` and `score` in a step: FLOPs without padding over the peak of all chips.

    A backward pass costs two forward passes, recomputed activations one. The head is always computed again. A critic's
    separate trunk costs as much as the policy's. A prompt that rollouts share in a row counts once. The result is empty
    if the peak rates of the chip are unknown.
    """
    if chip.flops is None:
        return {}
    config, group = run.config, run.layout.group
    answers = step.rollouts * step.answer_tokens
    prompts = step.rollouts if group is None else step.rollouts / group.answers
    tokens, context = prompts * step.prompt_tokens + answers, (step.prompt_tokens + step.answer_tokens) / 2
    layers, head = forward_flops(run.policy, tokens, context, 0), forward_flops(run.policy, 0, 0, answers)
    critic = config.trained_critic
    trunks = 1 if critic is None or critic.shared_trunk else 2
    own, reference, epochs = run.parts.own_scorings, config.needs_reference, run.parts.passes_per_step
    passes = 3 if getattr(config.model, "gradient_checkpointing", True) is False else 4
    flops = {"update": epochs * (passes * trunks * layers + 4 * head)}
    if own or reference:
        flops["score"] = own * (trunks * layers + head) + reference * (layers + head)
    peak = run.trainer.device_mesh.size * chip.flops
    return {name: count / peak for name, count in flops.items()}


def sampler_seconds(run: RunShapes, step: StepSize, chip: Chip, hosts: int) -> dict[str, float]:
    """Return the least seconds of `prefill` and `decode` in a step, if all slots are refilled at once.

    Prefill takes the FLOPs of all prompts, each processed once, over the peak of all chips. A decode step reads the
    weights and the filled part of the KV cache: on average the prompt and half of the answer. It takes at least the
    time of its FLOPs. `run` has the shapes on the chips of one of the `hosts`, which sample a step together. The result
    is empty if the peak rates of the chip are unknown.
    """
    if chip.flops is None or chip.memory_bandwidth is None:
        return {}
    peak, slots = run.trainer.device_mesh.size * chip.flops, run.sizes.slots
    prefill = forward_flops(run.policy, step.groups * step.prompt_tokens, step.prompt_tokens / 2, 0)
    context = step.prompt_tokens + step.answer_tokens / 2
    cached = chip_bytes(run.cache) * min(context / run.rl.rollouts.max_length, 1)
    reading = (decoded_weight_bytes(run) + cached) / chip.memory_bandwidth
    computing = forward_flops(run.policy, slots, context, slots) / peak
    decode_steps = math.ceil(step.rollouts / (slots * hosts)) * step.answer_tokens
    return {"prefill": prefill / (peak * hosts), "decode": decode_steps * max(reading, computing)}


def decoded_weight_bytes(run: RunShapes) -> int:
    """Return the bytes of the weights that a chip of the sampler reads for a token: all layers and the head."""
    policy = cast(Any, run.policy)
    read = eqx.filter_eval_shape(run.trainer.mp.cast_to_compute, (policy.transformer, policy.get_lm_head()))
    return chip_bytes(run.place_for_sampler(read))
