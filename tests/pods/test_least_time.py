# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from typing import Any, cast

import pytest

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.models.flops import flops_per_token, forward_flops
from marin_rl.pods.chips import Chip
from marin_rl.pods.least_time import (
    StepSize,
    decoded_weight_bytes,
    sampler_seconds,
    trainer_seconds,
)
from marin_rl.pods.programs import RunShapes, lower_score, open_shapes, programs_of
from marin_rl.utils.settings.decode import encode
from tests.pods.plan_cases import tiny_config
from tests.sampling.families import mixtures

STEP = StepSize(groups=4, rollouts=16, prompt_tokens=24, answer_tokens=8, microbatches=4, updates=1)
# The tiny model by hand: 2 layers of width 32, 4 query and 2 key heads of size 8, MLP of 64, vocabulary of 128.
LINEAR = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
ATTENTION = 2 * 4 * 8
HEAD = 128 * 32
CHIP = Chip("one", "tpu", memory=1e9, flops=1.0, memory_bandwidth=1e30)
"""Its seconds are FLOPs, because reading takes no time."""


@pytest.fixture(scope="module")
def run() -> RunShapes:
    return open_shapes(tiny_config(), vocab_size=128)


def opened(*overrides: str) -> RunShapes:
    return open_shapes(tiny_config(*overrides), vocab_size=128)


def test_flops_of_a_forward_pass_by_hand(run: RunShapes):
    assert forward_flops(run.policy, 10, 5, 3) == 2 * LINEAR * 10 + 4 * ATTENTION * 10 * 5 + 2 * HEAD * 3


def test_flops_of_a_forward_pass_agree_with_those_that_xla_counts(run: RunShapes):
    """XLA counts the body of a loop once, so the model has one layer, and the head one block."""
    one = run.with_layers(1)
    counted = lower_score(one).compile().cost_analysis()["flops"]
    tokens = run.layout.rows_per_microbatch * run.layout.row_length
    # `vanilla` attention computes all pairs of positions.
    assert forward_flops(one.policy, tokens, run.layout.row_length, tokens) == pytest.approx(counted, rel=0.15)


def test_mixture_counts_the_experts_of_a_token():
    model = """{type: mixtral, seq_len: 32, hidden_dim: 32, intermediate_dim: 64, num_layers: 1, num_heads: 4,
        num_kv_heads: 2, n_routed_experts: 4, num_experts_per_tok: 2, gradient_checkpointing: false}"""
    router = 32 * 4
    linear = 32 * (32 + 16 + 16 + 32) + router + 2 * 3 * 32 * 64
    assert forward_flops(opened("--model", model).policy, 1, 0, 0) == 2 * linear


@pytest.mark.parametrize("name", mixtures())
@pytest.mark.parametrize("dense", [(), (0,)])
def test_flops_of_a_mixture_count_its_dense_layers_and_its_head_size(name: str, dense: tuple[int, ...]):
    """Three layers of width 32, 4 query and 2 key heads of size 16, 2 of 8 experts of 16 hidden units, or 48."""
    config = dataclasses.replace(cast(Any, mixtures()[name]), num_layers=3, mlp_only_layers=dense)
    run = opened("--model", json.dumps({"type": name, **encode(config), "gradient_checkpointing": False}))
    mlps = (3 - len(dense)) * (32 * 8 + 2 * 3 * 32 * 16) + len(dense) * 3 * 32 * 48
    linear, attention = 3 * 32 * (64 + 32 + 32 + 64) + mlps, 3 * 4 * 16
    assert forward_flops(run.policy, 1, 5, 1) == 2 * linear + 4 * attention * 5 + 2 * HEAD
    assert flops_per_token(config, 128, 5) == forward_flops(run.policy, 1, 5, 1)
    assert run.has_dense_layers == bool(dense)


def test_update_costs_three_forward_passes_and_recomputed_activations(run: RunShapes):
    tokens = 16 * 32
    layers, head = 2 * LINEAR * tokens + 4 * ATTENTION * tokens * 16, 2 * HEAD * 16 * 8
    devices = run.trainer.device_mesh.size
    assert trainer_seconds(run, STEP, CHIP) == {"update": (3 * layers + 4 * head) / devices}
    recomputing = opened("--model.gradient_checkpointing", "true")
    assert trainer_seconds(recomputing, STEP, CHIP) == {"update": 4 * (layers + head) / devices}
    # Rows of four answers to a prompt hold it once.
    sharing = RowLayout(row_length=24 + 4 * 8, rows_per_microbatch=1, packed=True, group=GroupRow(24, 4, 8))
    tokens = 4 * 24 + 16 * 8
    layers = 2 * LINEAR * tokens + 4 * ATTENTION * tokens * 16
    shared = trainer_seconds(dataclasses.replace(run, layout=sharing), STEP, CHIP)
    assert shared == {"update": (3 * layers + 4 * head) / devices}


