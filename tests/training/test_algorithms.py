# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The gradient of each algorithm, from its name to the batches and the loss of a run, against its paper and TRL.

The formulas are written from the papers, in float64 numpy, as losses of the log-probs and values of all action tokens;
central differences give their gradients.
"""

import collections
import dataclasses
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from marin_rl.batching.rl_example import PackedBatch, RlExample
from marin_rl.batching.rollout_batch import RolloutBatch, batch_rollouts
from marin_rl.config.algorithms import NAMES
from marin_rl.config.command_line import merge_layers
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.critic import ActorCritic, policy_of
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.objectives.shaping import shape_rewards
from marin_rl.rollouts.config import rewards_differ
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.timing import PhaseTimer
from tests.config.mistakes import BASE
from tests.training.bare_run import NEWEST, bare_builder

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("compiled_quickly")]

TASK = Task("t", "ones", ({"role": "user", "content": "2x3"},), "1")
LONGEST = 10
"""`sampling.max_new_tokens`."""
RATIOS = (0.7, 0.79, 0.9, 1.1, 1.21, 1.29, 1.4, 3.0, 6.0)
"""π/π_old of the action tokens: on both sides of every bound, and near it."""
LOG_SEQUENCE_RATIOS = (4.2e-4, 6e-4, -3.1e-4, -6e-4, 3e-4, -2e-4, 3e-4, -2e-4)
"""Mean of log π/π_old over a rollout, for GSPO: near the upper bound where A > 0, and near the lower where A < 0."""
VALUE_STEPS = (0.05, 0.21, -0.21, -0.1, 0.5, -0.4)
"""V - V_old."""
GROUPS: list[list[list[tuple[str, int, float]]]] = [
    [[("s0", 3, 0.0), ("s1", 4, 1.0)], [("s0", 9, 1.0)], [("s0", 2, 0.25), ("s1", 3, 0.0)], [("s0", 5, 0.0)]],
    [[("a", 10, 1.0)], [("a", 2, 0.0), ("b", 2, 0.5)], [("b", 4, 0.0)], [("b", 3, 1.0), ("a", 2, 0.0)]],
    [[("c", 3, 1.0)], [("c", 4, 1.0)]],
]
"""Anchor, tokens and reward of each turn, of each rollout, of each group. The rewards of the last group are equal."""


@dataclasses.dataclass
class Sample:
    """A rollout, with the arrays of its action tokens."""

    turns: list[tuple[str, int, float]]
    old: np.ndarray
    reference: np.ndarray
    old_values: np.ndarray

    @property
    def reward(self) -> float:
        return sum(reward for _, _, reward in self.turns)

    @property
    def longest(self) -> int:
        return max(length for _, length, _ in self.turns)


Samples = Sequence[Sequence[Sample]]
Tokens = list[np.ndarray]
"""Values of the action tokens of each rollout, in the order of the groups."""
Loss = Callable[[Samples, Tokens, Tokens, Tokens], float]
"""From the rollouts, their log-probs, the same log-probs without gradient, and their values."""


def chained(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable(groups)]


# The formulas.


def ratios(samples: Samples, logprobs: Tokens) -> Tokens:
    return [np.exp(new - sample.old) for new, sample in zip(logprobs, chained(samples), strict=True)]


def clipped(ratio: np.ndarray, advantage: Any, low: float = 0.2, high: float = 0.2) -> np.ndarray:
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def k3(samples: Samples, logprobs: Tokens) -> Tokens:
    differences = [sample.reference - new for new, sample in zip(logprobs, chained(samples), strict=True)]
    return [np.exp(d) - 1 - d for d in differences]


def mean_of_means(terms: Tokens) -> float:
    return float(np.mean([term.mean() for term in terms]))


def mean_of_sums(terms: Tokens) -> float:
    return float(np.mean([term.sum() for term in terms]))


def mean_of_tokens(terms: Tokens) -> float:
    return float(np.concatenate(terms).mean())


def by_group(samples: Samples, advantage: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    return [a for group in samples for a in advantage(np.array([sample.reward for sample in group]))]


def standardized(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def grpo_advantages(samples: Samples) -> list[float]:
    return by_group(samples, standardized)


def group_loss(samples: Samples, logprobs: Tokens, advantages: Sequence[Any], **bounds: float) -> Tokens:
    pairs = zip(ratios(samples, logprobs), advantages, strict=True)
    return [clipped(ratio, advantage, **bounds) for ratio, advantage in pairs]


def rloo_advantages(samples: Samples) -> list[float]:
    advantages = []
    for group in samples:
        returns = [sample.reward - 0.03 * (sample.old - sample.reference).sum() for sample in group]
        for index, own in enumerate(returns):
            advantages.append(own - np.mean(returns[:index] + returns[index + 1 :]))
    return advantages


def rloo(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    return mean_of_sums([-a * new for a, new in zip(rloo_advantages(samples), logprobs, strict=True)])


def grpo(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    terms = group_loss(samples, logprobs, grpo_advantages(samples))
    return mean_of_means(terms) + 0.04 * mean_of_means(k3(samples, logprobs))


def dr_grpo(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    return mean_of_sums(group_loss(samples, logprobs, by_group(samples, lambda r: r - r.mean()))) / LONGEST


def dapo_advantages(samples: Samples) -> list[float]:
    """With the soft penalty; a fifth of the longest answer is its buffer."""
    buffer, advantages = LONGEST / 5, []
    for group in samples:
        over = np.array([sample.longest for sample in group]) - (LONGEST - buffer)
        advantages += [*standardized(np.array([s.reward for s in group]) - over.clip(0, buffer) / buffer)]
    return advantages


def dapo(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    """Without the group of equal rewards, which is the last."""
    groups, kept = samples[:-1], logprobs[: -len(samples[-1])]
    return mean_of_tokens(group_loss(groups, kept, dapo_advantages(groups), high=0.28))


def ppo(samples: Samples, logprobs: Tokens, _frozen: Tokens, values: Tokens) -> float:
    advantages, targets = [], []
    for sample in chained(samples):
        rewards = -0.05 * (sample.old - sample.reference)
        rewards[np.cumsum([length for _, length, _ in sample.turns]) - 1] += [reward for _, _, reward in sample.turns]
        after, advantage = np.append(sample.old_values[1:], 0.0), np.zeros(len(rewards) + 1)
        for t in reversed(range(len(rewards))):
            advantage[t] = rewards[t] + after[t] - sample.old_values[t] + 0.95 * advantage[t + 1]
        advantages.append(advantage[:-1])
        targets.append(advantage[:-1] + sample.old_values)
    every = np.concatenate(advantages)
    whitened = [(a - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) for a in advantages]
    critic = []
    for value, target, sample in zip(values, targets, chained(samples), strict=True):
        near = np.clip(value, sample.old_values - 0.2, sample.old_values + 0.2)
        critic.append(0.5 * np.maximum((value - target) ** 2, (near - target) ** 2))
    return mean_of_tokens(group_loss(samples, logprobs, whitened)) + 0.1 * mean_of_tokens(critic)


def gspo(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    advantages = grpo_advantages(samples)
    sequence = [np.exp((new - s.old).mean()) for new, s in zip(logprobs, chained(samples), strict=True)]
    pairs = zip(sequence, advantages, strict=True)
    return float(np.mean([clipped(s, a, low=3e-4, high=4e-4) for s, a in pairs]))


def cispo(samples: Samples, logprobs: Tokens, frozen: Tokens, _values: Tokens) -> float:
    parts = zip(ratios(samples, frozen), grpo_advantages(samples), logprobs, strict=True)
    return mean_of_tokens([-np.minimum(ratio, 5.0) * advantage * new for ratio, advantage, new in parts])


def maxrl(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    return mean_of_tokens(group_loss(samples, logprobs, by_group(samples, lambda r: (r - r.mean()) / r.mean())))


def gigpo(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    advantages = []
    for group in samples:
        mean, visits = np.mean([sample.reward for sample in group]), collections.defaultdict(list)
        returns = [
            [sum(0.95 ** (k - t) * turns[k][2] for k in range(t, len(turns))) for t in range(len(turns))]
            for turns in (sample.turns for sample in group)
        ]
        for sample, of_turns in zip(group, returns, strict=True):
            for (anchor, _, _), later in zip(sample.turns, of_turns, strict=True):
                visits[anchor].append(later)
        for sample, of_turns in zip(group, returns, strict=True):
            steps = [later - np.mean(visits[turn[0]]) for turn, later in zip(sample.turns, of_turns, strict=True)]
            advantages.append(sample.reward - mean + np.repeat(steps, [length for _, length, _ in sample.turns]))
    return mean_of_tokens(group_loss(samples, logprobs, advantages)) + 0.01 * mean_of_tokens(k3(samples, logprobs))


def opd(samples: Samples, logprobs: Tokens, _frozen: Tokens, _values: Tokens) -> float:
    parts = zip(ratios(samples, logprobs), chained(samples), strict=True)
    return mean_of_sums([ratio * (sample.old - sample.reference) for ratio, sample in parts])


FORMULAS: dict[str, Loss] = {
    loss.__name__: loss for loss in (rloo, grpo, dr_grpo, dapo, ppo, gspo, cispo, maxrl, gigpo, opd)
}


# The path of a run.


def configured(name: str) -> TrainConfig:
    """The config of an algorithm, as from a file with its name and the least that it needs."""
    needed = {"opd": {"reference": {"type": "initial"}}, "gigpo": {"rollouts": {"max_turns": 2}}}
    base = {**yaml.safe_load(BASE), "sampling": {"max_new_tokens": LONGEST}, "algorithm": name}
    return decode(TrainConfig, merge_layers(TrainConfig, [base, needed.get(name, {})]))


def make_rollouts(old: Tokens | None = None) -> list[RolloutGroup]:
    """The rollouts of `GROUPS` with random tokens, and with log-probs if they are known."""
    rng, of_rollouts = np.random.default_rng(0), iter(old or ())

    def turn(index: int, length: int, logprobs: np.ndarray, reward: float, anchor: str) -> Turn:
        ids = tuple(rng.integers(1, 250, length).tolist())
        generation = Generation(ids, tuple(logprobs.tolist()), StopReason.STOP, 0, 0)
        return Turn(
            (259, 260), generation, TASK.messages, {"r": reward}, starts_sequence=index == 0, anchor_state=anchor
        )

    def rollout(name: str, turns: list[tuple[str, int, float]]) -> Rollout:
        lengths = [length for _, length, _ in turns]
        logprobs = np.split(next(of_rollouts, np.full(sum(lengths), -1.0)), np.cumsum(lengths)[:-1])
        made = [
            turn(i, n, part, reward, anchor)
            for i, ((anchor, n, reward), part) in enumerate(zip(turns, logprobs, strict=True))
        ]
        total = {"r": sum(reward for _, _, reward in turns)}
        return Rollout(name, name[0], TASK, tuple(made), RolloutStatus.COMPLETED, total)

    return [
        RolloutGroup(str(number), [rollout(f"{number}-{index}", turns) for index, turns in enumerate(group)])
        for number, group in enumerate(GROUPS)
    ]


def make_policy(tiny: Any, trainer: Any, config: TrainConfig) -> Any:
    policy = tiny.make_model(trainer)
    if config.critic is None:
        return policy
    assert config.critic.shared_trunk
    weight = jnp.asarray(np.random.default_rng(1).normal(size=policy.Embed.size), jnp.float32)
    return ActorCritic(policy, hax.named(weight, policy.Embed), hax.zeros(()), None)


@eqx.filter_jit
def outputs(model: Any, batch: RlExample, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probs and values of the tokens at some places of a microbatch."""
    trunk = policy_activations(policy_of(model), batch)
    logprobs, _ = token_logprobs(trunk, policy_of(model).get_lm_head(), batch, temperature=1.0, block_size=64)
    values = model.values(batch, trunk) if isinstance(model, ActorCritic) else hax.zeros(batch.input_ids.axes)
    arrays = (logprobs.rearrange(batch.input_ids.axes), values)
    return tuple(array.array.reshape(-1)[places] for array in arrays)  # pyrefly: ignore[bad-return]


