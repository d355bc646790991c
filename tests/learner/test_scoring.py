# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.batching.rl_example import pack_to_score
from marin_rl.learner.critic import ActorCritic, CriticConfig, with_critic
from marin_rl.learner.scoring import Scorer, Scores

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TEMPERATURE = 0.8
LENGTHS = [(9,), (12, 5, 7), (), (2,), (11,), (6, 6), (3,)]
"""Lengths of the sequences of each rollout; the last rollout has no loss."""
LAYOUTS = {
    "one microbatch": RowLayout(12, 10, packed=False),
    "unpacked, three microbatches": RowLayout(12, 4, packed=False),
    "packed, two passes": RowLayout(16, 3, packed=True),
    "packed, three microbatches": RowLayout(14, 2, packed=True, whole_rollouts=False),
}
PASSES = {
    "one microbatch": 1,
    "unpacked, three microbatches": 3,
    "packed, two passes": 2,
    "packed, three microbatches": 3,
}


def make_rollouts(vocab: int) -> list[ProcessedRollout]:
    """Return rollouts with any number of sequences, with loss on about half of the tokens."""
    rng = np.random.default_rng(0)
    rollouts = []
    for index, lengths in enumerate(LENGTHS):
        at = np.arange(12)[None]
        tokens = at < np.array(lengths, np.int64).reshape(-1, 1)
        mask = tokens & (rng.random(tokens.shape) < 0.5) & (at > 0)
        mask[:, 1] |= tokens[:, 1]
        if index == len(LENGTHS) - 1:
            mask[:] = False
        zeros = np.zeros(tokens.shape, np.float32)
        rollouts.append(
            ProcessedRollout(
                source="test",
                id=str(index),
                input_ids=np.where(tokens, rng.integers(0, vocab, tokens.shape), 0).astype(np.int32),
                loss_mask=mask,
                segment_ids=tokens.astype(np.int32),
                policy_logprobs=zeros,
                reference_logprobs=zeros,
                turn_ids=np.where(mask, 0, -1).astype(np.int32),
                values=zeros,
            )
        )
    return rollouts


@pytest.fixture(scope="module")
def rollouts(tiny) -> list[ProcessedRollout]:
    return make_rollouts(tiny.VOCAB)


@pytest.fixture(scope="module")
def critic(model: LmHeadModel) -> ActorCritic:
    rng = np.random.default_rng(3)
    new = with_critic(CriticConfig(shared_trunk=False), model)
    trunk = jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(scale=0.2, size=leaf.shape), leaf.dtype), new.trunk)
    weight = NamedArray(jnp.asarray(rng.normal(size=model.Embed.size), jnp.float32), (model.Embed,))
    return ActorCritic(model, weight, NamedArray(jnp.float32(0.3), ()), trunk)


