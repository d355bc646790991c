# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from haliax.util import ensure_tuple
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.learner.config import LoraConfig
from marin_rl.models.lora import (
    Adapter,
    LoraTargetError,
    adapted_modules,
    init_adapter,
    merge_adapter,
    with_adapter,
)
from marin_rl.models.mixture import mixture_shape, routed_activations, with_routing
from tests.sampling.families import FAMILIES, VOCAB, dense_layers, mixtures, random_model

pytestmark = [
    pytest.mark.both_lines,
    pytest.mark.usefixtures("compiled_quickly"),
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    **dict.fromkeys(("mixtral", "qwen3_moe"), (*ATTENTION, "gate", "lm_head")),
    "qwen3": (*LoraConfig().targets, "lm_head"),
}
"""Targets of the families that differ from the default."""
LAYERS = "transformer.layers.stacked"


def targets_of(name: str) -> tuple[str, ...]:
    return TARGETS.get(name, LoraConfig().targets)


def random_adapter(model, targets, *, rank: int = 3, seed: int = 1) -> Adapter:
    """An adapter whose A and B are drawn by numpy."""
    rng = np.random.default_rng(seed)
    adapter = init_adapter(model, rank=rank, scale=2.0, targets=targets, key=jax.random.PRNGKey(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.1, size=leaf.shape), leaf.dtype), adapter)


@pytest.fixture(scope="module")
def logits_of(trainer):
    @jax.jit
    def logits(model):
        ids = hax.named(np.arange(24).reshape(2, 12) % VOCAB, ("batch", "position"))
        mask = AttentionMask.causal()
        if mixture_shape(model.config) is None:
            trunk = model.activations(ids, mask, key=None)
        else:
            positions = hax.arange(ids.resolve_axis("position"))
            trunk = routed_activations(with_routing(model), ids, mask, positions)[0]
        return hax.dot(trunk, model.get_lm_head(), axis="embed").rearrange(("batch", "position", "vocab")).array

    with trainer.use_device_mesh():
        yield logits


def make_base(name: str) -> LmHeadModel:
    return eqx.filter(random_model((FAMILIES | dense_layers())[name]), eqx.is_array)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "f32") for name in FAMILIES), ("llama", "bf16"), ("gpt2", "bf16")]
)
def test_a_new_adapter_changes_no_bit(name: str, precision: str, logits_of) -> None:
    cast = jmp.get_policy(f"c={precision}").cast_to_compute
    base = cast(make_base(name))
    adapter = cast(init_adapter(base, rank=3, scale=2.0, targets=targets_of(name), key=jax.random.PRNGKey(0)))
    expected, adapted = logits_of(base), with_adapter(base, adapter)
    np.testing.assert_array_equal(logits_of(adapted), expected)
    np.testing.assert_array_equal(logits_of(merge_adapter(adapted)), expected)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["gemma", "gpt2", "llama", "mixtral", "olmo2", "qwen3", *mixtures(), *dense_layers()])
def test_the_merged_weights_are_those_of_numpy_and_compute_the_same(name: str, logits_of) -> None:
    base = make_base(name)
    adapter = random_adapter(base, targets_of(name))
    adapted = with_adapter(base, adapter)
    merged = merge_adapter(adapted)
    linear, changed = adapted_modules(base, targets_of(name)), adapted_modules(merged, targets_of(name))
    assert linear.keys() == changed.keys() == adapter.layers.keys()
    for path, layer in linear.items():
        a, b = adapter.layers[path].a, adapter.layers[path].b
        In, Out = ([axis.name for axis in ensure_tuple(axes)] for axes in (layer.In, layer.Out))
        stacked = [axis.name for axis in a.axes if axis.name not in (*In, "lora_rank")]
        shape = [layer.weight.resolve_axis(axis).size for axis in (*stacked, *In, *Out)]
        flat_a = np.asarray(a.rearrange((*stacked, *In, "lora_rank")).array, np.float64).reshape(
            *shape[: len(stacked)], -1, 3
        )
        flat_b = np.asarray(b.rearrange((*stacked, "lora_rank", *Out)).array, np.float64).reshape(
            *shape[: len(stacked)], 3, -1
        )
        expected = np.asarray(layer.weight.rearrange((*stacked, *In, *Out)).array, np.float64)
        expected = expected + 2.0 * (flat_a @ flat_b).reshape(shape)
        found = changed[path].weight.rearrange((*stacked, *In, *Out)).array
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=path)
    found, of_merged, of_base = logits_of(adapted), logits_of(merged), logits_of(base)
    np.testing.assert_allclose(found, of_merged, rtol=1e-4, atol=1e-4)
    assert np.abs(found - of_base).max() > 0.05
    same = [left is right for left, right in zip(jax.tree.leaves(base), jax.tree.leaves(merged), strict=True)]
    assert same.count(False) == len(adapter.layers)


