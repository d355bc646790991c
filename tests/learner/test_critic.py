# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from types import ModuleType

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.critic import ActorCritic, CriticConfig, policy_of, with_critic
from marin_rl.learner.logprobs import policy_activations
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.objectives.kl import NoKlConfig
from marin_rl.objectives.policy_loss import ReinforceLossConfig
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SHARED, SEPARATE = CriticConfig(shared_trunk=True), CriticConfig(shared_trunk=False)


def trained(critic: ActorCritic, seed: int = 5) -> ActorCritic:
    """A critic with nonzero values and, if its trunk is separate, with a trunk that differs from the policy's."""
    rng = np.random.default_rng(seed)

    def move(leaf: jax.Array) -> jax.Array:
        return leaf + jnp.asarray(rng.normal(scale=0.2, size=leaf.shape), leaf.dtype)

    def parts(model: ActorCritic):
        return [model.value_weight, model.value_bias, model.trunk]

    return eqx.tree_at(parts, critic, jax.tree.map(move, parts(critic)), is_leaf=lambda leaf: leaf is None)


@eqx.filter_jit
def values_of(model: ActorCritic, batch: RlExample) -> NamedArray:
    return model.values(batch, policy_activations(model.policy, batch))


@pytest.fixture(scope="module")
def batch(tiny: ModuleType) -> RlExample:
    return tiny.make_example()


@pytest.fixture(scope="module", params=[SHARED, SEPARATE], ids=["shared", "separate"])
def critic(request: pytest.FixtureRequest, model: LmHeadModel) -> ActorCritic:
    return trained(with_critic(request.param, model))


@pytest.mark.medium
def test_values_of_a_new_critic_are_zero(model: LmHeadModel, batch: RlExample) -> None:
    for config in (SHARED, SEPARATE):
        assert not np.any(values_of(with_critic(config, model), batch).array)


def test_values_are_a_linear_function_of_the_activations_before_each_token(
    tiny: ModuleType, critic: ActorCritic, batch: RlExample
) -> None:
    values = values_of(critic, batch)
    assert values.axes == batch.input_ids.axes
    assert values.array.dtype == jnp.float32
    trunk = critic.policy if critic.trunk is None else critic.trunk
    hidden = trunk.activations(batch.input_ids, batch.attention_mask, key=None, pos_ids=batch.position_ids)
    hidden = np.asarray(hidden.rearrange(("batch", "position", "embed")).array, np.float64)
    weight, bias = np.asarray(critic.value_weight.array, np.float64), float(critic.value_bias.array)
    mask = np.asarray(batch.loss_mask.array)
    expected = np.zeros(mask.shape)
    for row, position in np.argwhere(mask):
        expected[row, position] = hidden[row, position - 1] @ weight + bias
    assert mask.sum() > 20
    assert np.abs(expected[mask]).min() > 0
    np.testing.assert_allclose(values.array, expected, atol=1e-5)


