# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import os
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levanter.layers.attention import AttentionMask
from levanter.optim.config import OptimizerConfig

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.loss import loss_metrics
from marin_rl.learner.placement import place_batch, placed_shape, stack_microbatches, take_microbatch
from marin_rl.learner.train_step import (
    Learner,
    NonFiniteUpdateError,
    SkipState,
    StepwiseAdamW,
    compiler_options,
    fold_metrics,
    skip_nonfinite_updates,
)
from marin_rl.objectives.kl import KlEstimator
from marin_rl.utils.levanter_line import UNUSABLE_OPTIMIZERS
from tests import fork_server
from tests.cpu_host import cpu_host
from tests.learner import stream_cases

pytestmark = pytest.mark.both_lines


@pytest.fixture(scope="module")
def one_device(tiny):
    """Return metrics and gradients on one device, by number of microbatches."""

    def run(microbatches: int):
        trainer = tiny.make_trainer(tiny.MESH_ROWS // microbatches)
        learner = tiny.make_learner(trainer, optimizer=tiny.SgdConfig())
        measured, gradient, _ = tiny.loss_and_gradient(learner, microbatches)
        return measured, gradient

    return {microbatches: run(microbatches) for microbatches in (1, 4)}


def assert_same_update(found, expected) -> None:
    for name, value in expected[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        np.testing.assert_allclose(found[1][name], gradient, atol=1e-5, err_msg=name)


@pytest.mark.medium
def test_microbatches_change_neither_loss_nor_gradient_nor_metrics(one_device) -> None:
    assert_same_update(one_device[4], one_device[1])


def test_the_gradient_is_that_of_the_textbook_formula(tiny, one_device) -> None:
    """Compute PPO's clipped term plus k3 from full logits, differentiated by jax."""
    trainer = tiny.make_trainer(tiny.MESH_ROWS)
    example = tiny.make_example(tiny.MESH_ROWS)
    settings = tiny.make_loss()
    assert settings.kl.estimator is KlEstimator.K3
    batch = {name: value.array for name, value in example.arrays().items()}

    def textbook(model) -> jax.Array:
        mask = AttentionMask.causal().with_segment_ids(example.segment_ids)
        logits = model(example.input_ids, mask).rearrange(("batch", "position", "vocab")).array
        logs = jax.nn.log_softmax(logits / settings.temperature)[:, :-1]
        logprobs = jnp.take_along_axis(logs, batch["input_ids"][:, 1:, None], -1)[..., 0]
        ratio = jnp.exp(logprobs - batch["policy_logprobs"][:, 1:])
        gain = batch["advantages"][:, 1:]
        d = batch["reference_logprobs"][:, 1:] - logprobs
        clipped = jnp.maximum(-gain * ratio, -gain * jnp.clip(ratio, 0.8, 1.2))
        terms = batch["importance_weights"][:, 1:] * clipped + 0.1 * (jnp.exp(d) - 1 - d)
        return jnp.sum(jnp.where(batch["loss_mask"][:, 1:], batch["loss_weights"][:, 1:] * terms, 0))

    with trainer.use_device_mesh():
        model = tiny.make_model(trainer)
        value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(textbook))(model)
    measured, found = one_device[1]
    np.testing.assert_allclose(measured["loss/total"], value, rtol=1e-5)
    expected = tiny.arrays_by_path(gradient)
    assert max(np.abs(array).max() for array in expected.values()) > 0.01
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)
    norm = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in expected.values()))
    np.testing.assert_allclose(measured["grad_norm"], norm, rtol=1e-4)