def test_a_is_uniform_with_the_bound_of_peft_and_b_is_zero() -> None:
    base = make_base("llama")
    adapter = init_adapter(base, rank=64, scale=1.0, targets=["q_proj", "down_proj"], key=jax.random.PRNGKey(0))
    assert list(adapter.layers) == [f"{LAYERS}.self_attn.q_proj", f"{LAYERS}.mlp.down_proj"]
    for (path, layer), inputs in zip(adapter.layers.items(), (32, 48), strict=True):
        bound = 1 / np.sqrt(inputs)
        assert 0.98 * bound < np.abs(layer.a.array).max() <= bound, path
        assert abs(float(np.std(layer.a.array)) - bound / np.sqrt(3)) < 0.03 * bound
        assert not np.any(layer.b.array)
    first, second = (layer.a.array for layer in adapter.layers.values())
    assert not np.array_equal(first[..., :8], second[..., :8])
    assert {axis.name: axis.size for axis in adapter.layers[f"{LAYERS}.self_attn.q_proj"].b.axes} == {
        **{"layer": 2, "kv_head": 2, "q_heads_per_group": 2, "head_size": 8, "lora_rank": 64}
    }


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("llama", "q_prj", r"'q_prj' names no linear layer of this llama model; .*did you mean 'q_proj'"),
        ("gpt2", "q_proj", r"'q_proj' names no linear layer of this gpt2 model; .*c_attn, c_fc, c_proj"),
        ("mixtral", "gate_proj", r"'gate_proj' names no linear layer of this mixtral model"),
        ("mixtral", "w1", r"'w1' names no linear layer of this mixtral model; .* experts"),
        *(
            (name, target, rf"{target!r} names no linear layer of this qwen3_moe model; .* experts")
            for name in mixtures()
            for target in ("gate_proj", "experts", "experts.gate_proj", "embed_tokens")
        ),
        *((name, "experts.up_proj", "'experts.up_proj' names no linear layer") for name in dense_layers()),
        ("llama", "embed_tokens", r"'embed_tokens' names no linear layer of this llama model; embeddings"),
        ("llama", "lm_head", r"'lm_head' names no linear layer of this llama model; .*, a head tied to them"),
        ("gpt2", "wte", r"'wte' names no linear layer"),
        ("llama", "proj", r"'proj' names no linear layer"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused(name: str, target: str, message: str) -> None:
    with pytest.raises(LoraTargetError, match=f"lora.targets: {message}"):
        adapted_modules(make_base(name), [target])


@pytest.mark.parametrize("name", FAMILIES)
def test_head_and_router_are_adapted_only_if_they_are_named(name: str) -> None:
    base = make_base(name)
    named = adapted_modules(base, ATTENTION if name != "gpt2" else ["c_attn"])
    assert not any(path.endswith(("lm_head", ".gate")) for path in named)
    assert all(path.startswith("transformer.") for path in named)


@pytest.mark.parametrize("name", dense_layers())
def test_only_the_dense_layers_of_a_mixture_have_a_projection_that_is_adapted(name: str) -> None:
    found = list(adapted_modules(make_base(name), ["up_proj", "gate"]))
    blocks = "transformer.layers.blocks"
    assert found == [f"{blocks}.0.mlp.up_proj", f"{blocks}.1.mlp.gate", f"{blocks}.2.mlp.up_proj"]


def test_a_longer_target_names_one_of_two_modules_with_the_same_name() -> None:
    base = make_base("gpt2")
    assert len(adapted_modules(base, ["c_proj"])) == 2
    assert list(adapted_modules(base, ["mlp.c_proj"])) == ["transformer.blocks.stacked.mlp.c_proj"]
