# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The same rollouts in many arrangements, with a learner's update under every objective.

Used by test_invariance.py, which also runs it on 8 fake CPU devices in a separate process:
`python -m tests.learner.invariance_cases FOLDER`.

All objectives are compiled together, one program per shape of a microbatch: the model is repeated once per objective,
and an index selects the objective of each copy. Aggregation and KL in the reward are data and need no program.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.metrics import Metric
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.rl_example import PackedBatch, RlExample, pack_batch
from marin_rl.batching.rollout_batch import TOKEN_ARRAYS, RolloutBatch, batch_rollouts, join_batches
from marin_rl.learner.critic import ActorCritic, CriticConfig
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Learner
from marin_rl.objectives.advantage_inputs import AdvantageInputs
from marin_rl.objectives.advantages import RlooConfig
from marin_rl.objectives.aggregation import ConstantConfig, SequenceMeanConfig, SequenceSumConfig, TokenMeanConfig
from marin_rl.objectives.kl import KlConfig, KlEstimator, LossKlConfig, NoKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import (
    CispoLossConfig,
    GspoLossConfig,
    ImportanceLossConfig,
    PolicyLossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
    RlooSequenceLossConfig,
)
from marin_rl.types import Generation, Rollout, RolloutStatus, StopReason, Task, Turn
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests import tiny_learner as tiny

POSITIONS, EMBED, VOCAB, MLP = 16, 8, 24, 8
TEMPERATURE, BLOCK_SIZE = 0.8, 5
CRITIC = CriticConfig(shared_trunk=True)
AGGREGATIONS = {
    "token_mean": TokenMeanConfig(),
    "sequence_mean": SequenceMeanConfig(),
    "sequence_sum": SequenceSumConfig(),
    "constant": ConstantConfig(5),
}
# Bounds that clip some rollouts and tokens but not others.
TERMS: dict[str, PolicyLossConfig] = {
    "reinforce": ReinforceLossConfig(),
    "importance": ImportanceLossConfig(),
    "ppo_clip": PpoClipLossConfig(0.1, 0.2, dual_clip=1.3),
    "gspo": GspoLossConfig(0.05, 0.1),
    "rloo_sequence": RlooSequenceLossConfig(0.05, 0.1),
    "cispo": CispoLossConfig(0.2, 0.2),
}
KLS: dict[str, KlConfig] = {
    "none": NoKlConfig(),
    "in_reward": RewardKlConfig(0.2),
    **{str(estimator): LossKlConfig(0.2, estimator) for estimator in KlEstimator},
}
COMBINATIONS = list(itertools.product(AGGREGATIONS, TERMS, KLS))


class PrefixMean(LmHeadModel[LlamaConfig]):
    """A minimal language model: each token sees the mean of its segment so far, its position, and one MLP."""

    embedding: NamedArray
    positions: NamedArray
    up: NamedArray
    down: NamedArray
    head: NamedArray

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(hidden_dim=EMBED)

    @property
    def Vocab(self) -> Axis:
        return Axis("vocab", VOCAB)

    @classmethod
    def init(cls, Vocab, config, *, key):
        raise NotImplementedError

    def activations(self, input_ids, attn_mask=None, *, key=None, pos_ids=None):
        Pos = input_ids.resolve_axis("position")
        KeyPos = Pos.alias("key_position")
        seen = attn_mask.materialize(Pos, KeyPos).astype(jnp.float32)
        tokens = self.embedding.take("vocab", input_ids) + self.positions.take("place", pos_ids)
        mean = hax.dot(seen / hax.sum(seen, KeyPos), tokens.rename({"position": "key_position"}), axis=KeyPos)
        inputs = tokens + 2 * mean
        return inputs + hax.dot(hax.tanh(hax.dot(inputs, self.up, axis="embed")), self.down, axis="mlp")

    def get_lm_head(self):
        return self.head

    def resize_vocab(self, new_size, key=None):
        raise NotImplementedError