@pytest.mark.medium
def test_gradients_of_separate_calls_are_those_of_an_update(tiny, trainer) -> None:
    """Also the loss and its metrics; the sum is zero after the step that applies it."""
    learner = tiny.make_learner(trainer, optimizer=StepwiseAdamW())
    measured, expected, _ = tiny.loss_and_gradient(tiny.make_learner(trainer, optimizer=tiny.SgdConfig()), 4)
    state, reports, total = learner.start(tiny.make_model(trainer)), [], 0.0
    before = tiny.arrays_by_path(state.state.model)
    for rows in tiny.split_rows(tiny.make_example(tiny.MESH_ROWS), 4):
        value, metrics = learner.forward(state.state.model, rows, tiny.make_loss())
        state, loss, report = learner.forward_backward(state, rows, tiny.make_loss())
        np.testing.assert_allclose(value, loss, rtol=1e-5)
        assert metrics.keys() == report.keys()
        reports.append(report)
        total += float(loss)
    found = tiny.arrays_by_path(state.gradient)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(total, measured["loss/total"], rtol=1e-5)
    folded = fold_metrics(reports)
    for name in folded.keys() & measured.keys():
        np.testing.assert_allclose(float(folded[name]), measured[name], rtol=1e-4, atol=1e-6, err_msg=name)
    state, metrics = learner.step(state, 0.5, eps=1e3)
    np.testing.assert_allclose(metrics["grad_norm"], measured["grad_norm"], rtol=1e-5)
    for name, array in tiny.arrays_by_path(state.state.model).items():
        np.testing.assert_allclose(before[name] - array, 5e-4 * expected[name], atol=1e-6)
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.gradient))


class OneWeight(eqx.Module):
    weight: jax.Array


def test_gradients_of_bfloat16_parameters_are_summed_in_float32(tiny) -> None:
    """In bfloat16, 256 + 1 is 256."""
    trainer = tiny.make_trainer(jax.device_count(), policy="p=bf16,c=bf16")

    def loss(model: OneWeight, batch: object, key: None = None) -> tuple[jax.Array, dict]:
        return model.weight.astype(jnp.float32), {}

    learner = Learner(trainer, tiny.SgdConfig(), loss, num_updates=1)
    state = learner.initial_state(OneWeight(jnp.zeros((), jnp.bfloat16)), jax.random.PRNGKey(0))
    microbatches = tiny.split_rows(tiny.make_example(300 * jax.device_count(), 4), 300)
    state, _ = learner.update(state, microbatches)
    assert (state.model.weight.dtype, float(state.model.weight)) == (jnp.bfloat16, -300.0)


