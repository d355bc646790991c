# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.rl_example import pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, join_batches, make_batch
from marin_rl.learner.critic import ActorCritic, CriticConfig, with_critic
from marin_rl.learner.scoring import Scorer, Scores
from marin_rl.objectives.aggregation import TokenMeanConfig

pytestmark = [pytest.mark.both_lines, pytest.mark.usefixtures("compiled_quickly")]

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


def make_rollouts(vocab: int) -> RolloutBatch:
    """Return rollouts with any number of sequences, with loss on about half of the tokens."""
    rng = np.random.default_rng(0)
    sequences = [np.arange(length) for lengths in LENGTHS for length in lengths]
    position = np.concatenate(sequences)
    has_loss = (position == 1) | ((position > 1) & (rng.random(position.size) < 0.5))
    has_loss[-sum(LENGTHS[-1]) :] = False
    return make_batch(
        [str(index) for index in range(len(LENGTHS))],
        LENGTHS,
        input_ids=rng.integers(0, vocab, position.size).astype(np.int32),
        turn_ids=np.where(has_loss, 0, -1).astype(np.int32),
    )


@pytest.fixture(scope="module")
def rollouts(tiny) -> RolloutBatch:
    return make_rollouts(tiny.VOCAB)


@pytest.fixture(scope="module")
def critic(model: LmHeadModel) -> ActorCritic:
    rng = np.random.default_rng(3)
    new = with_critic(CriticConfig(shared_trunk=False), model)
    trunk = jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(scale=0.2, size=leaf.shape), leaf.dtype), new.trunk)
    weight = NamedArray(jnp.asarray(rng.normal(size=model.Embed.size), jnp.float32), (model.Embed,))
    return ActorCritic(model, weight, NamedArray(jnp.float32(0.3), ()), trunk)


@pytest.fixture(scope="module")
def expected(critic: ActorCritic, rollouts: RolloutBatch) -> Scores:
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
    logprobs, values = (np.zeros(rollouts.input_ids.shape) for _ in range(2))
    for start, end in itertools.pairwise(rollouts.sequence_offsets.tolist()):
        ids = rollouts.input_ids[start:end]
        logs, hidden = (np.asarray(array, np.float64) for array in run(jnp.asarray(np.pad(ids, (0, 12 - ids.size)))))
        for position in np.flatnonzero(rollouts.loss_mask[start:end]):
            logprobs[start + position] = logs[position - 1, ids[position]]
            values[start + position] = hidden[position - 1] @ weight + 0.3
    return Scores(logprobs.astype(np.float32), values.astype(np.float32))


def make_scorer(trainer, layout: RowLayout) -> Scorer:
    return Scorer(trainer, layout, pad_token_id=0, temperature=TEMPERATURE, block_size=5, capacity=8)


def assert_scores(found: Scores, expected: Scores) -> None:
    assert found.is_most_likely is None
    for name in ("logprobs", "values"):
        array = getattr(expected, name)
        assert getattr(found, name).dtype == np.float32
        np.testing.assert_allclose(getattr(found, name), array, atol=1e-5, err_msg=name)


def scores_of(rollouts: RolloutBatch, scores: Scores, indices: Sequence[int]) -> Scores:
    """Scores of some rollouts."""
    arrays = (rollouts.split(array) for array in scores[:2])
    return Scores(*(np.concatenate([array[index] for index in indices]) for array in arrays))


@pytest.mark.medium
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_scores_as_a_full_forward_pass_does(trainer, rollouts, critic, expected, name: str) -> None:
    layout = LAYOUTS[name]
    assert len(pack_batch(rollouts, TokenMeanConfig(), layout, pad_token_id=0).microbatches) == PASSES[name]
    found = make_scorer(trainer, layout).score(critic, rollouts)
    assert_scores(found, expected)
    assert (found.logprobs[rollouts.loss_mask] < 0).all()
    assert not found.logprobs[~rollouts.loss_mask].any()
    assert not found.values[~rollouts.loss_mask].any()
    assert rollouts.num_loss_tokens.sum() > 20


@pytest.fixture(scope="module")
def scorer(trainer) -> Scorer:
    return make_scorer(trainer, LAYOUTS["packed, two passes"])


@pytest.mark.medium
def test_a_policy_without_a_critic_has_no_values(scorer, rollouts, model, expected) -> None:
    found = scorer.score(model, rollouts)
    assert_scores(found, without_values(expected))


