# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Updates of adapters: gradients, microbatches, devices and memory."""

import os
import sys
from types import ModuleType
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax.util import ensure_tuple
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopTracker, current_tracker

from marin_rl.batching.packing import RowLayout
from marin_rl.learner.config import LoraConfig
from marin_rl.learner.critic import assemble
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.models.lora import Adapter, adapted_modules, merge_adapter, with_adapter
from marin_rl.utils.levanter_line import seq_len
from tests import fork_server
from tests.cpu_host import cpu_host
from tests.learner.lora_cases import LORA, PRECISIONS, STEPS, adapter_learner, first_updates

pytestmark = pytest.mark.both_lines


def random_adapter(spec: PolicySpec, seed: int = 3) -> Adapter:
    rng = np.random.default_rng(seed)
    adapter = spec.new_adapter(jax.random.PRNGKey(0))
    return jax.tree.map(lambda leaf: jax.numpy.asarray(rng.normal(scale=0.2, size=leaf.shape), leaf.dtype), adapter)


def gradient_of_adapter(tiny: ModuleType, microbatches: int) -> tuple[dict[str, np.ndarray], Adapter, LmHeadModel]:
    trainer = tiny.make_trainer(tiny.MESH_ROWS // microbatches)
    learner, spec = adapter_learner(trainer, loss=tiny.make_loss(), optimizer=tiny.SgdConfig())
    adapter = random_adapter(spec)
    before, base = tiny.arrays_by_path(adapter), tiny.make_model(trainer)
    state = learner.initial_state(adapter, jax.random.PRNGKey(1))
    state, _ = learner.update(state, tiny.split_rows(tiny.make_example(tiny.MESH_ROWS), microbatches))
    after = tiny.arrays_by_path(state.model)
    return {name: before[name] - after[name] for name in before}, random_adapter(spec), base


@pytest.mark.medium
def test_gradients_are_those_of_the_merged_weights_times_a_and_b(tiny: ModuleType) -> None:
    """dL/dA = s Bᵀ dL/dW and dL/dB = s dL/dW Aᵀ, with the gradient of whole weights `W + s A B` as the oracle."""
    found, adapter, base = gradient_of_adapter(tiny, 1)
    trainer = tiny.make_trainer(tiny.MESH_ROWS)
    learner = tiny.make_learner(trainer, optimizer=tiny.SgdConfig())
    merged = merge_adapter(with_adapter(base, adapter))
    copied = jax.tree.map(lambda leaf: jax.numpy.copy(leaf) if eqx.is_array(leaf) else leaf, merged)
    state, _ = learner.update(
        learner.initial_state(copied, jax.random.PRNGKey(1)), tiny.split_rows(tiny.make_example(tiny.MESH_ROWS), 1)
    )
    of_merged, updated = adapted_modules(merged, LORA.targets), adapted_modules(state.model, LORA.targets)
    assert len(found) == 2 * len(of_merged)
    for path, layer in of_merged.items():
        weight = layer.weight - updated[path].weight
        a, b = adapter.layers[path].a, adapter.layers[path].b
        expected = {
            "a": hax.dot(weight, b, axis=ensure_tuple(layer.Out)).rearrange(a.axes) * LORA.scale,
            "b": hax.dot(weight, a, axis=ensure_tuple(layer.In)).rearrange(b.axes) * LORA.scale,
        }
        for name, array in expected.items():
            gradient = found[f".layers['{path}'].{name}[<flat index 0>]"]
            assert np.abs(gradient).max() > 1e-3, path
            np.testing.assert_allclose(gradient, array.array, atol=2e-6, rtol=1e-4, err_msg=f"{path} {name}")


@pytest.mark.medium
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_of_a_new_adapter_are_those_of_the_base_bit_for_bit(tiny: ModuleType, precision: str) -> None:
    trainer = tiny.make_trainer(4, policy=precision)
    base = trainer.mp.cast_to_compute(tiny.make_model(trainer))
    adapter = PolicySpec(tiny.LLAMA, tiny.VOCAB, trainer, lora=LORA).new_adapter(jax.random.PRNGKey(0))
    scorer = Scorer(trainer, RowLayout(12, 4, packed=False), pad_token_id=0, temperature=0.8, block_size=16)
    rollouts = tiny.one_sequence(np.random.default_rng(0).integers(0, tiny.VOCAB, 12).tolist(), 3)
    expected, found = scorer.score(base, rollouts), scorer.score(assemble(adapter, base), rollouts)
    assert np.count_nonzero(expected.logprobs) == 9
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()


@pytest.mark.medium
def test_microbatches_do_not_change_the_gradient(tiny: ModuleType) -> None:
    whole, parts = gradient_of_adapter(tiny, 1)[0], gradient_of_adapter(tiny, 4)[0]
    for name, array in whole.items():
        np.testing.assert_allclose(parts[name], array, atol=1e-6, err_msg=name)


def test_a_step_changes_the_adapter_and_keeps_the_base(tiny: ModuleType) -> None:
    trainer = tiny.make_trainer()
    learner, spec = adapter_learner(trainer)
    state = learner.initial_state(spec.new_adapter(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
    frozen = learner._frozen
    for _ in range(2):
        state, _ = learner.update(state, [tiny.make_example()])
    assert not any(array.is_deleted() for array in frozen)
    tiny.assert_same_bits(frozen, jax.tree.leaves(tiny.make_model(trainer)))
    trained = sum(array.size for array in jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    # A and B, two moments of each, and some scalars.
    assert 3 * spec.num_trained <= trained < 3 * spec.num_trained + 16
    assert jax.tree.structure(state.model) == jax.tree.structure(spec.trained)


@pytest.mark.medium
def test_weight_decay_shrinks_a_and_b_as_in_peft(tiny: ModuleType) -> None:
    """The first gradient of A is 0, so that only the decay changes it."""
    trainer = tiny.make_trainer()
    optimizer = AdamConfig(learning_rate=0.1, lr_schedule="constant", warmup=0, weight_decay=0.5)
    learner, spec = adapter_learner(trainer, optimizer=optimizer)
    adapter = spec.new_adapter(jax.random.PRNGKey(0))
    before = tiny.arrays_by_path(adapter)
    state, _ = learner.update(learner.initial_state(adapter, jax.random.PRNGKey(1)), [tiny.make_example()])
    after = tiny.arrays_by_path(state.model)
    assert sum(".a[" in name for name in before) == len(LORA.targets)
    for name, array in before.items():
        if ".a[" in name:
            np.testing.assert_allclose(after[name], 0.95 * array, rtol=1e-6, err_msg=name)
    mask: Any = optimizer.build_weight_decay_mask()
    with current_tracker(NoopTracker()):
        assert all(jax.tree.leaves(mask(spec.trained)))


SMOLLM2 = LlamaConfig(
    **seq_len(2048),
    hidden_dim=576,
    intermediate_dim=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    tie_word_embeddings=True,
    attn_backend=AttentionBackend.VANILLA,
)
"""SmolLM2-135M, which has 49,152 tokens."""


@pytest.mark.slow
def test_for_smollm2_an_adapter_of_rank_8_is_small_to_send_and_to_train(tiny: ModuleType) -> None:
    """At most 2 % of the bytes go to a worker, and an update needs at most 0.6 of the memory of full training."""
    trainer, vocab = tiny.make_trainer(4), 49_152
    peaks, sent = [], []
    for lora in (None, LoraConfig(rank=8)):
        spec = PolicySpec(SMOLLM2, vocab, trainer, lora=lora)
        frozen = None if lora is None else Frozen(spec.place(spec.base))
        learner = Learner(trainer, tiny.adam(), tiny.make_loss(block_size=256), num_updates=1, frozen=frozen)
        state = spec.place(learner.state_shape(spec.trained))
        lowered = learner.lower(state, [tiny.make_example(4, 256, vocab)])
        memory: Any = lowered.compile().memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        peaks.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results)
        sent.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec.trained_policy)))
    assert sent[0] == 4 * 134_515_008
    assert sent[1] <= 0.02 * sent[0]
    assert peaks[1] <= 0.6 * peaks[0]


