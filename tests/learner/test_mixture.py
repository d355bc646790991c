# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures of experts in the learner: replay, losses, meshes."""

import dataclasses
import functools
import operator
import os
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import levanter.tracker
import numpy as np
import pytest
from levanter.tracker import NoopTracker

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.rl_example import RlExample, pack_batch
from marin_rl.batching.rollout_batch import batch_rollouts, join_batches
from marin_rl.learner.logprobs import activations_and_routing, token_logprobs
from marin_rl.learner.router_loss import router_loss
from marin_rl.models import mixture
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.types import Generation, Rollout, RolloutStatus, Task, Turn
from tests import fork_server
from tests import tiny_learner as tiny
from tests.cpu_host import cpu_host
from tests.learner.mixture_cases import (
    MIXTURES,
    config_of,
    random_experts,
    sampled,
    shape_of,
    update,
    with_router,
)
from tests.sampling.test_group_sampler import make_requests

pytestmark = [pytest.mark.both_lines, pytest.mark.medium]


@pytest.fixture(scope="module", params=MIXTURES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, trainer) -> Any:
    return tiny.make_model(trainer, config_of(name))


@functools.cache
def program(name: str):
    @eqx.filter_jit
    def run(model: Any, example: RlExample):
        activations, experts, routing = activations_and_routing(model, example)
        logprobs, _ = token_logprobs(activations, model.get_lm_head(), example, temperature=1.0, block_size=16)
        assert experts is not None
        experts = experts.rearrange((*example.input_ids.axes, "layer", "top_experts"))
        return logprobs.array, experts.array, router_loss(config_of(name), routing)

    return run


