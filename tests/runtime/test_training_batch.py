# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives.advantage_inputs import AdvantageConfig, AdvantageInputs, TokenAdvantages
from marin_rl.objectives.advantages import DrGrpoConfig, GaeConfig
from marin_rl.objectives.aggregation import SequenceMeanConfig, SequenceSumConfig, TokenMeanConfig
from marin_rl.objectives.importance import IcepopConfig, MaskMismatchConfig, TisConfig
from marin_rl.objectives.kl import LossKlConfig, NoKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.objectives.shaping import KeepTruncatedConfig, MaskTruncatedConfig
from marin_rl.runtime.config import UpdateConfig
from marin_rl.runtime.progress import Progress
from marin_rl.runtime.training_batch import TrainingBatch, build_batch, minibatches
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.timing import PhaseTimer
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from tests.runtime.bare_run import Score, bare_run, make_config, zeros

TASK = Task("t", "ones", ({"role": "user", "content": "2x3"},), "1")
PROMPT = (259, 50, 257, 260)


def turn(length: int = 2, reward: float | None = None, *, logprob: float = -0.5, starts: bool = True, **more) -> Turn:
    """An answer of `length` tokens, of falling log-prob, to a prompt of four."""
    logprobs = tuple(logprob * (index + 1) for index in range(length))
    generation = Generation((49,) * length, logprobs, StopReason.STOP, 0, 0)
    rewards = {} if reward is None else {"correct": reward}
    return Turn(PROMPT, generation, TASK.messages, rewards, starts_sequence=starts, **more)


def rollout(name: str, reward: float | None, *turns: Turn, truncated: bool = False) -> Rollout:
    """A rollout of one turn, or these; failed where it has no reward."""
    turns = turns or (turn(reward=reward),)
    if reward is None:
        return Rollout(name, "g", TASK, turns, RolloutStatus.FAILED, {}, "it broke")
    status = RolloutStatus.TRUNCATED if truncated else RolloutStatus.COMPLETED
    return Rollout(name, "g", TASK, turns, status, {"correct": reward})


def group(*rewards: float | None) -> RolloutGroup:
    return RolloutGroup("g", [rollout(f"g-{index}", reward) for index, reward in enumerate(rewards)])


def build(run: TrainingRun, *rollouts: Rollout) -> TrainingBatch:
    return build_batch(run, [RolloutGroup("g", rollouts)], PhaseTimer())


def mean_advantages(batch: TrainingBatch) -> dict[str, float | None]:
    return {id: signal.mean_advantage for id, signal in batch.stored.items()}


def actions(batch: TrainingBatch, name: str) -> list[list[float]]:
    """An array over the action tokens of each rollout."""
    return [getattr(processed, name)[processed.loss_mask].tolist() for processed in batch.rollouts]


@dataclasses.dataclass(frozen=True)
class Recorder(AdvantageConfig):
    """Keeps what it is told, and gives the rollouts 0, 1, 2, … on all of their tokens."""

    told: list[Sequence[Sequence[AdvantageInputs]]] = dataclasses.field(default_factory=list)

    @property
    def minimum_group_size(self) -> int:
        return 1

    @property
    def needs_critic(self) -> bool:
        return False

    @property
    def needs_turns(self) -> bool:
        return False

    @property
    def is_token_level(self) -> bool:
        return False

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        self.told.append(groups)
        numbers = iter(range(1000))
        return [
            [
                TokenAdvantages(np.full(len(s.turn_ids), float(next(numbers))), np.zeros(len(s.turn_ids)))
                for s in signals
            ]
            for signals in groups
        ]


def signals_of(recorder: Recorder) -> dict[str, AdvantageInputs]:
    [groups] = recorder.told
    return {signal.id: signal for signals in groups for signal in signals}


# From rollouts to advantages.