@pytest.fixture(scope="module")
def on_8_devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("devices")
    command = [sys.executable, "-m", "tests.learner.lora_cases", str(folder)]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr[-4000:]
    return {file.stem: dict(np.load(file)) for file in folder.iterdir()}


@pytest.fixture(scope="module")
def on_1_device() -> dict[str, dict[str, np.ndarray]]:
    return {precision: first_updates(precision) for precision in PRECISIONS}


def moved(found: dict[str, np.ndarray], step: int, matrix: str) -> np.ndarray:
    """Changes of all elements of A or B since the start."""
    names = [name[1:] for name in found if name.startswith("0") and f".{matrix}[" in name]
    assert len(names) == len(LORA.targets)
    return np.concatenate([(found[f"{step}{name}"] - found[f"0{name}"]).ravel() for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PRECISIONS, "4 data x 2 model shards"])
def test_8_devices_move_the_adapter_as_one_device_does(
    on_8_devices: dict[str, dict[str, np.ndarray]], on_1_device: dict[str, dict[str, np.ndarray]], case: str
) -> None:
    """The first gradient of A is exactly 0, which Adam must not turn into steps along rounding errors."""
    is_exact = case != "p=f32,c=bf16"
    shards, one = on_8_devices[case], on_1_device[PRECISIONS[0] if is_exact else case]
    assert shards.keys() == one.keys()
    # The fingerprint of the base does not depend on its sharding.
    assert str(shards["base"]) == str(one["base"])
    losses = [[float(found[f"{step} loss"]) for step in range(1, STEPS + 1)] for found in (shards, one)]
    np.testing.assert_allclose(*losses, rtol=1e-5 if is_exact else 1e-3)
    assert losses[1][-1] < losses[1][0] - 0.001
    for found in (shards, one):
        assert not moved(found, 1, "a").any()
        assert np.abs(moved(found, 1, "b")).max() == pytest.approx(1e-3, rel=1e-3)
        assert np.mean(np.abs(moved(found, 2, "a")) > 1e-4) > 0.9
    for step in range(1, STEPS + 1):
        for matrix in ("a", "b"):
            ours, expected = moved(shards, step, matrix), moved(one, step, matrix)
            if is_exact:
                np.testing.assert_allclose(ours, expected, atol=1e-5, err_msg=f"{step} {matrix}")
            elif step > 1 or matrix == "b":
                cosine = ours @ expected / np.linalg.norm(ours) / np.linalg.norm(expected)
                assert cosine > 0.99, (step, matrix)
