# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.config.reference_config import CheckpointReferenceConfig
from marin_rl.config.sections import RolloutConfig, UpdateConfig
from marin_rl.learner.config import ObservationLossConfig
from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives import DistillationConfig, DrGrpoConfig, GaeConfig, GigpoConfig, ReinforceConfig
from marin_rl.objectives.advantage_inputs import AdvantageConfig, AdvantageInputs, TokenAdvantages
from marin_rl.objectives.advantages import Normalization
from marin_rl.objectives.aggregation import SequenceMeanConfig, SequenceSumConfig, TokenMeanConfig
from marin_rl.objectives.importance import IcepopConfig, MaskMismatchConfig, TisConfig
from marin_rl.objectives.kl import ExactKlConfig, LossKlConfig, NoKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig, ReinforceLossConfig
from marin_rl.objectives.shaping import KeepTruncatedConfig, MaskTruncatedConfig
from marin_rl.training import batch_builder
from marin_rl.training.batch_builder import BatchBuilder, TrainingBatch
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from marin_rl.utils.timing import PhaseTimer
from tests.training.bare_run import NEWEST, Score, bare_builder, make_config

TASK = Task("t", "ones", ({"role": "user", "content": "2x3"},), "1")
PROMPT = (259, 50, 257, 260)


def turn(length: int = 2, reward: float | None = None, *, logprob: float = -0.5, starts: bool = True, **more) -> Turn:
    """A reply of `length` tokens with decreasing log-probs, to a prompt of four."""
    logprobs = tuple(logprob * (index + 1) for index in range(length))
    generation = Generation((49,) * length, logprobs, StopReason.STOP, 0, 0)
    rewards = {} if reward is None else {"correct": reward}
    return Turn(PROMPT, generation, TASK.messages, rewards, starts_sequence=starts, **more)


def rollout(name: str, reward: float | None, *turns: Turn, truncated: bool = False) -> Rollout:
    """A rollout of one turn, or of `turns`, which failed if `reward` is None."""
    turns = turns or (turn(reward=reward),)
    if reward is None:
        return Rollout(name, "g", TASK, turns, RolloutStatus.FAILED, {}, "it broke")
    status = RolloutStatus.TRUNCATED if truncated else RolloutStatus.COMPLETED
    return Rollout(name, "g", TASK, turns, status, {"correct": reward})


def group(*rewards: float | None) -> RolloutGroup:
    return RolloutGroup("g", [rollout(f"g-{index}", reward) for index, reward in enumerate(rewards)])


def build(builder: BatchBuilder, *rollouts: Rollout, step: int = 1) -> TrainingBatch:
    return builder.build([RolloutGroup("g", rollouts)], NEWEST, step, PhaseTimer())


def mean_advantages(batch: TrainingBatch) -> dict[str, float | None]:
    return {id: signal.mean_advantage for id, signal in batch.stored.items()}


def actions(batch: TrainingBatch, name: str) -> list[list[float]]:
    """Values of an array at the action tokens of each rollout."""
    return [values.tolist() for values in batch.rollouts.actions(getattr(batch.rollouts, name))]


@dataclasses.dataclass(frozen=True)
class Recorder(AdvantageConfig):
    """Records its inputs, and returns the advantages 0, 1, 2, … on all tokens of the rollouts."""

    calls: list[Sequence[Sequence[AdvantageInputs]]] = dataclasses.field(default_factory=list)

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        self.calls.append(groups)
        numbers = iter(range(1000))
        return [
            [
                TokenAdvantages(np.full(len(s.turn_ids), float(next(numbers))), np.zeros(len(s.turn_ids)))
                for s in signals
            ]
            for signals in groups
        ]


def unpacked(batch: TrainingBatch, packed: PackedBatch, name: str) -> list[np.ndarray]:
    """Values of the tokens of each rollout in an update with all rollouts."""
    values = np.stack([np.asarray(getattr(part, name).array) for part in packed.microbatches])
    return batch.rollouts.split(packed.unpack(values))


def inputs_of(recorder: Recorder) -> dict[str, AdvantageInputs]:
    [groups] = recorder.calls
    return {signal.id: signal for signals in groups for signal in signals}


# From rollouts to advantages.