def test_the_worked_example_of_rloo_reaches_the_tokens_with_loss_and_no_others():
    run = bare_run(make_config())
    batch = build_batch(run, [group(1.0, 2.0, 5.0, 8.0)], PhaseTimer())
    expected = [-4, -8 / 3, 4 / 3, 16 / 3]
    np.testing.assert_allclose(list(mean_advantages(batch).values()), expected, rtol=1e-12)
    [packed] = minibatches(run, batch, 1)
    [only] = packed.microbatches
    for array, advantage in zip(packed.unpack([np.asarray(only.advantages.array)]), expected, strict=True):
        np.testing.assert_allclose(array[0, 4:6], advantage, rtol=1e-6)
        assert not array[0, :4].any()
        assert not array[0, 6:].any()
    mask = np.asarray(only.loss_mask.array)
    assert not np.asarray(only.advantages.array)[~mask].any()
    assert batch.metrics == {
        "objective/rlhf_reward": 4.0,
        "objective/non_score_reward": 0.0,
        "advantage/mean": pytest.approx(0.0, abs=1e-12),
        "advantage/std": pytest.approx(np.std(expected)),
        "advantage/zero_share": 0.0,
    }


def test_a_failed_rollout_leaves_the_baseline_and_the_arrays():
    run = bare_run(make_config())
    batch = build_batch(run, [group(1.0, None, 0.0)], PhaseTimer())
    assert mean_advantages(batch) == {"g-0": 1.0, "g-2": -1.0}
    assert [processed.id for processed in batch.rollouts] == ["g-0", "g-2"]
    [packed] = minibatches(run, batch, 1)
    # sequence_sum over the two rollouts that count
    weights = np.unique(np.concatenate([np.asarray(part.loss_weights.array) for part in packed.microbatches]))
    assert weights.tolist() == [0.0, 0.5]


def test_what_an_estimator_is_told_of_a_rollout():
    recorder = Recorder()
    run = bare_run(make_config(advantage=recorder), values=lambda processed: processed.turn_ids + 0.5)
    turns = (
        turn(2, 0.25, anchor_state="here"),
        turn(3, None, anchor_state="there", starts=False),
        turn(1, 0.0, anchor_state="here", starts=True),
    )
    good = dataclasses.replace(rollout("good", 1.0, *turns), rewards={"correct": 1.0, "overlong": -0.5})
    build(run, good, rollout("failed", None, *turns[:2]))
    told = signals_of(recorder)
    assert told["good"].score == 0.5
    assert told["good"].turn_rewards.tolist() == [0.25, 0.0, 0.0]
    # No reward is not the same as a reward of 0.
    assert told["good"].unrewarded_turns == (1,)
    assert told["good"].anchors == ("here", "there", "here")
    # Over both sequences: the last turn started one.
    assert told["good"].turn_ids.tolist() == [0, 0, 1, 1, 1, 2]
    assert told["good"].penalties.tolist() == [0.0] * 6
    # Without a critic and without a correction nobody asks the learner.
    assert told["good"].values.tolist() == [0.0] * 6
    failed = told["failed"]
    assert (failed.score, failed.anchors, failed.turn_ids.size) == (None, ("here", "there"), 0)


def test_groups_and_their_order_are_kept():
    recorder = Recorder()
    run = bare_run(make_config(advantage=recorder))
    first = RolloutGroup("g", [rollout("a", 1.0), rollout("b", None), rollout("c", 0.0)])
    second = RolloutGroup("g", [rollout("d", 1.0), rollout("e", 1.0)])
    batch = build_batch(run, [first, second], PhaseTimer())
    assert [[signal.id for signal in signals] for signals in recorder.told[0]] == [["a", "b", "c"], ["d", "e"]]
    # Numbers 0 to 4 went to a to e; b has no tokens.
    assert [token_advantages.advantages.tolist() for token_advantages in batch.token_advantages] == [
        [0, 0],
        [2, 2],
        [3, 3],
        [4, 4],
    ]
    assert mean_advantages(batch) == {"a": 0.0, "c": 2.0, "d": 3.0, "e": 4.0}


def test_phases_are_timed():
    timer = PhaseTimer()
    build_batch(bare_run(make_config()), [group(1.0, 0.0)], timer)
    assert set(timer.seconds) == {"batch", "reference"}


# The reference.