@pytest.mark.medium
def test_token_accuracy_is_that_of_full_logits(trainer, rollouts, model) -> None:
    scorer = Scorer(
        trainer,
        LAYOUTS["packed, two passes"],
        pad_token_id=0,
        temperature=TEMPERATURE,
        block_size=5,
        capacity=8,
        accuracy=True,
    )
    Pos = Axis("position", 12)
    run = jax.jit(lambda ids: jnp.argmax(model(NamedArray(ids, (Pos,)), AttentionMask.causal()).array, axis=-1))
    input_ids, expected = rollouts.input_ids.copy(), np.zeros(rollouts.loss_mask.shape, bool)
    for start, end in itertools.pairwise(rollouts.sequence_offsets.tolist()):
        for position in range(1, end - start):
            top = run(jnp.asarray(np.pad(input_ids[start:end], (0, 12 - (end - start)))))[position - 1]
            if position % 2:  # every other token is the most likely one after those before it
                input_ids[start + position] = top
            expected[start + position] = input_ids[start + position] == top
    expected &= rollouts.loss_mask
    found = scorer.score(model, dataclasses.replace(rollouts, input_ids=input_ids)).is_most_likely
    np.testing.assert_array_equal(found, expected)
    assert 10 < expected.sum() < rollouts.loss_mask.sum() - 10


def without_values(scores: Scores) -> Scores:
    return scores._replace(values=np.zeros_like(scores.values))


@pytest.mark.medium
def test_a_rollouts_scores_do_not_depend_on_its_neighbours(scorer, rollouts, critic, expected) -> None:
    for some in ([4], [6, 5, 4, 3, 2, 1, 0]):
        assert_scores(scorer.score(critic, rollouts.take(np.array(some))), scores_of(rollouts, expected, some))


def test_new_microbatch_counts_and_weights_do_not_recompile(tiny, trainer, scorer, rollouts, critic):
    scorer.score(critic, rollouts)
    other = ActorCritic(tiny.make_model(trainer, seed=1), critic.value_weight, critic.value_bias, critic.trunk)
    with tiny.counted_compiles() as compiled:
        scorer.score(critic, rollouts.take(np.array([0])))
        scorer.score(critic, join_batches([rollouts] * 3))
        changed = scorer.score(other, rollouts)
    assert compiled == []
    assert np.abs(changed.logprobs - scorer.score(critic, rollouts).logprobs).max() > 0.1


def test_weights_are_unchanged(tiny, scorer, rollouts, critic) -> None:
    before = tiny.arrays_by_path(critic)
    scorer.score(critic, rollouts)
    for name, array in tiny.arrays_by_path(critic).items():
        assert array.tobytes() == before[name].tobytes(), name


def test_no_rollouts_give_no_scores(scorer, rollouts, critic) -> None:
    assert [array.size for array in scorer.score(critic, rollouts.take(np.array([], np.int64)))[:2]] == [0, 0]


def test_error_names_the_rollout_of_a_sequence_that_does_not_fit(trainer, rollouts, critic) -> None:
    short = make_scorer(trainer, RowLayout(11, 4, packed=True))
    with pytest.raises(ValueError, match="rollout 1 has a sequence of 12 tokens, which does not fit into rows of 11"):
        short.score(critic, rollouts)


@pytest.mark.medium
def test_shared_prompts_do_not_change_scores(trainer, critic: ActorCritic, rollouts: RolloutBatch) -> None:
    # Five rollouts with one prompt, of which one has no loss, and those of the other tests.
    group = rollouts.take(np.array([4, 4, 4, 6, 4]))
    position = np.concatenate([np.arange(end - start) for start, end in itertools.pairwise(group.token_offsets)])
    index = np.repeat(np.arange(5), np.diff(group.token_offsets))
    mask = np.where(position > 6, group.loss_mask, position == 6) & (index != 3)
    group = dataclasses.replace(
        group,
        input_ids=np.where(position < 6, position + 1, group.input_ids + index).astype(np.int32),
        loss_mask=mask,
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
    )
    batch = join_batches([group, rollouts])
    groups = RowLayout(39, 1, packed=True, whole_rollouts=False, group=GroupRow(5, 2, 17))
    layout = RowLayout(32, 1, packed=True, whole_rollouts=False, row_cost=1.0, alternatives=(groups,))
    packed = pack_batch(batch, TokenMeanConfig(), layout, pad_token_id=0)
    assert [slot.prompt_length for slots in packed.slots[:5] for slot in slots].count(5) == 4
    found, expected = (
        Scorer(trainer, layout, pad_token_id=0, temperature=TEMPERATURE, block_size=5).score(critic, batch)
        for layout in (layout, LAYOUTS["one microbatch"])
    )
    assert_scores(found, expected)
