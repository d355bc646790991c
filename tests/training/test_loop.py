# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training loop: record n holds metrics of step n and the evaluation of the weights after step n."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from levanter.models.llama import LlamaConfig

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.environments.base import AbstractEnvironment, Episode, Split, Step
from marin_rl.evaluate import EvaluateConfig, run_evaluation
from marin_rl.learner.train_step import Learner, PendingUpdate
from marin_rl.models.flops import flops_per_token
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.objectives.kl import LossKlConfig
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.config import ResampleGroupsConfig
from marin_rl.rollouts.run_rollouts import run_tasks
from marin_rl.runs.rollout_store import RolloutStore, read_rollouts
from marin_rl.runs.stored_rollout import as_table
from marin_rl.tokenization.load import TokenPieces
from marin_rl.training.batch_builder import BatchBuilder
from marin_rl.training.loop import (
    PHASES,
    TrainedStep,
    TrainingRun,
    model_flops_utilization,
    throughput_metrics,
    train,
    train_on_groups,
)
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from marin_rl.utils.levanter_line import seq_len
from marin_rl.utils.timing import PhaseTimer
from tests.tiny_run import TinyRun, copy_of, interrupted_after, outcome, without_losses, without_timings
from tests.training.bare_run import local_rollouts
from tests.training.reopened_run import config_of, reopen

pytestmark = pytest.mark.both_lines

# OBJECTIVES.md, "Metrics that every run logs", without those that need a critic, a reference or a known device.
ALWAYS = {
    *("eps", "episode", "lr", "grad_norm", "step"),
    *("objective/entropy", "objective/scores", "objective/non_score_reward", "objective/rlhf_reward"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "policy/neg_logprob", "loss/policy_avg"),
    *("val/ratio", "val/ratio_var", "val/num_eos_tokens"),
    *("train/rewards", "train/format_rewards", "train/correct_rewards", "train/output_length"),
    *("reward/correct/mean", "reward/correct/std", "reward/format/mean", "reward/format/std"),
    *("groups/zero_spread_share", "groups/all_good_share", "groups/all_bad_share"),
    *("rollouts/truncated_share", "rollouts/turns", "rollouts/failed"),
    *("mismatch/logprob_difference_mean", "mismatch/logprob_difference_max", "mismatch/k3"),
    *("mismatch/effective_sample_size", "staleness/min", "staleness/mean", "staleness/max"),
    *("tokens/trained_per_second", "tokens/sampled_per_second", "batch/packing_efficiency", "batch/microbatches"),
    *(
        "filter/kept_groups",
        "filter/dropped_zero_spread",
        "filter/dropped_ungraded",
        "filter/replaced",
        "updates",
        "updates/skipped",
        "groups/no_signal",
        "replay/stale",
        "replay/waiting",
    ),
    *(f"seconds/{phase}" for phase in ("sample", "reward", "batch", "reference", "step", "transfer", "store", "wait")),
    "seconds/total",
}


def reopened(run: TinyRun, step: int) -> TrainingRun:
    """Open the run with the weights after a step."""
    opened = reopen(run)
    opened.state.progress.step = step
    checkpoint = opened.checkpoints.open(step)
    model = (
        RunParts(opened.config, opened.learner.trainer).policy_spec(checkpoint.vocab_size).restore_policy(checkpoint)
    )
    opened.trainer_state = dataclasses.replace(opened.trainer_state, model=model)
    opened.publish_weights()
    return opened


@pytest.fixture(scope="module")
def after_two(finished_run: TinyRun) -> TrainingRun:
    """The finished run with the weights after step 2."""
    return reopened(finished_run, 2)


def rows_of(run: TinyRun, step: int) -> list[dict[str, Any]]:
    """The stored rollouts of a step."""
    [table] = read_rollouts(run.path / "rollouts", [step], purposes=["training"])
    return table.to_pylist()


def leaves(run: TrainingRun) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(run.trainer_state)]


def evaluations(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("eval/")}


def test_every_record_has_all_metrics(finished_run: TinyRun) -> None:
    for record in finished_run.records()[1:]:
        assert set(record) >= ALWAYS
        assert all(isinstance(value, int | float) for value in record.values())


def test_evaluations_run_before_rl_periodically_and_at_the_end(finished_run: TinyRun) -> None:
    assert [record["step"] for record in finished_run.records() if evaluations(record)] == [0, 3, 6]
    assert "before_warm_start/eval/ones/accuracy_sampled" in finished_run.records()[0]