def logprobs_with(name: str, model: Any, experts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Return the log-probs with given experts, the used experts, and the metrics of the router."""
    logprobs, used, (_, metrics) = program(name)(model, with_router(tiny.make_example(), name, experts))
    return np.asarray(logprobs), np.asarray(used), {key: float(metric.value()) for key, metric in metrics.items()}


@pytest.mark.filterwarnings("ignore:`_get_mesh` is deprecated:DeprecationWarning")  # levanter's blocks call it
def test_the_model_is_levanters(name: str, model: Any, trainer) -> None:
    """Activations and balancing loss, with all tokens and without replay."""
    example = tiny.make_example()
    ones = hax.ones_like(example.segment_ids)
    example = dataclasses.replace(
        example, segment_ids=ones, position_ids=hax.arange(ones.axes[1]).broadcast_axis(ones.axes[0])
    )
    routed = dataclasses.replace(with_router(example, name), experts=None)
    with trainer.use_device_mesh(), levanter.tracker.current_tracker(NoopTracker()):
        own = jax.jit(lambda: activations_and_routing(model, routed))()
        with levanter.tracker.defer_tracker_for_jit():
            expected, loss = model.activations(
                example.input_ids, example.attention_mask, key=None, pos_ids=example.position_ids
            )
    np.testing.assert_allclose(own[0].array, expected.rearrange(own[0].axes).array, atol=2e-5)
    total, metrics = router_loss(config_of(name), own[2])
    ours = total if name == "mixtral" else metrics["loss/router_balance_avg"].value()  # levanter's has no z-loss
    np.testing.assert_allclose(ours, loss.scalar() if isinstance(loss, hax.NamedArray) else loss, rtol=1e-5)


def test_replay_of_the_own_choice_is_bit_equal_and_other_choices_are_not(name: str, model: Any) -> None:
    """The same program without recorded choices routes anew. A token or a layer too late is another function."""
    routed, own, metrics = logprobs_with(name, model, None)
    assert metrics["router/differing"] == 0
    replayed, used, metrics = logprobs_with(name, model, own)
    np.testing.assert_array_equal(replayed, routed)
    np.testing.assert_array_equal(used, own)
    assert metrics["router/differing"] == 0
    for axis in (1, 2):
        moved, _, metrics = logprobs_with(name, model, np.roll(own, 1, axis=axis))
        assert np.abs(moved - routed).mean() > 1e-3
        assert metrics["router/differing"] > 0.2
    given = random_experts(name)
    given[:, ::2] = 255
    _, used, _ = logprobs_with(name, model, given)
    np.testing.assert_array_equal(used[:, 1::2], given[:, 1::2])


def test_padding_and_microbatches_do_not_change_the_statistics(name: str, model: Any) -> None:
    """The weights of all tokens of a batch add up to 1, and a shared prompt counts once."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, tiny.VOCAB, 5)
    sequences = [tiny.one_sequence([*prompt, *rng.integers(2, tiny.VOCAB, answer)], 5) for answer in (3, 2, 4)]
    batch = join_batches(sequences)
    alone = RowLayout(12, 1, packed=False)
    group = GroupRow(4, 3, 6)
    shared = dataclasses.replace(
        alone, row_cost=1.0, alternatives=(RowLayout(group.row_length, 1, packed=True, group=group),)
    )
    sums, tokens = {}, {}
    for key, layout in {"alone": alone, "shared": shared}.items():
        packed = pack_batch(batch, TokenMeanConfig(), layout, pad_token_id=0, has_router=True)
        weights = np.concatenate([part.router_weights.array.ravel() for part in packed.microbatches])
        assert weights.sum() == pytest.approx(1)
        tokens[key] = np.count_nonzero(weights)
        run = jax.jit(lambda part: activations_and_routing(model, part)[2])
        sums[key] = jax.tree.map(lambda *parts: sum(parts), *map(run, packed.microbatches))
        assert sums[key].weight[0] == pytest.approx(1)
        np.testing.assert_allclose(sums[key].loads.sum(-1), sums[key].weight * shape_of(name).per_token, rtol=1e-5)
        np.testing.assert_allclose(sums[key].probabilities.sum(-1), sums[key].weight, rtol=1e-5)
    # The last token of each sequence is not read.
    assert tokens == {"alone": 21, "shared": 13}


def test_meshes_that_split_experts_change_nothing(tmp_path: Path, trainer) -> None:
    command = [sys.executable, "-m", "tests.learner.mixture_cases", str(tmp_path)]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr[-4000:]
    for name in MIXTURES:
        found = dict(np.load(tmp_path / f"{name}.npz"))
        assert found.pop("devices") == 8
        expected = update(name, trainer, with_router(tiny.make_example(), name, random_experts(name)))
        expected |= sampled(name, None)
        assert set(found) == set(expected)
        for key, array in expected.items():
            np.testing.assert_allclose(found[key], array, rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}")


def test_tokens_are_sorted_by_expert_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mixture` chooses by the platform of the compiled program and the number of tokens."""
    arrays = [jnp.zeros(shape) for shape in ((300, 4), (300, 2), (300, 2), (3, 4, 5), (3, 4, 5), (3, 5, 4))]
    arrays[1] = arrays[1].astype(jnp.int32)
    run = jax.jit(functools.partial(mixture.mixture, activation=jnp.tanh))
    for tokens, platform, sorts in ((300, "cpu", False), (300, "tpu", True), (200, "tpu", False)):
        given = [array[:tokens] for array in arrays[:3]] + arrays[3:]
        text = run.trace(*given).lower(lowering_platforms=(platform,)).as_text()
        assert ("ragged" in text) == sorts, (tokens, platform)


def test_another_model_chooses_its_own_experts(name: str, model: Any) -> None:
    """The trunk of a critic and a teacher are not routed by the experts of the policy."""
    run = jax.jit(lambda batch: activations_and_routing(model, batch.for_other_model())[1].array)
    with_given, without = (with_router(tiny.make_example(), name, given) for given in (random_experts(name), None))
    np.testing.assert_array_equal(run(with_given), run(without))


def test_experts_that_the_model_lacks_are_refused(name: str) -> None:
    shape = shape_of(name)
    experts = np.full((4, shape.layers, shape.per_token), 255, np.uint8)
    batch = dataclasses.replace(tiny.one_sequence([1, 2, 3, 4], 2), experts=experts)
    batch.check_experts(shape.experts)
    # One that does not exist, and a choice in one of two places.
    for wrong in ([shape.experts, 0], [255, 1]):
        experts[2, 1] = wrong
        with pytest.raises(ValueError, match="rollout test: a token has the experts"):
            batch.check_experts(shape.experts)


def one_turn_rollout(id: str, prompt: tuple[int, ...], generation: Generation) -> Rollout:
    messages = ({"role": "user", "content": ""},)
    turn = Turn(prompt, generation, messages, starts_sequence=True)
    return Rollout(id, "group", Task(id, "test", messages, ""), (turn,), RolloutStatus.COMPLETED, {"reward": 1.0})


def test_replay_removes_the_effect_of_flipped_experts(trainer) -> None:
    """A sampler in bfloat16 flips experts near ties; with the learner in float32, only its rounding is left."""
    sizes = {"hidden_dim": 64, "num_layers": 4, "n_routed_experts": 64, "num_experts_per_tok": 1}
    config = dataclasses.replace(config_of("mixtral"), **sizes, lbl_coef=None, rzl_coef=None)
    model = tiny.make_model(trainer, config)
    layers = "transformer.layers.stacked.block_sparse_moe"
    where = operator.attrgetter(f"{layers}.gate.weight", f"{layers}.experts.w2.weight")
    gate, down = where(model)
    # Many near ties, and experts that differ by more than rounding.
    model = eqx.tree_at(where, model, (0.1 * gate, 3.0 * down))
    half = dataclasses.replace(trainer, mp=jmp.get_policy("p=f32,c=bf16"))
    with half.use_device_mesh():
        sampling = SamplingConfig(max_new_tokens=32, max_seqs=16)
        sampler = GroupSampler(model, config=sampling, stop_token_ids=(), max_context=40, trainer=half, experts=True)
        requests = make_requests([8] * 16, max_new_tokens=32)
        generations = sampler.sample(requests)
    rollouts = [
        one_turn_rollout(str(index), request.prompt_tokens, generation)
        for index, (request, generation) in enumerate(zip(requests, generations, strict=True))
    ]
    batch = batch_rollouts(rollouts, experts=True)
    packed = pack_batch(batch, TokenMeanConfig(), RowLayout(40, 16, packed=False), pad_token_id=0, has_router=True)
    (example,) = packed.microbatches

    @jax.jit
    def score(example: RlExample):
        trunk, _, routing = activations_and_routing(model, example)
        logprobs, _ = token_logprobs(trunk, model.get_lm_head(), example, temperature=1.0, block_size=64)
        return logprobs.array, routing.differing.mean()

    def difference(example: RlExample) -> tuple[float, float, float]:
        logprobs, differing = score(example)
        error = np.abs(packed.unpack(np.asarray(logprobs)[None]) - batch.policy_logprobs)[batch.loss_mask]
        return error.mean(), np.square(error).mean(), float(differing)

    none = np.full_like(example.experts.array, 255)
    rerouted = difference(dataclasses.replace(example, experts=hax.named(none, example.experts.axes)))
    replayed = difference(example)
    assert replayed[2] > 0.003  # experts that the learner would not have chosen
    assert rerouted[0] > 5 * replayed[0]
    assert rerouted[1] > 100 * replayed[1]
    assert replayed[0] < 0.02
