# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The experts of a generation are those that the router of the full forward pass chooses."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import TokenRows
from marin_rl.learner.logprobs import activations_and_routing
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import SampleRequest, WeightPoll
from marin_rl.types import Generation
from tests.sampling.families import CONTEXT, FAMILIES, random_model
from tests.sampling.test_group_sampler import (
    LENGTHS,
    MAX_NEW,
    OBSERVATIONS,
    SLOTS,
    STOP_IDS,
    make_requests,
    run_conversation,
)

pytestmark = [pytest.mark.both_lines, pytest.mark.medium]

MIXTURES = [name for name in ("mixtral", "qwen3_moe") if name in FAMILIES]


def chosen_by_forward_pass(model: LmHeadModel, sequences: list[tuple[int, ...]]) -> np.ndarray:
    """Return the experts of every position, `[sequence, position, layer, top_experts]`."""
    tokens = np.zeros((len(sequences), CONTEXT), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    axes = Axis("batch", len(tokens)), Axis("position", CONTEXT)
    ids, ones = hax.named(jnp.asarray(tokens), axes), hax.ones(axes, jnp.int32)
    rows = TokenRows(input_ids=ids, segment_ids=ones, position_ids=hax.arange(axes[1]).broadcast_axis(axes[0]))
    experts = hax.named_jit(lambda model, rows: activations_and_routing(model, rows)[1])(model, rows)
    return np.asarray(experts.rearrange(("batch", "position", "layer", "top_experts")).array)


def check(model: LmHeadModel, requests: list[SampleRequest], generations: list[Generation]) -> None:
    sequences = [request.prompt_tokens + one.token_ids for request, one in zip(requests, generations, strict=True)]
    expected = chosen_by_forward_pass(model, sequences)
    for row, (sequence, generation) in enumerate(zip(sequences, generations, strict=True)):
        assert generation.experts is not None
        assert generation.experts.dtype == np.uint8
        np.testing.assert_array_equal(generation.experts, expected[row, : len(sequence) - 1])


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_those_of_the_full_forward_pass(name: str):
    """Also of refilled slots, of copied prompts, in further turns, and under new weights."""
    model, other = (random_model(FAMILIES[name], seed) for seed in range(2))
    config = SamplingConfig(max_new_tokens=MAX_NEW, max_seqs=SLOTS)
    sampler = GroupSampler(model, config=config, stop_token_ids=STOP_IDS, max_context=CONTEXT, experts=True)
    requests = make_requests(LENGTHS)
    copies = [SampleRequest(requests[index].prompt_tokens, 100 + index, MAX_NEW) for index in (9, 9, 14)]
    requests = [*requests, *copies]
    check(model, requests, sampler.sample(requests))
    sampler.update_weights(other, 1)
    check(other, *run_conversation(sampler, "episode", OBSERVATIONS[:2]))


def test_the_experts_of_parts_are_those_of_the_generation():
    model = random_model(FAMILIES["mixtral"])
    config = SamplingConfig(max_new_tokens=MAX_NEW, max_seqs=SLOTS)
    sampler = GroupSampler(
        model,
        config=config,
        stop_token_ids=(),
        max_context=CONTEXT,
        experts=True,
        weight_poll=WeightPoll(lambda: None, 3),
    )
    (number,) = sampler.start(make_requests([5]))
    parts, seen, ended = [], 0, []
    while not ended:
        ended = sampler.advance()
        if part := sampler.progress({number: seen}).get(number):
            parts.append(part.experts)
            seen += len(part.token_ids)
    assert len(parts) > 1
    experts = ended[0][1].experts
    assert experts is not None
    found = np.concatenate(parts)
    assert len(found) == 5 + seen - 1
    np.testing.assert_array_equal(found, experts[: len(found)])


def test_a_sampler_reports_experts_only_on_request():
    model = random_model(FAMILIES["mixtral"])
    config = SamplingConfig(max_new_tokens=2, max_seqs=SLOTS)
    sampler = GroupSampler(model, config=config, stop_token_ids=STOP_IDS, max_context=CONTEXT)
    (generation,) = sampler.sample(make_requests([3], max_new_tokens=2))
    assert generation.experts is None
