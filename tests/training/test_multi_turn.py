# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Multi-turn episodes with different numbers of turns, from observations to the training batch."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.sections import RolloutConfig
from marin_rl.environments.base import AbstractEnvironment, Episode, Split, Step
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives import GaeConfig, GigpoConfig, ReinforceConfig
from marin_rl.objectives.policy_loss import (
    GspoLossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
    RlooSequenceLossConfig,
    TokenBatch,
)
from marin_rl.rollouts.run_rollouts import run_tasks
from marin_rl.runs.stored_rollout import as_table
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.training.batch_builder import BatchBuilder, TrainingBatch
from marin_rl.types import Message, Rollout, RolloutGroup, Task
from marin_rl.utils.timing import PhaseTimer
from tests.training.bare_run import END, NEWEST, TOKENIZER, USER, bare_builder, make_config, make_runner


@dataclasses.dataclass(frozen=True)
class Visit:
    """A step of an episode: the observation, and the reward of the reply (None for no reward)."""

    place: str
    reward: float | None = None


Path = Sequence[Visit]


@dataclasses.dataclass
class Maze(AbstractEnvironment):
    """One task; attempt number n follows path number n, independent of the replies."""

    paths: Sequence[Path]
    name: str = "maze"
    started: int = 0

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task("t", self.name, (Message(role="user", content=self.paths[0][0].place),), "")]

    async def start(self, task: Task, seed: int) -> Episode:
        self.started += 1
        return Walk(self.paths[self.started - 1])


@dataclasses.dataclass
class Walk:
    path: Path
    taken: int = 0

    async def step(self, reply: str) -> Step:
        here, self.taken = self.path[self.taken], self.taken + 1
        rewards: Mapping[str, float] = {} if here.reward is None else {"found": here.reward}
        if self.taken == len(self.path):
            return Step(rewards)
        return Step(rewards, (Message(role="user", content=self.path[self.taken].place),), done=False)

    async def close(self) -> None:
        pass


def answer(request: SampleRequest) -> Sequence[int]:
    """Reply with one to four tokens, depending on the number of turns."""
    return (*[97] * (request.prompt_tokens.count(USER) % 4), END)


ROLLOUTS = RolloutConfig(prompts_per_step=1, group_size=4, max_length=64, max_turns=8, row_length=64)


def run_paths(
    paths: Sequence[Path], *, tokenizer: ChatTokenizer = TOKENIZER, rows: int = 4, **changes
) -> tuple[BatchBuilder, RolloutGroup, TrainingBatch]:
    """Sample one group with one attempt per path, and build its training batch."""
    config, environment = make_config(rollouts=ROLLOUTS, **changes), Maze(paths)
    builder = bare_builder(config, tokenizer=tokenizer, rows=rows)
    runner = make_runner(config, answer, environment, tokenizer=tokenizer)
    [group] = run_tasks(
        runner, environment.tasks(Split.TRAIN), group_size=len(paths), temperature=1.0, seed_parts=(0, "train", 1)
    )
    return builder, group, builder.build([group], NEWEST, 1, PhaseTimer())


def episode(turns: int, reward: float) -> Path:
    """A path of `turns` turns with a reward at the end."""
    return [*(Visit(f"n{index}") for index in range(turns - 1)), Visit(f"n{turns - 1}", reward)]


TURNS = (1, 2, 6, 3)
EPISODES = [episode(turns, reward) for turns, reward in zip(TURNS, (1.0, 2.0, 5.0, 8.0), strict=True)]
ADVANTAGES = (-4.0, -8 / 3, 4 / 3, 16 / 3)
TOKENS = (2, 5, 15, 9)
"""Sampled tokens of each episode; the turns have 2, 3, 4, 1, 2, 3."""