def make_prefix_mean(trainer: TrainerConfig) -> PrefixMean:
    rng = np.random.default_rng(0)
    Embed, Vocab, Mlp, Place = Axis("embed", EMBED), Axis("vocab", VOCAB), Axis("mlp", MLP), Axis("place", POSITIONS)
    axes = ((Vocab, Embed), (Place, Embed), (Embed, Mlp), (Mlp, Embed), (Embed, Vocab))
    arrays = [hax.named(rng.normal(scale=0.6, size=[a.size for a in own]).astype(np.float32), own) for own in axes]
    with trainer.use_device_mesh():
        return hax.shard(PrefixMean(*arrays), trainer.parameter_axis_mapping)


def make_actor_critic(trainer: TrainerConfig) -> ActorCritic:
    """A llama with a value head on its trunk."""
    policy = tiny.make_model(trainer)
    weight = np.random.default_rng(1).normal(scale=0.5, size=policy.Embed.size).astype(np.float32)
    return ActorCritic(policy, hax.named(jnp.asarray(weight), policy.Embed), hax.named(jnp.float32(0.25), ()), None)


Objective = Axis("objective", len(TERMS) * len(KLS))
OBJECTIVES = list(itertools.product(TERMS, KLS))


class EveryObjective(eqx.Module):
    """One copy of a model per objective. The copies share no parameters, so each gets its own gradient."""

    models: LmHeadModel | ActorCritic
    """Models with the axis `objective` on every array."""
    losses: NamedArray
    """`{objective}` zeros; their gradient is the loss of each objective. A parameter compiles faster than a metric."""
    clipped: NamedArray
    """`{objective}` zeros; their gradient is the number of clipped tokens."""

    @staticmethod
    def start(model: LmHeadModel | ActorCritic) -> "EveryObjective":
        def repeat(leaf: NamedArray) -> NamedArray:
            return hax.broadcast_axis(leaf, Objective)

        models = jax.tree.map(repeat, model, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
        return EveryObjective(models, hax.zeros(Objective), hax.zeros(Objective))


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenTerm(PolicyLossConfig):
    index: jax.Array

    def per_token(self, tokens):
        branches = [config.per_token for config in TERMS.values()]
        return jax.lax.switch(self.index, branches, tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenKl(KlConfig):
    index: jax.Array

    def reward_penalty(self, kl):
        raise NotImplementedError

    def loss_terms(self, logprobs, reference_logprobs):
        return jax.lax.switch(self.index, [config.loss_terms for config in KLS.values()], logprobs, reference_logprobs)


def every_loss(every: EveryObjective, batch: RlExample, *, key=None) -> tuple[jax.Array, dict[str, Metric]]:
    """Return the sum of the losses of all objectives."""

    def loss(model: LmHeadModel | ActorCritic, term: NamedArray, kl: NamedArray) -> tuple[jax.Array, jax.Array]:
        total, metrics = RlLoss(ChosenTerm(term.array).per_token, ChosenKl(kl.array), TEMPERATURE, BLOCK_SIZE, CRITIC)(
            model, batch
        )
        return total, metrics["policy/clipfrac_avg"]._value

    term, kl = (hax.named(index, Objective) for index in np.indices((len(TERMS), len(KLS))).reshape(2, -1))
    losses, clipped = hax.vmap(loss, Objective)(every.models, term, kl)
    told = every.losses.array * jax.lax.stop_gradient(losses) + every.clipped.array * clipped
    return jnp.sum(losses + told), {}


class Episode(NamedTuple):
    """Token counts of a rollout."""

    group: int
    observations: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[int, ...], ...]
    rewritten: tuple[int, ...]
    """Turns before which the history was rewritten; earlier tokens are no longer visible."""
    score: float
    has_loss: bool


GROUPS = [
    # turns of each rollout, and the turns at which a new sequence starts; the first group has 1, 2, 6 and 3 turns
    [(1, ()), (2, ()), (6, ()), (3, (2,))],
    [(1, ()), (1, ()), (2, (1,)), (1, ())],
    [(1, ()), (2, ()), (2, (1,)), (1, ()), (1, ())],
]
SEQUENCES = 16


def make_episodes() -> list[Episode]:
    """Return thirteen rollouts of three groups, in 16 sequences; the last has no loss."""
    rng = np.random.default_rng(2)

    def tokens(at_least: int, at_most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, VOCAB, rng.integers(at_least, at_most + 1)).tolist())

    episodes = []
    for group, rollouts in enumerate(GROUPS):
        prompt = tokens(4, 4)
        for turns, rewritten in rollouts:
            most = 5 if turns == 1 else 3 if turns < 4 else 1
            observations = [prompt, *(tokens(1, 2 if turns < 4 else 1) for _ in range(turns - 1))]
            actions = [tokens(1, most) for _ in range(turns)]
            episodes.append(Episode(group, tuple(observations), tuple(actions), rewritten, float(rng.normal()), True))
    episodes[-1] = episodes[-1]._replace(has_loss=False)
    return episodes