def test_rloo_worked_example_on_loss_tokens():
    builder = bare_builder(make_config())
    batch = builder.build([group(1.0, 2.0, 5.0, 8.0)], NEWEST, 1, PhaseTimer())
    expected = [-4, -8 / 3, 4 / 3, 16 / 3]
    np.testing.assert_allclose(list(mean_advantages(batch).values()), expected, rtol=1e-12)
    [packed] = builder.minibatches(batch.rollouts, 1)
    [only] = packed.microbatches
    for array, advantage in zip(unpacked(batch, packed, "advantages"), expected, strict=True):
        np.testing.assert_allclose(array[4:], advantage, rtol=1e-6)
        assert not array[:4].any()
    mask = np.asarray(only.loss_mask.array)
    assert not np.asarray(only.advantages.array)[~mask].any()
    assert batch.metrics == {
        "objective/rlhf_reward": 4.0,
        "objective/non_score_reward": 0.0,
        "advantage/mean": pytest.approx(0.0, abs=1e-12),
        "advantage/std": pytest.approx(np.std(expected)),
        "advantage/zero_share": 0.0,
        "groups/no_signal": 0.0,
    }


def test_failed_rollout_is_excluded_from_baseline_and_arrays():
    builder = bare_builder(make_config())
    batch = builder.build([group(1.0, None, 0.0)], NEWEST, 1, PhaseTimer())
    assert mean_advantages(batch) == {"g-0": 1.0, "g-2": -1.0}
    assert batch.rollouts.ids == ("g-0", "g-2")
    [packed] = builder.minibatches(batch.rollouts, 1)
    # sequence_sum over the two scored rollouts
    weights = np.unique(np.concatenate([np.asarray(part.loss_weights.array) for part in packed.microbatches]))
    assert weights.tolist() == [0.0, 0.5]


def test_advantage_inputs_of_a_rollout():
    recorder = Recorder()
    builder = bare_builder(make_config(advantage=recorder), values=lambda batch: batch.turn_ids + 0.5)
    turns = (
        turn(2, 0.25, anchor_state="here"),
        turn(3, None, anchor_state="there", starts=False),
        turn(1, 0.0, anchor_state="here", starts=True),
    )
    good = dataclasses.replace(rollout("good", 1.0, *turns), rewards={"correct": 1.0, "overlong": -0.5})
    build(builder, good, rollout("failed", None, *turns[:2]))
    inputs = inputs_of(recorder)
    assert inputs["good"].score == 0.5
    assert inputs["good"].turn_rewards.tolist() == [0.25, 0.0, 0.0]
    # A missing reward differs from a reward of 0.
    assert inputs["good"].unrewarded_turns == (1,)
    assert inputs["good"].anchors == ("here", "there", "here")
    # Over both sequences: the last turn started a new one.
    assert inputs["good"].turn_ids.tolist() == [0, 0, 1, 1, 1, 2]
    assert inputs["good"].penalties.tolist() == [0.0] * 6
    # Without critic and correction, the learner does not score the rollouts.
    assert inputs["good"].values.tolist() == [0.0] * 6
    # They pass the checks, which the builder leaves out.
    assert [dataclasses.replace(own).id for own in inputs.values()] == ["good", "failed"]
    failed = inputs["failed"]
    assert (failed.score, failed.anchors, failed.turn_ids.size) == (None, ("here", "there"), 0)


def test_groups_keep_their_order():
    recorder = Recorder()
    builder = bare_builder(make_config(advantage=recorder))
    first = RolloutGroup("g", [rollout("a", 1.0), rollout("b", None), rollout("c", 0.0)])
    second = RolloutGroup("g", [rollout("d", 1.0), rollout("e", 1.0)])
    batch = builder.build([first, second], NEWEST, 1, PhaseTimer())
    assert [[signal.id for signal in signals] for signals in recorder.calls[0]] == [["a", "b", "c"], ["d", "e"]]
    # Rollouts a to e get the advantages 0 to 4; b has no tokens.
    assert actions(batch, "advantages") == [[0, 0], [2, 2], [3, 3], [4, 4]]
    assert mean_advantages(batch) == {"a": 0.0, "c": 2.0, "d": 3.0, "e": 4.0}


