# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.models.llama import LlamaConfig

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.processed_rollout import ProcessedRollout, process_rollout
from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.objectives.advantage_inputs import TokenAdvantages
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.training import throughput
from marin_rl.training.throughput import PHASES, model_flops_utilization, throughput_metrics
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")
MODEL = LlamaConfig(seq_len=16, hidden_dim=16, intermediate_dim=32, num_layers=1, num_heads=2, num_kv_heads=2)
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

    def processed(index: int, length: int) -> ProcessedRollout:
        generation = Generation((1,) * (length - 2), (-1.0,) * (length - 2), StopReason.STOP, 0, 0)
        turn = Turn((2, 3), generation, (), {"correct": 1.0}, starts_sequence=True)
        rollout = Rollout(str(index), "g", TASK, (turn,), RolloutStatus.COMPLETED, {"correct": 1.0})
        return process_rollout(rollout, length=10, pad_token_id=0)

    rollouts = [processed(index, length) for index, length in enumerate(lengths)]
    token_advantages_list = [
        TokenAdvantages(np.ones(rollout.num_loss_tokens), np.zeros(rollout.num_loss_tokens)) for rollout in rollouts
    ]
    return pack_batch(rollouts, token_advantages_list, TokenMeanConfig(), LAYOUT, pad_token_id=0)


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


def test_no_updates_give_zero_training_rate():
    found = throughput_metrics([group(3, 5)], [], SECONDS, elapsed=4.0)
    assert found["tokens/sampled_per_second"] == 8 / 0.5
    trained = ("tokens/trained_per_second", "batch/packing_efficiency", "batch/microbatches")
    assert [found[name] for name in trained] == [0.0] * 3


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


def test_missing_phases_do_not_divide_by_zero():
    found = throughput_metrics([group(3)], [batch(8)], {}, elapsed=1.0)
    assert np.isfinite(list(found.values())).all()


def test_mfu_is_share_of_peak(monkeypatch: pytest.MonkeyPatch):
    peak = 1e6
    monkeypatch.setattr(throughput, "device_hardware_flops", lambda device: peak)
    found = model_flops_utilization(MODEL, 264, [batch(7), batch(8)], step_seconds=2.0)
    per_token = MODEL.flops_per_token(264)
    assert per_token is not None
    assert found == {"mfu": pytest.approx(3 * per_token * 15 / (2.0 * peak * jax.device_count()))}


def test_no_mfu_if_peak_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(throughput, "device_hardware_flops", lambda device: None)
    assert model_flops_utilization(MODEL, 264, [batch(8)], 1.0) == {}


def test_no_mfu_without_updates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(throughput, "device_hardware_flops", lambda device: 1e6)
    assert model_flops_utilization(MODEL, 264, [], 1.0) == {}