def packed_rollouts(builder: Any, batch: RolloutBatch) -> PackedBatch:
    """All rollouts as one microbatch, with an advantage so that no minibatch is left out."""
    return next(iter(builder.minibatches(dataclasses.replace(batch, advantages=batch.loss_mask * 1.0), 1)))


@dataclasses.dataclass
class Problem:
    """Rollouts with known log-probs under all policies, and a model."""

    config: TrainConfig
    model: Any
    samples: Samples
    logprobs: Tokens
    values: Tokens
    vjp: Callable[[tuple[jax.Array, jax.Array]], Any]
    """From derivatives of the log-probs and values of all tokens, of the rollouts' batch, to those of the weights."""
    batch: RolloutBatch


def make_problem(tiny: Any, trainer: Any, name: str, *, on_policy: bool = False) -> Problem:
    config = configured(name)
    model = make_policy(tiny, trainer, config)
    batch = batch_rollouts([r for group in make_rollouts() for r in group.rollouts], max_length=32)
    packed = packed_rollouts(bare_builder(config), batch)
    [only] = packed.microbatches
    (logprobs, values), vjp = eqx.filter_vjp(lambda model: outputs(model, only, jnp.asarray(packed.places)), model)
    new, of_values = (batch.actions(np.asarray(array, np.float64)) for array in (logprobs, values))
    rng, steps, value_steps = np.random.default_rng(2), iter(np.tile(np.log(RATIOS), 20)), iter(VALUE_STEPS * 20)
    flat = []
    for index, (turns, own, value) in enumerate(zip(chained(GROUPS), new, of_values, strict=True)):
        ratio = np.array([0.0 if on_policy else next(steps) for _ in own])
        if name == "gspo":
            ratio = rng.normal(scale=0.01, size=len(own))
            ratio += LOG_SEQUENCE_RATIOS[index % len(LOG_SEQUENCE_RATIOS)] - ratio.mean()
        old_values = value - np.array([next(value_steps) for _ in own])
        flat.append(Sample(turns, own - ratio, own - ratio + rng.normal(size=len(own)), old_values))
    ends = np.cumsum([len(group) for group in GROUPS])
    samples = [flat[end - len(group) : end] for end, group in zip(ends, GROUPS, strict=True)]
    return Problem(config, model, samples, new, of_values, vjp, batch)