def test_a_penalty_in_the_reward_is_taken_from_each_token_and_from_the_return():
    recorder = Recorder()
    run = bare_run(
        make_config(advantage=recorder, kl=RewardKlConfig(beta=0.5)),
        reference=lambda processed: np.full(processed.input_ids.shape, -2.0),
    )
    batch = build(run, rollout("a", 1.0), rollout("b", 0.0, turn(3)))
    told = signals_of(recorder)
    # log π is -0.5, -1, -1.5: k1 is 1.5, 1, 0.5.
    assert told["a"].penalties.tolist() == [0.75, 0.5]
    assert told["a"].total_return == pytest.approx(1.0 - 1.25)
    assert told["b"].penalties.tolist() == [0.75, 0.5, 0.25]
    assert actions(batch, "reference_logprobs") == [[-2.0] * 2, [-2.0] * 3]
    assert batch.metrics["objective/kl"] == pytest.approx((2.5 + 3.0) / 2)
    assert batch.metrics["objective/non_score_reward"] == pytest.approx(0.5 * 2.75)
    assert batch.metrics["objective/rlhf_reward"] == pytest.approx(0.5 - 0.5 * 2.75)


def test_the_kl_can_be_watched_without_a_penalty():
    def advantages(kl: NoKlConfig, reference: Score | None) -> tuple[list[list[float]], Mapping[str, float]]:
        run = bare_run(make_config(kl=kl), reference=reference)
        batch = build(run, rollout("a", 1.0), rollout("b", 0.0, turn(3)))
        return [token_advantages.advantages.tolist() for token_advantages in batch.token_advantages], batch.metrics

    assert not NoKlConfig().needs_reference
    assert NoKlConfig(watch=True).needs_reference
    watched, metrics = advantages(NoKlConfig(watch=True), lambda processed: np.full(processed.input_ids.shape, -2.0))
    plain, without = advantages(NoKlConfig(), None)
    # log π is -0.5, -1, -1.5: k1 is 1.5, 1, 0.5.
    assert metrics["objective/kl"] == pytest.approx((2.5 + 3.0) / 2)
    assert "objective/kl" not in without
    assert watched == plain
    for name in ("objective/non_score_reward", "objective/rlhf_reward"):
        assert metrics[name] == without[name]
    assert metrics["objective/non_score_reward"] == 0.0


@pytest.mark.parametrize("masks", [False, True])
def test_advantage_statistics_are_of_the_loss_tokens(masks: bool):
    run = bare_run(make_config(truncation=MaskTruncatedConfig() if masks else KeepTruncatedConfig()))
    equal = RolloutGroup("h", [dataclasses.replace(rollout(name, 1.0), group_id="h") for name in ("c", "d")])
    made = RolloutGroup("g", [rollout("a", 1.0), rollout("b", 0.0, turn(4), truncated=True)])
    metrics = build_batch(run, [made, equal], PhaseTimer()).metrics
    # rloo: 1 on two tokens, -1 on four tokens of a truncated rollout, 0 on four tokens.
    tokens = np.array([1.0] * 2 + ([] if masks else [-1.0] * 4) + [0.0] * 4)
    assert metrics["advantage/mean"] == pytest.approx(tokens.mean())
    assert metrics["advantage/std"] == pytest.approx(math.sqrt(np.mean((tokens - tokens.mean()) ** 2)))
    assert metrics["advantage/zero_share"] == pytest.approx(4 / tokens.size)


def test_a_penalty_in_the_loss_leaves_the_reward_alone_and_is_told_all_the_same():
    recorder = Recorder()
    run = bare_run(
        make_config(advantage=recorder, kl=LossKlConfig(beta=0.5)),
        reference=lambda processed: np.full(processed.input_ids.shape, -2.0),
    )
    batch = build(run, rollout("a", 1.0))
    assert signals_of(recorder)["a"].penalties.tolist() == [0.0, 0.0]
    assert batch.metrics["objective/kl"] == pytest.approx(2.5)


def test_log_ratios_beyond_reason_are_clamped():
    recorder = Recorder()
    run = bare_run(
        make_config(advantage=recorder, kl=RewardKlConfig(beta=1.0)),
        reference=lambda processed: np.full(processed.input_ids.shape, -500.0),
    )
    build(run, rollout("a", 1.0))
    assert signals_of(recorder)["a"].penalties.tolist() == [20.0, 20.0]


