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
from levanter.metrics import fold
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.loss import RlLoss, loss_metrics
from marin_rl.objectives.aggregation import (
    AggregationConfig,
    ConstantConfig,
    SequenceMeanConfig,
    SequenceSumConfig,
    TokenMeanConfig,
)
from marin_rl.objectives.kl import KlConfig, KlEstimator, LossKlConfig, NoKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import (
    ImportanceLossConfig,
    PolicyLossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
)

ROWS, POSITIONS, EMBED, VOCAB = 4, 6, 3, 9
TEMPERATURE = 0.7
AXES = (Axis("batch", ROWS), Axis("position", POSITIONS))

POLICY_LOSSES = {
    "reinforce": ReinforceLossConfig(),
    "importance": ImportanceLossConfig(),
    "ppo_clip": PpoClipLossConfig(0.1, 0.3),
    "dual_clip": PpoClipLossConfig(0.1, 0.3, dual_clip=1.5),
}
KLS = {
    "none": NoKlConfig(),
    "in_reward": RewardKlConfig(0.3),
    "k1": LossKlConfig(0.3, KlEstimator.K1),
    "k2": LossKlConfig(0.3, KlEstimator.K2),
    "k3": LossKlConfig(0.3, KlEstimator.K3),
}
AGGREGATIONS = {
    "token_mean": TokenMeanConfig(),
    "sequence_mean": SequenceMeanConfig(),
    "sequence_sum": SequenceSumConfig(),
    "constant": ConstantConfig(10),
}


class TableModel(LmHeadModel[LlamaConfig]):
    """A language model whose activations are its parameters, one vector a position."""

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
    """Numbers in float64, and the batch made of them."""

    table: np.ndarray
    head: np.ndarray
    ids: np.ndarray
    mask: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    policy: np.ndarray
    reference: np.ndarray

    def batch(self, aggregation: AggregationConfig) -> RlExample:
        rollout_ids = np.where(self.mask, self.rollout[:, None], -1)
        arrays = {
            "input_ids": self.ids.astype(np.int32),
            "loss_mask": self.mask,
            "segment_ids": np.ones(self.mask.shape, np.int32),
            "loss_weights": aggregation.loss_weights(self.mask, rollout_ids),
            "advantages": np.where(self.mask, self.advantages[self.rollout][:, None], 0).astype(np.float32),
            "policy_logprobs": np.where(self.mask, self.policy, 0).astype(np.float32),
            "reference_logprobs": np.where(self.mask, self.reference, 0).astype(np.float32),
        }
        return RlExample(**{name: hax.named(jnp.asarray(array), AXES) for name, array in arrays.items()})


def make_case(seed: int = 0) -> Case:
    """Three rollouts; the second has two rows."""
    rng = np.random.default_rng(seed)
    table, head = rng.normal(size=(ROWS, POSITIONS, EMBED)), rng.normal(size=(EMBED, VOCAB))
    ids = rng.integers(0, VOCAB, (ROWS, POSITIONS))
    mask = rng.random((ROWS, POSITIONS)) < 0.6
    mask[:, 0] = False
    logprobs, _ = token_values(table, head, ids)
    return Case(
        table,
        head,
        ids,
        mask,
        np.array([0, 1, 1, 2]),
        np.array([1.5, -0.8, 0.4]),
        logprobs + rng.normal(scale=0.5, size=logprobs.shape),
        logprobs + rng.normal(scale=0.5, size=logprobs.shape),
    )


