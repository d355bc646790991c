# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json

import pytest

from experiments.benchmarks import benchmark_sandbox
from marin_rl.rewards.sandbox.isolation import Isolation


@pytest.mark.medium
def test_figures(capsys: pytest.CaptureFixture[str]):
    benchmark_sandbox.main(["--calls", "3", "--rounds", "2", "--characters", "10", "--imports", "json"])
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == "benchmark_sandbox"
    assert set(report["figures"]) == {"plain", "json"}
    for measured in report["figures"].values():
        assert measured["direct_milliseconds"]["min"] > 0
        assert measured["none"] is not None
        for level in Isolation:
            if measured[level.value] is not None:
                assert measured[level.value]["call_milliseconds"]["count"] == 3
                assert set(measured[level.value]["groups"]) == {"separate", "shared"}
                for group in measured[level.value]["groups"].values():
                    assert group["call_milliseconds"]["count"] == group["cpu_speedup"]["count"] == 2
                    assert group["call_milliseconds"]["min"] > 0
