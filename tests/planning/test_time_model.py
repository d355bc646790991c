# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math

import pytest

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.chips import CHIPS
from marin_rl.planning.compiling import Measured
from marin_rl.planning.hlo import CollectiveBytes
from marin_rl.planning.programs import RunShapes, lower_score, open_shapes, programs_of
from marin_rl.planning.time_model import (
    ModelWork,
    StepSize,
    Work,
    bound,
    decode_steps,
    decode_work,
    measure_cpu,
    model_flops,
    model_work,
    prefill_work,
    score_work,
    short_prefill_work,
    update_work,
)
from tests.planning.plan_cases import tiny_config

STEP = StepSize(groups=4, rollouts=16, prompt_tokens=24, answer_tokens=8, microbatches=4, updates=1)
LINEAR = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
HEAD = 128 * 32
SENT = CollectiveBytes(5.0, 7.0, 1.0)


@pytest.fixture(scope="module")
def run() -> RunShapes:
    return open_shapes(tiny_config(), vocab_size=128)


def measured(**sizes: float) -> Measured:
    return Measured(
        **{"arguments": 0, "outputs": 0, "aliased": 0, "temporaries": 0, "traffic": 3.0} | sizes, collectives=SENT
    )


@pytest.mark.parametrize(
    ("work", "seconds", "limit"),
    [
        (Work(flops=459e12, traffic=2765e9 / 2), 1.0, "compute"),
        (Work(flops=459e12, traffic=2765e9 * 2), 2.0, "memory"),
        (Work(interconnect=600e9, network=6.25e9 * 3), 3.0, "network"),
        (Work(interconnect=600e9 * 4, host=16e9), 4.0, "interconnect"),
        (Work(traffic=2765e9, host=16e9 * 5), 5.0, "host link"),
        (Work(), 0.0, "compute"),
    ],
)
def test_bound_is_the_largest_term(work: Work, seconds: float, limit: str):
    assert bound(work, CHIPS["v5p"]) == (seconds, limit)


def test_terms_of_a_cpu_are_added():
    chip = dataclasses.replace(CHIPS["v5p"], platform="cpu")
    assert bound(Work(flops=459e12 * 2, traffic=2765e9, host=16e9), chip) == (4.0, "compute")


def test_products_of_a_model_are_counted_from_its_layers(run: RunShapes):
    assert model_work(run) == ModelWork(linear=LINEAR, head=HEAD, attention=2 * 4 * 8)


def test_flops_of_a_forward_pass_agree_with_those_that_xla_counts(run: RunShapes):
    """XLA counts the body of a loop once, so the model has one layer, and the head one block."""
    one = run.with_layers(1)
    counted = lower_score(one).compile().cost_analysis()["flops"]
    tokens = run.layout.rows_per_microbatch * run.layout.row_length
    # `vanilla` attention computes all pairs of positions.
    expected = model_work(one).forward(tokens, run.layout.row_length, tokens)
    assert expected == pytest.approx(counted, rel=0.15)


def test_update_costs_three_forward_passes_and_recomputed_activations(run: RunShapes):
    tokens = 4 * run.layout.rows_per_microbatch * run.layout.row_length
    attention = 4 * 64 * tokens * run.layout.row_length / 2
    head = 2 * HEAD * 16 * 8
    work = update_work(run, STEP, None)
    assert work == Work(flops=3 * (2 * LINEAR * tokens + attention) + 4 * head)
    config = run.config
    model = dataclasses.replace(config.model, gradient_checkpointing=True)
    recomputing = dataclasses.replace(run, config=dataclasses.replace(config, model=model))
    assert update_work(recomputing, STEP, None).flops == 4 * (2 * LINEAR * tokens + attention) + 4 * head
    assert update_work(run, STEP._replace(updates=2), measured()) == Work(work.flops, 6.0, 10.0, 14.0)


