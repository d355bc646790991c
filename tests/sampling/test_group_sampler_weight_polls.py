# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weight updates during decoding: the version and the distribution of each token."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import SampleRequest, WeightPoll
from marin_rl.types import Generation
from tests.sampling.test_group_sampler import (
    CONFIG,
    CONTEXT,
    LENGTHS,
    LLAMA,
    MAX_NEW,
    SLOTS,
    STOP_IDS,
    build,
    log_softmax,
    make_requests,
    make_sampler,
)

ROUNDS = 2
BEFORE = 3 * ROUNDS
"""Tokens of a sequence at poll 3."""


class Watch:
    """A sampler with an action at each weight poll."""

    def __init__(self, model: LmHeadModel) -> None:
        self.model = model
        self.weight_poll = 0
        self.at: dict[int, Callable[[], None]] = {}
        self.sampler = GroupSampler(
            model,
            config=CONFIG,
            stop_token_ids=STOP_IDS,
            max_context=CONTEXT,
            weight_poll=WeightPoll(self.poll, ROUNDS),
        )

    def poll(self) -> None:
        self.at.get(self.weight_poll, lambda: None)()
        self.weight_poll += 1

    def sample(self, requests: Sequence[SampleRequest], **at: Callable[[], None]) -> list[Generation]:
        """Sample under the first weights, version 0, with actions at polls 0, 1, ..."""
        self.sampler.update_weights(self.model, 0)
        self.weight_poll = 0
        self.at = {int(name.removeprefix("poll")): action for name, action in at.items()}
        return self.sampler.sample(requests)

    def swap(self, model: LmHeadModel, version: int) -> Callable[[], None]:
        return lambda: self.sampler.update_weights(model, version)


@pytest.fixture(scope="module")
def model() -> LmHeadModel:
    return build(LLAMA)


@pytest.fixture(scope="module")
def watch(model: LmHeadModel) -> Watch:
    return Watch(model)


@pytest.fixture(scope="module")
def alone(model: LmHeadModel) -> list[Generation]:
    """Return the generations of `REQUESTS` under the first weights, without polls."""
    return make_sampler(model).sample(REQUESTS)


@pytest.fixture(scope="module")
def other() -> LmHeadModel:
    return build(LLAMA, seed=1)


# Sequences end at stop tokens or at their limits: before, at and after the weight update.
REQUESTS = [
    dataclasses.replace(request, max_new_tokens=limit)
    for request, limit in zip(
        make_requests([1, 7, 8, 9, 15, 16, 17, 24]), [1, 3, BEFORE, BEFORE + 1, 4, 12, 12, 12], strict=True
    )
]


@pytest.mark.medium
def test_polls_without_new_weights_change_nothing(model: LmHeadModel, watch: Watch) -> None:
    requests = make_requests([*LENGTHS, *[3] * (2 * SLOTS)])
    wanted = make_sampler(model).sample(requests)
    for _ in range(2):
        assert watch.sample(requests) == wanted
    assert watch.weight_poll >= len(requests) / SLOTS


@pytest.mark.medium
def test_sampler_polls_every_n_decode_steps(watch: Watch) -> None:
    for limit in (1, ROUNDS, ROUNDS + 1, 2 * ROUNDS + 1, MAX_NEW):
        found = watch.sample([SampleRequest((5, 9), seed, limit) for seed in range(SLOTS)])
        longest = max(len(one.token_ids) for one in found)
        assert longest == limit, "one of the seeds does not stop early"
        assert watch.weight_poll == math.ceil(longest / ROUNDS)


def test_last_version_is_that_of_the_last_update_before_the_end(
    watch: Watch, other: LmHeadModel, model: LmHeadModel, alone: list[Generation]
) -> None:
    found = watch.sample(REQUESTS, poll1=watch.swap(other, 2), poll2=watch.swap(model, 3), poll4=watch.swap(other, 5))
    for one, old in zip(found, alone, strict=True):
        assert (one.token_ids[:2], one.logprobs[:2]) == (old.token_ids[:2], old.logprobs[:2])
        # Polls 1, 2 and 4 come after 2, 4 and 8 tokens.
        wanted = 5 if len(one.token_ids) > 8 else 3 if len(one.token_ids) > 4 else 2 if len(one.token_ids) > 2 else 0
        assert (one.first_version, one.last_version) == (0, wanted)
    assert {one.last_version for one in found} == {0, 2, 3, 5}


def layers_of(model: LmHeadModel) -> list:
    stacked = model.transformer.layers.stacked
    return [hax.tree_util.tree_map(lambda leaf, i=i: leaf["layer", i], stacked) for i in range(LLAMA.num_layers)]