def whole(batch: RolloutBatch, actions: Tokens) -> np.ndarray:
    """Values of all tokens of a batch from those of its action tokens."""
    values = np.zeros(batch.input_ids.shape)
    values[batch.loss_mask] = np.concatenate(actions)
    return values


def run_gradient(problem: Problem) -> Any:
    """The gradient of the first update of a run with the config, for the rollouts."""
    config, flat = problem.config, chained(problem.samples)
    groups = shape_rewards(
        make_rollouts([sample.old for sample in flat]),
        config.overlong,
        config.truncation,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    groups = [group for group in groups if rewards_differ(group) or not config.filter.drops]
    kept = sum(len(group.rollouts) for group in groups)
    builder = bare_builder(
        config,
        reference=(lambda batch: whole(batch, [sample.reference for sample in flat[:kept]]))
        if config.needs_reference
        else None,
        values=lambda batch: whole(batch, [sample.old_values for sample in flat[:kept]]),
    )
    [packed] = builder.minibatches(builder.build(groups, NEWEST, 1, PhaseTimer()).rollouts, 1)
    loss = builder.parts.loss

    [only] = packed.microbatches
    return eqx.filter_jit(eqx.filter_grad(lambda model, microbatch: loss(model, microbatch)[0]))(problem.model, only)


def differences(of_loss: Callable[[Tokens], float], at: Tokens) -> Tokens:
    """Central differences of a loss with respect to each token."""
    step, flat, ends = 1e-6, np.concatenate(at), np.cumsum([len(row) for row in at])[:-1]

    def moved(index: int, by: float) -> float:
        return of_loss(np.split(flat + by * (np.arange(flat.size) == index), ends))

    slopes = [(moved(index, step) - moved(index, -step)) / (2 * step) for index in range(flat.size)]
    return np.split(np.array(slopes), ends)


def assert_same_gradient(problem: Problem, of_logprobs: Tokens, of_values: Tokens | None = None) -> None:
    slopes = [whole(problem.batch, rows) for rows in (of_logprobs, of_values or [0 * row for row in of_logprobs])]
    [expected] = problem.vjp(tuple(jnp.asarray(array, jnp.float32) for array in slopes))
    found = run_gradient(problem)
    compared = 0
    for theirs, ours in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-4 * scale)
        compared += scale > 0
    assert compared > 5


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_paper(tiny, trainer, name):
    problem = make_problem(tiny, trainer, name)
    loss, samples, logprobs, values = FORMULAS[name], problem.samples, problem.logprobs, problem.values
    of_logprobs = differences(lambda moved: loss(samples, moved, logprobs, values), logprobs)
    assert_same_gradient(
        problem, of_logprobs, differences(lambda moved: loss(samples, logprobs, logprobs, moved), values)
    )


