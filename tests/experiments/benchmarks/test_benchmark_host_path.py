# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json

import pytest

from experiments.benchmarks import benchmark_host_path


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
