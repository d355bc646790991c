# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import jax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from haliax import Axis
from levanter.models.llama import LlamaConfig

from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample
from marin_rl.runtime import throughput
from marin_rl.runtime.throughput import PHASES, model_flops_utilization, throughput_metrics
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")
MODEL = LlamaConfig(seq_len=16, hidden_dim=16, intermediate_dim=32, num_layers=1, num_heads=2, num_kv_heads=2)
SECONDS = {"sample": 0.5, "reward": 0.25, "step": 2.0, "transfer": 0.25}


def group(*lengths: int) -> RolloutGroup:
    def rollout(length: int) -> Rollout:
        generation = Generation((1,) * length, (-1.0,) * length, StopReason.STOP, 0, 0)
        return Rollout(
            "r", "g", TASK, (Turn((2, 3), generation, (), 1.0, True),), RolloutStatus.COMPLETED, {"correct": 1.0}
        )

    return RolloutGroup("g", [rollout(length) for length in lengths])


def batch(used: int, loss: int) -> RlExample:
    """Two rows of ten positions; so many hold tokens, and so many of these carry loss."""
    axes = (Axis("batch", 2), Axis("position", 10))
    arrays = {name: np.zeros((2, 10), dtype) for name, dtype in PER_TOKEN_DTYPES.items()}
    arrays["segment_ids"].flat[:used] = 1
    arrays["loss_mask"].flat[:loss] = True
    return RlExample(**{name: hax.named(array, axes) for name, array in arrays.items()})


def test_rates_count_no_padding():
    found = throughput_metrics([group(3, 5), group(4)], batch(used=15, loss=12), SECONDS, elapsed=4.0)
    assert found["eps"] == 3 / 4
    assert found["tokens/sampled_per_second"] == 12 / 0.5
    assert found["tokens/trained_per_second"] == 12 / 2.0
    assert found["batch/packing_efficiency"] == 0.75


def test_every_phase_is_told_and_the_rest_is_waiting():
    found = throughput_metrics([group(3)], batch(15, 12), SECONDS, elapsed=4.0)
    assert {phase: found[f"seconds/{phase}"] for phase in PHASES} == {
        **dict.fromkeys(PHASES, 0.0),
        **SECONDS,
        "wait": 1.0,
    }
    assert found["seconds/total"] == 4.0
    # Clocks are read one after the other; what is accounted for may exceed the whole by a hair.
    assert throughput_metrics([group(3)], batch(15, 12), SECONDS, elapsed=2.999)["seconds/wait"] == 0.0


def test_nothing_sampled_in_no_time_is_no_division_by_zero():
    found = throughput_metrics([group(3)], batch(15, 12), {}, elapsed=1.0)
    assert np.isfinite(list(found.values())).all()


def test_utilization_is_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch):
    peak = 1e6
    monkeypatch.setattr(throughput, "device_hardware_flops", lambda device: peak)
    found = model_flops_utilization(MODEL, 264, batch(used=15, loss=12), step_seconds=2.0)
    per_token = MODEL.flops_per_token(264)
    assert per_token is not None
    assert found == {"mfu": pytest.approx(3 * per_token * 15 / (2.0 * peak * jax.device_count()))}


def test_where_the_peak_is_not_known_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(throughput, "device_hardware_flops", lambda device: None)
    assert model_flops_utilization(MODEL, 264, batch(15, 12), 1.0) == {}