def test_epochs_and_a_separate_critic_multiply_the_update(run: RunShapes):
    once = trainer_seconds(run, STEP, CHIP)["update"]
    epochs = opened("--updates.epochs", "3", "--policy_loss", "{type: ppo_clip}")
    assert trainer_seconds(epochs, STEP, CHIP)["update"] == pytest.approx(3 * once)
    critic = ["--advantage.type", "gae", "--critic.shared_trunk"]
    assert trainer_seconds(opened(*critic, "true"), STEP, CHIP)["update"] == once
    head = 4 * 2 * HEAD * 16 * 8 / run.trainer.device_mesh.size
    assert trainer_seconds(opened(*critic, "false"), STEP, CHIP)["update"] == pytest.approx(2 * once - head)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--kl", "{type: in_loss, beta: 0.1}"], 1.0),
        (["--off_policy_correction.type", "tis"], 1.0),
        (["--kl", "{type: in_loss, beta: 0.1}", "--off_policy_correction.type", "tis"], 2.0),
        (["--rollout_store.learner_logprobs", "true", "--rollout_store.every", "4"], 0.25),
        (["--off_policy_correction.type", "tis", "--rollout_store.learner_logprobs", "true"], 1.0),
        (["--rollout_store.learner_logprobs", "true", "--rollout_store.every", "0"], 0.0),
    ],
)
def test_each_scoring_of_the_rollouts_counts(run: RunShapes, options: list[str], count: float):
    run = dataclasses.replace(run, config=tiny_config(*options))
    seconds = trainer_seconds(run, STEP, CHIP)
    head = 2 * HEAD * 16 * 8 / run.trainer.device_mesh.size
    assert seconds.get("score", 0.0) == pytest.approx(count * (seconds["update"] - head) / 3)
    assert ("score" in seconds) == ("score" in programs_of(run.parts, hosts=1)) == (count > 0)


def test_prefill_processes_each_prompt_once(run: RunShapes):
    tokens = 4 * 24
    flops = 2 * LINEAR * tokens + 4 * ATTENTION * tokens * 12
    devices = run.trainer.device_mesh.size
    assert sampler_seconds(run, STEP, CHIP, hosts=2)["prefill"] == flops / devices / 2


def test_decode_reads_weights_and_the_filled_cache_for_each_token(run: RunShapes):
    """Eight slots sample 16 rollouts in two rounds of 8 tokens, with 28 of at most 32 tokens in the cache."""
    chip = Chip("one", "tpu", memory=1e9, flops=1e30, memory_bandwidth=1.0)
    devices = run.trainer.device_mesh.size
    slots = -(-8 // devices) * devices
    weights = 4 * (LINEAR + HEAD + 5 * 32)  # Five norms.
    cache = 2 * slots // devices * 32 * 2 * 2 * 8 * 4  # Layers, slots, tokens, keys and values, heads, size, bytes.
    assert decoded_weight_bytes(run) == weights
    seconds = sampler_seconds(run, STEP, chip, hosts=1)["decode"]
    assert seconds == pytest.approx(16 // slots * 8 * (weights + cache * 28 / 32))
    # Two hosts sample half of the rollouts each.
    assert sampler_seconds(run, STEP, chip, hosts=2)["decode"] == pytest.approx(seconds / 2)
    computed = sampler_seconds(run, STEP, CHIP, hosts=1)["decode"]
    flops = 2 * (LINEAR + HEAD) * slots + 4 * ATTENTION * slots * 28
    assert computed == pytest.approx(16 // slots * 8 * flops / devices)


def test_no_times_without_the_rates_of_a_chip(run: RunShapes):
    unknown = Chip("cpu", "cpu", memory=1e9, flops=None, memory_bandwidth=None)
    assert trainer_seconds(run, STEP, unknown) == sampler_seconds(run, STEP, unknown, hosts=1) == {}