def rewriting_tokenizer() -> ChatTokenizer:
    """A tokenizer with a template that omits all replies but the last, so every turn starts a new sequence."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'user' or loop.last -%}"
        "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
        "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    return ChatTokenizer(tokenizer)


@pytest.fixture(params=["one sequence", "a sequence a turn"])
def tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    return TOKENIZER if request.param == "one sequence" else rewriting_tokenizer()


def sequence_counts(tokenizer: ChatTokenizer) -> list[int]:
    return [1] * 4 if tokenizer is TOKENIZER else list(TURNS)


def test_group_with_different_numbers_of_turns(tokenizer: ChatTokenizer):
    _, group, batch = run_paths(EPISODES, tokenizer=tokenizer)
    assert [len(rollout.turns) for rollout in group.rollouts] == list(TURNS)
    rollouts = batch.rollouts
    assert [len(lengths) for lengths in rollouts.lengths] == sequence_counts(tokenizer)
    assert rollouts.num_loss_tokens.tolist() == list(TOKENS)
    # One advantage per rollout, the same on the tokens of all its turns.
    for found, advantage, tokens in zip(rollouts.actions(rollouts.advantages), ADVANTAGES, TOKENS, strict=True):
        np.testing.assert_allclose(found, [advantage] * tokens, rtol=1e-12)


def test_observations_have_no_loss(tokenizer: ChatTokenizer):
    _, group, batch = run_paths(EPISODES, tokenizer=tokenizer)
    tokens, turn_ids = (batch.rollouts.actions(getattr(batch.rollouts, name)) for name in ("input_ids", "turn_ids"))
    for rollout, of_rollout, turns_of_rollout in zip(group.rollouts, tokens, turn_ids, strict=True):
        sampled = [token for turn in rollout.turns for token in turn.generation.token_ids]
        assert of_rollout.tolist() == sampled
        turns = [index for index, turn in enumerate(rollout.turns) for _ in turn.generation.token_ids]
        assert turns_of_rollout.tolist() == turns


def test_logprobs_sum_over_all_turns(tokenizer: ChatTokenizer):
    builder, _, batch = run_paths(EPISODES, tokenizer=tokenizer)
    [packed] = builder.minibatches(batch.rollouts, 1)
    rng = np.random.default_rng(0)
    shape = (builder.parts.layout.rows_per_microbatch, 64)
    learner = [-rng.random(shape).astype(np.float32) for _ in packed.microbatches]
    loss = 0.0
    for part, logprobs in zip(jax.tree.map(jnp.asarray, packed.microbatches), learner, strict=True):
        tokens = TokenBatch(
            jnp.asarray(logprobs),
            part.policy_logprobs.array,
            part.advantages.array,
            part.loss_mask.array,
            part.rollout_ids.array,
        )
        terms = ReinforceLossConfig().per_token(tokens)
        loss += float(jnp.sum(part.loss_weights.array * terms.terms))
    # -1/4 · Σ_i A_i Σ_t log π_t: four rollouts, independent of the number of sequences.
    sums = [logprobs.sum(dtype=np.float64) for logprobs in batch.rollouts.actions(packed.unpack(np.stack(learner)))]
    assert loss == pytest.approx(-np.dot(ADVANTAGES, sums) / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "mean"), [(RlooSequenceLossConfig(0.9, 9.0), False), (GspoLossConfig(0.9, 9.0), True)]
)
def test_rollout_ratio_covers_all_turns(config, mean: bool, tokenizer: ChatTokenizer):
    builder, _, batch = run_paths(EPISODES, tokenizer=tokenizer, policy_loss=config)
    [packed] = builder.minibatches(batch.rollouts, 1)
    change = [np.random.default_rng(index).normal(0, 0.05, (4, 64)).astype(np.float32) for index in range(9)]
    change = change[: len(packed.microbatches)]
    found = []
    for part, moved in zip(jax.tree.map(jnp.asarray, packed.microbatches), change, strict=True):
        policy = part.policy_logprobs.array
        mask, ids = part.loss_mask.array, part.rollout_ids.array
        # With an advantage of -1 the term equals the ratio.
        tokens = TokenBatch(policy + moved, policy, -jnp.ones_like(policy), mask, ids)
        found.append(np.asarray(config.per_token(tokens).terms))
    terms, moved = (batch.rollouts.actions(packed.unpack(np.stack(rows))) for rows in (found, change))
    for of_rollout, changes in zip(terms, moved, strict=True):
        total, tokens = changes.sum(dtype=np.float64), changes.size
        expected = np.exp(total / tokens) if mean else np.exp(total) / tokens
        np.testing.assert_allclose(of_rollout, expected, rtol=1e-4)


def test_rollout_ratio_keeps_sequences_in_one_microbatch():
    builder, _, batch = run_paths(EPISODES, tokenizer=rewriting_tokenizer(), rows=2, policy_loss=GspoLossConfig())
    [packed] = builder.minibatches(batch.rollouts, 1)
    assert len(packed.microbatches) > 1
    assert all(len({slot.microbatch_index for slot in slots}) == 1 for slots in packed.slots)


# GiGPO.


def worked_example() -> list[Path]:
    """OBJECTIVES.md: T0 visits s0, s1, s2 with rewards 0, 0, 1; T1 s0, s1, s3 with 0, 0, 0; T2 s0, s2 with 0, 1."""
    return [
        [Visit("s0", 0.0), Visit("s1", 0.0), Visit("s2", 1.0)],
        [Visit("s0", 0.0), Visit("s1", 0.0), Visit("s3", 0.0)],
        [Visit("s0", 0.0), Visit("s2", 1.0)],
    ]


EPISODE = (1 / 3, -2 / 3, 1 / 3)
STEPS = ((0.285, 0.475, 0.0), (-0.6175, -0.475, 0.0), (0.3325, 0.0))


def by_turn(batch: TrainingBatch, group: RolloutGroup) -> list[list[float]]:
    """Advantage of each turn, after checking that it is equal on all tokens of the turn."""
    found = []
    advantages = batch.rollouts.actions(batch.rollouts.advantages)
    for rollout, of_rollout in zip(group.rollouts, advantages, strict=True):
        lengths = [len(turn.generation.token_ids) for turn in rollout.turns]
        parts = np.split(of_rollout, np.cumsum(lengths)[:-1])
        assert all(np.unique(part).size == 1 for part in parts)
        found.append([float(part[0]) for part in parts])
    return found


def expected(episodes: Sequence[float], steps: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[of_episode + step for step in own] for of_episode, own in zip(episodes, steps, strict=True)]


def assert_close(actual: list[list[float]], desired: list[list[float]]) -> None:
    for row, desired_row in zip(actual, desired, strict=True):
        assert row == pytest.approx(desired_row, abs=1e-12)


def test_gigpo_worked_example_on_tokens(tokenizer: ChatTokenizer):
    _, group, batch = run_paths(worked_example(), tokenizer=tokenizer, advantage=GigpoConfig())
    anchors = [[turn.anchor_state for turn in rollout.turns] for rollout in group.rollouts]
    # Equal observations have equal anchors, independent of turn and attempt.
    assert anchors[0][0] == anchors[1][0] == anchors[2][0]
    assert anchors[0][1] == anchors[1][1]
    assert anchors[0][2] == anchors[2][1]
    assert len({anchor for own in anchors for anchor in own}) == 4
    assert_close(by_turn(batch, group), expected(EPISODE, STEPS))


def test_gigpo_components_are_logged_per_turn(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="marin_rl.training.batch_builder"):
        _, group, _ = run_paths(worked_example(), advantage=GigpoConfig())
    messages = [record.getMessage() for record in caplog.records if "anchor hash" in record.getMessage()]
    turns = [(rollout.id, index, turn) for rollout in group.rollouts for index, turn in enumerate(rollout.turns)]
    assert len(messages) == len(turns) == 8
    for line, (id, index, turn) in zip(messages, turns, strict=True):
        assert line.startswith(f"rollout {id} turn {index}: anchor hash {turn.anchor_state}, return ")
    assert messages[0].endswith("return 0.9025, A_E 0.333333, A_S 0.285, advantage [0.618333]")
    assert messages[3].endswith("return 0, A_E -0.666667, A_S -0.6175, advantage [-1.28417]")


def test_gigpo_components_are_stored_per_turn():
    _, group, batch = run_paths(worked_example(), advantage=GigpoConfig())
    rows = as_table(group.rollouts, 1, "training", batch.stored, lambda token: b"x").to_pylist()
    assert [row["turns"][0]["episode_advantage"] for row in rows] == pytest.approx(EPISODE)
    assert [[turn["step_advantage"] for turn in row["turns"]] for row in rows] == [
        pytest.approx(list(one)) for one in STEPS
    ]
    assert [turn["step_return"] for turn in rows[0]["turns"]] == pytest.approx([0.9025, 0.95, 1.0])
    for row in rows:
        for turn in row["turns"]:
            total = turn["episode_advantage"] + turn["step_advantage"]
            assert turn["advantages"] == pytest.approx([total] * len(turn["token_ids"]))


def test_outcome_score_is_added_to_last_turn():
    # The same example with an outcome reward and no intermediate rewards.
    paths = [[Visit("s0"), Visit("s1"), Visit("s2", 1.0)], [Visit("s0"), Visit("s1"), Visit("s3", 0.0)]]
    paths.append([Visit("s0"), Visit("s2", 1.0)])
    _, group, batch = run_paths(paths, advantage=GigpoConfig())
    assert_close(by_turn(batch, group), expected(EPISODE, STEPS))


def test_reinforce_discounts_following_rewards():
    _, group, batch = run_paths(worked_example(), advantage=ReinforceConfig(gamma=0.95))
    assert_close(by_turn(batch, group), [[0.9025, 0.95, 1.0], [0.0, 0.0, 0.0], [0.95, 1.0]])


def gae_by_position(rollout: Rollout, values: np.ndarray, gamma: float, lam: float) -> list[float]:
    """Compute GAE by its definition, backwards over all positions of a row; observations are skipped."""
    positions: list[tuple[int | None, bool]] = []
    for index, turn in enumerate(rollout.turns):
        length = len(turn.generation.token_ids)
        positions += [(None, False)] * len(turn.observation_tokens)
        positions += [(index, at + 1 == length) for at in range(length)]
    assert rollout.total_reward is not None
    earlier = sum(turn.reward or 0.0 for turn in rollout.turns[:-1])
    advantages: list[float] = []
    next_value = next_advantage = 0.0
    for place, (index, ends) in reversed(list(enumerate(positions))):
        if index is None:
            continue
        reward = 0.0
        if ends:
            is_last = index + 1 == len(rollout.turns)
            reward = rollout.total_reward - earlier if is_last else rollout.turns[index].reward or 0.0
        delta = reward + gamma * next_value - values[place]
        next_value, next_advantage = values[place], delta + gamma * lam * next_advantage
        advantages.append(next_advantage)
    return advantages[::-1]


def test_gae_rewards_at_turn_ends_across_observations():
    paths = [
        [Visit("s0", 0.5), Visit("s1"), Visit("s2", 1.0)],
        [Visit("s0", -1.0), Visit("long", 0.25), Visit("s3", 0.0), Visit("s4", 2.0)],
        episode(3, 1.0),
    ]
    config = make_config(
        rollouts=ROLLOUTS,
        advantage=GaeConfig(gamma=0.9, lam=0.8, whiten=False),
        critic=CriticConfig(),
        policy_loss=PpoClipLossConfig(),
    )
    row = np.sin(np.arange(64.0)).astype(np.float32)
    environment = Maze(paths)

    def values_of(made: RolloutBatch) -> np.ndarray:
        return np.concatenate([row[: tokens.size] for tokens in made.split(made.input_ids)])

    builder = bare_builder(config, values=values_of, rows=4)
    [group] = run_tasks(
        make_runner(config, answer, environment),
        environment.tasks(Split.TRAIN),
        group_size=len(paths),
        temperature=1.0,
        seed_parts=(0, "train", 1),
    )
    # A rollout-level reward that belongs to no turn, such as a length penalty.
    rollouts = [dataclasses.replace(one, rewards={**one.rewards, "short": 0.75}) for one in group.rollouts]
    batch = builder.build([RolloutGroup(group.id, rollouts)], NEWEST, 1, PhaseTimer())
    made = batch.rollouts
    computed = zip(rollouts, *map(made.actions, (made.values, made.advantages, made.returns)), strict=True)
    for rollout, values, advantages, returns in computed:
        expected = np.array(gae_by_position(rollout, row.astype(np.float64), 0.9, 0.8))
        np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(returns, expected + values.astype(np.float64), rtol=1e-12, atol=1e-12)
        [stored] = as_table([rollout], 1, "training", batch.stored, lambda token: b"x").to_pylist()
        assert [value for turn in stored["turns"] for value in turn["values"]] == values.tolist()
