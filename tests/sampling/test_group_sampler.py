# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import os
import sys
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel

from experiments.lab.benchmarks.measurement import counted_compiles
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest, SamplerError, WeightPoll
from marin_rl.sampling.sizes import DECODE_STEPS, prefill_shapes, sampler_sizes
from marin_rl.types import Generation, StopReason
from marin_rl.utils.levanter_line import seq_len
from tests import fork_server
from tests.cpu_host import cpu_host

VOCAB = 64
CONTEXT = 40
STOP_IDS = (62, 63)
SLOTS = 8
MAX_NEW = 12
SIZES: dict[str, Any] = {
    **seq_len(64),
    **{"hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "initializer_range": 0.2,
}
LLAMA = LlamaConfig(**SIZES)
CONFIG = SamplingConfig(max_new_tokens=MAX_NEW, max_seqs=SLOTS)


def build(config: LlamaConfig, seed: int = 0) -> LmHeadModel:
    return hax.named_jit(config.build)(Axis("vocab", VOCAB), key=jax.random.PRNGKey(seed))


def make_sampler(model: LmHeadModel) -> GroupSampler:
    return GroupSampler(model, config=CONFIG, stop_token_ids=STOP_IDS, max_context=CONTEXT)


@pytest.fixture(scope="module")
def model() -> LmHeadModel:
    return build(LLAMA)


@pytest.fixture(scope="module")
def used_sampler(model: LmHeadModel) -> GroupSampler:
    """A sampler that all tests share, which has processed earlier calls."""
    return make_sampler(model)


@pytest.fixture
def sampler(used_sampler: GroupSampler, model: LmHeadModel) -> GroupSampler:
    used_sampler.update_weights(model, 0)
    return used_sampler


@hax.named_jit
def forward(model: LmHeadModel, tokens: NamedArray) -> NamedArray:
    return model(tokens, attn_mask=AttentionMask.causal())


def full_logits(model: LmHeadModel, sequences: list[tuple[int, ...]]) -> np.ndarray:
    """Return `[sequence, position, vocab]` in float64, from the learner's forward pass."""
    tokens = np.zeros((-(-len(sequences) // SLOTS) * SLOTS, CONTEXT), dtype=np.int32)
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence)] = sequence
    chunks = [
        forward(model, hax.named(chunk, ("batch", "position"))).array
        for chunk in np.split(tokens, len(tokens) // SLOTS)
    ]
    return np.concatenate([np.asarray(chunk, dtype=np.float64) for chunk in chunks])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def largest_error(model: LmHeadModel, requests: list[SampleRequest], generations: list[Generation]) -> float:
    logits = full_logits(
        model, [request.prompt_tokens + g.token_ids for request, g in zip(requests, generations, strict=True)]
    )
    errors = []
    for row, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        expected = log_softmax(logits[row] / (request.temperature or 1.0))
        for offset, (token, value) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True)):
            errors.append(abs(value - expected[len(request.prompt_tokens) - 1 + offset, token]))
    return max(errors)


def make_requests(lengths: list[int], temperature: float = 1.0, max_new_tokens: int = MAX_NEW) -> list[SampleRequest]:
    rng = np.random.default_rng(len(lengths))
    return [
        SampleRequest(tuple(rng.integers(0, STOP_IDS[0], length).tolist()), seed, max_new_tokens, temperature)
        for seed, length in enumerate(lengths)
    ]


# One chunk of a prefill and several, also a part of one; limited by the context; more requests than slots.
LENGTHS = [1, 2, 5, 7, 8, 9, 15, 16, 17, 23, 24, 31, 33, 38, 39, 3, 8, 12, 20, 26]


@pytest.mark.medium
def test_logprobs_are_those_of_the_full_forward_pass(sampler: GroupSampler, model: LmHeadModel):
    temperatures = [0.0, 0.3, 1.0, 1.5]
    requests = [
        dataclasses.replace(request, temperature=temperatures[index % 4])
        for index, request in enumerate(make_requests(LENGTHS))
    ]
    assert largest_error(model, requests, sampler.sample(requests)) < 1e-5


def test_greedy_equals_a_naive_argmax_loop(sampler: GroupSampler, model: LmHeadModel):
    requests = make_requests([1, 4, 8, 11, 16, 21], temperature=0.0)
    sequences = [request.prompt_tokens for request in requests]
    for _ in range(MAX_NEW):
        logits = full_logits(model, sequences)
        sequences = [
            sequence if sequence[-1] in STOP_IDS else (*sequence, int(logits[row, len(sequence) - 1].argmax()))
            for row, sequence in enumerate(sequences)
        ]
    expected = [sequence[len(request.prompt_tokens) :] for request, sequence in zip(requests, sequences, strict=True)]
    assert [generation.token_ids for generation in sampler.sample(requests)] == expected


@pytest.mark.medium
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_tokens_follow_the_softmax(sampler: GroupSampler, model: LmHeadModel, temperature: float):
    prompt = (5, 9, 33)
    count = 2400
    requests = [SampleRequest(prompt, seed, 1, temperature) for seed in range(count)]
    drawn = np.bincount([g.token_ids[0] for g in sampler.sample(requests)], minlength=VOCAB)
    expected = count * np.exp(log_softmax(full_logits(model, [prompt])[0, len(prompt) - 1] / temperature))
    rare = expected < 5
    drawn = np.append(drawn[~rare], drawn[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    degrees = len(expected) - 1
    assert degrees >= 10
    # The mean of the chi-square distribution plus five of its standard deviations.
    assert ((drawn - expected) ** 2 / expected).sum() < degrees + 5 * (2 * degrees) ** 0.5


def test_equal_seeds_repeat_and_different_seeds_differ(sampler: GroupSampler):
    # The seeds differ in the low half, in the high half, and not at all.
    seeds = [7, 8, 7 + 2**40, 7, 2**63 - 1]
    generations = sampler.sample([SampleRequest((1, 2, 3), seed, MAX_NEW) for seed in seeds])
    assert generations[0] == generations[3]
    assert len({g.token_ids for g in generations}) == 4


def test_results_do_not_depend_on_the_rest_of_the_batch(sampler: GroupSampler):
    requests = make_requests(LENGTHS)
    together = sampler.sample(requests)
    assert sampler.sample(requests[::-1])[::-1] == together
    assert [sampler.sample([request])[0] for request in requests] == together


def test_results_do_not_depend_on_history(sampler: GroupSampler, model: LmHeadModel):
    for lengths in ([39, 1, 7], [30] * 13, [2] * SLOTS):
        sampler.sample(make_requests(lengths))
    requests = make_requests(LENGTHS)
    assert sampler.sample(requests) == make_sampler(model).sample(requests)


def test_prompts_are_processed_once_per_group(sampler: GroupSampler, model: LmHeadModel):
    requests = [
        dataclasses.replace(request, seed=seed) for request in make_requests([9, 20, 33]) for seed in range(2 * SLOTS)
    ]
    before = sampler.work.prefilled_tokens
    generations = sampler.sample(requests)
    assert sampler.work.prefilled_tokens - before == sum(len - 1 for len in (9, 20, 33))
    assert largest_error(model, requests, generations) < 1e-5
    assert len({generation.token_ids for generation in generations}) > 3


@pytest.mark.medium
def test_prompts_of_all_lengths_take_the_same_calls_in_any_company(model: LmHeadModel):
    context = 200
    config = SamplingConfig(max_new_tokens=2, max_seqs=SLOTS)
    sampler = GroupSampler(model, config=config, stop_token_ids=[], max_context=context)
    long, short = prefill_shapes("cpu", SLOTS, context, config.max_new_tokens)
    requests = make_requests([190, 77, 129, 2, 20], max_new_tokens=2)
    together = sampler.sample(requests)
    # Five whole chunks of the first prompt and four of the third; the rest of all.
    rows = [5 + 4, *(-(-tokens // short.chunk) for tokens in (189 - 160, 76, 0, 1, 19))]
    calls = -(-rows[0] // long.rows), -(-sum(rows[1:]) // short.rows)
    assert sampler.work.prefill_positions == calls[0] * long.positions + calls[1] * short.positions
    assert sampler.sample(requests[::-1])[::-1] == together
    assert [sampler.sample([request])[0] for request in requests] == together


def run_conversation(sampler: GroupSampler, name: str, observations: list[tuple[int, ...]]) -> tuple[list, list]:
    """Return requests and generations of a conversation, each turn of which adds an observation."""
    requests, generations = [], []
    prompt: tuple[int, ...] = ()
    for turn, observation in enumerate(observations):
        prompt += observation
        requests.append(SampleRequest(prompt, turn, 5, conversation=name))
        [number] = sampler.start(requests[-1:])
        ended: dict[int, Generation] = {}
        while number not in ended:
            ended.update(sampler.advance())
        generations.append(ended[number])
        prompt += ended[number].token_ids
    return requests, generations


OBSERVATIONS = [(5, 9, 33, 2), (7,), (8, 1, 4, 4, 9)]


def test_further_turns_continue_from_their_cache(sampler: GroupSampler, model: LmHeadModel):
    before = sampler.work.prefilled_tokens
    requests, generations = run_conversation(sampler, "first", OBSERVATIONS)
    assert largest_error(model, requests, generations) < 1e-5
    # The last prompt token and the last sampled one are processed by decode steps.
    assert sampler.work.prefilled_tokens - before == 3 + 1 + 5
    sampler.end_conversation("first")
    assert run_conversation(sampler, "second", OBSERVATIONS)[1] == generations
    sampler.reset()


def test_further_turns_may_rewrite_the_history(sampler: GroupSampler, model: LmHeadModel):
    """As chat templates do that drop earlier reasoning; the cache is used up to the first change."""
    requests, generations = run_conversation(sampler, "first", OBSERVATIONS[:1])
    history = requests[0].prompt_tokens + generations[0].token_ids
    before = sampler.work.prefilled_tokens
    for changed in ((*history[:6], 61, *history[8:], 3), (*history[:2], 60, 60, 3), history[:2]):
        requests = [SampleRequest(changed, 7, 5, conversation="first")]
        [number] = sampler.start(requests)
        ended = dict(sampler.advance())
        assert largest_error(model, requests, [ended[number]]) < 1e-5
    assert sampler.work.prefilled_tokens - before == (len(history) - 7) + 2
    # The slot is no longer a source of the first prompt's cache.
    sampler.end_conversation("first")
    again = [SampleRequest(OBSERVATIONS[0], seed, 5) for seed in range(3)]
    assert largest_error(model, again, sampler.sample(again)) < 1e-5


def test_conversations_keep_their_slot_until_they_end(sampler: GroupSampler):
    requests = make_requests([3] * (SLOTS + 1), max_new_tokens=2)
    numbers = sampler.start(
        [dataclasses.replace(request, conversation=str(index)) for index, request in enumerate(requests)]
    )
    ended: dict[int, Generation] = {}
    while len(ended) < SLOTS:
        ended.update(sampler.advance())
    assert sampler.is_idle
    assert sampler.advance() == []
    assert numbers[-1] not in ended
    sampler.end_conversation("3")
    sampler.end_conversation("never started")
    assert not sampler.is_idle
    assert [number for number, _ in sampler.advance()] == numbers[-1:]
    # Another request waits, and is dropped.
    sampler.start([dataclasses.replace(requests[0], conversation="waiting")])
    sampler.end_conversation("waiting")
    sampler.end_conversation("4")
    assert sampler.advance() == []
    sampler.reset()


def test_conversation_has_one_request_at_a_time(sampler: GroupSampler):
    twice = [SampleRequest((1,), seed, 4, conversation="x") for seed in range(2)]
    for requests in (twice, twice[:1], twice[1:]):
        if requests is twice[1:]:
            sampler.advance()
        with pytest.raises(ValueError, match="conversation 'x' has two requests at the same time"):
            sampler.start(requests) and sampler.start(requests)
    sampler.reset()


PIECES = [
    *(letter.encode() for letter in "ab<>/\n"),
    "\u20ac".encode()[:1],
    "\u20ac".encode()[1:],
    b"</",
    b"a>\n\n",
    b"\n\nb",
]
"""Bytes of the first tokens; the others are repetitions of them."""


def piece_of(token: int) -> bytes:
    return PIECES[token % len(PIECES)]


TEXTS = ("</a>", "\n\n", "\u20ac\u20ac", "abab")


@pytest.mark.parametrize("steps", [1, 5, DECODE_STEPS["cpu"]])
def test_the_first_token_that_completes_a_stop_text_ends_a_generation(model: LmHeadModel, steps: int):
    requests = make_requests([1, 4, 9, 17, 20, 25] * 8, temperature=5.0)
    free = make_sampler(model).sample(requests)
    config = dataclasses.replace(CONFIG, stop=TEXTS)
    sampler = GroupSampler(
        model,
        config=config,
        stop_token_ids=STOP_IDS,
        token_bytes=piece_of,
        max_context=CONTEXT,
        weight_poll=WeightPoll(lambda: None, steps),
    )
    stopped, by_text = sampler.sample(requests), 0
    for one, whole in zip(stopped, free, strict=True):
        said = [b"".join(map(piece_of, whole.token_ids[:end])) for end in range(len(whole.token_ids) + 1)]
        ends = [end for end, text in enumerate(said) if any(stop.encode() in text for stop in TEXTS)]
        count = ends[0] if ends else len(whole.token_ids)
        assert (one.token_ids, one.logprobs) == (whole.token_ids[:count], whole.logprobs[:count])
        assert one.stop_reason is (StopReason.STOP if ends else whole.stop_reason)
        by_text += bool(ends)
    assert by_text > 10


@pytest.mark.medium
def test_prompt_is_no_part_of_a_stop_text(model: LmHeadModel):
    [request] = make_requests([3], temperature=0.0)
    plain = GroupSampler(model, config=CONFIG, stop_token_ids=[], max_context=CONTEXT).sample([request])
    texts = {request.prompt_tokens[-1]: b"a", plain[0].token_ids[0]: b"b"}
    config = dataclasses.replace(CONFIG, stop=("ab",))
    sampler = GroupSampler(
        model, config=config, stop_token_ids=[], token_bytes=lambda token: texts.get(token, b""), max_context=CONTEXT
    )
    assert sampler.sample([request]) == plain


def test_sizes_that_do_not_fit_are_refused(model: LmHeadModel, sampler: GroupSampler):
    with pytest.raises(ValueError, match="max_context is 1"):
        GroupSampler(model, config=CONFIG, stop_token_ids=STOP_IDS, max_context=1)
    with pytest.raises(PromptTooLongError, match=rf"request 1: the prompt has {CONTEXT} tokens, but the limit is 39"):
        sampler.start([SampleRequest((1,), 0, 4), SampleRequest((1,) * CONTEXT, 0, 4)])
    assert sampler.advance() == []
    # 2 layers, keys and values, 8 slots, 40 positions, 2 heads of 8 float32 numbers.
    size = 2 * 2 * 8 * 40 * 2 * 8 * 4 / 2**30
    fits, too_small = (dataclasses.replace(CONFIG, max_cache_gib=size * factor) for factor in (1.0, 0.99))
    GroupSampler(model, config=fits, stop_token_ids=STOP_IDS, max_context=CONTEXT)
    with pytest.raises(
        ValueError, match=r"the KV cache of 8 sequences .* of 40 tokens takes .* lower sampling.max_seqs"
    ):
        GroupSampler(model, config=too_small, stop_token_ids=STOP_IDS, max_context=CONTEXT)


@pytest.mark.medium
def test_bfloat16_cache_is_close_to_float32(model: LmHeadModel):
    requests = make_requests(LENGTHS)
    config = dataclasses.replace(CONFIG, kv_cache_dtype="bfloat16")
    generations = GroupSampler(model, config=config, stop_token_ids=STOP_IDS, max_context=CONTEXT).sample(requests)
    assert 1e-5 < largest_error(model, requests, generations) < 0.1


def assert_complete(generation: Generation, allowed: int) -> None:
    if generation.stop_reason is StopReason.STOP:
        assert generation.token_ids[-1] in STOP_IDS
        assert len(generation.token_ids) <= allowed
    else:
        assert generation.token_ids[-1] not in STOP_IDS
        assert len(generation.token_ids) == allowed
    assert not set(generation.token_ids[:-1]) & set(STOP_IDS)


def test_every_slot_can_fill_the_whole_context(sampler: GroupSampler):
    """All slots are full at the same time."""
    generations = []
    for seed in range(4):
        requests = [
            dataclasses.replace(request, seed=seed * SLOTS + index)
            for index, request in enumerate(make_requests([CONTEXT - MAX_NEW] * SLOTS))
        ]
        generations += sampler.sample(requests)
    for generation in generations:
        assert_complete(generation, MAX_NEW)
    [short] = sampler.sample([SampleRequest((1,) * (CONTEXT - 2), 3, MAX_NEW)])
    assert_complete(short, 2)
    assert sum(g.stop_reason is StopReason.LENGTH for g in generations) >= SLOTS


def test_each_stop_token_alone_stops(sampler: GroupSampler):
    generations = sampler.sample(make_requests([4] * 400))
    last = [g.token_ids[-1] for g in generations if g.stop_reason is StopReason.STOP]
    assert set(last) == set(STOP_IDS)
    for generation in generations:
        assert_complete(generation, MAX_NEW)


@pytest.mark.medium
def test_requests_after_compile_compile_nothing(model: LmHeadModel):
    # Calls for long prompts are small with few slots and little room for prompts. No other test has this context.
    context, config = CONTEXT - 1, dataclasses.replace(CONFIG, max_new_tokens=CONTEXT - 2, max_seqs=4)
    sampler = GroupSampler(model, config=config, stop_token_ids=STOP_IDS, max_context=context)
    long = sampler_sizes(config, context, None).prefill.long_tokens(context - 2)
    assert 0 < long < context - 2, "the prompt has a long and a short call"
    with counted_compiles() as count:
        sampler.compile()
    assert count.programs > 0
    requests = make_requests([2, context - 1])
    with counted_compiles() as count:
        sampler.sample([*requests, *requests])
    assert count.programs == 0


def test_new_weights_are_used_at_once_without_compiling(sampler: GroupSampler, model: LmHeadModel):
    requests = make_requests(LENGTHS)
    before = sampler.sample(requests)
    other = build(LLAMA, seed=1)
    with counted_compiles() as compiles:
        sampler.update_weights(other, 5)
        after = sampler.sample(requests)
    assert compiles.programs == 0
    assert largest_error(other, requests, after) < 1e-5
    assert {g.token_ids for g in after} != {g.token_ids for g in before}
    assert {(g.first_version, g.last_version) for g in before} == {(0, 0)}
    assert {(g.first_version, g.last_version) for g in after} == {(5, 5)}
    for change in (lambda leaf: leaf[..., :1], lambda leaf: leaf.astype(jnp.bfloat16)):
        changed = eqx.tree_at(lambda m: m.transformer.norm.weight.array, model, replace_fn=change)
        with pytest.raises(ValueError, match="update_weights to version 3: the model's structure, shapes or dtypes"):
            sampler.update_weights(changed, 3)
    assert sampler.version == 5


def test_calls_end_after_the_given_time_with_the_same_generations(model: LmHeadModel):
    requests = make_requests(LENGTHS[:SLOTS])
    sampler = GroupSampler(model, config=CONFIG, stop_token_ids=STOP_IDS, max_context=CONTEXT, call_seconds=1e-9)
    assert sampler.sample(requests) == make_sampler(model).sample(requests)
    # The last call took longer, so each call has one step now.
    numbers = sampler.start(requests)
    sampler.advance()
    progress = sampler.progress(dict.fromkeys(numbers, 0))
    assert len(progress) > 1
    assert {len(part.token_ids) for part in progress.values()} == {1}
    sampler.reset()


def test_weights_with_nan_raise_and_do_not_affect_later_calls(sampler: GroupSampler, model: LmHeadModel):
    requests = make_requests(LENGTHS)
    expected = sampler.sample(requests)
    sampler.update_weights(jax.tree.map(lambda leaf: leaf * jnp.nan, model), 1)
    with pytest.raises(SamplerError, match="Check the weights for NaN"):
        sampler.sample(requests)
    sampler.update_weights(model, 0)
    assert sampler.sample(requests) == expected


@pytest.mark.medium
@pytest.mark.parametrize("model_axis_size", [pytest.param(1, marks=pytest.mark.medium), 2])
def test_parity_on_eight_devices_with_the_learners_sharding(model_axis_size: int):
    command = [sys.executable, "-m", "tests.sampling.sharded_parity", str(model_axis_size)]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["devices"] == measured["parameter_devices"] == 8
    # Weights that are converted for several hosts stay sharded until they are copied.
    assert measured["copies_equal"]
    assert measured["converted_bytes"] < 0.5
    assert measured["sharded"]
    assert measured["repeats"]
    assert measured["recompiled"] == 0
    assert measured["error"] < 1e-5
