# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
from pathlib import Path

import pytest

from experiments.frozenlake import VARIANTS
from experiments.report import OBJECTIVES, SEEDS, main
from experiments.staleness import LAGS


def write_run(run: Path) -> Path:
    """Write records of 60 steps: sampled accuracy rises from 0.2 to 0.8, greedy accuracy from 0.3 to 0.9."""
    records = []
    for step in range(61):
        record = {"step": step, "train/rewards": step / 100, "objective/kl": 0.5, "mismatch/k3": 0.25}
        record["policy/clipfrac_avg"] = 0.125
        if step == 0:
            # Not a point of the curve.
            record |= {f"before_warm_start/eval/sums/accuracy_{kind}": 0.0 for kind in ("sampled", "greedy")}
        if step % 10 == 0:
            record |= {"eval/sums/accuracy_sampled": 0.2 + step / 100, "eval/sums/accuracy_greedy": 0.3 + step / 100}
        records.append(record)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return run


@pytest.mark.medium
@pytest.mark.parametrize(
    ("report", "names", "line"),
    [
        ("frozenlake", VARIANTS, "| 1 | gigpo | 0.200 → 0.800 | 0.700 | 0.300 → 0.900 | 0.505 | 0.300 |"),
        (
            "objectives",
            [*OBJECTIVES, "rloo_watched", "rloo_kl"],
            "| ppo | 3 | 0.200 → 0.800 | +0.600 | 0.300 → 0.900 |",
        ),
        ("objectives", [*OBJECTIVES, "rloo_watched", "rloo_kl"], "| 2 | β = 0.1 | 0.500 | 0.480 | 0.800 |"),
        (
            "staleness",
            [f"lag{lag}" for lag in LAGS],
            "| 4 | 2 | 0.200 → 0.800 | 0.700 | 0.300 → 0.900 | 0.300 | 0.125 |",
        ),
    ],
)
def test_report_prints_table_and_saves_plot(report: str, names: list[str], line: str, tmp_path: Path, capsys):
    for name in names:
        for seed in SEEDS:
            write_run(tmp_path / "runs" / f"{name}-seed{seed}")
    main([report, str(tmp_path / "plots" / "plot.png"), str(tmp_path / "runs")])
    assert line in capsys.readouterr().out
    assert (tmp_path / "plots" / "plot.png").read_bytes().startswith(b"\x89PNG")
