# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json

import numpy as np
import pytest

from experiments.benchmarks import benchmark_host_path
from experiments.benchmarks.benchmark_host_path import SampledStep


@pytest.mark.medium
def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"groups": 2, "members": 3, "prompt_tokens": 4, "sampled_tokens": 5, "row_length": 16, "rounds": 1}
    benchmark_host_path.main([*(f"--{name}={size}" for name, size in sizes.items()), "--unpacked"])
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == "benchmark_host_path"
    assert report["settings"] == {**sizes, "rows": 8, "unpacked": True}
    parts = ("records", "encode_groups", "decode_groups", "advantages", "packing", "store")
    assert list(report["figures"]) == [f"{name}_cpu_milliseconds" for name in (*parts, "store_table", "store_parquet")]
    assert all(figure["count"] == 1 for figure in report["figures"].values())


def test_records_have_the_sampled_tokens() -> None:
    step = SampledStep(2, 3, 4, 5)
    groups = step.records()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [len(group.rollouts) for group in groups] == [3, 3]
    assert [rollout.turns[0].generation.token_ids for rollout in rollouts] == [
        tuple(row) for row in step.tokens.tolist()
    ]
    assert [rollout.turns[0].observation_tokens for rollout in rollouts] == [
        tuple(row) for row in np.repeat(step.prompts, 3, axis=0).tolist()
    ]