@pytest.mark.medium
def test_evaluation_of_record_n_uses_weights_after_step_n(finished_run: TinyRun) -> None:
    measured = {}
    for step in (0, 2, 3, 6):
        found, measured[step] = run_evaluation(EvaluateConfig(str(finished_run.path), step))
        assert found == step
    records = finished_run.records()
    for step in (0, 3, 6):
        recorded = evaluations(records[step])
        assert recorded == without_losses(measured[step])
    # Consecutive weights differ, so equality identifies the step.
    assert measured[2] != measured[3]
    assert len({tuple(evaluation.values()) for evaluation in measured.values()}) == 4


def test_rollouts_of_record_n_are_sampled_with_weights_before_step_n(
    finished_run: TinyRun, after_two: TrainingRun
) -> None:
    config = after_two.config
    groups = run_tasks(
        after_two.runner,
        # Two steps of four tasks precede this one.
        after_two.runner.environment.stream(config.seed).draw({"drawn": 8}, 4)[0],
        group_size=config.rollouts.group_size,
        temperature=config.sampling.temperature,
        seed_parts=(config.seed, "train", 3),
    )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    piece = TokenPieces(after_two.runner.tokenizer.tokenizer)
    repeated_rows = as_table(rollouts, 3, "training", {}, piece).to_pylist()
    for row, again in zip(rows_of(finished_run, 3), repeated_rows, strict=True):
        for name in ("id", "group_id", "task_id", "answer", "status", "reward", "rewards", "evaluations"):
            assert row[name] == again[name]
        for turn, repeated in zip(row["turns"], again["turns"], strict=True):
            for name in ("messages", "observation_tokens", "token_ids", "pieces", "stop_reason", "first_version"):
                assert list(turn[name]) == list(repeated[name]) if name.endswith("s") else turn[name] == repeated[name]
            np.testing.assert_array_equal(turn["logprobs"], np.float32(repeated["logprobs"]))
    assert {turn.generation.first_version for rollout in rollouts for turn in rollout.turns} == {2}
    record = finished_run.records()[3]
    assert record["objective/scores"] == pytest.approx(np.mean([rollout.total_reward for rollout in rollouts]))
    assert [record[f"staleness/{kind}"] for kind in ("min", "mean", "max")] == [0.0] * 3


def test_stored_evaluations_match_records(finished_run: TinyRun) -> None:
    tables = list(read_rollouts(finished_run.path / "rollouts", purposes=["evaluation"]))
    assert [set(table["step"].to_pylist()) for table in tables] == [{0}, {3}, {6}]
    for table, step in zip(tables, (0, 3, 6), strict=True):
        rows = table.to_pylist()
        greedy = [row for row in rows if "-greedy-" in row["id"]]
        # Each task has two sampled attempts and a greedy one.
        assert 3 * len(greedy) == len(rows)
        right = np.mean([dict(row["rewards"])["correct"] for row in greedy])
        assert right == pytest.approx(finished_run.records()[step]["eval/ones/accuracy_greedy"])
        assert {row["not_trained"] for row in rows} == {"evaluation"}
        assert {turn["last_version"] for row in rows for turn in row["turns"]} == {step}


@pytest.mark.medium
def test_storing_learner_logprobs_does_not_affect_training(
    finished_run: TinyRun, new_run: Callable[..., TinyRun]
) -> None:
    settings = {
        "initialize_from": str(finished_run.path),
        "warm_start__max_steps": 0,
        "num_steps": 2,
        "kl": {"type": "in_loss", "beta": 0.1},
    }
    plain = new_run(**settings)
    asked = new_run(**settings, rollout_store={"learner_logprobs": True, "every": 2})
    for run in (plain, asked):
        assert run.train() == 0
    assert outcome(asked)["state"] == outcome(plain)["state"]
    turns = [turn for row in rows_of(asked, 2) for turn in row["turns"]]
    policy, learner, reference = (
        np.concatenate([turn[name] for turn in turns])
        for name in ("logprobs", "learner_logprobs", "reference_logprobs")
    )
    assert 0 < np.abs(policy - learner).max() < 1e-5
    # The reference still has the weights from before step 1.
    assert np.abs(policy - reference).max() > 1e-3
    assert {turn["learner_logprobs"] for row in rows_of(plain, 2) for turn in row["turns"]} == {None}
    assert not (asked.path / "rollouts" / "step-00000001.parquet").exists()