@pytest.mark.medium
def test_any_mesh_gives_the_same_loss_and_gradient(one_device, trainer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.learner.mesh_cases", str(tmp_path)]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["devices"] == 8
    of_streams = stream_cases.update(
        stream_cases.make_stream_learner(trainer), stream_cases.pack(stream_cases.ON_MESHES)
    )
    meshes = {
        "data8-passes4": {"replica": 1, "data": 8, "model": 1},
        "data4-model2-passes2": {"replica": 1, "data": 4, "model": 2},
    }
    for case, mesh in meshes.items():
        assert facts[case]["mesh"] == mesh
        assert facts[case]["shards"] == 8  # parameters are split over all devices
        found = facts[case]["measured"], dict(np.load(tmp_path / f"{case}.npz"))
        streams = facts[case]["streams"], dict(np.load(tmp_path / f"{case}-streams.npz"))
        assert_same_update(streams, of_streams)
        assert_same_update(found, one_device[1])
    assert facts["meshes differ"]
    assert facts["restored on the other mesh"]
    assert facts["compiled after the restore"] == 0
    for difference, largest in facts["shared prompts"]:
        assert difference <= 1e-5 * max(largest, 1.0)
        assert largest > 1e-3


@pytest.mark.medium
def test_on_a_cpu_xla_compiles_reductions_itself(tiny) -> None:
    """The library YNN takes up to ten times as long for reductions with an exponential."""
    mesh = tiny.make_trainer().device_mesh
    logits = jax.ShapeDtypeStruct((256, 32_000), jnp.float32)
    programs = [
        jax.jit(jax.nn.logsumexp, static_argnums=1, compiler_options=options).lower(logits, -1).compile().as_text()
        for options in (None, compiler_options(mesh))
    ]
    assert ["ynn" in str(program) for program in programs] == [True, False]


@pytest.mark.medium
def test_a_batch_above_the_capacity_compiles_once(tiny, learner) -> None:
    examples = [tiny.make_example(seed=seed) for seed in range(8)]
    state, _ = learner.update(tiny.fresh_state(learner), examples[:4])
    with tiny.counted_compiles() as compiled:
        state, _ = learner.update(state, examples[:5])
    assert len(compiled) == 1
    with tiny.counted_compiles() as compiled:
        learner.update(state, examples)
    assert compiled == []


@pytest.mark.medium
def test_an_update_uses_the_program_that_was_compiled_ahead(tiny, trainer) -> None:
    example, counts = tiny.make_example(), []
    # The first learner also compiles single operations outside of its program.
    for _ in range(2):
        learner = tiny.make_learner(trainer)
        state = tiny.fresh_state(learner)
        with tiny.counted_compiles() as compiled:
            learner.compile_ahead(jax.eval_shape(lambda state=state: state.model), example)
            learner.update(state, [example])
        counts.append(len(compiled))
    assert counts[-1] == 1


def with_experts(example: RlExample, seed: int) -> RlExample:
    """The microbatch with random chosen experts."""
    axes = (*example.input_ids.axes, hax.Axis("layer", 2), hax.Axis("top_experts", 3))
    experts = np.random.default_rng(seed).integers(256, size=[axis.size for axis in axes]).astype(np.uint8)
    return dataclasses.replace(example, experts=hax.named(experts, axes))


@pytest.mark.parametrize("has_own_rows", [True, False])
def test_chosen_experts_are_placed_like_the_tokens(tiny, trainer, monkeypatch, has_own_rows: bool) -> None:
    if has_own_rows:
        monkeypatch.setattr("marin_rl.learner.placement.own_rows", lambda config: np.arange)
    stacked = stack_microbatches([with_experts(tiny.make_example(), 3)], 2)
    assert stacked.experts is not None
    rows = stacked.input_ids.axis_size("batch")
    with trainer.use_device_mesh():
        placed = place_batch(stacked, trainer, rows if has_own_rows else None)
        shape = placed_shape(stacked, trainer.device_mesh, trainer.compute_axis_mapping)
    assert placed.experts is not None
    assert shape.experts is not None
    assert placed.experts.axes == shape.experts.axes == stacked.experts.axes
    assert placed.experts.array.sharding.is_equivalent_to(shape.experts.array.sharding, 5)
    np.testing.assert_array_equal(placed.experts.array, stacked.experts.array)
    taken = take_microbatch(placed, 0).experts
    assert taken is not None
    np.testing.assert_array_equal(taken.array, stacked.experts.array[0])


def test_stacked_microbatches_are_those_of_the_batch_then_zeros(tiny) -> None:
    examples = [with_experts(tiny.make_example(seed=seed), seed) for seed in range(3)]
    stacked = stack_microbatches(examples, 1)
    for name, value in stacked.arrays().items():
        assert isinstance(value.array, np.ndarray), name  # not on a device yet
        more = ["layer", "top_experts"] if name == "experts" else []
        assert [axis.name for axis in value.axes] == ["microbatch", "batch", "position", *more]
        parts = [np.asarray(getattr(example, name).array) for example in examples]
        np.testing.assert_array_equal(value.array, [*parts, np.zeros_like(parts[0])], err_msg=name)
        assert value.dtype == parts[0].dtype
    second = take_microbatch(stacked, 1)
    assert jax.tree.structure(second) == jax.tree.structure(examples[1])
    tiny.assert_same_bits(jax.tree.map(jnp.asarray, second), examples[1])


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:`_get_mesh` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(OptimizerConfig.get_known_choices()))
def test_the_config_refuses_the_optimizers_that_cannot_be_compiled(tiny, trainer, name: str) -> None:
    changes = {"max_grad_norm": None} if name == "mars" else {}
    learner = tiny.make_learner(trainer, optimizer=OptimizerConfig.get_choice_class(name)(**changes))

    def lower() -> None:
        learner.lower(tiny.fresh_state(learner), [tiny.make_example()])

    if name not in UNUSABLE_OPTIMIZERS:
        lower()
        return
    with pytest.raises((TypeError, ValueError, AttributeError)):
        lower()


def test_later_steps_with_any_microbatch_count_do_not_compile(tiny, learner) -> None:
    def step(state, seeds):
        state, measured = learner.update(state, [tiny.make_example(seed=seed) for seed in seeds])
        loss_metrics([{name: m for name, m in measured.items() if name.startswith(MEASURED_BY_THE_LOSS)}])
        return state

    state = step(tiny.fresh_state(learner), [0])
    with tiny.counted_compiles() as compiled:
        for microbatches in (1, 3, 4, 2):
            state = step(state, range(microbatches))
    assert compiled == []
    with tiny.counted_compiles() as compiled:
        jax.jit(lambda x: x + 17)(jnp.ones(3)).block_until_ready()
    assert compiled  # the listener works