def token_values(table: np.ndarray, head: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-prob of each token and entropy where it was predicted, by loops over full logits."""
    logprobs, entropies = np.zeros(ids.shape), np.zeros(ids.shape)
    for row in range(ids.shape[0]):
        for position in range(1, ids.shape[1]):
            logits = table[row, position - 1] @ head / TEMPERATURE
            logs = logits - np.log(np.sum(np.exp(logits)))
            logprobs[row, position] = logs[ids[row, position]]
            entropies[row, position] = -np.sum(np.exp(logs) * logs)
    return logprobs, entropies


def policy_term(name: str, logprob: float, old: float, advantage: float) -> float:
    ratio = np.exp(logprob - old)
    if name == "reinforce":
        return -advantage * logprob
    if name == "importance":
        return -advantage * ratio
    term = max(-advantage * ratio, -advantage * min(max(ratio, 0.9), 1.3))
    return min(term, -1.5 * advantage) if name == "dual_clip" and advantage < 0 else term


def kl_term(name: str, logprob: float, reference: float) -> float:
    d = reference - logprob
    return 0.3 * {"none": 0.0, "in_reward": 0.0, "k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[name]


def token_weight(name: str, case: Case, rollout: int) -> float:
    lengths = [int(case.mask[case.rollout == index].sum()) for index in range(3)]
    return {
        "token_mean": 1 / sum(lengths),
        "sequence_mean": 1 / (3 * lengths[rollout]),
        "sequence_sum": 1 / 3,
        "constant": 1 / (3 * 10),
    }[name]


def oracle(case: Case, policy: str, kl: str, aggregation: str, table: np.ndarray, head: np.ndarray):
    """The two parts of the loss, by loops in float64."""
    logprobs, _ = token_values(table, head, case.ids)
    policy_part = kl_part = 0.0
    for row, position in np.argwhere(case.mask):
        at = row, position
        weight = token_weight(aggregation, case, case.rollout[row])
        advantage = case.advantages[case.rollout[row]]
        policy_part += weight * policy_term(policy, logprobs[at], case.policy[at], advantage)
        kl_part += weight * kl_term(kl, logprobs[at], case.reference[at])
    return policy_part, kl_part


def rl_loss(policy: PolicyLossConfig, kl: KlConfig, *, block_size: int = POSITIONS, microbatches: int = 1) -> RlLoss:
    return RlLoss(policy, kl, TEMPERATURE, block_size, microbatches)


COMBINATIONS = [
    *((policy, kl, "sequence_sum") for policy in POLICY_LOSSES for kl in KLS),
    *(("ppo_clip", "k2", aggregation) for aggregation in AGGREGATIONS if aggregation != "sequence_sum"),
]


@pytest.mark.parametrize(("policy", "kl", "aggregation"), COMBINATIONS)
def test_value_and_gradient_agree_with_loops_in_float64(policy: str, kl: str, aggregation: str) -> None:
    case = make_case()
    loss = rl_loss(POLICY_LOSSES[policy], KLS[kl])
    batch = case.batch(AGGREGATIONS[aggregation])
    value, pullback, metrics = jax.vjp(
        lambda model: loss(model, batch), make_model(case.table, case.head), has_aux=True
    )
    expected = oracle(case, policy, kl, aggregation, case.table, case.head)
    np.testing.assert_allclose(value, sum(expected), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(float(metrics["loss/policy_avg"]), expected[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(float(metrics["loss/kl_avg"]), expected[1], rtol=2e-5, atol=1e-6)

    (gradient,) = pullback(jnp.float32(1))
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


def test_the_block_size_does_not_matter() -> None:
    case = make_case()
    batch, model = case.batch(SequenceSumConfig()), make_model(case.table, case.head)
    whole, blocks = (
        eqx.filter_value_and_grad(rl_loss(PpoClipLossConfig(), KLS["k3"], block_size=size), has_aux=True)(model, batch)
        for size in (POSITIONS, 4)
    )
    for found, expected in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def rows_of(tree, rows: slice):
    """A microbatch: some rows of a batch or of the table of a model."""
    return jax.tree.map(
        lambda leaf: leaf["batch", rows] if isinstance(leaf, NamedArray) and leaf.has_axis("batch") else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, NamedArray),
    )


def microbatched(count: int) -> tuple[float, dict[str, float]]:
    """What levanter makes of `count` microbatches: the mean of the losses, and folded metrics."""
    case = make_case(seed=3)
    case.mask[0] = False  # microbatches of different weight; at 4, one without any loss
    batch, model = case.batch(SequenceMeanConfig()), make_model(case.table, case.head)
    loss = rl_loss(PpoClipLossConfig(0.1, 0.3), KLS["k3"], microbatches=count)
    size = ROWS // count
    parts = [
        loss(rows_of(model, slice(start, start + size)), rows_of(batch, slice(start, start + size)))
        for start in range(0, ROWS, size)
    ]
    folded = parts[0][1]
    for _, metrics in parts[1:]:
        folded = {name: fold(metric, metrics[name]) for name, metric in folded.items()}
    return sum(float(part[0]) for part in parts) / count, {name: float(m) for name, m in folded.items()}


@pytest.mark.parametrize("count", [2, 4])
def test_microbatches_change_neither_loss_nor_metrics(count: int) -> None:
    whole_loss, whole = microbatched(1)
    loss, metrics = microbatched(count)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5)
    assert metrics.keys() == whole.keys()
    published, expected = loss_metrics(metrics), loss_metrics(whole)
    for name, value in expected.items():
        np.testing.assert_allclose(published[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_metrics_are_what_their_names_say() -> None:
    case = make_case()
    loss = rl_loss(POLICY_LOSSES["ppo_clip"], KLS["k3"])
    _, metrics = loss(make_model(case.table, case.head), case.batch(TokenMeanConfig()))
    found = loss_metrics({name: float(metric) for name, metric in metrics.items()})
    logprobs, entropies = token_values(case.table, case.head, case.ids)
    difference = (logprobs - case.policy)[case.mask]
    ratio = np.exp(difference)
    advantage = np.broadcast_to(case.advantages[case.rollout][:, None], case.mask.shape)[case.mask]
    clipped = ((advantage > 0) & (ratio > 1.3)) | ((advantage < 0) & (ratio < 0.9))
    policy_part, kl_part = oracle(case, "ppo_clip", "k3", "token_mean", case.table, case.head)
    expected: Mapping[str, float] = {
        "loss/policy_avg": policy_part,
        "loss/kl_avg": kl_part,
        "policy/clipfrac_avg": clipped.mean(),
        "policy/entropy_avg": entropies[case.mask].mean(),
        "objective/entropy": entropies[case.mask].mean(),
        "policy/neg_logprob": -logprobs[case.mask].mean(),
        "policy/approxkl_avg": (difference**2).mean() / 2,
        "val/ratio": ratio.mean(),
        "val/ratio_var": ratio.var(),
        "mismatch/logprob_difference_mean": np.abs(difference).mean(),
        "mismatch/logprob_difference_max": np.abs(difference).max(),
        "mismatch/k3": (ratio - 1 - difference).mean(),
        "mismatch/effective_sample_size": ratio.sum() ** 2 / (ratio.size * (ratio**2).sum()),
    }
    assert clipped.any()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("block_size", [2, POSITIONS])
@pytest.mark.parametrize("poison", [np.inf, np.nan, 3e38])
def test_what_the_model_finds_off_the_mask_does_not_leak(poison: float, block_size: int) -> None:
    case = make_case()
    loss = eqx.filter_value_and_grad(rl_loss(PpoClipLossConfig(), KLS["k3"], block_size=block_size), has_aux=True)
    batch = case.batch(SequenceSumConfig())
    (value, metrics), gradient = loss(make_model(case.table, case.head), batch)
    # A position is off the mask where the token after it carries no loss.
    silent = ~np.concatenate([case.mask[:, 1:], np.zeros((ROWS, 1), bool)], axis=1)
    poisoned = np.where(silent[..., None], poison, case.table)
    (found_value, found_metrics), found = loss(make_model(poisoned, case.head), batch)
    np.testing.assert_allclose(found_value, value, rtol=1e-6)
    for name, metric in metrics.items():
        np.testing.assert_allclose(float(found_metrics[name]), float(metric), rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(found.head.array, gradient.head.array, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.table.array, gradient.table.array, rtol=1e-5, atol=1e-7)


def test_a_batch_of_padding_costs_nothing() -> None:
    case = make_case()
    case.mask[:] = False
    (value, metrics), gradient = eqx.filter_value_and_grad(rl_loss(PpoClipLossConfig(), KLS["k3"]), has_aux=True)(
        make_model(case.table, case.head), case.batch(TokenMeanConfig())
    )
    assert float(value) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    published = loss_metrics({name: float(metric) for name, metric in metrics.items()})
    assert all(np.isfinite(value) for value in published.values())