class PerAction(NamedTuple):
    """Values of each rollout's action tokens, one array per rollout."""

    policy_logprobs: list[np.ndarray]
    reference_logprobs: list[np.ndarray]
    importance_weights: list[np.ndarray]
    values: list[np.ndarray]
    targets: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A layout of the rollouts; it must not change an update."""

    rows: int
    row_length: int = POSITIONS
    packed: bool = False
    microbatches: int = 1
    """Expected number of microbatches, to verify the case itself."""
    own_positions: int = POSITIONS
    """Row length of a rollout's arrays."""
    order: int | None = None
    """Seed of a permutation of the rollouts."""
    each_turn_apart: bool = False
    """Split every turn into a separate sequence that repeats earlier tokens without loss."""
    whole_rollouts: bool = True
    one_sequence: bool = False
    """Leave out rollouts of several sequences."""
    group: GroupRow | None = None
    """Parts of the rows of another layout, which the rollouts use."""

    @property
    def layout(self) -> RowLayout:
        layout = RowLayout(self.row_length, self.rows, self.packed, self.whole_rollouts)
        if self.group is None:
            return layout
        groups = dataclasses.replace(layout, row_length=self.group.row_length, group=self.group)
        return dataclasses.replace(layout, row_cost=1.0, alternatives=(groups,))


BASE = Arrangement(SEQUENCES)
# Four kinds of microbatches, hence four programs.
ARRANGEMENTS = {
    "permuted": Arrangement(16, order=5),
    "two passes": Arrangement(8, microbatches=2),
    "packed": Arrangement(8, packed=True),
    "longer rows of their own": Arrangement(8, own_positions=21, microbatches=2),
    "each turn apart": Arrangement(8, packed=True, each_turn_apart=True, microbatches=2),
    "each turn apart, unpacked": Arrangement(8, each_turn_apart=True, microbatches=3),
    "four microbatches": Arrangement(4, microbatches=4),
    "packed, two passes": Arrangement(4, packed=True, microbatches=2),
    "packed, permuted": Arrangement(4, packed=True, order=6, microbatches=2),
    "longer rows, eight microbatches": Arrangement(2, 17, microbatches=8),
    "packed in longer rows, four microbatches": Arrangement(2, 17, packed=True, microbatches=4),
}
OF_LLAMA = ("packed", "each turn apart", "longer rows of their own")
"""Arrangements that the program of "two passes" can run."""
ON_MESHES = ARRANGEMENTS["each turn apart"]
SCATTERED = Arrangement(4, packed=True, microbatches=3, each_turn_apart=True, whole_rollouts=False)
ONE_SEQUENCE = Arrangement(SEQUENCES, one_sequence=True)
ONE_SEQUENCE_SHARED = Arrangement(4, packed=True, group=GroupRow(4, 3, 12), one_sequence=True)
SCATTERED_SHARED = Arrangement(
    4, packed=True, group=GroupRow(4, 3, 12), microbatches=5, each_turn_apart=True, whole_rollouts=False
)
"""Arrangements with a rollout's sequences in different microbatches; only for terms without a ratio per rollout."""
MESHES = {"data8": 1, "data4-model2": 2}
"""Size of the model axis; the other axes share 8 devices."""