# The reference.


def test_reward_penalty_is_subtracted_per_token_and_from_return():
    recorder = Recorder()
    builder = bare_builder(
        make_config(advantage=recorder, kl=RewardKlConfig(beta=0.5)),
        reference=lambda batch: np.full(batch.input_ids.shape, -2.0),
    )
    batch = build(builder, rollout("a", 1.0), rollout("b", 0.0, turn(3)))
    inputs = inputs_of(recorder)
    # log π is -0.5, -1, -1.5: k1 is 1.5, 1, 0.5.
    assert inputs["a"].penalties.tolist() == [0.75, 0.5]
    assert inputs["a"].total_return == pytest.approx(1.0 - 1.25)
    assert inputs["b"].penalties.tolist() == [0.75, 0.5, 0.25]
    assert actions(batch, "reference_logprobs") == [[-2.0] * 2, [-2.0] * 3]
    assert batch.metrics["objective/kl"] == pytest.approx((2.5 + 3.0) / 2)
    assert batch.metrics["objective/non_score_reward"] == pytest.approx(0.5 * 2.75)
    assert batch.metrics["objective/rlhf_reward"] == pytest.approx(0.5 - 0.5 * 2.75)


def test_kl_is_measured_without_penalty():
    def advantages(kl: NoKlConfig, reference: Score | None) -> tuple[list[list[float]], Mapping[str, float]]:
        builder = bare_builder(make_config(kl=kl), reference=reference)
        batch = build(builder, rollout("a", 1.0), rollout("b", 0.0, turn(3)))
        return actions(batch, "advantages"), batch.metrics

    assert not NoKlConfig().needs_reference
    assert NoKlConfig(watch=True).needs_reference
    watched, metrics = advantages(NoKlConfig(watch=True), lambda batch: np.full(batch.input_ids.shape, -2.0))
    plain, without = advantages(NoKlConfig(), None)
    # log π is -0.5, -1, -1.5: k1 is 1.5, 1, 0.5.
    assert metrics["objective/kl"] == pytest.approx((2.5 + 3.0) / 2)
    assert "objective/kl" not in without
    assert watched == plain
    for name in ("objective/non_score_reward", "objective/rlhf_reward"):
        assert metrics[name] == without[name]
    assert metrics["objective/non_score_reward"] == 0.0


@pytest.mark.parametrize("masks", [False, True])
def test_advantage_statistics_cover_loss_tokens(masks: bool):
    builder = bare_builder(make_config(truncation=MaskTruncatedConfig() if masks else KeepTruncatedConfig()))
    equal = RolloutGroup("h", [dataclasses.replace(rollout(name, 1.0), group_id="h") for name in ("c", "d")])
    made = RolloutGroup("g", [rollout("a", 1.0), rollout("b", 0.0, turn(4), truncated=True)])
    metrics = builder.build([made, equal], NEWEST, 1, PhaseTimer()).metrics
    # rloo: 1 on two tokens, -1 on four tokens of a truncated rollout, 0 on four tokens.
    tokens = np.array([1.0] * 2 + ([] if masks else [-1.0] * 4) + [0.0] * 4)
    assert metrics["advantage/mean"] == pytest.approx(tokens.mean())
    assert metrics["advantage/std"] == pytest.approx(math.sqrt(np.mean((tokens - tokens.mean()) ** 2)))
    assert metrics["advantage/zero_share"] == pytest.approx(4 / tokens.size)


def test_extreme_log_ratios_are_clamped():
    recorder = Recorder()
    builder = bare_builder(
        make_config(advantage=recorder, kl=RewardKlConfig(beta=1.0)),
        reference=lambda batch: np.full(batch.input_ids.shape, -500.0),
    )
    build(builder, rollout("a", 1.0))
    assert inputs_of(recorder)["a"].penalties.tolist() == [20.0, 20.0]


def test_a_sequence_longer_than_the_maximum_is_refused():
    with pytest.raises(
        ValueError, match=r"rollout a: a sequence of 65 tokens does not fit .*raise rollouts.max_length"
    ):
        build(bare_builder(make_config()), rollout("a", 5.0, turn(61)))


# Distillation.