# The critic.


def test_values_and_targets_reach_estimator_batch_and_metric():
    run = bare_run(
        make_config(
            advantage=GaeConfig(gamma=1.0, lam=0.0, whiten=False),
            critic=CriticConfig(),
            policy_loss=PpoClipLossConfig(),
        ),
        # 1, 2, 3 on the tokens of the answer, whose prompt has four.
        values=lambda processed: np.broadcast_to(np.arange(64.0) - 3, processed.input_ids.shape),
    )
    batch = build(run, rollout("a", 5.0, turn(3)))
    # The worked example of OBJECTIVES.md.
    assert [token_advantages.advantages.tolist() for token_advantages in batch.token_advantages] == [[1.0, 1.0, 2.0]]
    assert [token_advantages.value_targets.tolist() for token_advantages in batch.token_advantages] == [[2.0, 3.0, 5.0]]
    assert actions(batch, "values") == [[1.0, 2.0, 3.0]]
    variance = np.var([2.0, 3.0, 5.0], ddof=1)
    assert batch.metrics["critic/value_mean"] == pytest.approx(2.0)
    assert batch.metrics["critic/value_std"] == pytest.approx(1.0)
    assert batch.metrics["critic/target_mean"] == pytest.approx(10 / 3)
    [stored] = batch.stored.values()
    assert stored.values is not None
    assert stored.value_targets is not None
    assert (stored.values.tolist(), stored.value_targets.tolist()) == ([1.0, 2.0, 3.0], [2.0, 3.0, 5.0])
    assert batch.metrics["critic/explained_variance"] == pytest.approx(1 - np.var([1.0, 1.0, 2.0], ddof=1) / variance)
    [packed] = minibatches(run, batch, 1)
    for name, expected in (("values", [1.0, 2.0, 3.0]), ("returns", [2.0, 3.0, 5.0]), ("advantages", [1.0, 1.0, 2.0])):
        [array] = packed.unpack([np.asarray(getattr(part, name).array) for part in packed.microbatches])
        assert array[0, 4:7].tolist() == expected


# The sampler that differs from the learner.


def test_without_a_correction_ratios_start_from_the_sampler():
    run = bare_run(make_config(), learner=lambda processed: processed.policy_logprobs - 1.0)
    batch = build(run, rollout("a", 1.0))
    assert [weights.tolist() for weights in batch.importance_weights] == [[1.0, 1.0]]
    assert actions(batch, "policy_logprobs") == [[-0.5, -1.0]]
    assert batch.mismatch is None


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (TisConfig(cap=2.0), math.exp(-1.0), 2.0),
        (IcepopConfig(low=0.5, high=20.0), 0.0, math.exp(2.0)),
        (MaskMismatchConfig(cap=2.0), 0.0, 0.0),
        (MaskMismatchConfig(cap=3.0), 1.0, 1.0),
    ],
)
def test_a_correction_weighs_tokens_and_ratios_start_from_the_learner(config, first: float, second: float):
    # log w is -1 and 2: together 1.
    def learner(processed):
        return processed.policy_logprobs + np.where(np.arange(64) == 4, -1.0, 2.0)

    run = bare_run(make_config(off_policy_correction=config, policy_loss=PpoClipLossConfig()), learner=learner)
    answer = Generation((49, 49), (-0.5, -3.0), StopReason.STOP, 0, 0)
    made = rollout("a", 1.0, dataclasses.replace(turn(), generation=answer))
    batch = build(run, made)
    np.testing.assert_allclose(batch.importance_weights[0], [first, second], rtol=1e-6)
    np.testing.assert_allclose(actions(batch, "policy_logprobs"), [[-1.5, -1.0]], rtol=1e-6)
    # Raw, before any truncation.
    assert batch.mismatch is not None
    assert batch.mismatch["mismatch/weight_max"] == pytest.approx(math.exp(2.0), rel=1e-5)
    assert batch.mismatch["mismatch/logprob_difference_mean"] == pytest.approx(1.5)
    assert batch.mismatch["mismatch/weight_mean"] == pytest.approx((math.exp(-1.0) + math.exp(2.0)) / 2, rel=1e-5)
    [packed] = minibatches(run, batch, 1)
    [weights] = packed.unpack([np.asarray(part.importance_weights.array) for part in packed.microbatches])
    np.testing.assert_allclose(weights[0, 4:6], [first, second], rtol=1e-6)
    # A token of weight 0 still counts in the denominator.
    [loss] = packed.unpack([np.asarray(part.loss_weights.array) for part in packed.microbatches])
    assert loss[0, 4:6].tolist() == [1.0, 1.0]