def arrange(episode: Episode, name: str, arrangement: Arrangement) -> RolloutBatch:
    """Build a batch of one rollout with the code for sampled rollouts."""
    turns, seen = [], ()
    for index, (observation, action) in enumerate(zip(episode.observations, episode.actions, strict=True)):
        anew = index == 0 or index in episode.rewritten
        context = observation if anew else (*seen, *observation)
        starts = anew or arrangement.each_turn_apart
        generation = Generation(action, (-1.0,) * len(action), StopReason.STOP, 0, 0)
        turns.append(Turn(context if starts else observation, generation, (), {}, "", starts))
        seen = (*context, *action)
    task = Task("t", "test", ({"role": "user", "content": ""},), "")
    rollout = Rollout(name, str(episode.group), task, tuple(turns), RolloutStatus.COMPLETED, {"score": episode.score})
    batch = batch_rollouts([rollout], max_length=arrangement.own_positions)
    return batch if episode.has_loss else batch.without_loss(np.array([0]))


class Update(NamedTuple):
    """The result of one step of gradient descent."""

    loss: float
    clipped: float
    """Number of tokens."""
    gradient: dict[str, np.ndarray]
    """Gradient by parameter."""


class Matrix:
    """Updates of one model under every objective and arrangement."""

    def __init__(self, trainer: TrainerConfig, model: LmHeadModel | ActorCritic):
        self.trainer = trainer
        self.learner = Learner(trainer, tiny.SgdConfig(), every_loss, num_updates=10)
        self.episodes = make_episodes()
        self.per_action = self._score(model)
        with trainer.use_device_mesh():
            start = eqx.filter_jit(EveryObjective.start)(model)
        self._start = self.learner.initial_state(start, jax.random.PRNGKey(0))
        self._before = arrays_by_name(self._start.model)
        self._credits = functools.cache(self._compute_credits)
        self._steps = functools.cache(self._run)

    def update(self, arrangement: Arrangement, aggregation: str, term: str, kl: str) -> Update:
        """Return one objective's part of a step; the step runs once for all objectives."""
        return self._steps(arrangement, aggregation, kl == "in_reward")[OBJECTIVES.index((term, kl))]

    def step(self, microbatches: Sequence[RlExample]) -> list[Update]:
        """Run one step of gradient descent from the same weights and return the update of each objective."""
        state = jax.tree.map(jnp.copy, self._start)  # steps donate their state
        state, _ = self.learner.update(state, microbatches)
        after = arrays_by_name(state.model)
        gradient = {name: array - after[name] for name, array in self._before.items()}
        losses, clipped = gradient.pop(".losses"), gradient.pop(".clipped")
        return [
            Update(losses[index], clipped[index], {name: array[index] for name, array in gradient.items()})
            for index in range(len(OBJECTIVES))
        ]

    def _run(self, arrangement: Arrangement, aggregation: str, in_reward: bool) -> list[Update]:
        packed = self.pack(arrangement, aggregation, in_reward)
        assert len(packed.microbatches) == arrangement.microbatches
        return self.step(packed.microbatches)

    def pack(self, arrangement: Arrangement, aggregation: str, in_reward: bool) -> PackedBatch:
        """Return the batch with all inputs from the host."""
        actions, advantages = self.per_action, self._credits(in_reward)
        order = [i for i, episode in enumerate(self.episodes) if not (arrangement.one_sequence and episode.rewritten)]
        if arrangement.order is not None:
            order = np.random.default_rng(arrangement.order).permutation(order).tolist()
        batch = join_batches([arrange(self.episodes[index], str(index), arrangement) for index in order])
        inputs = {"advantages": advantages, "returns": actions.targets}
        for name in ("policy_logprobs", "reference_logprobs", "values", "importance_weights"):
            inputs[name] = getattr(actions, name)
        arrays = {
            name: batch.from_actions(name, [values[index] for index in order]).astype(TOKEN_ARRAYS[name])
            for name, values in inputs.items()
        }
        batch = dataclasses.replace(batch, **arrays)
        return pack_batch(batch, AGGREGATIONS[aggregation], arrangement.layout, pad_token_id=0)

    def _score(self, model: LmHeadModel | ActorCritic) -> PerAction:
        """Return old and reference log-probs near the model's, and random values for the rest."""
        rng = np.random.default_rng(3)
        layout = ARRANGEMENTS["packed"].layout
        scorer = Scorer(self.trainer, layout, pad_token_id=0, temperature=TEMPERATURE, block_size=BLOCK_SIZE)
        batch = join_batches([arrange(episode, str(index), BASE) for index, episode in enumerate(self.episodes)])
        scores = scorer.score(model, batch)
        # Rounded, so that the numbers are equal on every mesh.
        own, values = (batch.actions(array.round(3)) for array in scores[:2])

        def near(arrays: Sequence[np.ndarray], scale: float) -> list[np.ndarray]:
            return [array + rng.normal(scale=scale, size=array.shape) for array in arrays]

        return PerAction(
            [np.minimum(array, 0) for array in near(own, 0.3)],
            [np.minimum(array, 0) for array in near(own, 0.6)],
            [rng.uniform(0.5, 1.5, array.shape) for array in own],
            near(values, 0.3),
            near(values, 1.0),
        )

    def _compute_credits(self, in_reward: bool) -> list[np.ndarray]:
        """Return advantages with or without a KL penalty in the reward."""
        kl = KLS["in_reward"] if in_reward else KLS["none"]
        groups: dict[int, list[AdvantageInputs]] = {}
        for index, episode in enumerate(self.episodes):
            k1 = self.per_action.policy_logprobs[index] - self.per_action.reference_logprobs[index]
            signal = AdvantageInputs(
                id=str(index),
                score=episode.score,
                turn_rewards=np.zeros(len(episode.actions)),
                anchors=("",) * len(episode.actions),
                turn_ids=np.zeros(k1.size, np.int32),
                penalties=kl.reward_penalty(k1),
                values=np.zeros(k1.size),
            )
            groups.setdefault(episode.group, []).append(signal)
        computed = RlooConfig().compute(list(groups.values()))
        return [token_advantages.advantages for group in computed for token_advantages in group]


