# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from collections.abc import Mapping

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.metrics import Metric
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.critic import ActorCritic, CriticConfig
from marin_rl.learner.loss import RlLoss, cross_entropy_loss, first_log_ratios, loss_metrics
from marin_rl.learner.train_step import fold_metrics
from marin_rl.objectives.aggregation import (
    AggregationConfig,
    ConstantConfig,
    SequenceMeanConfig,
    SequenceSumConfig,
    TokenMeanConfig,
)
from marin_rl.objectives.importance import mismatch_metrics
from marin_rl.objectives.kl import KlEstimator, LossKlConfig, NoKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import (
    CispoLossConfig,
    GspoLossConfig,
    ImportanceLossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
    RlooSequenceLossConfig,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROWS, POSITIONS, EMBED, VOCAB = 4, 6, 3, 9
TEMPERATURE = 0.7
AXES = (Axis("batch", ROWS), Axis("position", POSITIONS))

POLICY_LOSSES = {
    "reinforce": ReinforceLossConfig(),
    "importance": ImportanceLossConfig(),
    "ppo_clip": PpoClipLossConfig(0.1, 0.3),
    "dual_clip": PpoClipLossConfig(0.1, 0.3, dual_clip=1.5),
    "gspo": GspoLossConfig(0.1, 0.3),
    "rloo_sequence": RlooSequenceLossConfig(0.1, 0.3),
    "cispo": CispoLossConfig(0.1, 0.3),
}
KLS = {
    "none": NoKlConfig(),
    "in_reward": RewardKlConfig(0.3),
    "k1": LossKlConfig(0.3, KlEstimator.K1),
    "k2": LossKlConfig(0.3, KlEstimator.K2),
    "k3": LossKlConfig(0.3, KlEstimator.K3),
    "k3_plus": LossKlConfig(0.3, KlEstimator.K3_PLUS),
}
AGGREGATIONS = {
    "token_mean": TokenMeanConfig(),
    "sequence_mean": SequenceMeanConfig(),
    "sequence_sum": SequenceSumConfig(),
    "constant": ConstantConfig(10),
}
CRITIC = CriticConfig(coefficient=0.7, clip=0.4)


class TableModel(LmHeadModel[LlamaConfig]):
    """A language model with its activations as parameters, one vector per position."""

    table: NamedArray
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
        return self.table

    def get_lm_head(self):
        return self.head

    def resize_vocab(self, new_size, key=None):
        raise NotImplementedError


def make_model(table: np.ndarray, head: np.ndarray) -> TableModel:
    rows = Axis("batch", table.shape[0])
    named = hax.named(jnp.asarray(table, jnp.float32), (rows, AXES[1], "embed"))
    return TableModel(named, hax.named(jnp.asarray(head, jnp.float32), ("embed", "vocab")))


@dataclasses.dataclass
class Case:
    """Inputs in float64, and the batch made from them."""

    table: np.ndarray
    head: np.ndarray
    ids: np.ndarray
    mask: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    policy: np.ndarray
    reference: np.ndarray
    importance: np.ndarray
    values: np.ndarray
    returns: np.ndarray

    def batch(self, aggregation: AggregationConfig) -> RlExample:
        owners = np.broadcast_to(self.rollout[:, None], self.mask.shape)

        def masked(values: np.ndarray) -> np.ndarray:
            return np.where(self.mask, values, 0).astype(np.float32)

        arrays = {
            "input_ids": self.ids.astype(np.int32),
            "loss_mask": self.mask,
            "segment_ids": np.ones(self.mask.shape, np.int32),
            "position_ids": np.broadcast_to(np.arange(POSITIONS, dtype=np.int32), self.mask.shape),
            "rollout_ids": owners.astype(np.int32),
            "loss_weights": masked(
                aggregation.loss_weights(np.bincount(owners[self.mask], minlength=owners.max() + 1))[owners]
            ),
            "importance_weights": masked(self.importance),
            "advantages": masked(self.advantages),
            "policy_logprobs": masked(self.policy),
            "reference_logprobs": masked(self.reference),
            "values": masked(self.values),
            "returns": masked(self.returns),
        }
        return RlExample(**{name: hax.named(jnp.asarray(array), AXES) for name, array in arrays.items()})


def make_case(seed: int = 0) -> Case:
    """Return three rollouts with different advantages per token; the second has two rows."""
    rng = np.random.default_rng(seed)
    table, head = rng.normal(size=(ROWS, POSITIONS, EMBED)), rng.normal(size=(EMBED, VOCAB))
    ids = rng.integers(0, VOCAB, (ROWS, POSITIONS))
    mask = rng.random((ROWS, POSITIONS)) < 0.6
    mask[:, 0] = False
    logprobs, _ = token_values(table, head, ids)
    rollout = np.array([0, 1, 1, 2])
    return Case(
        table,
        head,
        ids,
        mask,
        rollout,
        np.array([1.5, -0.8, 0.4])[rollout][:, None] + rng.normal(scale=0.1, size=ids.shape),
        logprobs + rng.normal(scale=0.5, size=ids.shape),
        logprobs + rng.normal(scale=0.5, size=ids.shape),
        rng.uniform(0.5, 1.5, ids.shape),
        rng.normal(size=ids.shape),
        rng.normal(size=ids.shape),
    )


def token_values(table: np.ndarray, head: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the log-prob of each token and the entropy of its prediction with loops over full logits."""
    logprobs, entropies = np.zeros(ids.shape), np.zeros(ids.shape)
    for row in range(ids.shape[0]):
        for position in range(1, ids.shape[1]):
            logits = table[row, position - 1] @ head / TEMPERATURE
            logs = logits - np.log(np.sum(np.exp(logits)))
            logprobs[row, position] = logs[ids[row, position]]
            entropies[row, position] = -np.sum(np.exp(logs) * logs)
    return logprobs, entropies


def clipped_term(ratio: float, advantage: float, low: float = 0.9, high: float = 1.3) -> float:
    return max(-advantage * ratio, -advantage * min(max(ratio, low), high))


def policy_term(name: str, case: Case, at: tuple[int, int], logprobs: np.ndarray, frozen: np.ndarray) -> float:
    """Compute one token's term; no gradient flows through the log-probs in `frozen`."""
    advantage, ratio = case.advantages[at], np.exp(logprobs[at] - case.policy[at])
    if name == "reinforce":
        return -advantage * logprobs[at]
    if name == "importance":
        return -advantage * ratio
    if name == "cispo":
        return -min(max(np.exp(frozen[at] - case.policy[at]), 0.9), 1.3) * advantage * logprobs[at]
    if name in ("gspo", "rloo_sequence"):
        rows = case.rollout == case.rollout[at[0]]
        differences = (logprobs - case.policy)[rows][case.mask[rows]]
        if name == "gspo":
            return clipped_term(np.exp(differences.mean()), advantage)
        return clipped_term(np.exp(differences.sum()), advantage) / differences.size
    term = clipped_term(ratio, advantage)
    return min(term, -1.5 * advantage) if name == "dual_clip" and advantage < 0 else term


def kl_term(name: str, logprob: float, reference: float, frozen: float) -> float:
    d = reference - logprob
    k2, k3 = d * d / 2, np.exp(d) - 1 - d
    # The value of k3, the gradient of k2.
    d_frozen = reference - frozen
    k3_plus = np.exp(d_frozen) - 1 - d_frozen + k2 - d_frozen**2 / 2
    return 0.3 * {"none": 0.0, "in_reward": 0.0, "k1": -d, "k2": k2, "k3": k3, "k3_plus": k3_plus}[name]


def token_weight(name: str, case: Case, rollout: int) -> float:
    lengths = [int(case.mask[case.rollout == index].sum()) for index in range(3)]
    return {
        "token_mean": 1 / sum(lengths),
        "sequence_mean": 1 / (3 * lengths[rollout]),
        "sequence_sum": 1 / 3,
        "constant": 1 / (3 * 10),
    }[name]


def oracle(
    case: Case, policy: str, kl: str, aggregation: str, table: np.ndarray, head: np.ndarray
) -> tuple[float, float]:
    """Compute the policy part and the KL part of the loss with loops in float64."""
    logprobs, _ = token_values(table, head, case.ids)
    frozen, _ = token_values(case.table, case.head, case.ids)
    policy_part = kl_part = 0.0
    for row, position in np.argwhere(case.mask):
        at = int(row), int(position)
        weight = token_weight(aggregation, case, case.rollout[row])
        policy_part += weight * case.importance[at] * policy_term(policy, case, at, logprobs, frozen)
        kl_part += weight * kl_term(kl, logprobs[at], case.reference[at], frozen[at])
    return policy_part, kl_part


def rl_loss(policy: str, kl: str, *, block_size: int = POSITIONS, critic: CriticConfig | None = None) -> RlLoss:
    return RlLoss(POLICY_LOSSES[policy].per_token, KLS[kl], TEMPERATURE, block_size, critic)


def differentiate(loss: RlLoss, model: LmHeadModel | ActorCritic, batch: RlExample):
    return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(model, batch)


COMBINATIONS = [
    *((policy, "k3", "sequence_sum") for policy in POLICY_LOSSES),
    *(("reinforce", kl, "sequence_mean") for kl in KLS if kl != "k3"),
    *((policy, "k2", name) for policy in ("ppo_clip", "rloo_sequence") for name in AGGREGATIONS),
]
"""Combinations of the two parts; test_invariance.py tests all of them."""


@pytest.mark.medium
@pytest.mark.parametrize(("policy", "kl", "aggregation"), COMBINATIONS)
def test_value_and_gradient_agree_with_loops_in_float64(policy: str, kl: str, aggregation: str) -> None:
    case = make_case()
    batch = case.batch(AGGREGATIONS[aggregation])
    (value, metrics), gradient = differentiate(rl_loss(policy, kl), make_model(case.table, case.head), batch)
    expected = oracle(case, policy, kl, aggregation, case.table, case.head)
    np.testing.assert_allclose(value, sum(expected), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(float(metrics["loss/policy_avg"]), expected[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(float(metrics["loss/kl_avg"]), expected[1], rtol=2e-5, atol=1e-6)

    rng = np.random.default_rng(1)
    for _ in range(3):
        along = rng.normal(size=case.table.shape), rng.normal(size=case.head.shape)
        step = 1e-6
        ahead, behind = (
            sum(oracle(case, policy, kl, aggregation, case.table + s * along[0], case.head + s * along[1]))
            for s in (step, -step)
        )
        slope = np.sum(gradient.table.array * along[0]) + np.sum(gradient.head.array * along[1])
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-5)


def make_critic(case: Case, weight: np.ndarray, bias: float, trunk: np.ndarray | None) -> ActorCritic:
    own = None if trunk is None else make_model(trunk, case.head)
    value_weight = hax.named(jnp.asarray(weight, jnp.float32), "embed")
    value_bias = hax.named(jnp.float32(bias), ())
    return ActorCritic(make_model(case.table, case.head), value_weight, value_bias, own)


def value_oracle(case: Case, weight: np.ndarray, bias: float, trunk: np.ndarray, clip: float | None):
    """Compute the value part of the loss under sequence_mean, and the clipped tokens, with loops in float64."""
    part, clipped = 0.0, []
    for row, position in np.argwhere(case.mask):
        value = trunk[row, position - 1] @ weight + bias
        old, target = case.values[row, position], case.returns[row, position]
        error = (value - target) ** 2
        bounded = error if clip is None else (min(max(value, old - clip), old + clip) - target) ** 2
        clipped.append(bounded > error)
        part += token_weight("sequence_mean", case, case.rollout[row]) * max(error, bounded) / 2
    return part, clipped


@pytest.mark.medium
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("clip", [0.4, None])
def test_the_critics_loss_agrees_with_loops_in_float64(shared: bool, clip: float | None) -> None:
    case, rng = make_case(), np.random.default_rng(7)
    weight, bias, own = rng.normal(size=EMBED), 0.3, rng.normal(size=case.table.shape)
    critic = CriticConfig(shared_trunk=shared, coefficient=0.7, clip=clip)
    model = make_critic(case, weight, bias, None if shared else own)
    batch = case.batch(SequenceMeanConfig())
    (value, metrics), gradient = differentiate(rl_loss("ppo_clip", "k3", critic=critic), model, batch)
    (alone, _), policy_gradient = differentiate(rl_loss("ppo_clip", "k3"), model.policy, batch)

    trunk = case.table if shared else own
    part, clipped = value_oracle(case, weight, bias, trunk, clip)
    np.testing.assert_allclose(float(metrics["loss/value_avg"]), part, rtol=2e-5)
    np.testing.assert_allclose(value, float(alone) + 0.7 * part, rtol=2e-5)
    assert any(clipped) == (clip is not None)
    np.testing.assert_allclose(float(metrics["val/clipfrac_avg"]), np.mean(clipped), rtol=1e-6)

    along = rng.normal(size=EMBED), rng.normal(), rng.normal(size=case.table.shape)
    step = 1e-6
    ahead, behind = (
        value_oracle(case, weight + s * along[0], bias + s * along[1], trunk + s * along[2], clip)[0]
        for s in (step, -step)
    )
    # Only the critic's loss updates a separate trunk, and only the policy's loss updates the policy.
    moved = gradient.policy.table.array - policy_gradient.table.array if shared else gradient.trunk.table.array
    slope = (
        np.sum(gradient.value_weight.array * along[0]) + gradient.value_bias.array * along[1] + np.sum(moved * along[2])
    )
    np.testing.assert_allclose(slope, 0.7 * (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient.policy.head.array, policy_gradient.head.array, rtol=1e-5, atol=1e-7)
    if not shared:
        np.testing.assert_allclose(gradient.policy.table.array, policy_gradient.table.array, rtol=1e-5, atol=1e-7)
        assert not np.any(gradient.trunk.head.array)


def ce_case(case: Case, batch: RlExample) -> tuple[np.ndarray, RlExample]:
    """Return tokens of the cross-entropy, some on the loss mask and some off it, and the batch with their weights."""
    ce_mask = np.random.default_rng(5).random(case.mask.shape) < 0.5
    ce_mask[:, 0] = False
    assert (ce_mask & case.mask).any()
    assert (ce_mask & ~case.mask).any()
    assert (case.mask & ~ce_mask).any()
    weights = hax.named(jnp.asarray(ce_mask / ce_mask.sum(), jnp.float32), AXES)
    return ce_mask, dataclasses.replace(batch, ce_weights=weights)


@pytest.mark.medium
@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", None])
def test_the_cross_entropy_is_a_stream_of_its_own(policy: str | None) -> None:
    case = make_case()
    case.reference[~case.mask] = case.policy[~case.mask] = np.nan
    batch = case.batch(SequenceSumConfig())
    ce_mask, both = ce_case(case, batch)
    rl = rl_loss("ppo_clip" if policy is None else policy, "k3")
    loss = dataclasses.replace(rl, ce_coefficient=0.25, policy_loss=None if policy is None else rl.policy_loss)
    model = make_model(case.table, case.head)
    (value, metrics), gradient = differentiate(loss, model, both)
    (alone, rl_metrics), rl_gradient = differentiate(rl, model, batch)
    if policy is None:
        alone, rl_metrics, rl_gradient = 0.0, {}, jax.tree.map(jnp.zeros_like, rl_gradient)

    # The mean of -log π over these tokens, and its gradient, with full logits in float64.
    logprobs, _ = token_values(case.table, case.head, case.ids)
    np.testing.assert_allclose(float(metrics["loss/ce_avg"]), -logprobs[ce_mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(value, float(alone) - 0.25 * logprobs[ce_mask].mean(), rtol=1e-5)
    of_table, of_head = np.zeros(case.table.shape), np.zeros(case.head.shape)
    for row, position in np.argwhere(ce_mask):
        hidden = case.table[row, position - 1]
        logits = hidden @ case.head / TEMPERATURE
        slope = np.exp(logits) / np.exp(logits).sum() - (np.arange(VOCAB) == case.ids[row, position])
        slope *= 0.25 / (ce_mask.sum() * TEMPERATURE)
        of_table[row, position - 1] += case.head @ slope
        of_head += np.outer(hidden, slope)
    np.testing.assert_allclose(gradient.table.array, rl_gradient.table.array + of_table, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient.head.array, rl_gradient.head.array + of_head, rtol=1e-4, atol=1e-6)
    # The metrics of the stream `rl` do not change.
    assert metrics.keys() == {*rl_metrics, "loss/ce_avg"}
    for name, expected in rl_metrics.items():
        np.testing.assert_allclose(float(metrics[name]), float(expected), rtol=1e-6, err_msg=name)
    assert ("objective/entropy" in loss_metrics([metrics])) == (policy is not None)


@pytest.mark.medium
def test_parts_of_the_cross_entropy_add_up_over_microbatches() -> None:
    case = make_case()
    _, batch = ce_case(case, case.batch(SequenceMeanConfig()))
    model, loss = make_model(case.table, case.head), cross_entropy_loss(block_size=4)
    whole_loss, whole = loss(model, batch)
    parts = [loss(rows_of(model, slice(row, row + 1)), rows_of(batch, slice(row, row + 1))) for row in range(ROWS)]
    np.testing.assert_allclose(sum(float(part[0]) for part in parts), whole_loss, rtol=1e-6)
    published = loss_metrics([fold_metrics([part[1] for part in parts])])
    assert published == {"loss/ce_avg": pytest.approx(float(whole["loss/ce_avg"]), rel=1e-6)}
    assert float(whole_loss) == float(whole["loss/ce_avg"])


def test_a_token_without_importance_has_no_policy_loss() -> None:
    case = make_case()
    case.importance[:] = 0
    batch = case.batch(SequenceSumConfig())
    (value, metrics), _ = differentiate(rl_loss("ppo_clip", "k3"), make_model(case.table, case.head), batch)
    assert float(metrics["loss/policy_avg"]) == 0
    assert float(value) == float(metrics["loss/kl_avg"]) > 0


def test_the_block_size_does_not_matter() -> None:
    case = make_case()
    batch, model = case.batch(SequenceSumConfig()), make_model(case.table, case.head)
    whole, blocks = (differentiate(rl_loss("ppo_clip", "k3", block_size=size), model, batch) for size in (POSITIONS, 4))
    for found, expected in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def rows_of(tree, rows: slice):
    """Return one microbatch: some rows of a batch, or of the table of a model."""
    return jax.tree.map(
        lambda leaf: leaf["batch", rows] if isinstance(leaf, NamedArray) and leaf.has_axis("batch") else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, NamedArray),
    )


def in_microbatches(count: int) -> tuple[float, dict[str, Metric]]:
    """Return the sum of the losses of `count` microbatches, and their folded metrics."""
    case = make_case(seed=3)
    case.mask[0] = False  # microbatches of different weight; one of four has no loss tokens
    batch, model = case.batch(SequenceMeanConfig()), make_critic(case, np.ones(EMBED), 0.1, None)
    loss = eqx.filter_jit(rl_loss("ppo_clip", "k3", critic=CRITIC))
    size = ROWS // count
    parts = [
        loss(rows_of(model, slice(start, start + size)), rows_of(batch, slice(start, start + size)))
        for start in range(0, ROWS, size)
    ]
    return sum(float(part[0]) for part in parts), fold_metrics([part[1] for part in parts])


@pytest.mark.medium
@pytest.mark.parametrize("count", [2, 4])
def test_microbatches_change_neither_loss_nor_metrics(count: int) -> None:
    whole_loss, whole = in_microbatches(1)
    loss, metrics = in_microbatches(count)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5)
    assert metrics.keys() == whole.keys()
    published, expected = loss_metrics([metrics]), loss_metrics([whole])
    for name, value in expected.items():
        np.testing.assert_allclose(published[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def expected_metrics(case: Case) -> dict[str, float]:
    """Metrics of ppo_clip with k3 under token_mean and a critic with weight 1 and bias 0.1."""
    logprobs, entropies = token_values(case.table, case.head, case.ids)
    difference = (logprobs - case.policy)[case.mask]
    ratio, advantage = np.exp(difference), case.advantages[case.mask]
    clipped = ((advantage > 0) & (ratio > 1.3)) | ((advantage < 0) & (ratio < 0.9))
    assert clipped.any()
    policy_part, kl_part = oracle(case, "ppo_clip", "k3", "token_mean", case.table, case.head)
    values = np.roll(case.table.sum(axis=-1) + 0.1, 1, axis=1)[case.mask]
    old, targets = case.values[case.mask], case.returns[case.mask]
    bounded = (np.clip(values, old - CRITIC.clip, old + CRITIC.clip) - targets) ** 2
    errors = (values - targets) ** 2
    return {
        "loss/policy_avg": policy_part,
        "loss/kl_avg": kl_part,
        "loss/value_avg": np.maximum(errors, bounded).mean() / 2,
        "val/clipfrac_avg": (bounded > errors).mean(),
        "policy/clipfrac_avg": clipped.mean(),
        "policy/entropy_avg": entropies[case.mask].mean(),
        "objective/entropy": entropies[case.mask].mean(),
        "policy/neg_logprob": -logprobs[case.mask].mean(),
        "policy/approxkl_avg": (difference**2).mean() / 2,
        "val/ratio": ratio.mean(),
        "val/ratio_var": ratio.var(),
    }


def expected_mismatch(case: Case) -> dict[str, float]:
    logprobs, _ = token_values(case.table, case.head, case.ids)
    difference = (logprobs - case.policy)[case.mask]
    ratio = np.exp(difference)
    return {
        "mismatch/logprob_difference_mean": np.abs(difference).mean(),
        "mismatch/logprob_difference_max": np.abs(difference).max(),
        "mismatch/k3": (ratio - 1 - difference).mean(),
        "mismatch/weight_mean": ratio.mean(),
        "mismatch/effective_sample_size": ratio.sum() ** 2 / (ratio.size * (ratio**2).sum()),
    }


def measure(case: Case) -> dict[str, Metric]:
    model = make_critic(case, np.ones(EMBED), 0.1, None)
    loss = rl_loss("ppo_clip", "k3", critic=CRITIC)
    return eqx.filter_jit(loss)(model, case.batch(TokenMeanConfig()))[1]


def assert_metrics(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)


def test_metrics_match_their_definitions() -> None:
    assert_metrics(loss_metrics([measure(make_case())]), expected_metrics(make_case()))


def test_metrics_of_several_updates() -> None:
    """Losses are averaged over updates, other metrics over tokens; entropy and mismatch are of the first update."""
    cases = [make_case(seed) for seed in (0, 1, 2)]
    counts = np.array([case.mask.sum() for case in cases])
    assert len(set(counts.tolist())) > 1
    apart = [expected_metrics(case) for case in cases]
    expected = {name: float(np.average([one[name] for one in apart], weights=counts)) for name in apart[0]}
    for name in expected:
        if name.startswith("loss/"):
            expected[name] = float(np.mean([one[name] for one in apart]))
        elif name == "objective/entropy":
            expected[name] = apart[0][name]
    means = [one["val/ratio"] for one in apart]
    spread = [
        one["val/ratio_var"] + (mean - expected["val/ratio"]) ** 2 for one, mean in zip(apart, means, strict=True)
    ]
    expected["val/ratio_var"] = float(np.average(spread, weights=counts))
    measured = [measure(case) for case in cases]
    assert_metrics(loss_metrics(measured), expected)
    assert_metrics(mismatch_metrics(first_log_ratios(measured)), expected_mismatch(cases[0]))


@pytest.mark.parametrize(("poison", "block_size"), [(np.inf, 2), (np.nan, POSITIONS), (3e38, 2)])
def test_values_off_the_mask_do_not_leak(poison: float, block_size: int) -> None:
    case = make_case()
    loss = rl_loss("ppo_clip", "k3", block_size=block_size, critic=CRITIC)
    batch, weight = case.batch(SequenceSumConfig()), np.ones(EMBED)
    (value, metrics), gradient = differentiate(loss, make_critic(case, weight, 0.1, None), batch)
    # Mask positions that predict a token without loss.
    silent = ~np.concatenate([case.mask[:, 1:], np.zeros((ROWS, 1), bool)], axis=1)
    case.table = np.where(silent[..., None], poison, case.table)
    (found_value, found_metrics), found = differentiate(loss, make_critic(case, weight, 0.1, None), batch)
    np.testing.assert_allclose(found_value, value, rtol=1e-6)
    for name, metric in metrics.items():
        np.testing.assert_allclose(float(found_metrics[name]), float(metric), rtol=1e-6, err_msg=name)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", "rloo_sequence"])
def test_batch_of_padding_has_zero_loss(policy: str) -> None:
    case = make_case()
    case.mask[:] = False
    model = make_critic(case, np.ones(EMBED), 0.1, None)
    loss = rl_loss(policy, "k3", critic=CRITIC)
    (value, metrics), gradient = differentiate(loss, model, case.batch(TokenMeanConfig()))
    assert float(value) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    assert all(np.isfinite(value) for value in loss_metrics([metrics]).values())


def test_critic_without_config_is_not_trained() -> None:
    case = make_case()
    batch = case.batch(SequenceSumConfig())
    model = make_critic(case, np.ones(EMBED), 0.1, None)
    (value, metrics), gradient = differentiate(rl_loss("ppo_clip", "k3"), model, batch)
    (alone, _), expected = differentiate(rl_loss("ppo_clip", "k3"), model.policy, batch)
    assert float(value) == float(alone)
    assert "loss/value_avg" not in metrics
    assert not np.any(gradient.value_weight.array)
    np.testing.assert_array_equal(gradient.policy.table.array, expected.table.array)