MEASURED_BY_THE_LOSS = ("loss/policy", "loss/kl", "policy/", "log_ratio/")


def test_metrics_of_a_step(tiny, learner) -> None:
    state, measures = learner.update(tiny.fresh_state(learner), [tiny.make_example()])
    assert int(state.step) == 1
    assert {name for name in measures if not name.startswith(MEASURED_BY_THE_LOSS)} == {"loss/total", "grad_norm", "lr"}
    measured = {name: float(metric) for name, metric in measures.items()}
    assert measured["lr"] == pytest.approx(1e-2)
    assert measured["loss/total"] == pytest.approx(measured["loss/policy_avg"] + measured["loss/kl_avg"], rel=1e-5)


def test_a_state_is_placed_alike_when_fresh_and_after_a_step(tiny, learner) -> None:
    fresh = tiny.fresh_state(learner)
    placed = tiny.placements(fresh)
    assert all(committed for _, committed in placed.values())
    state, _ = learner.update(fresh, [tiny.make_example()])
    assert tiny.placements(state) == placed
    somewhere = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
    assert tiny.placements(somewhere) != placed
    assert tiny.placements(learner.place(somewhere)) == placed
    tiny.assert_same_bits(learner.place(somewhere), state)


def test_the_same_step_twice_is_bit_identical(tiny, learner) -> None:
    first, _ = learner.update(tiny.fresh_state(learner), [tiny.make_example()])
    second, _ = learner.update(tiny.fresh_state(learner), [tiny.make_example()])
    tiny.assert_same_bits(first, second)


def test_training_lowers_the_loss(tiny, learner) -> None:
    state, losses = tiny.fresh_state(learner), []
    for _ in range(5):
        state, measured = learner.update(state, [tiny.make_example()])
        losses.append(float(measured["loss/total"]))
    assert losses[-1] < losses[0]


def test_nonfinite_update_raises(tiny, learner) -> None:
    state, _ = learner.update(tiny.fresh_state(learner), [tiny.make_example()])
    weights = np.array(tiny.make_example().loss_weights.array)
    weights[weights > 0] = np.nan
    with pytest.raises(NonFiniteUpdateError, match=r"update 2: loss nan, gradient norm nan; the weights are unchanged"):
        learner.update(state, [tiny.replace_arrays(tiny.make_example(), loss_weights=weights)])
    # The learner is still usable.
    learner.update(tiny.fresh_state(learner), [tiny.make_example()])


def test_a_dispatched_update_reports_nonfinite_numbers_when_it_is_waited_for(tiny, learner) -> None:
    before, _ = learner.update(tiny.fresh_state(learner), [tiny.make_example()])
    kept = jax.tree.map(jnp.copy, before)
    weights = np.array(tiny.make_example().loss_weights.array)
    weights[weights > 0] = np.nan
    state, update = learner.dispatch(before, [tiny.replace_arrays(tiny.make_example(), loss_weights=weights)])
    tiny.assert_same_bits((state.model, state.opt_state.inner), (kept.model, kept.opt_state.inner))
    # A later update may already be running, and donates the state.
    _, later = learner.dispatch(state, [tiny.make_example()])
    with pytest.raises(NonFiniteUpdateError, match="update 2: loss nan"):
        update.wait()
    assert np.isfinite(float(later.wait()["loss/total"]))


@pytest.mark.medium
def test_nonfinite_gradient_leaves_weights_and_moments(tiny, learner) -> None:
    state, _ = learner.update(tiny.fresh_state(learner), [tiny.make_example()])
    gradient = jax.tree.map(lambda leaf: leaf + np.nan, eqx.filter(state.model, eqx.is_inexact_array))
    with learner.trainer.use_device_mesh():
        after, _ = state.take_step(gradient, loss=np.nan, key=state.training_key)
    assert not bool(after.opt_state.finite)
    tiny.assert_same_bits((after.model, after.opt_state.inner), (state.model, state.opt_state.inner))