def distilled(*rollouts: Rollout, **changes: Any) -> tuple[BatchBuilder, TrainingBatch]:
    """A batch with a teacher whose log-prob is -0.75 for every token, and a coefficient of 2."""
    settings = {"distillation": DistillationConfig(2.0), "advantage": DrGrpoConfig(), **changes}
    teacher = lambda batch: np.full(batch.input_ids.shape, -0.75)  # noqa: E731
    learner = lambda batch: batch.policy_logprobs - 0.25  # noqa: E731
    builder = bare_builder(make_config(**settings), reference=teacher, learner=learner)
    return builder, build(builder, *rollouts)


def test_distillation_is_added_to_the_advantages_of_the_task_or_replaces_them():
    # log π is -0.5 and -1, so that the teacher prefers the second token.
    rollouts = rollout("a", 1.0), rollout("b", 0.0)
    _, added = distilled(*rollouts)
    assert actions(added, "advantages") == [[0.5 - 0.5, 0.5 + 0.5], [-0.5 - 0.5, -0.5 + 0.5]]
    assert added.metrics["distillation/teacher_kl"] == 0.0
    assert added.metrics["objective/kl"] == 0.0
    _, alone = distilled(*rollouts, distillation=DistillationConfig(2.0, alone=True))
    assert actions(alone, "advantages") == [[-0.5, 0.5], [-0.5, 0.5]]
    # The mean over tokens, and the mean over rollouts of their sums, which the KL metric has.
    _, longer = distilled(rollout("a", 1.0, turn(1)), rollout("b", 0.0, turn(3)))
    assert longer.metrics["distillation/teacher_kl"] == pytest.approx((0.25 + 0.25 - 0.25 - 0.75) / 4)
    assert longer.metrics["objective/kl"] == pytest.approx((0.25 - 0.75) / 2)


def test_masked_tokens_are_excluded_from_distillation():
    builder, batch = distilled(
        rollout("a", 1.0, turn(4), truncated=True), rollout("b", 0.0), truncation=MaskTruncatedConfig()
    )
    assert actions(batch, "advantages") == [[], [-1.0, 0.0]]
    assert batch.metrics["distillation/teacher_kl"] == 0.0
    [packed] = builder.minibatches(batch.rollouts, 1)
    assert not unpacked(batch, packed, "advantages")[0].any()


def test_distillation_uses_the_corrected_logprobs_in_every_minibatch():
    rollouts = [rollout(name, float(name == "a"), turn(2)) for name in "abcd"]
    builder, batch = distilled(
        *rollouts,
        distillation=DistillationConfig(2.0, alone=True),
        off_policy_correction=TisConfig(),
        policy_loss=PpoClipLossConfig(),
        updates=UpdateConfig(minibatches=2),
    )
    # The learner's log-probs are -0.75 and -1.25.
    assert actions(batch, "advantages") == [[0.0, 1.0]] * 4
    found = [
        np.asarray(part.advantages.array)
        for packed in builder.minibatches(batch.rollouts, 1)
        for part in packed.microbatches
    ]
    assert sorted(np.concatenate([part[part != 0] for part in found]).tolist()) == [1.0] * 4


# The critic.


def test_values_and_targets_in_estimator_batch_and_metrics():
    builder = bare_builder(
        make_config(
            advantage=GaeConfig(gamma=1.0, lam=0.0, whiten=False),
            critic=CriticConfig(),
            policy_loss=PpoClipLossConfig(),
        ),
        # 1, 2, 3 on the tokens of the reply, after a prompt of four.
        values=lambda batch: np.arange(batch.input_ids.size) - 3.0,
    )
    batch = build(builder, rollout("a", 5.0, turn(3)))
    # The worked example of OBJECTIVES.md.
    assert actions(batch, "advantages") == [[1.0, 1.0, 2.0]]
    assert actions(batch, "returns") == [[2.0, 3.0, 5.0]]
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
    [packed] = builder.minibatches(batch.rollouts, 1)
    for name, expected in (("values", [1.0, 2.0, 3.0]), ("returns", [2.0, 3.0, 5.0]), ("advantages", [1.0, 1.0, 2.0])):
        [array] = unpacked(batch, packed, name)
        assert array[4:].tolist() == expected


# Off-policy correction.