def test_separate_trunk_of_a_critic_costs_as_much_as_the_policy(run: RunShapes):
    def with_critic(shared: str) -> RunShapes:
        options = ["--advantage.type", "gae", "--critic.shared_trunk", shared]
        return open_shapes(tiny_config(*options), vocab_size=128)

    shared, separate = with_critic("true"), with_critic("false")
    head = HEAD * 16 * 8
    assert update_work(shared, STEP, None) == update_work(run, STEP, None)
    policy = update_work(run, STEP, None).flops - 8 * head
    assert update_work(separate, STEP, None).flops == 2 * policy + 8 * head
    assert score_work(separate, STEP, None).flops == 2 * score_work(shared, STEP, None).flops - 2 * head
    assert model_flops(separate, STEP) == 2 * model_flops(run, STEP) - 6 * head


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
    config = tiny_config(*options)
    counted = score_work(dataclasses.replace(run, config=config), STEP, measured())
    tokens = 4 * run.layout.rows_per_microbatch * run.layout.row_length
    one = 2 * LINEAR * tokens + 4 * 64 * tokens * run.layout.row_length / 2 + 2 * HEAD * 16 * 8
    assert counted == Work(one, 3.0, 5.0, 7.0).times(count)
    assert ("score" in programs_of(config, hosts=1)) == (count > 0)


def test_sampler_computes_all_experts():
    model = """{type: mixtral, seq_len: 32, hidden_dim: 32, intermediate_dim: 64, num_layers: 1, num_heads: 4,
        num_kv_heads: 2, n_routed_experts: 4, num_experts_per_tok: 2, gradient_checkpointing: false}"""
    mixture = open_shapes(tiny_config("--model", model), vocab_size=128)
    chosen, sampled = model_work(mixture), model_work(mixture, all_experts=True)
    assert sampled.linear - chosen.linear == 2 * 3 * 32 * 64
    flops = decode_work(mixture, STEP, None).flops
    assert flops == sampled.forward(8, 28, 8) * 16


def test_model_flops_have_no_padding(run: RunShapes):
    tokens = 16 * 32
    expected = 3 * (2 * LINEAR * tokens + 4 * 64 * tokens * 16 + 2 * HEAD * 16 * 8)
    assert model_flops(run, STEP) == pytest.approx(expected)
    sharing = RowLayout(row_length=24 + 4 * 8, rows_per_microbatch=1, packed=True, group=GroupRow(24, 4, 8))
    tokens = 4 * 24 + 16 * 8
    expected = 3 * (2 * LINEAR * tokens + 4 * 64 * tokens * 16 + 2 * HEAD * 16 * 8)
    assert model_flops(dataclasses.replace(run, layout=sharing), STEP) == pytest.approx(expected)
    assert score_work(run, STEP, None).flops < update_work(run, STEP, None).flops / 2


def test_prefill_reads_each_prompt_once(run: RunShapes):
    rows, chunk = run.sizes.prefill.short
    calls = math.ceil(4 * math.ceil(24 / chunk) / rows)
    flops = 2 * LINEAR * rows * chunk + 4 * 64 * rows * chunk * 12
    assert short_prefill_work(run, STEP, measured()) == Work(flops, 3.0, 5.0, 7.0).times(calls)
    assert prefill_work(run, STEP, measured()) == Work()


def test_long_prompts_take_long_calls_of_prefill(run: RunShapes):
    long, short = run.sizes.prefill
    step = STEP._replace(prompt_tokens=long.positions + 1)
    assert prefill_work(run, step, measured()).traffic == 4 * 3.0
    assert short_prefill_work(run, step, measured()).traffic == math.ceil(4 / short.rows) * 3.0


def test_decode_takes_a_step_of_all_slots_for_each_token(run: RunShapes):
    slots = run.sizes.slots
    assert slots == 8
    assert decode_steps(STEP, run.sizes) == 2 * 8
    flops = 2 * (LINEAR + HEAD) * slots + 4 * 64 * slots * 28
    # A CPU reads the whole cache.
    assert decode_work(run, STEP, measured(traffic=100.0, cache=50.0)) == Work(flops, 100.0, 5.0, 7.0).times(16)


def test_rates_of_a_cpu_are_shared_by_its_devices():
    chip = dataclasses.replace(CHIPS["v5e"], name="cpu", platform="cpu")
    one, four = measure_cpu(chip, 1), measure_cpu(chip, 4)
    assert 1e8 < one.flops < 1e14
    assert 1e7 < four.memory_bandwidth < 1e13
    assert four.flops < one.flops
    assert four.memory == chip.memory