def test_value_of_a_token_depends_only_on_earlier_tokens(
    tiny: ModuleType, critic: ActorCritic, batch: RlExample
) -> None:
    """A baseline that depends on the action would bias the gradient."""
    mask, ids = np.asarray(batch.loss_mask.array), np.array(batch.input_ids.array)
    row = int(mask.sum(axis=1).argmax())
    own = np.flatnonzero(mask[row])
    changed_at = int(own[own.size // 2])
    ids[row, changed_at] = (ids[row, changed_at] + 1) % tiny.VOCAB
    before, after = values_of(critic, batch), values_of(critic, tiny.replace_arrays(batch, input_ids=ids))
    same = np.asarray(before.array) == np.asarray(after.array)
    assert same[row, : changed_at + 1].all()
    assert not same[row, own[own > changed_at]].any()
    assert np.delete(same, row, axis=0).all()


def test_values_off_the_mask_are_zero(critic: ActorCritic, batch: RlExample) -> None:
    assert float(critic.value_bias.array) != 0
    values, mask = np.asarray(values_of(critic, batch).array), np.asarray(batch.loss_mask.array)
    assert not values[~mask].any()
    assert values[mask].all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_activations_of_other_tokens_do_not_leak(model: LmHeadModel, batch: RlExample, poison: float) -> None:
    critic = trained(with_critic(SHARED, model))
    clean = policy_activations(model, batch)
    asked = np.roll(np.asarray(batch.loss_mask.array), -1, axis=1)
    poisoned = hax.where(hax.named(jnp.asarray(asked), batch.input_ids.axes), clean, poison)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def total(both: tuple[ActorCritic, NamedArray]) -> jax.Array:
        return hax.sum(hax.square(both[0].values(batch, both[1]))).scalar()

    expected, found = total((critic, clean)), total((critic, poisoned))
    assert float(expected[0]) > 0
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_separate_trunk_starts_as_a_copy(tiny: ModuleType, model: LmHeadModel, batch: RlExample) -> None:
    critic = with_critic(SEPARATE, model)
    assert critic.trunk is not None
    tiny.assert_same_bits(critic.trunk.transformer, model.transformer)
    tiny.assert_same_bits(critic.trunk.embeddings, model.embeddings)
    # Steps donate their state, which fails if an array occurs in it twice.
    held = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(eqx.filter(critic, eqx.is_array))]
    assert len(set(held)) == len(held)
    # The values do not depend on the policy's trunk.
    silence = hax.zeros_like(policy_activations(model, batch))
    moved = trained(critic)
    np.testing.assert_allclose(moved.values(batch, silence).array, values_of(moved, batch).array, atol=1e-6)


def test_separate_trunk_has_no_unused_head(tiny: ModuleType, trainer: TrainerConfig, model: LmHeadModel) -> None:
    assert model.lm_head is not None
    critic = with_critic(SEPARATE, model)
    assert critic.trunk.lm_head is None
    assert critic.policy.lm_head is model.lm_head
    tied = tiny.make_model(trainer, dataclasses.replace(tiny.LLAMA, tie_word_embeddings=True))
    assert tied.lm_head is None
    tiny.assert_same_bits(with_critic(SEPARATE, tied).trunk, tied)
    # Models with permanently tied embeddings have no field for the head.
    gpt2 = PolicySpec(
        Gpt2Config(**seq_len(16), hidden_dim=16, num_layers=1, num_heads=2), model.vocab_size, trainer
    ).policy
    trunk = eqx.filter_eval_shape(with_critic, SEPARATE, gpt2).trunk
    assert jax.tree.structure(trunk) == jax.tree.structure(gpt2)


@pytest.mark.medium
@pytest.mark.parametrize("config", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_critic_loss_updates_the_policy_only_through_a_shared_trunk(
    tiny: ModuleType, model: LmHeadModel, batch: RlExample, config: CriticConfig
) -> None:
    critic = trained(with_critic(config, model))
    nothing_earned = tiny.replace_arrays(batch, advantages=np.zeros(batch.input_ids.array.shape, np.float32))
    loss = RlLoss(ReinforceLossConfig().per_token, NoKlConfig(), 1.0, tiny.POSITIONS, config)
    gradient, _ = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))(critic, nothing_earned)
    assert np.any(gradient.value_weight.array)
    assert np.any(gradient.value_bias.array)
    moved = {name: bool(np.any(array)) for name, array in tiny.arrays_by_path(gradient.policy.transformer).items()}
    assert set(moved.values()) == {config.shared_trunk}
    assert not np.any(gradient.policy.lm_head.weight.array)
    if not config.shared_trunk:
        assert all(np.any(array) for array in tiny.arrays_by_path(gradient.trunk.transformer).values())


def test_policy_of_returns_the_policy(model: LmHeadModel) -> None:
    assert policy_of(model) is model
    assert policy_of(with_critic(SHARED, model)) is model


def test_without_critic_the_policy_is_unchanged(tiny: ModuleType, trainer: TrainerConfig, model: LmHeadModel) -> None:
    assert PolicySpec(tiny.LLAMA, tiny.VOCAB, trainer).attach_critic(model) is model


@pytest.mark.parametrize("config", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_attached_critic_has_the_shapes_of_a_resumed_run(tiny: ModuleType, config: CriticConfig) -> None:
    trainer = tiny.make_trainer(policy="p=bf16,c=bf16")
    model = tiny.make_model(trainer)
    spec = PolicySpec(tiny.LLAMA, tiny.VOCAB, trainer, config)
    attached, shape = spec.attach_critic(model), spec.place(spec.trained)
    assert jax.tree.structure(shape) == jax.tree.structure(attached)
    for expected, leaf in zip(jax.tree.leaves(shape), jax.tree.leaves(attached), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, jnp.bfloat16)
        assert leaf.sharding == expected.sharding
    tiny.assert_same_bits(attached.policy, model)


def test_export_of_the_policy_excludes_the_critic(trainer: TrainerConfig, model: LmHeadModel, tmp_path) -> None:
    chat = ChatTokenizer(byte_tokenizer())
    for name, policy in (("alone", model), ("inside", policy_of(with_critic(SEPARATE, model)))):
        save_hf_policy(policy, chat, tmp_path / name, trainer)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("alone", "inside")]
    assert "model.safetensors" in files[0]
    assert files[0] == files[1]