def test_ratios_use_sampler_logprobs_without_correction():
    builder = bare_builder(make_config(), learner=lambda batch: batch.policy_logprobs - 1.0)
    batch = build(builder, rollout("a", 1.0))
    assert actions(batch, "importance_weights") == [[1.0, 1.0]]
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
def test_correction_weights_tokens_and_ratios_use_learner_logprobs(config, first: float, second: float):
    # log w is -1 and 2, with a sum of 1.
    def learner(batch):
        return batch.policy_logprobs + np.where(np.arange(batch.input_ids.size) == 4, -1.0, 2.0)

    parts = {"policy_loss": PpoClipLossConfig(), "advantage": ReinforceConfig()}
    builder = bare_builder(make_config(off_policy_correction=config, **parts), learner=learner)
    answer = Generation((49, 49), (-0.5, -3.0), StopReason.STOP, 0, 0)
    made = rollout("a", 1.0, dataclasses.replace(turn(), generation=answer))
    batch = build(builder, made)
    np.testing.assert_allclose(actions(batch, "importance_weights"), [[first, second]], rtol=1e-6)
    np.testing.assert_allclose(actions(batch, "policy_logprobs"), [[-1.5, -1.0]], rtol=1e-6)
    # Metrics of the raw weights, before truncation.
    assert batch.mismatch is not None
    assert batch.mismatch["mismatch/weight_max"] == pytest.approx(math.exp(2.0), rel=1e-5)
    assert batch.mismatch["mismatch/logprob_difference_mean"] == pytest.approx(1.5)
    assert batch.mismatch["mismatch/weight_mean"] == pytest.approx((math.exp(-1.0) + math.exp(2.0)) / 2, rel=1e-5)
    updates = list(builder.minibatches(batch.rollouts, 1))
    # Weights that are all 0 leave no gradient.
    assert len(updates) == (first + second > 0)
    for packed in updates:
        [weights] = unpacked(batch, packed, "importance_weights")
        np.testing.assert_allclose(weights[4:], [first, second], rtol=1e-6)
        # A token of weight 0 still counts in the denominator.
        [loss] = unpacked(batch, packed, "loss_weights")
        assert loss[4:].tolist() == [1.0, 1.0]


# Truncated rollouts.


@pytest.mark.parametrize("aggregation", [SequenceSumConfig(), SequenceMeanConfig(), TokenMeanConfig()])
def test_masked_rollouts_count_in_baseline_but_not_denominator(aggregation):
    builder = bare_builder(make_config(truncation=MaskTruncatedConfig(), aggregation=aggregation))
    made = [rollout("a", 1.0), rollout("b", 4.0, turn(6), truncated=True), rollout("c", 0.0)]
    batch = build(builder, *made)
    # The baseline is the mean of the other two, including the truncated rollout.
    assert mean_advantages(batch) == {"a": -1.0, "b": None, "c": -2.5}
    [packed] = builder.minibatches(batch.rollouts, 1)
    assert packed.num_loss_tokens == 4
    a, b, c = unpacked(batch, packed, "loss_weights")
    each = {SequenceSumConfig: 1 / 2, SequenceMeanConfig: 1 / 4, TokenMeanConfig: 1 / 4}[type(aggregation)]
    assert (a[4:].tolist(), c[4:].tolist()) == ([each] * 2, [each] * 2)
    assert not b.any()


def test_masked_rollout_return_includes_penalty():
    builder = bare_builder(
        make_config(truncation=MaskTruncatedConfig(), kl=RewardKlConfig(beta=1.0), advantage=DrGrpoConfig()),
        reference=lambda batch: np.full(batch.input_ids.shape, -2.0),
    )
    # Returns 1 - 2.5 and 4 - 3.
    batch = build(builder, rollout("a", 1.0), rollout("b", 4.0, turn(3), truncated=True))
    assert mean_advantages(batch) == {"a": pytest.approx(-1.25), "b": None}
    assert batch.metrics["objective/kl"] == pytest.approx((2.5 + 3.0) / 2)
    assert batch.metrics["objective/rlhf_reward"] == pytest.approx(2.5 - 2.75)