# TRL.

TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "rloo": {"beta": 0.03},
    "grpo": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}
"""Settings of TRL's index of papers, and the loss of each algorithm; all others are TRL's defaults."""
ADVANTAGES: dict[str, Callable[[Samples], list[float]]] = {
    "rloo": rloo_advantages,
    "dr_grpo": lambda samples: by_group(samples, lambda r: r - r.mean()),
    "dapo": dapo_advantages,
}
"""Advantages that differ from those of GRPO."""


def trl_slopes(name: str, problem: Problem) -> Tokens:
    """∂L/∂log π of each action token, from TRL's loss and the advantages of the paper."""
    trl = pytest.importorskip("trl", reason="needs the extra test-torch")
    torch = pytest.importorskip("torch")
    kind = trl.RLOOConfig if name == "rloo" else trl.GRPOConfig
    args = kind("unused", use_cpu=True, bf16=False, report_to=[], steps_per_generation=1, **TRL_SETTINGS[name])
    samples = problem.samples[:-1] if name == "dapo" else problem.samples
    flat = chained(samples)

    def padded(rows: Sequence[np.ndarray]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    new = padded(problem.logprobs[: len(flat)]).requires_grad_()
    old, mask = padded([sample.old for sample in flat]), padded([np.ones(len(sample.old)) for sample in flat])
    empty = torch.zeros(len(flat), 0, dtype=torch.long)
    inputs = {
        **{"prompt_ids": empty, "prompt_mask": empty, "completion_ids": mask.long(), "completion_mask": mask},
        **{"old_per_token_logps": old, "old_logps": (old * mask).sum(1), "num_items_in_batch": mask.sum()},
        "ref_per_token_logps": padded([sample.reference for sample in flat]),
        "advantages": torch.tensor(ADVANTAGES.get(name, grpo_advantages)(samples)),
    }
    # What `_compute_loss` reads of a trainer, which takes a model and a dataset to build.
    trainer = types.SimpleNamespace(
        **{**vars(args), "epsilon_low": args.epsilon, "epsilon_high": args.epsilon_high or args.epsilon},
        **{"args": args, "aux_loss_enabled": False, "_entropy_bonus_enabled": False},
        **{"current_gradient_accumulation_steps": 1, "_metrics": {"train": collections.defaultdict(list)}},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x
        ),
    )
    trainer.max_completion_length = LONGEST
    loss = (trl.RLOOTrainer if name == "rloo" else trl.GRPOTrainer)._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    slopes = [row[: len(sample.old)].numpy() for row, sample in zip(new.grad, flat, strict=True)]
    return [*slopes, *(np.zeros(len(row)) for row in problem.logprobs[len(flat) :])]


@pytest.mark.torch
@pytest.mark.parametrize("name", TRL_SETTINGS)
def test_the_gradient_is_that_of_trl(tiny, trainer, name):
    # TRL clips the ratio of a whole answer; the paper, on-policy, has none.
    problem = make_problem(tiny, trainer, name, on_policy=name == "rloo")
    assert_same_gradient(problem, trl_slopes(name, problem))