@pytest.fixture(scope="module")
def expected(critic: ActorCritic, rollouts: list[ProcessedRollout]) -> list[Scores]:
    """Compute scores from full logits, one sequence at a time."""
    Pos = Axis("position", 12)

    @jax.jit
    def run(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert critic.trunk is not None
        named = NamedArray(ids, (Pos,))
        logits = critic.policy(named, AttentionMask.causal()).rearrange((Pos, "vocab")).array
        hidden = critic.trunk.activations(named, AttentionMask.causal()).rearrange((Pos, "embed")).array
        return jax.nn.log_softmax(logits / TEMPERATURE), hidden

    weight = np.asarray(critic.value_weight.array, np.float64)
    scores = []
    for rollout in rollouts:
        logprobs, values = (np.zeros(rollout.input_ids.shape) for _ in range(2))
        for row, ids in enumerate(rollout.input_ids):
            logs, hidden = (np.asarray(array, np.float64) for array in run(jnp.asarray(ids)))
            for position in np.flatnonzero(rollout.loss_mask[row]):
                logprobs[row, position] = logs[position - 1, ids[position]]
                values[row, position] = hidden[position - 1] @ weight + 0.3
        scores.append(Scores(logprobs.astype(np.float32), values.astype(np.float32)))
    return scores


def make_scorer(trainer, layout: RowLayout) -> Scorer:
    return Scorer(trainer, layout, pad_token_id=0, temperature=TEMPERATURE, block_size=5, capacity=8)


def assert_scores(found: list[Scores], expected: list[Scores]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name, array in other._asdict().items():
            assert getattr(one, name).dtype == np.float32
            np.testing.assert_allclose(getattr(one, name), array, atol=1e-5, err_msg=f"rollout {index}: {name}")


@pytest.mark.medium
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_scores_as_a_full_forward_pass_does(trainer, rollouts, critic, expected, name: str) -> None:
    layout = LAYOUTS[name]
    assert len(pack_to_score(rollouts, layout, pad_token_id=0).microbatches) == PASSES[name]
    found = make_scorer(trainer, layout).score(critic, rollouts)
    assert_scores(found, expected)
    for scores, rollout in zip(found, rollouts, strict=True):
        assert (scores.logprobs[rollout.loss_mask] < 0).all()
        assert not scores.logprobs[~rollout.loss_mask].any()
        assert not scores.values[~rollout.loss_mask].any()
    assert sum(rollout.num_loss_tokens for rollout in rollouts) > 20


@pytest.fixture(scope="module")
def scorer(trainer) -> Scorer:
    return make_scorer(trainer, LAYOUTS["packed, two passes"])


def test_a_policy_without_a_critic_has_no_values(scorer, rollouts, model, expected) -> None:
    found = scorer.score(model, rollouts)
    assert_scores(found, [scores._replace(values=np.zeros_like(scores.values)) for scores in expected])


def test_a_rollouts_scores_do_not_depend_on_its_neighbours(scorer, rollouts, critic, expected) -> None:
    assert_scores(scorer.score(critic, rollouts[4:5]), expected[4:5])
    assert_scores(scorer.score(critic, rollouts[::-1]), expected[::-1])


def test_new_microbatch_counts_and_weights_do_not_recompile(tiny, trainer, scorer, rollouts, critic):
    scorer.score(critic, rollouts)
    other = ActorCritic(tiny.make_model(trainer, seed=1), critic.value_weight, critic.value_bias, critic.trunk)
    with tiny.counted_compiles() as compiled:
        scorer.score(critic, rollouts[:1])
        scorer.score(critic, rollouts * 3)
        changed = scorer.score(other, rollouts)
    assert compiled == []
    assert np.abs(changed[0].logprobs - scorer.score(critic, rollouts)[0].logprobs).max() > 0.1


def test_weights_are_unchanged(tiny, scorer, rollouts, critic) -> None:
    before = tiny.arrays_by_path(critic)
    scorer.score(critic, rollouts)
    for name, array in tiny.arrays_by_path(critic).items():
        assert array.tobytes() == before[name].tobytes(), name


def test_no_rollouts_give_no_scores(scorer, critic) -> None:
    assert scorer.score(critic, []) == []


def test_error_names_the_rollout_of_a_sequence_that_does_not_fit(trainer, rollouts, critic) -> None:
    short = make_scorer(trainer, RowLayout(11, 4, packed=True))
    with pytest.raises(ValueError, match="rollout 1 has a sequence of 12 tokens, which does not fit into rows of 11"):
        short.score(critic, rollouts)


def test_shared_prompts_do_not_change_scores(trainer, critic: ActorCritic, rollouts: list[ProcessedRollout]) -> None:
    # Five rollouts with one prompt, of which one has no loss, and those of the other tests.
    group = []
    for index in range(5):
        rollout = rollouts[4 * (index != 3) + 6 * (index == 3)]
        ids, mask = rollout.input_ids.copy(), rollout.loss_mask.copy()
        ids[:, :6], mask[:, :6], mask[:, 6] = np.arange(1, 7), False, index != 3
        ids[:, 6:] += index
        turns = np.where(mask, 0, -1).astype(np.int32)
        group.append(dataclasses.replace(rollout, input_ids=ids, loss_mask=mask, turn_ids=turns))
    groups = RowLayout(39, 1, packed=True, whole_rollouts=False, group=GroupRow(5, 2, 17))
    layout = RowLayout(32, 1, packed=True, whole_rollouts=False, row_cost=1.0, alternatives=(groups,))
    packed = pack_to_score([*group, *rollouts], layout, pad_token_id=0)
    assert [slot.prompt_length for own in packed.slots[:5] for slot in own].count(5) == 4
    found, expected = (
        Scorer(trainer, layout, pad_token_id=0, temperature=TEMPERATURE, block_size=5).score(
            critic, [*group, *rollouts]
        )
        for layout in (layout, LAYOUTS["one microbatch"])
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(one.values, other.values, atol=1e-5)