def test_penalty_of_a_masked_rollout_is_not_part_of_its_turn_rewards():
    config = make_config(
        truncation=MaskTruncatedConfig(),
        kl=RewardKlConfig(beta=1.0),
        advantage=GigpoConfig(),
        rollouts=RolloutConfig(prompts_per_step=4, group_size=4, max_length=64, max_turns=2),
    )
    builder = bare_builder(config, reference=lambda batch: np.full(batch.input_ids.shape, -2.0))
    same = (turn(anchor_state="here"),)
    batch = build(builder, rollout("a", 1.0, *same), rollout("b", 0.0, *same, truncated=True))
    # Returns of the rollouts are 1 - 2.5 and 0 - 2.5, those of their only turns 1 and 0.
    episode, returns, steps = batch.stored["a"].turn_advantages
    assert (episode, returns.tolist(), steps.tolist()) == (0.5, [1.0], [0.5])


def test_no_update_if_all_rollouts_are_masked(caplog: pytest.LogCaptureFixture):
    builder = bare_builder(make_config(truncation=MaskTruncatedConfig()))
    batch = build(builder, *(rollout(name, 1.0, truncated=True) for name in "ab"), step=7)
    assert list(builder.minibatches(batch.rollouts, 1)) == []
    assert "step 7 makes no update: a limit cut off all 2 rollouts" in caplog.text


@pytest.mark.parametrize("truncated", [0, 1])
@pytest.mark.parametrize(
    ("correction", "name"), [(MaskMismatchConfig(cap=1.5), "mask"), (IcepopConfig(low=0.9, high=1.1), "icepop")]
)
def test_a_correction_that_masks_all_rollouts_is_named(
    caplog: pytest.LogCaptureFixture, correction: Any, name: str, truncated: int
):
    config = make_config(off_policy_correction=correction, truncation=MaskTruncatedConfig())
    rollouts = [rollout(f"r{index}", float(index), truncated=index < truncated) for index in range(2)]
    far = bare_builder(config, learner=lambda batch: batch.policy_logprobs + 0.25)
    batch = build(far, *rollouts)
    assert f"off_policy_correction: {{type: {name}}} masks all 2 rollouts" in caplog.text
    near = bare_builder(config, learner=lambda batch: batch.policy_logprobs)
    caplog.clear()
    mismatch = [batch.mismatch, build(near, *rollouts).mismatch]
    assert [metrics and metrics["mismatch/zero_share"] for metrics in mismatch] == [1.0, 0.0]
    assert not caplog.text


def test_streams_of_observations_and_of_the_teacher_have_their_own_denominators():
    config = make_config(
        observation_loss=ObservationLossConfig(),
        kl=ExactKlConfig(0.5),
        truncation=MaskTruncatedConfig(),
        rollouts=RolloutConfig(prompts_per_step=4, group_size=4, max_length=32, max_turns=3),
    )
    rollouts = [
        rollout("a", 1.0, turn(3), turn(2, starts=False), turn(2)),
        rollout("b", 2.0, turn(1), turn(1, starts=False), turn(1, starts=False)),
        rollout("masked", 3.0, turn(2), turn(2, starts=False), truncated=True),
    ]
    batch = build(bare_builder(config), *rollouts)
    assert batch.metrics["objective/non_score_reward"] == 0.0
    [packed] = bare_builder(config).minibatches(batch.rollouts, 1)
    # Observations are prompts of four tokens; the first of each sequence has no loss, nor has that of a rewritten one.
    observed = [[7, 8, 9, 10], [5, 6, 7, 8, 10, 11, 12, 13], []]
    for found, places in zip(unpacked(batch, packed, "ce_weights"), observed, strict=True):
        np.testing.assert_allclose(found, np.isin(np.arange(found.size), places) / 12, rtol=1e-6)
    for found, mask in zip(
        unpacked(batch, packed, "ref_kl_weights"), unpacked(batch, packed, "loss_mask"), strict=True
    ):
        np.testing.assert_allclose(found, mask / 10, rtol=1e-6)
    [plain] = bare_builder(make_config()).minibatches(batch.rollouts, 1)
    assert {"ce_weights", "ref_kl_weights"}.isdisjoint(plain.microbatches[0].arrays())


# Updates without a gradient.