class Histories:
    """Old weights that differ from the newest by how many nats a token has under them."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def get(self, version: int):
        self.asked.append(version)
        return (lambda processed: processed.policy_logprobs - 10.0 * version, zeros)


@pytest.mark.parametrize("critic", [None, CriticConfig()])
def test_kept_weights_score_what_they_sampled(critic: CriticConfig | None):
    objective = {} if critic is None else {"critic": critic, "advantage": GaeConfig()}
    config = make_config(off_policy_correction=TisConfig(cap=2.0), policy_loss=PpoClipLossConfig(), **objective)
    run = bare_run(
        config,
        learner=lambda processed: processed.policy_logprobs - 1.0,
        values=lambda processed: np.full(processed.input_ids.shape, 7.0),
        progress=Progress(step=3),
    )
    run.history = Histories()
    made = []
    for index, version in enumerate((3, 1, 2, 1)):
        sampled = dataclasses.replace(turn().generation, first_version=version, last_version=version)
        made.append(rollout(f"r{index}", float(index), dataclasses.replace(turn(), generation=sampled)))
    batch = build(run, *made)
    assert run.history.asked == [1, 2]
    assert actions(batch, "policy_logprobs") == [[-1.5, -2.0], [-10.5, -11.0], [-20.5, -21.0], [-10.5, -11.0]]
    np.testing.assert_allclose(np.log(batch.importance_weights), [[-1.0] * 2, [-10.0] * 2, [-20.0] * 2, [-10.0] * 2])
    # The critic's values are those of the newest weights.
    assert actions(batch, "values") == [[7.0 if critic else 0.0] * 2] * 4


# Truncated rollouts.


@pytest.mark.parametrize("aggregation", [SequenceSumConfig(), SequenceMeanConfig(), TokenMeanConfig()])
def test_masked_rollouts_stay_in_the_baseline_and_leave_the_denominators(aggregation):
    run = bare_run(make_config(truncation=MaskTruncatedConfig(), aggregation=aggregation))
    made = [rollout("a", 1.0), rollout("b", 4.0, turn(6), truncated=True), rollout("c", 0.0)]
    batch = build(run, *made)
    # Against the mean of the other two, the truncated one among them.
    assert mean_advantages(batch) == {"a": -1.0, "b": None, "c": -2.5}
    [packed] = minibatches(run, batch, 1)
    assert packed.num_loss_tokens == 4
    a, b, c = packed.unpack([np.asarray(part.loss_weights.array) for part in packed.microbatches])
    each = {SequenceSumConfig: 1 / 2, SequenceMeanConfig: 1 / 4, TokenMeanConfig: 1 / 4}[type(aggregation)]
    assert (a[0, 4:6].tolist(), c[0, 4:6].tolist()) == ([each] * 2, [each] * 2)
    assert not b.any()


def test_by_default_truncated_rollouts_count_like_any_other():
    run = bare_run(make_config())
    batch = build(run, rollout("a", 1.0), rollout("b", 4.0, truncated=True))
    assert mean_advantages(batch) == {"a": -3.0, "b": 3.0}
    [packed] = minibatches(run, batch, 1)
    assert packed.num_loss_tokens == 4


def test_a_masked_rollout_is_compared_by_its_return_with_the_penalty_in_it():
    run = bare_run(
        make_config(truncation=MaskTruncatedConfig(), kl=RewardKlConfig(beta=1.0), advantage=DrGrpoConfig()),
        reference=lambda processed: np.full(processed.input_ids.shape, -2.0),
    )
    # Returns 1 - 2.5 and 4 - 3.
    batch = build(run, rollout("a", 1.0), rollout("b", 4.0, turn(3), truncated=True))
    assert mean_advantages(batch) == {"a": pytest.approx(-1.25), "b": None}
    assert batch.metrics["objective/kl"] == pytest.approx((2.5 + 3.0) / 2)
    assert batch.metrics["objective/rlhf_reward"] == pytest.approx(2.5 - 2.75)


def test_where_every_rollout_is_masked_there_is_no_update():
    run = bare_run(make_config(truncation=MaskTruncatedConfig()))
    batch = build(run, *(rollout(name, 1.0, truncated=True) for name in "ab"))
    assert list(minibatches(run, batch, 1)) == []


# Minibatches.


def named(count: int) -> list[Rollout]:
    """Rollouts that are told apart by their advantages under the recorder: the n-th has n."""
    return [rollout(f"r{index}", 1.0) for index in range(count)]


def split(config: Any, count: int, step: int = 1, seed: int = 0, **changes: Any) -> list[list[int]]:
    """Which rollouts are in each update."""
    # The number 0 would look like no rollout at all.
    run = bare_run(
        make_config(updates=config, policy_loss=PpoClipLossConfig(), advantage=Recorder(), seed=seed, **changes)
    )
    batch = build(run, *named(count + 1))
    batch = batch._replace(
        rollouts=batch.rollouts[1:],
        token_advantages=batch.token_advantages[1:],
        importance_weights=batch.importance_weights[1:],
    )
    found = []
    for packed in minibatches(run, batch, step):
        arrays = packed.unpack([np.asarray(part.advantages.array) for part in packed.microbatches])
        found.append([int(array.max()) for array in arrays])
        owners = {number for number in np.concatenate([array.reshape(-1) for array in arrays]).tolist() if number}
        assert len(owners) == len(found[-1])
    return found


def test_one_update_has_every_rollout_in_order():
    assert split(UpdateConfig(), 5) == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("epochs", "parts", "count"), [(1, 4, 16), (3, 2, 16), (2, 3, 10), (4, 1, 7)])
def test_every_rollout_is_once_in_each_epoch(epochs: int, parts: int, count: int):
    found = split(UpdateConfig(epochs=epochs, minibatches=parts), count)
    assert len(found) == epochs * parts
    assert {len(part) for part in found} <= {count // parts, -(-count // parts)}
    for epoch in range(epochs):
        drawn = [number for part in found[epoch * parts : (epoch + 1) * parts] for number in part]
        assert sorted(drawn) == list(range(1, count + 1))


def test_every_epoch_and_every_step_and_every_seed_draws_anew():
    config = UpdateConfig(epochs=2, minibatches=2)
    first, second = split(config, 16)[:2], split(config, 16)[2:]
    assert first != second
    assert split(config, 16, step=2)[:2] != first
    assert split(config, 16, seed=1)[:2] != first


def test_a_resumed_step_draws_the_same():
    config = UpdateConfig(epochs=2, minibatches=3)
    assert split(config, 11, step=5, seed=3) == split(config, 11, step=5, seed=3)


def test_fewer_rollouts_than_minibatches_make_fewer_updates():
    assert sorted(split(UpdateConfig(minibatches=4), 3)) == [[1], [2], [3]]


def test_denominators_are_counted_over_each_minibatch():
    run = bare_run(make_config(updates=UpdateConfig(minibatches=2), policy_loss=PpoClipLossConfig()))
    batch = build(run, *named(6))
    for packed in minibatches(run, batch, 1):
        weights = [np.asarray(part.loss_weights.array) for part in packed.microbatches]
        # sequence_sum over three rollouts of two tokens each.
        assert sum(array.sum() for array in weights) == pytest.approx(2.0)
        assert packed.num_loss_tokens == 6


def test_where_everything_was_dropped_there_is_nothing_to_train_on():
    run = bare_run(make_config(updates=UpdateConfig(epochs=2, minibatches=2), policy_loss=PpoClipLossConfig()))
    batch = build_batch(run, [], PhaseTimer())
    assert (mean_advantages(batch), batch.metrics) == ({}, {})
    assert list(minibatches(run, batch, 1)) == []