def test_the_shape_of_a_state_is_that_of_the_state(tiny, learner) -> None:
    state = tiny.fresh_state(learner)
    shape = learner.state_shape(state.model)
    assert jax.tree.structure(shape) == jax.tree.structure(state)
    for found, leaf in zip(jax.tree.leaves(shape), jax.tree.leaves(state), strict=True):
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.medium
def test_bfloat16_compute_trains_close_to_float32(tiny, learner) -> None:
    mixed = tiny.make_learner(tiny.make_trainer(policy="p=f32,c=bf16"))
    state, exact = tiny.fresh_state(mixed), tiny.fresh_state(learner)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array)))
    losses = []
    for _ in range(3):
        state, measured = mixed.update(state, [tiny.make_example()])
        exact, expected = learner.update(exact, [tiny.make_example()])
        loss, exact_loss = float(measured["loss/total"]), float(expected["loss/total"])
        assert np.isfinite(loss)
        assert loss == pytest.approx(exact_loss, rel=0.02)
        assert float(measured["policy/entropy_avg"]) == pytest.approx(float(expected["policy/entropy_avg"]), rel=0.01)
        losses.append((loss, exact_loss))
    assert any(mixed_loss != exact_loss for mixed_loss, exact_loss in losses)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array)))


CLIP = 1.0
OPTIMIZER = skip_nonfinite_updates(optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1)))
PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([[0.5]])}
GRADS = {"w": jnp.array([3.0, 0.0, -4.0]), "b": jnp.array([[12.0]])}


@jax.jit
def apply(grads, state: SkipState, params, loss):
    updates, state = OPTIMIZER.update(grads, state, params, loss=loss)
    return optax.apply_updates(params, updates), state


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def broken(value: float):
    return {"w": GRADS["w"].at[1].set(value), "b": GRADS["b"]}


BROKEN_STEPS = {
    "nan gradient": (broken(np.nan), 1.0),
    "infinite gradient": (broken(np.inf), 1.0),
    "nan loss": (GRADS, np.nan),
    "infinite loss": (GRADS, -np.inf),
}


@pytest.fixture(params=BROKEN_STEPS)
def broken_step(request: pytest.FixtureRequest):
    return BROKEN_STEPS[request.param]


def test_skipped_update_leaves_weights_and_moments_bit_identical(broken_step) -> None:
    params, state = apply(GRADS, OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    after_params, after = apply(broken_step[0], state, params, broken_step[1])
    assert not bool(after.finite)
    assert bits(after_params) == bits(params)
    assert bits(after.inner) == bits(state.inner)


def test_training_continues_after_a_skipped_update(broken_step) -> None:
    params, state = apply(GRADS, OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    skipped_params, skipped = apply(broken_step[0], state, params, broken_step[1])
    expected_params, expected = apply(GRADS, state, params, 1.0)
    found_params, found = apply(GRADS, skipped, skipped_params, 1.0)
    assert bool(found.finite)
    assert bits(found_params) == bits(expected_params)
    assert bits(found.inner) == bits(expected.inner)


@pytest.mark.medium
def test_finite_update_is_that_of_the_wrapped_optimizer() -> None:
    bare = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1))
    updates, inner = bare.update(GRADS, bare.init(PARAMS), PARAMS)
    found, state = OPTIMIZER.update(GRADS, OPTIMIZER.init(PARAMS), PARAMS, loss=0.5)
    assert bool(state.finite)
    assert bits(found) == bits(updates)
    assert bits(state.inner) == bits(inner)


def test_the_norm_is_the_one_before_clipping() -> None:
    _, state = apply(GRADS, OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    assert float(state.grad_norm) == 13.0 > CLIP
    assert state.grad_norm.dtype == jnp.float32


def test_norm_of_a_nonfinite_gradient_is_reported() -> None:
    _, state = apply(broken(np.nan), OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    assert np.isnan(state.grad_norm)


def test_extra_arguments_reach_the_optimizer() -> None:
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    wrapped = skip_nonfinite_updates(spy)
    wrapped.update(GRADS, wrapped.init(PARAMS), PARAMS, loss=2.0, obj_fn=print)
    assert seen == {"loss": 2.0, "obj_fn": print}