EQUAL = [("a", 1.0), ("b", 1.0)]
OF_DIFFERENT = [*EQUAL, ("c", 0.0), ("d", 0.0)]


def count_updates(made: Sequence[tuple[str, float]] = EQUAL, *, turns: int = 1, **changes: Any) -> tuple[int, float]:
    """Return the updates of a step, and its groups without signal."""
    config = make_config(
        rollouts=RolloutConfig(prompts_per_step=4, group_size=4, max_length=32, max_turns=2), **changes
    )
    builder = bare_builder(config, reference=lambda batch: np.full(batch.input_ids.shape, -2.0))
    rollouts = [rollout(name, reward, turn(2), *[turn(2, starts=False)] * (turns - 1)) for name, reward in made]
    batch = build(builder, *rollouts)
    return len(list(builder.minibatches(batch.rollouts, 1))), batch.metrics["groups/no_signal"]


@pytest.mark.parametrize(
    ("updates", "changes"),
    [
        (0, {}),
        (0, {"advantage": DrGrpoConfig(normalize=Normalization.BATCH)}),
        (0, {"kl": NoKlConfig(watch=True)}),
        (0, {"kl": LossKlConfig(beta=0.0)}),
        # All rewards change by the same penalty.
        (0, {"kl": RewardKlConfig(beta=0.5)}),
        # A turn follows an observation.
        (0, {"observation_loss": ObservationLossConfig()}),
        (1, {"observation_loss": ObservationLossConfig(), "turns": 2}),
        (1, {"kl": LossKlConfig(beta=0.1)}),
        (1, {"kl": ExactKlConfig(0.5)}),
        (1, {"advantage": ReinforceConfig()}),
        (1, {"distillation": DistillationConfig(alone=True), "reference": CheckpointReferenceConfig("runs/teacher")}),
        (1, {"advantage": GaeConfig(), "critic": CriticConfig(), "policy_loss": PpoClipLossConfig()}),
        (1, {"made": OF_DIFFERENT}),
        (
            6,
            {
                "made": OF_DIFFERENT,
                "updates": UpdateConfig(epochs=3, minibatches=2),
                "policy_loss": PpoClipLossConfig(),
            },
        ),
        (0, {"updates": UpdateConfig(epochs=3, minibatches=2), "policy_loss": PpoClipLossConfig()}),
    ],
)
def test_a_batch_of_equal_rewards_makes_an_update_only_for_another_loss(updates: int, changes: dict[str, Any]):
    assert count_updates(**changes)[0] == updates


def test_a_policy_term_can_declare_a_gradient_without_advantages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ReinforceLossConfig, "needs_advantage", False)
    assert count_updates() == (1, 0.0)


@pytest.mark.parametrize(
    ("counts", "changes"),
    [
        ((1, 1.0), {"kl": LossKlConfig(beta=0.1)}),
        ((1, 0.0), {"kl": LossKlConfig(beta=0.1), "made": OF_DIFFERENT}),
        ((1, 0.0), {"kl": ExactKlConfig(0.5)}),
        ((1, 0.0), {"advantage": GaeConfig(), "critic": CriticConfig(), "policy_loss": PpoClipLossConfig()}),
    ],
)
def test_a_penalty_makes_updates_without_a_signal(counts: tuple[int, float], changes: dict[str, Any]):
    assert count_updates(**changes) == counts


def test_each_minibatch_is_left_out_for_its_own_advantages():
    parts = {"updates": UpdateConfig(minibatches=4), "policy_loss": PpoClipLossConfig()}
    builder = bare_builder(make_config(**parts))
    groups = [group(1.0, 1.0), group(0.0, 1.0)]
    batch = builder.build(groups, NEWEST, 1, PhaseTimer())
    # Of four minibatches of one rollout, two have an advantage.
    assert len(list(builder.minibatches(batch.rollouts, 1))) == 2
    assert batch.metrics["groups/no_signal"] == 1.0


@pytest.mark.parametrize("row", range(8))
def test_all_hosts_decide_alike_whose_rows_have_no_advantage(row: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_builder, "own_rows", lambda trainer: lambda count: np.array([row]))
    builder = bare_builder(make_config())
    equal, different = ([group(1.0, 1.0)] * 6, [group(1.0, 1.0)] * 5 + [group(0.0, 1.0)])
    counts = []
    for groups in (equal, different):
        batch = builder.build(groups, NEWEST, 1, PhaseTimer())
        counts.append(len(list(builder.minibatches(batch.rollouts, 1))))
    assert counts == [0, 1]


