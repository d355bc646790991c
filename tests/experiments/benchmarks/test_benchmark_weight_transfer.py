# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmarks import benchmark_weight_transfer
from experiments.benchmarks.benchmark_weight_transfer import synthetic_shapes
from experiments.benchmarks.weight_servers import Share, make_snapshot
from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.weights.fetch import open_receiver
from tests.tiny_run import make_run


@pytest.fixture(autouse=True)
def compilation_cache_as_before() -> Iterator[None]:
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.medium
def test_a_worker_gets_what_the_servers_hold():
    with benchmark_weight_transfer.weight_servers("t" * 32, synthetic_shapes(4), 2) as servers:
        for server in servers:
            server.publish(7)
        receiver = open_receiver(WeightTransferConfig(), [server.address for server in servers], "t" * 32)
        like = {str(number): np.zeros((4, 1024), np.float32) for number in range(16)}
        received, version = receiver.receive(like)
    expected = make_snapshot(Share("", 1, 2, synthetic_shapes(4))).data[3]
    assert version == 7
    assert received["3"][2:].tobytes() == expected.tobytes()


@pytest.mark.slow
def test_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmark_weight_transfer, "without_compilation_cache", lambda: None)
    sizes = ["--sizes_mb", "1", "--servers", "2", "--rounds", "2", "--steps", "2"]
    benchmark_weight_transfer.main([*sizes, "--config", str(make_run(tmp_path).config)])
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == "benchmark_weight_transfer"
    figures = report["figures"]
    assert set(figures) == {"publishing", "arrival_from_2", "1_mb_from_2"}
    arrival = figures["arrival_from_2"]
    assert arrival["bytes"] == figures["publishing"]["bytes"]
    for name in ("arrival_seconds", "transfer_seconds", "socket_seconds", "arrival_over_transfer"):
        assert arrival[name]["count"] == 2
        assert arrival[name]["min"] > 0
    measured = figures["1_mb_from_2"]
    assert measured["bytes"] == pytest.approx(1e6, rel=0.1)
    for name in ("transfer", "socket", "copy_to_fresh_memory", "copy_to_used_memory"):
        assert measured[f"{name}_gb_per_second"]["count"] == 2
        assert measured[f"{name}_gb_per_second"]["min"] > 0
    assert figures["publishing"]["publish_call_over_step"]["count"] == 2