def attend(query: NamedArray, keys: np.ndarray, values: np.ndarray, first: int) -> NamedArray:
    """Compute causal attention in float64; the queries are at positions from `first` on."""
    query = query.rearrange(("position", "kv_head", "q_heads_per_group", "head_size"))
    scores = np.einsum("qhgd,khd->hgqk", np.asarray(query.array, np.float64), keys) / math.sqrt(keys.shape[-1])
    past = np.arange(len(keys)) <= first + np.arange(scores.shape[2])[:, None]
    weights = np.where(past, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = np.einsum("hgqk,khd->qhgd", weights, values)
    heads = NamedArray(jnp.asarray(attended, jnp.float32), query.axes)
    return heads.flatten_axes(("kv_head", "q_heads_per_group"), "heads")


def mixed_logprobs(tokens: Sequence[int], parts: Sequence[tuple[LmHeadModel, int, int]]) -> np.ndarray:
    """Return `[position, vocab]` logits; each model processes its range of positions over the cache of the earlier
    models, so keys and values of a position come from the model that processed it."""
    order = ("position", "kv_head", "head_size")
    kept: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(LLAMA.num_layers)]
    found = []
    for model, start, stop in parts:
        positions = hax.named(jnp.arange(start, stop), "position")
        x = model.embeddings.embed(hax.named(jnp.asarray(tokens[start:stop]), "position"))
        for layer, cache in zip(layers_of(model), kept, strict=True):
            query, key, value = layer.self_attn._compute_qkv(layer.input_layernorm(x), key=None, pos_ids=positions)
            cache.append(tuple(np.asarray(one.rearrange(order).array, np.float64) for one in (key, value)))
            keys, values = (np.concatenate(all_parts) for all_parts in zip(*cache, strict=True))
            x = x + layer.self_attn.o_proj(attend(query, keys, values, start))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = hax.dot(model.transformer.norm(x), model.get_lm_head(), axis="embed")
        found.append(np.asarray(logits.rearrange(("position", "vocab")).array, np.float64))
    return log_softmax(np.concatenate(found))


@pytest.mark.medium
def test_after_an_update_of_all_weights_tokens_use_the_old_cache(
    watch: Watch, model: LmHeadModel, other: LmHeadModel
) -> None:
    length = 16
    requests = make_requests([length] * SLOTS)
    found = watch.sample(requests, poll3=watch.swap(other, 1))
    # Token BEFORE - 1 was sampled by the old weights, and is processed by the new ones.
    swap, end = length + BEFORE - 1, length + MAX_NEW - 1
    errors, differences = [], []
    for request, one in zip(requests, found, strict=True):
        tokens = (*request.prompt_tokens, *one.token_ids, *[0] * MAX_NEW)
        oracle = mixed_logprobs(tokens, [(model, 0, swap), (other, swap, end)])
        anew = mixed_logprobs(tokens, [(other, 0, end)])
        for index, (token, value) in enumerate(zip(one.token_ids, one.logprobs, strict=True), start=length - 1):
            errors.append(abs(value - oracle[index, token]))
            if index >= swap:
                differences.append(abs(value - anew[index, token]))
    assert max(errors) < 1e-5
    assert len(differences) >= 10
    assert max(differences) > 0.1, "with a cache of the new weights they would be others"


@pytest.mark.parametrize(("poll", "error"), [(0, OSError), (2, KeyboardInterrupt)])
def test_failing_poll_ends_the_call_and_leaves_a_working_sampler(
    watch: Watch, alone: list[Generation], poll: int, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("no route to the weights")

    with pytest.raises(error, match="no route to the weights"):
        watch.sample(REQUESTS, **{f"poll{poll}": fail})
    assert watch.sample(REQUESTS) == alone


def test_progress_returns_the_tokens_of_the_generations(watch: Watch, alone: list[Generation]) -> None:
    sampler = watch.sampler
    sampler.update_weights(watch.model, 0)
    numbers = sampler.start(REQUESTS)
    received: dict[int, list[tuple[int, float]]] = {number: [] for number in numbers}
    ended: dict[int, Generation] = {}
    assert sampler.progress(dict.fromkeys(numbers, 0)) == {}
    while len(ended) < len(numbers):
        ended |= sampler.advance()
        for number, part in sampler.progress({number: len(got) for number, got in received.items()}).items():
            assert number not in ended
            received[number] += zip(part.token_ids, part.logprobs, strict=True)
    assert [ended[number] for number in numbers] == alone
    for number, generation in ended.items():
        whole = list(zip(generation.token_ids, generation.logprobs, strict=True))
        assert received[number] == whole[: len(received[number])]
        assert len(received[number]) >= len(whole) - ROUNDS
    assert sampler.progress(dict.fromkeys(numbers, 0)) == {}
    sampler.reset()