def test_groups_without_a_graded_rollout_have_no_signal():
    builder = bare_builder(make_config())
    ungraded = group(None, None)
    assert builder.build([ungraded], NEWEST, 1, PhaseTimer()).metrics == {"groups/no_signal": 1.0}
    groups = [ungraded, group(0.0, 1.0)]
    assert builder.build(groups, NEWEST, 1, PhaseTimer()).metrics["groups/no_signal"] == 1.0


# Minibatches.


def named(count: int) -> list[Rollout]:
    """Rollouts that the recorder gives distinct advantages: the n-th has n."""
    return [rollout(f"r{index}", 1.0) for index in range(count)]


def split(config: Any, count: int, step: int = 1, seed: int = 0, **changes: Any) -> list[list[int]]:
    """Numbers of the rollouts in each update."""
    # An advantage of 0 looks like padding, so rollout 0 is removed.
    builder = bare_builder(
        make_config(updates=config, policy_loss=PpoClipLossConfig(), advantage=Recorder(), seed=seed, **changes)
    )
    rollouts = build(builder, *named(count + 1)).rollouts.take(np.arange(1, count + 1))
    updates = []
    for packed in builder.minibatches(rollouts, step):
        advantages = packed.unpack(np.stack([np.asarray(part.advantages.array) for part in packed.microbatches]))
        # A prompt of four tokens and a reply of two.
        numbers = advantages.reshape(-1, 6)
        assert not numbers[:, :4].any()
        assert (numbers[:, 4] == numbers[:, 5]).all()
        updates.append(numbers[:, 5].astype(int).tolist())
    return updates


@pytest.mark.parametrize(("epochs", "parts", "count"), [(1, 4, 16), (3, 2, 16), (2, 3, 10), (4, 1, 7)])
def test_each_epoch_contains_each_rollout_once(epochs: int, parts: int, count: int):
    found = split(UpdateConfig(epochs=epochs, minibatches=parts), count)
    assert len(found) == epochs * parts
    assert {len(part) for part in found} <= {count // parts, -(-count // parts)}
    for epoch in range(epochs):
        drawn = [number for part in found[epoch * parts : (epoch + 1) * parts] for number in part]
        assert sorted(drawn) == list(range(1, count + 1))


def test_minibatches_depend_on_epoch_step_and_seed():
    config = UpdateConfig(epochs=2, minibatches=2)
    first, second = split(config, 16)[:2], split(config, 16)[2:]
    assert first != second
    assert split(config, 16, step=2)[:2] != first
    assert split(config, 16, seed=1)[:2] != first


def test_an_equal_step_has_the_prompts_of_the_first_minibatch():
    updates = UpdateConfig(minibatches=4)
    step = bare_builder(make_config(updates=updates, policy_loss=PpoClipLossConfig())).parts.equal_step()
    assert step.prompts is not None
    # Rollouts have the numbers from 1 on, four for each prompt.
    expected = [str((number - 1) // 4).encode() for number in split(updates, 16)[0]]
    assert [prompt.token_ids for [prompt] in step.prompts] == expected
    assert len(set(expected)) > 1


def test_empty_minibatches_are_skipped():
    assert sorted(split(UpdateConfig(minibatches=4), 3)) == [[1], [2], [3]]


def test_denominator_is_per_minibatch():
    updates = UpdateConfig(minibatches=2)
    builder = bare_builder(make_config(updates=updates, policy_loss=PpoClipLossConfig(), advantage=Recorder()))
    batch = build(builder, *named(6))
    packed_batches = list(builder.minibatches(batch.rollouts, 1))
    assert len(packed_batches) == 2
    for packed in packed_batches:
        weights = [np.asarray(part.loss_weights.array) for part in packed.microbatches]
        # sequence_sum over three rollouts of two tokens each.
        assert sum(array.sum() for array in weights) == pytest.approx(2.0)
        assert packed.num_loss_tokens == 6
