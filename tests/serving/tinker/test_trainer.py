# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The trainer of the Tinker API against dense formulas in numpy, and against a single batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.learner.critic import assemble
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.serving.tinker.records import (
    MAX_TOPK,
    AdamParams,
    Datum,
    ForwardBackward,
    ModelSpec,
    RequestError,
    SampleJob,
    SampleOutputs,
    SampleParams,
)
from marin_rl.serving.tinker.trainer import JaxTrainer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.levanter_line import IS_NEW
from tests.models.hf_checkpoint import write_checkpoint
from tests.serving.tinker.wire import Wire, serving
from tests.tiny_learner import VOCAB, make_model, make_trainer

FULL = ModelSpec(lora_rank=0, seed=0, train_unembed=True, train_mlp=True, train_attn=True)
LORA = dataclasses.replace(FULL, lora_rank=4)
CONTEXT = 16


def tiny_trainer(folder: Path) -> JaxTrainer:
    """Return the trainer of a tiny base, which is written to a folder."""
    tokenizer, trainer = ChatTokenizer(byte_tokenizer()), make_trainer()
    save_hf_policy(make_model(trainer), tokenizer, folder, trainer)
    return JaxTrainer(str(folder), tokenizer, trainer, max_context=CONTEXT, max_seqs=8, call_seconds=0.1)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelSpec], JaxTrainer]:
    """Return the same trainer with a new model."""
    trainer = tiny_trainer(tmp_path_factory.mktemp("model"))

    def new(spec: ModelSpec = FULL) -> JaxTrainer:
        trainer.create(spec)
        return trainer

    return new


def random_data(count: int, loss: str, *, width: int = 0, seed: int = 0) -> tuple[Datum, ...]:
    """Return data with any targets, factors of both signs and zeros, and old log-probs near those of the model."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(rng.integers(1, CONTEXT + 1))
        shape = (length, width) if width else (length,)
        factors = np.where(rng.random(shape) < 0.3, 0, rng.normal(size=shape)).astype(np.float32)
        inputs = {"target_tokens": rng.integers(0, VOCAB, shape)}
        if loss == "cross_entropy":
            inputs["weights"] = factors
        else:
            inputs |= {"advantages": factors, "logprobs": rng.uniform(-7, -4, shape).astype(np.float32)}
        data.append(Datum(rng.integers(0, VOCAB, length).astype(np.int32), inputs))
    return tuple(data)


def request(data: tuple[Datum, ...], loss: str = "cross_entropy", **options: Any) -> ForwardBackward:
    config = {"beta": 0.05} if loss == "dro" else {}
    given = {"loss_fn": loss, "config": config, "forward_only": False, "data": data, **options}
    return ForwardBackward(model_id="m", seq_id=1, **given)


def dense_logs(model: LmHeadModel, tokens: np.ndarray) -> np.ndarray:
    """Return the log-softmax of all logits of a sequence."""
    return np.asarray(_logs(model, _filled([tokens], (1, CONTEXT))))[0, : len(tokens)]


@eqx.filter_jit
def _logs(model: LmHeadModel, tokens: np.ndarray) -> jax.Array:
    """Return those of sequences in rows of their own, where later positions change nothing."""
    named = hax.named(tokens, (Axis("batch", len(tokens)), Axis("position", CONTEXT)))
    logits = model(named, AttentionMask.causal()).rearrange(("batch", "position", "vocab")).array
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def _filled(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return an array with zeros around arrays of one datum each."""
    filled = np.zeros(shape, arrays[0].dtype)
    for row, array in zip(filled, arrays, strict=False):
        row[tuple(map(slice, array.shape))] = array
    return filled