def test_sampler_and_learner_logprobs_agree(finished_run: TinyRun) -> None:
    for record in finished_run.records()[1:]:
        assert record["mismatch/logprob_difference_max"] < 1e-5
        assert record["val/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert record["policy/clipfrac_avg"] == 0.0


def test_run_improves_accuracy(finished_run: TinyRun) -> None:
    records = finished_run.records()
    assert records[6]["eval/ones/accuracy_sampled"] > records[0]["eval/ones/accuracy_sampled"] + 0.2
    assert all(record["grad_norm"] > 0 for record in records[1:])


def test_progress_counters(finished_run: TinyRun) -> None:
    records = finished_run.records()[1:]
    assert [record["episode"] for record in records] == [16.0 * step for step in range(1, 7)]
    assert [record["updates"] for record in records] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    manifest = json.loads((finished_run.checkpoint(6) / "manifest.json").read_text())
    sampled = sum(record["train/output_length"] * 16 for record in records)
    assert manifest["progress"]["sampled_tokens"] == pytest.approx(sampled)
    assert manifest["progress"]["trained_tokens"] == manifest["progress"]["sampled_tokens"]
    assert manifest["progress"]["step"] == manifest["progress"]["updates"] == 6
    assert manifest["progress"]["tasks_drawn"] == 6 * 4


def test_phase_seconds_sum_to_total(finished_run: TinyRun) -> None:
    for record in finished_run.records()[1:]:
        seconds = {name: value for name, value in record.items() if name.startswith("seconds/")}
        total = seconds.pop("seconds/total")
        assert seconds.pop("seconds/compile") <= total
        assert sum(seconds.values()) == pytest.approx(total)


@pytest.mark.medium
def test_stop_request_saves_finished_step(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copy_of(finished_run, tmp_path / "copy")
    for step in (4, 5, 6):
        path = copied.checkpoint(step)
        path.rename(path.with_name(f"gone-{step}"))
    checkpoint = dataclasses.replace(config_of(copied).checkpoint, every=0, keep_every=0)
    run = reopen(copied, checkpoint=checkpoint)
    assert run.state.progress.step == 3
    records: dict[int, dict[str, float]] = {}
    compared: list[tuple[int, int]] = []

    def compare(step: int, batch: object, updates: Sequence[object]) -> None:
        assert updates
        compared.append((step, int(run.trainer_state.step)))

    monkeypatch.setattr("marin_rl.training.loop.require_same_batch", compare)
    assert train(run, records.__setitem__, lambda: 5 in records) is False
    # Training processes compare the batch of a step before the update.
    assert compared == [(4, 3), (5, 4)]
    assert list(records) == [4, 5]
    assert copied.steps()[-1] == 5
    expected = [without_timings(record) for record in finished_run.records()]
    for step, metrics in records.items():
        assert without_timings({"step": step, **metrics}) == expected[step]


@dataclasses.dataclass(frozen=True)
class Generous(AbstractEnvironment):
    """An environment that gives every reply the same reward."""

    inner: AbstractEnvironment

    @property
    def name(self) -> str:
        return self.inner.name

    def tasks(self, split: Split) -> Sequence[Task]:
        return self.inner.tasks(split)

    async def start(self, task: Task, seed: int) -> Episode:
        return Praise()


class Praise:
    async def step(self, reply: str) -> Step:
        return Step({"correct": 1.0})

    async def close(self) -> None:
        pass


def with_equal_rewards(group: RolloutGroup) -> RolloutGroup:
    rollouts = [dataclasses.replace(rollout, rewards={"correct": 1.0}) for rollout in group.rollouts]
    return RolloutGroup(group.id, rollouts)


@pytest.mark.medium
def test_a_step_of_equal_rewards_leaves_the_optimizer_as_it_is(finished_run: TinyRun, tmp_path: Path) -> None:
    run = reopen(copy_of(finished_run, tmp_path / "copy"), num_steps=8)
    groups = run.collector.collect(run.state, 7, PhaseTimer()).groups
    equal = [with_equal_rewards(group) for group in groups]
    first = jax.tree.map(np.array, run.trainer_state)

    def step(builder: BatchBuilder, state: Any, groups: Sequence[RolloutGroup]) -> TrainedStep:
        return train_on_groups(builder, run.learner, state, groups, 7, PhaseTimer())

    def start() -> Any:
        return run.learner.place(first)

    skipped = step(run.batch_builder, start(), equal)
    assert skipped.updates == []
    assert skipped.metrics["groups/no_signal"] == len(groups)
    assert not any(name.startswith(("loss/", "lr", "grad_norm")) for name in skipped.metrics)
    assert_same_leaves(skipped.state, first)
    # The next gradient acts as if the step had not been.
    undisturbed = step(run.batch_builder, start(), groups)
    assert undisturbed.updates
    after = step(run.batch_builder, skipped.state, groups)
    assert_same_leaves(after.state, undisturbed.state)

    # With a KL penalty in the loss the same batch makes its update, and the moments decay; it still teaches nothing.
    config = dataclasses.replace(run.config, kl=LossKlConfig(beta=0.1))
    always = dataclasses.replace(run.batch_builder, parts=dataclasses.replace(run.batch_builder.parts, config=config))
    decayed = step(always, start(), equal)
    assert (len(decayed.updates), decayed.metrics["grad_norm"]) == (1, 0.0)
    assert decayed.metrics["groups/no_signal"] == len(groups)
    moments = zip(jax.tree.leaves(decayed.state.opt_state), jax.tree.leaves(first.opt_state), strict=True)
    assert any(np.any(np.array(new) != old) for new, old in moments)


def assert_same_leaves(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array(one).tobytes() == np.array(other).tobytes()


def test_step_without_kept_groups_is_recorded_and_keeps_weights(finished_run: TinyRun, tmp_path: Path) -> None:
    copied = copy_of(finished_run, tmp_path / "copy")
    run = reopen(copied, num_steps=8, filter=ResampleGroupsConfig(max_batches=2))
    environment = Generous(run.runner.environment)
    rollout_source = local_rollouts(run.config, dataclasses.replace(run.runner, environment=environment))
    run.collector = dataclasses.replace(run.collector, environment=environment, rollout_source=rollout_source)
    before = leaves(run)
    records: dict[int, dict[str, float]] = {}
    assert train(run, records.__setitem__, lambda: False) is True
    assert all(np.array_equal(one, other) for one, other in zip(before, leaves(run), strict=True))
    assert list(records) == [7, 8]
    for step, record in records.items():
        assert {name: value for name, value in record.items() if name.startswith("filter/")} == {
            "filter/kept_groups": 0,
            "filter/dropped_zero_spread": 8,
            "filter/dropped_ungraded": 0,
            "filter/replaced": 4,
        }
        assert (record["updates"], record["updates/skipped"], record["groups/no_signal"]) == (6, 1, 0)
        assert record["episode"] == 6 * 16 + (step - 6) * 32
        # Rates count the finished groups, not those to train on.
        assert record["eps"] * record["seconds/total"] == pytest.approx(32)
        assert record["objective/scores"] == 1.0
        assert record["tokens/trained_per_second"] == 0.0
        # There are no metrics of a loss that was not computed.
        assert not any(name.startswith(("loss/", "val/ratio", "grad_norm", "objective/rlhf")) for name in record)
    assert (run.state.progress.step, run.state.progress.updates, run.state.progress.tasks_drawn) == (8, 6, 24 + 16)
    assert copied.steps()[-1] == 8
    rows = rows_of(copied, 8)
    assert [(row["advantage"], row["not_trained"]) for row in rows] == [(None, "filtered")] * 32


@pytest.mark.medium
def test_runs_are_deterministic_in_config_and_seed(finished_run: TinyRun, new_run: Callable[..., TinyRun]) -> None:
    settings = {"initialize_from": str(finished_run.path), "warm_start__max_steps": 0, "num_steps": 1}
    one, same, other = new_run(**settings), new_run(**settings), new_run(**settings, seed=4)
    for run in (one, same, other):
        assert run.train() == 0
    assert outcome(one) == outcome(same)
    assert outcome(one)["state"] != outcome(other)["state"]
    assert outcome(one)["rollouts"] != outcome(other)["rollouts"]


# Throughput.

TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")
MODEL = LlamaConfig(**seq_len(16), hidden_dim=16, intermediate_dim=32, num_layers=1, num_heads=2, num_kv_heads=2)
SECONDS = {"sample": 0.5, "reward": 0.25, "step": 2.0, "transfer": 0.25}


def group(*lengths: int) -> RolloutGroup:
    def rollout(length: int) -> Rollout:
        generation = Generation((1,) * length, (-1.0,) * length, StopReason.STOP, 0, 0)
        return Rollout(
            "r",
            "g",
            TASK,
            (Turn((2, 3), generation, (), {"correct": 1.0}, starts_sequence=True),),
            RolloutStatus.COMPLETED,
            {"correct": 1.0},
        )

    return RolloutGroup("g", [rollout(length) for length in lengths])


LAYOUT = RowLayout(row_length=10, rows_per_microbatch=1, packed=False)


def batch(*lengths: int) -> PackedBatch:
    """One microbatch of ten positions per length: a prompt of two tokens, and an answer of the remaining length."""

    def rollout(index: int, length: int) -> Rollout:
        generation = Generation((1,) * (length - 2), (-1.0,) * (length - 2), StopReason.STOP, 0, 0)
        turn = Turn((2, 3), generation, (), {"correct": 1.0}, starts_sequence=True)
        return Rollout(str(index), "g", TASK, (turn,), RolloutStatus.COMPLETED, {"correct": 1.0})

    batch = batch_rollouts([rollout(index, length) for index, length in enumerate(lengths)], max_length=10)
    return pack_batch(batch, TokenMeanConfig(), LAYOUT, pad_token_id=0)


def test_rates_exclude_padding():
    found = throughput_metrics([group(3, 5), group(4)], [batch(7, 8)], SECONDS, elapsed=4.0)
    assert found["eps"] == 3 / 4
    assert found["tokens/sampled_per_second"] == 12 / 0.5
    assert found["tokens/trained_per_second"] == 11 / 2.0
    assert found["batch/packing_efficiency"] == 0.75
    assert found["batch/microbatches"] == 2.0


def test_tokens_count_in_every_update():
    found = throughput_metrics([group(3)], [batch(7, 8), batch(10)], SECONDS, elapsed=4.0)
    assert found["tokens/trained_per_second"] == (11 + 8) / 2.0
    assert found["batch/packing_efficiency"] == pytest.approx(25 / 30)
    assert found["batch/microbatches"] == 3.0


def test_phase_seconds_and_wait():
    found = throughput_metrics([group(3)], [batch(8)], SECONDS, elapsed=4.0)
    assert {phase: found[f"seconds/{phase}"] for phase in PHASES} == {
        **dict.fromkeys(PHASES, 0.0),
        **SECONDS,
        "wait": 1.0,
    }
    assert found["seconds/total"] == 4.0
    # Clocks are read one after another, so the phases may exceed the total slightly.
    assert throughput_metrics([group(3)], [batch(8)], SECONDS, elapsed=2.999)["seconds/wait"] == 0.0


def test_the_time_of_an_update_includes_storing():
    found = throughput_metrics([group(3)], [batch(8)], {**SECONDS, "store": 0.5}, elapsed=4.0)
    assert found["tokens/trained_per_second"] == 6 / 2.5
    assert (found["seconds/step"], found["seconds/store"], found["seconds/wait"]) == (2.0, 0.5, 0.5)


@pytest.mark.medium
def test_rollouts_are_stored_before_the_update_is_waited_for(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = interrupted_after(finished_run, 5, tmp_path / "copy")
    order: list[str] = []

    def log(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def logged(*args, **settings):
            order.append(name)
            return original(*args, **settings)

        monkeypatch.setattr(owner, name, logged)

    log(Learner, "dispatch")
    log(RolloutStore, "write")
    log(PendingUpdate, "wait")
    log(TrainingRun, "publish_weights")
    assert resumed.train() == 0
    # The last write is that of the evaluation.
    assert order == ["dispatch", "write", "wait", "publish_weights", "write"]


def test_mfu_is_share_of_peak(monkeypatch: pytest.MonkeyPatch):
    peak = 1e6
    monkeypatch.setattr("marin_rl.training.loop.peak_flops", lambda device: peak)
    found = model_flops_utilization(MODEL, 264, [batch(7), batch(8)], step_seconds=2.0)
    per_token = flops_per_token(MODEL, 264, LAYOUT.row_length)
    longer = dataclasses.replace(MODEL, **seq_len(131_072))
    assert model_flops_utilization(longer, 264, [batch(7), batch(8)], step_seconds=2.0) == found
    assert found == {"mfu": pytest.approx(3 * per_token * 15 / (2.0 * peak * jax.device_count()))}


def test_no_mfu_if_peak_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marin_rl.training.loop.peak_flops", lambda device: None)
    assert model_flops_utilization(MODEL, 264, [batch(8)], 1.0) == {}