def arrays_by_name(model: EveryObjective) -> dict[str, np.ndarray]:
    return {name.partition("[")[0]: array for name, array in tiny.arrays_by_path(model).items()}


def assert_same(found: Update, expected: Update, what: str) -> None:
    """Compare with a tolerance of 1e-5."""
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5, atol=1e-5, err_msg=f"{what}: loss")
    assert found.clipped == expected.clipped, what
    assert found.gradient.keys() == expected.gradient.keys()
    for name, array in expected.gradient.items():
        np.testing.assert_allclose(found.gradient[name], array, rtol=0, atol=1e-5, err_msg=f"{what}: {name}")


def main(folder: Path) -> None:
    for name, model_axis in MESHES.items():
        trainer = tiny.make_trainer(ON_MESHES.rows, model_axis=model_axis)
        matrix = Matrix(trainer, make_prefix_mean(trainer))
        updates = [matrix.update(ON_MESHES, *combination) for combination in COMBINATIONS]
        mesh = {f"mesh {axis}": size for axis, size in matrix.learner.trainer.device_mesh.shape.items()}
        shards = {str(shard.index) for shard in matrix._start.model.models.up.array.addressable_shards}
        gradient = {name: np.stack([update.gradient[name] for update in updates]) for name in updates[0].gradient}
        told = {name: [getattr(update, name) for update in updates] for name in ("loss", "clipped")}
        np.savez(folder / f"{name}.npz", **mesh, shards=len(shards), **gradient, **told)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