@eqx.filter_jit
def _logprobs_and_gradient(
    trained: Any, base: LmHeadModel, tokens: np.ndarray, targets: np.ndarray, factors: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the log-probs of targets, and the gradient of their sum with these factors."""

    def logprobs(trained: Any) -> jax.Array:
        return jnp.take_along_axis(_logs(assemble(trained, base), tokens), targets, axis=2)

    found, pull_back = jax.vjp(logprobs, trained)
    return found, pull_back(factors)[0]


def dense_loss(
    trained: Any, base: LmHeadModel, data: tuple[Datum, ...], loss: str
) -> tuple[jax.Array, list[np.ndarray], Any]:
    """Compute loss, log-probs and gradient as the documentation says, from all logits of each datum alone.

    All data of this file have one shape, for which a program is compiled once.
    """
    shape = (16, CONTEXT, 3)
    inputs = {name: [datum.inputs[name].reshape(len(datum.tokens), -1) for datum in data] for name in data[0].inputs}
    filled = {name: _filled(arrays, shape) for name, arrays in inputs.items()}
    exists = _filled([np.ones(array.shape, bool) for array in inputs["target_tokens"]], shape)
    tokens = _filled([datum.tokens for datum in data], shape[:2])

    def total(lp: jax.Array) -> jax.Array:
        factor = filled["weights" if loss == "cross_entropy" else "advantages"]
        return jnp.where(exists, _terms(loss, lp, factor, filled.get("logprobs")), 0).sum()

    run = functools.partial(_logprobs_and_gradient, trained, base, tokens, filled["target_tokens"])
    lp, _ = run(jnp.zeros(shape))
    value, factors = jax.value_and_grad(total)(lp)
    scored = [
        np.asarray(row)[own].reshape(datum.inputs["target_tokens"].shape)
        for row, own, datum in zip(lp, exists, data, strict=False)
    ]
    return value, scored, run(factors)[1]


def _terms(loss: str, lp: jax.Array, factor: np.ndarray, q: np.ndarray | None) -> jax.Array:
    if q is None:
        return -(lp * factor)
    r = jnp.exp(lp - q)
    return {
        "importance_sampling": -(r * factor),
        "ppo": -jnp.minimum(r * factor, jnp.clip(r, 0.8, 1.2) * factor),
        "cispo": -(jax.lax.stop_gradient(jnp.clip(r, 0.0, 4.0)) * lp * factor),
        "dro": -(lp * factor - 0.5 * 0.05 * (lp - q) ** 2),
    }[loss]


def gradient_of(trainer: JaxTrainer) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer._state.gradient)]


@pytest.mark.medium
@pytest.mark.parametrize("spec", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("loss", "width"),
    [("cross_entropy", 0), ("cross_entropy", 3), ("importance_sampling", 0), ("ppo", 0), ("cispo", 0), ("dro", 0)],
)
def test_loss_and_gradient_are_those_of_the_dense_formula(make, loss: str, width: int, spec: ModelSpec):
    trainer = make(spec)
    if spec.lora_rank:
        # With B at 0 the gradient of A is 0.
        trainer.forward_backward(request(random_data(3, "cross_entropy", seed=5)))
        trainer.optim_step(AdamParams(learning_rate=0.1))
    check_against_dense_formula(trainer, random_data(7, loss, width=width), loss)


def check_against_dense_formula(trainer: JaxTrainer, data: tuple[Datum, ...], loss: str) -> None:
    """Compare loss, log-probs and gradient of a call."""
    expected, logprobs, gradient = dense_loss(trainer._state.state.model, trainer._base, data, loss)
    outputs = trainer.forward_backward(request(data, loss))
    np.testing.assert_allclose(outputs.metrics["loss:sum"], expected, rtol=1e-5)
    for found, wanted in zip(outputs.logprobs, logprobs, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-6)
    for found, wanted in zip(gradient_of(trainer), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


def group_data(loss: str, *, width: int = 0, seed: int = 0) -> tuple[Datum, ...]:
    """Return data with and without a common beginning: of two groups, equal, contained in others, and with weights."""
    rng = np.random.default_rng(seed)
    factor = "weights" if loss == "cross_entropy" else "advantages"

    def datum(prompt: np.ndarray, length: int, first: int) -> Datum:
        tokens = np.append(prompt, rng.integers(0, VOCAB, length)).astype(np.int32)
        targets = np.append(tokens[1:], rng.integers(0, VOCAB)).astype(np.int64)
        if width:
            targets = np.column_stack([targets, *np.broadcast_to(tokens, (width - 1, len(tokens)))])
        factors = rng.normal(size=targets.shape).astype(np.float32)
        factors[:first] = 0
        inputs = {"target_tokens": targets, factor: factors}
        if loss != "cross_entropy":
            inputs["logprobs"] = rng.uniform(-7, -4, targets.shape).astype(np.float32)
        return Datum(tokens, inputs)

    prompts = rng.integers(0, VOCAB, (3, 11))
    samples = [datum(prompt, length, 10) for prompt in prompts[:2] for length in (2, 2, 1, 2)]
    # Without advantage, without an answer, with loss in the prompt, and one that shares half a prompt only.
    others = [datum(prompts[0], 2, 99), datum(prompts[1], 0, 10), datum(prompts[0], 2, 4), datum(prompts[1][:6], 5, 7)]
    data = [*samples, *others, samples[0], samples[0], datum(prompts[2], 1, 0), datum(prompts[2][:1], 0, 0)]
    return tuple(data[index] for index in rng.permutation(len(data)))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("loss", "width"), [("cross_entropy", 0), ("cross_entropy", 3), ("importance_sampling", 2), ("ppo", 0), ("dro", 0)]
)
def test_data_that_share_a_prompt_have_the_results_of_each_alone(make, loss: str, width: int):
    trainer, data = make(), group_data(loss, width=width)
    (_, packed), *_ = trainer._pack(data, loss)
    assert (packed.microbatches[0].group is not None) == (loss != "dro")
    check_against_dense_formula(trainer, data, loss)
    unscored = tuple(datum._replace(inputs={"target_tokens": datum.inputs["target_tokens"]}) for datum in data)
    if loss == "cross_entropy":
        # Without weights, equal answers are shared, too.
        alone = [trainer.forward_backward(request((one,), forward_only=True)).logprobs[0] for one in unscored]
        together = trainer.forward_backward(request(unscored, forward_only=True)).logprobs
        for found, wanted in zip(together, alone, strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.both_lines
@pytest.mark.medium
def test_gradient_of_chunks_is_that_of_one_call(make):
    data = random_data(40, "ppo")
    trainer = make()
    trainer.forward_backward(request(data, "ppo"))
    whole = gradient_of(trainer)
    trainer = make()
    for chunk in (data[30:], data[:7], data[7:30]):
        trainer.forward_backward(request(chunk, "ppo"))
    for found, wanted in zip(gradient_of(trainer), whole, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.medium
def test_forward_only_adds_no_gradient_and_gives_the_same_logprobs(make):
    trainer, data = make(), random_data(9, "cross_entropy")
    first = trainer.forward_backward(request(data, forward_only=True))
    assert not any(leaf.any() for leaf in gradient_of(trainer))
    second = trainer.forward_backward(request(data))
    for left, right in zip(first.logprobs, second.logprobs, strict=True):
        # Another program, which rounds differently.
        np.testing.assert_allclose(left, right, atol=2e-6)


@pytest.mark.medium
def test_infinite_ratio_of_a_token_without_advantage_is_no_nan(make):
    trainer = make()
    (datum,) = random_data(1, "importance_sampling")
    zeros = np.zeros(len(datum.tokens), np.float32)
    inputs = {**datum.inputs, "advantages": zeros, "logprobs": zeros - np.float32(1e30)}
    outputs = trainer.forward_backward(request((datum._replace(inputs=inputs),), "importance_sampling"))
    assert outputs.metrics["loss:sum"] == 0
    assert not any(leaf.any() for leaf in gradient_of(trainer))


@pytest.mark.medium
@pytest.mark.parametrize("old", [-100.0, -1000.0, -1e30])
@pytest.mark.parametrize(("loss", "sign"), [("ppo", 1), ("cispo", 1), ("cispo", -1)])
def test_an_infinite_ratio_that_is_clipped_is_as_a_large_one(make, loss: str, sign: int, old: float):
    (datum,) = random_data(1, loss, seed=2)
    advantages = sign * (1 + np.abs(datum.inputs["advantages"]))
    # Some tokens have ratios near 1, whose gradient must remain.
    is_infinite = np.arange(len(datum.tokens)) % 3 == 0

    def run(logprob: float) -> tuple[float, list[np.ndarray]]:
        logprobs = np.where(is_infinite, np.float32(logprob), datum.inputs["logprobs"])
        trainer = make()
        inputs = {**datum.inputs, "advantages": advantages, "logprobs": logprobs}
        outputs = trainer.forward_backward(request((datum._replace(inputs=inputs),), loss))
        return outputs.metrics["loss:sum"], gradient_of(trainer)

    (loss_sum, gradient), (wanted_sum, wanted) = run(old), run(-20.0)
    assert loss_sum == wanted_sum
    assert any(leaf.any() for leaf in wanted)
    for found, expected in zip(gradient, wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.medium
def test_a_loss_without_a_ratio_has_a_finite_gradient_at_any_old_logprobs(make):
    (datum,) = random_data(1, "dro")
    logprobs = np.full(len(datum.tokens), -1000, np.float32)
    check_against_dense_formula(make(), (datum._replace(inputs={**datum.inputs, "logprobs": logprobs}),), "dro")


@pytest.mark.both_lines
@pytest.mark.medium
def test_state_survives_a_folder(make, tmp_path: Path):
    trainer, data = make(LORA), random_data(5, "cross_entropy")
    step = AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
    trainer.forward_backward(request(data))
    trainer.optim_step(step)
    trainer.forward_backward(request(data))
    trainer.save(tmp_path / "saved")

    def go_on() -> list[np.ndarray]:
        trainer.forward_backward(request(data[:2]))
        trainer.optim_step(step)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer._state.state.model)]

    wanted = go_on()
    trainer.create(LORA)
    trainer.load(tmp_path / "saved", optimizer=True)
    for found, expected in zip(go_on(), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
    trainer.create(LORA)
    trainer.load(tmp_path / "saved", optimizer=False)
    assert not any(
        leaf.any()
        for leaf in jax.tree.leaves((trainer._state.state.opt_state.inner.inner_state, trainer._state.gradient))
    )
    with pytest.raises(RequestError, match="cannot be loaded"):
        make(FULL).load(tmp_path / "saved", optimizer=True)


class Source:
    """Requests that arrive in parts."""

    def __init__(self, *parts: list[SampleParams]):
        self.parts = [[SampleJob(f"{n}.{i}", params) for i, params in enumerate(part)] for n, part in enumerate(parts)]
        self.results: dict[str, SampleOutputs | RequestError] = {}

    def take(self) -> list[SampleJob]:
        return self.parts.pop(0) if self.parts else []

    def finish(self, key: str, result: SampleOutputs | RequestError) -> None:
        assert key not in self.results
        self.results[key] = result


PROMPT = SampleParams((70, 71, 72), 2, 6, 3, 1.0, -1, 1.0, None, False, 0)


@pytest.mark.both_lines
@pytest.mark.medium
def test_a_mixture_is_trained_and_sampled(tmp_path: Path):
    """An adapter leaves out the experts, which the client must ask for."""
    case = "qwen3_moe_dense" if IS_NEW else "mixtral"
    tokenizer, folder = ChatTokenizer(byte_tokenizer()), write_checkpoint(tmp_path / "base", case)
    trainer = JaxTrainer(folder, tokenizer, make_trainer(), max_context=CONTEXT, max_seqs=8, call_seconds=0.1)
    with pytest.raises(RequestError, match="the experts of a mixture cannot be adapted; set it to false, or train all"):
        trainer.create(LORA)
    for spec in (dataclasses.replace(LORA, train_mlp=False), FULL):
        trainer.create(spec)
        trainer.forward_backward(request(random_data(3, "cross_entropy")))
        trainer.optim_step(AdamParams(learning_rate=0.1))
        trainer.save_sampler(tmp_path / str(spec.lora_rank))
        source = Source([PROMPT])
        trainer.sample(tmp_path / str(spec.lora_rank), source)
        tokens, logprobs = source.results["0.0"].samples[0].tokens, source.results["0.0"].samples[0].logprobs
        sequence = np.array([*PROMPT.prompt, *tokens], np.int32)
        datum = Datum(sequence[:-1], {"target_tokens": sequence[1:].astype(np.int64)})
        of_trainer = trainer.forward_backward(request((datum,), forward_only=True)).logprobs[0]
        np.testing.assert_allclose(of_trainer[len(PROMPT.prompt) - 1 :], logprobs, atol=1e-5)


@pytest.mark.both_lines
@pytest.mark.medium
def test_samplers_stay_as_they_were(make, tmp_path: Path):
    """A snapshot and the base answer as before after any number of steps, and log-probs are those of the trainer."""
    trainer = make(LORA)
    trainer.forward_backward(request(random_data(5, "cross_entropy")))
    trainer.optim_step(AdamParams(learning_rate=0.1))
    trainer.save_sampler(tmp_path / "first")
    scored = dataclasses.replace(PROMPT, prompt_logprobs=True)

    def ask(path: Path | None) -> SampleOutputs:
        source = Source([scored], [PROMPT])
        trainer.sample(path, source)
        assert source.results["0.0"].samples == source.results["1.0"].samples
        return source.results["0.0"]

    first, base = ask(tmp_path / "first"), ask(None)
    assert first.samples != base.samples
    tokens, logprobs = first.samples[0].tokens, first.samples[0].logprobs
    sequence = np.array([*PROMPT.prompt, *tokens], np.int32)
    targets = {"target_tokens": sequence[1:].astype(np.int64)}
    of_trainer = trainer.forward_backward(request((Datum(sequence[:-1], targets),), forward_only=True)).logprobs[0]
    np.testing.assert_allclose(of_trainer[len(PROMPT.prompt) - 1 :], logprobs, atol=1e-5)
    assert np.isnan(first.prompt_logprobs[0])
    np.testing.assert_allclose(first.prompt_logprobs[1:], of_trainer[: len(PROMPT.prompt) - 1], atol=1e-6)
    for _ in range(3):
        trainer.forward_backward(request(random_data(5, "cross_entropy")))
        trainer.optim_step(AdamParams(learning_rate=0.1))
        trainer.save_sampler(tmp_path / f"{_}")
    assert str(ask(tmp_path / "2")) != str(first)
    assert str(ask(tmp_path / "first")) == str(first)
    trainer.create(FULL)
    assert str(ask(tmp_path / "first")) == str(first)
    assert str(ask(None)) == str(base)


@pytest.mark.medium
def test_likeliest_tokens_are_those_of_the_dense_softmax(make, tmp_path: Path):
    """Of the base and of trained weights, for prompts in common rows, with any numbers of tokens."""
    trainer, generator = make(LORA), np.random.default_rng(3)
    trainer.forward_backward(request(random_data(5, "cross_entropy")))
    trainer.optim_step(AdamParams(learning_rate=0.1))
    trainer.save_sampler(tmp_path / "saved")
    counts = [1, 2, 3, 20, min(MAX_TOPK, VOCAB), 3, 0]
    jobs = [
        dataclasses.replace(
            PROMPT,
            prompt=tuple(map(int, generator.integers(0, VOCAB, length))),
            max_tokens=1,
            topk_prompt_logprobs=count,
        )
        for length, count in zip([4, CONTEXT - 1, 1, 9, 5, 2, 3], counts, strict=True)
    ]
    base = trainer._base
    for path, model in ((None, base), (tmp_path / "saved", assemble(trainer._state.state.model, base))):
        source = Source(jobs[:4], jobs[4:])
        trainer.sample(path, source)
        found = [source.results[f"{index // 4}.{index % 4}"].topk for index in range(len(jobs))]
        for job, top in zip(jobs, found, strict=True):
            if not job.topk_prompt_logprobs:
                assert top is None
                continue
            logs = dense_logs(model, np.array(job.prompt, np.int32))[:-1]
            order = np.argsort(-logs, axis=1, kind="stable")[:, : job.topk_prompt_logprobs]
            ids, logprobs = top
            assert ids.shape == logprobs.shape == (len(job.prompt), job.topk_prompt_logprobs)
            np.testing.assert_allclose(logprobs[1:], np.take_along_axis(logs, order, axis=1), atol=1e-5)
            # Neighbours may be equal up to rounding.
            np.testing.assert_allclose(np.take_along_axis(logs, ids[1:], axis=1), logprobs[1:], atol=1e-5)
            assert all(len(set(row)) == len(row) for row in ids[1:])
            assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)


@pytest.mark.medium
def test_numbers_of_likeliest_tokens_compile_few_programs(make):
    trainer = make()
    before = trainer.num_programs
    wanted = [dataclasses.replace(PROMPT, topk_prompt_logprobs=count, max_tokens=1) for count in range(1, 17)]
    for job in wanted:
        trainer.sample(None, Source([job]))
    # 1, 2, 4, 8 and 16.
    assert trainer.num_programs - before <= 5


def test_stops_end_a_sample_and_remain_in_it(make):
    trainer = make()
    whole = Source([dataclasses.replace(PROMPT, num_samples=1, max_tokens=10, temperature=0.0)])
    trainer.sample(None, whole)
    (sample,) = whole.results["0.0"].samples
    token = sample.tokens[2]
    first = sample.tokens.index(token)
    by_token = dataclasses.replace(PROMPT, num_samples=1, max_tokens=10, temperature=0.0, stop=(token,))
    source = Source([by_token])
    trainer.sample(None, source)
    (cut,) = source.results["0.0"].samples
    assert cut.tokens == sample.tokens[: first + 1]
    assert cut.logprobs == sample.logprobs[: first + 1]
    assert cut.stopped


@pytest.mark.parametrize("max_tokens", [None, CONTEXT - 3, CONTEXT, 10**9])
@pytest.mark.parametrize("stop", [None, ("never",)])
def test_a_sample_ends_with_the_context(make, max_tokens: int | None, stop: tuple[str, ...] | None):
    source = Source([dataclasses.replace(PROMPT, max_tokens=max_tokens, stop=stop)])
    make().sample(None, source)
    for sample in source.results["0.0"].samples:
        assert len(sample.tokens) == len(sample.logprobs)
        assert sample.stopped or len(sample.tokens) == CONTEXT - len(PROMPT.prompt)


@pytest.mark.medium
def test_a_sample_that_filled_the_context_is_scored(make):
    trainer = make()
    tokens = tuple(map(int, np.random.default_rng(0).integers(0, VOCAB, CONTEXT)))
    full = dataclasses.replace(PROMPT, prompt=tokens, max_tokens=1, prompt_logprobs=True)
    source = Source([full, PROMPT, dataclasses.replace(full, prompt_logprobs=False, topk_prompt_logprobs=2)])
    trainer.sample(None, source)
    scored, _, top = (source.results[f"0.{index}"] for index in range(3))
    logs = dense_logs(trainer._base, np.array(tokens, np.int32))
    np.testing.assert_allclose(scored.prompt_logprobs[1:], logs[np.arange(CONTEXT - 1), tokens[1:]], atol=1e-5)
    np.testing.assert_allclose(top.topk[1][1:, 0], logs[:-1].max(axis=1), atol=1e-5)
    # There is no room for a token.
    assert [sample.tokens for sample in scored.samples] == [()] * full.num_samples
    assert len(source.results["0.1"].samples) == 2


@pytest.mark.parametrize("damage", ["manifest.json", "*.bin"])
def test_damaged_weights_fail_their_samples_only(make, tmp_path: Path, damage: str):
    trainer = make(LORA)
    for name in ("good", "bad", *"abc"):
        # Those that were saved last are still in memory.
        trainer.save_sampler(tmp_path / name)
    file = max((tmp_path / "bad").rglob(damage), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"#")
    with pytest.raises(RequestError):
        trainer.sample(tmp_path / "bad", Source([PROMPT]))
    source = Source([PROMPT])
    trainer.sample(tmp_path / "good", source)
    assert len(source.results["0.0"].samples) == 2


@pytest.mark.medium
def test_a_folder_that_cannot_be_written_changes_nothing(make, tmp_path: Path):
    trainer, data = make(LORA), random_data(3, "cross_entropy")
    trainer.forward_backward(request(data))
    gradient = gradient_of(trainer)
    (tmp_path / "file").touch()
    for save in (trainer.save, trainer.save_sampler):
        with pytest.raises(OSError, match="file"):
            save(tmp_path / "file/folder")
    for left, right in zip(gradient_of(trainer), gradient, strict=True):
        np.testing.assert_array_equal(left, right)
    assert trainer.optim_step(AdamParams())["grad_norm"] > 0


@pytest.mark.medium
@pytest.mark.parametrize(
    "setting",
    [
        {"eps": 0.0},
        {"eps": 1e-60},
        {"eps": 1e-40},
        {"eps": float("nan")},
        {"beta1": 0.99999999},
        {"beta2": 0.99999999},
        {"beta2": 1.0},
        {"beta1": -0.1},
        {"learning_rate": 1e39},
        {"learning_rate": -1.0},
        {"weight_decay": 1e39},
        {"weight_decay": -1e39},
        {"grad_clip_norm": 1e39},
        {"grad_clip_norm": 1e-60},
        {"grad_clip_norm": 1e-40},
        # The new weights overflow.
        {"learning_rate": 1e30, "weight_decay": 1e30},
        {"learning_rate": 3e38, "weight_decay": 3e38},
        {"learning_rate": 1e4, "weight_decay": -3e38},
    ],
)
def test_settings_that_float32_cannot_compute_with_change_nothing(make, setting: dict[str, float]):
    trainer = make(LORA)
    trainer.forward_backward(request(random_data(3, "cross_entropy")))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer._state)]
    with pytest.raises(RequestError):
        trainer.optim_step(AdamParams(**setting))
    for left, right in zip(jax.tree.leaves(trainer._state), before, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.medium
@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ()},
        {"prompt": (VOCAB,)},
        {"prompt": (-1,)},
        {"prompt": (1,) * CONTEXT},
        {"prompt": (1,) * (CONTEXT + 1), "prompt_logprobs": True},
        {"max_tokens": 0},
        {"num_samples": 0},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"temperature": 1e-31},
        {"temperature": 5e-324},
        {"top_k": 5},
        {"top_p": 0.5},
        {"stop": ()},
        {"stop": ("",)},
        {"stop": ("a", "")},
        {"topk_prompt_logprobs": MAX_TOPK + 1},
        {"topk_prompt_logprobs": -1},
    ],
)
def test_bad_samples_are_refused_and_others_are_answered(make, change: dict[str, object]):
    source = Source([dataclasses.replace(PROMPT, **change), PROMPT])
    make().sample(None, source)
    assert isinstance(source.results["0.0"], RequestError)
    assert len(source.results["0.1"].samples) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"data": (Datum(np.array([VOCAB], np.int32), {"target_tokens": np.array([1])}),)},
        {"data": (Datum(np.array([1], np.int32), {"target_tokens": np.array([VOCAB])}),)},
        {"data": (Datum(np.ones(CONTEXT + 1, np.int32), {"target_tokens": np.ones(CONTEXT + 1, np.int64)}),)},
    ],
)
def test_bad_data_change_nothing(make, change: dict[str, object]):
    trainer = make()
    with pytest.raises(RequestError):
        trainer.forward_backward(request(**{"data": random_data(2, "cross_entropy"), **change}))
    assert not any(leaf.any() for leaf in gradient_of(trainer))


@pytest.mark.medium
@pytest.mark.parametrize("size", [3e38, 1e25])
def test_gradient_that_is_not_finite_is_dropped_and_not_saved(make, tmp_path: Path, size: float):
    """The entries of the sum, or only the square of its norm, overflow."""
    trainer, data = make(), random_data(3, "cross_entropy")
    trainer.forward_backward(request(data))
    trainer.optim_step(AdamParams())
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer._state)]
    make()
    huge = tuple(
        datum._replace(inputs={**datum.inputs, "weights": np.full(len(datum.tokens), size, np.float32)})
        for datum in data
    )
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer._state.state.model)]
    trainer.forward_backward(request(huge))
    with pytest.raises(RequestError, match="cannot be saved"):
        trainer.save(tmp_path / "state")
    assert not (tmp_path / "state").exists()
    # A sampler needs the weights alone.
    trainer.save_sampler(tmp_path / "sampler")
    with pytest.raises(RequestError, match="dropped"):
        trainer.optim_step(AdamParams())
    for left, right in zip(jax.tree.leaves(trainer._state.state.model), before, strict=True):
        np.testing.assert_array_equal(left, right)
    assert not any(leaf.any() for leaf in gradient_of(trainer))
    # Later calls are as if it had never been.
    trainer.forward_backward(request(data))
    trainer.save(tmp_path / "state")
    trainer.optim_step(AdamParams())
    for left, right in zip(jax.tree.leaves(trainer._state), wanted, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.both_lines
@pytest.mark.medium
def test_settings_and_lengths_compile_few_programs(make):
    trainer = make()
    before = trainer.num_programs
    for seed in range(4):
        for loss in ("ppo", "cispo", "cross_entropy", "dro"):
            trainer.forward_backward(request(random_data(3, loss, seed=seed), loss))
    # Microbatches of 1, 2 or 4 rows.
    assert trainer.num_programs - before <= 3


@pytest.mark.medium
def test_a_server_that_starts_again_has_the_same_weights(make, tmp_path: Path):
    """The weights, the open sum of gradients and the samples are those of a server that went on."""

    def begin(url: str) -> str:
        wire = Wire(url)
        asked = {"model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4, "seed": 1}}
        model = wire.result(wire.post("create_model", session_id=wire.session(), **asked)["request_id"])["model_id"]
        for seq, tokens in ((1, [[5, 6, 7], [8]]), (3, [[9, 10]])):
            wire.result(wire.forward_backward(model, seq, tokens).json()["request_id"])
            if seq == 1:
                wire.step(model, 2, rate=0.1)
        return model

    def end(url: str, model: str) -> tuple[float, bytes]:
        wire = Wire(url)
        norm = wire.step(model, 4, rate=0.1)["grad_norm"]
        save = wire.operate("save_weights_for_sampler", model, 5, sampling_session_seq_id=0)
        sampler = wire.result(save)["sampling_session_id"]
        params = {"max_tokens": 5, "seed": 1}
        return norm, wire.result(wire.sample(sampler, sampling_params=params, num_samples=2))

    with serving(tmp_path / "whole", make()) as (url, _):
        wanted = end(url, begin(url))
    with serving(tmp_path / "stopped", make()) as (url, _):
        model = begin(url)
    with serving(tmp_path / "stopped", make()) as (url, service):
        assert end(url, model) == wanted
        assert service.counts()["programs"] > 0
