# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
from pathlib import Path

import pytest

from experiments.lab.report import main
from marin_rl.runs.run_directory import OutputExistsError


def write_run(run: Path, seed: int, name: str, start: float) -> str:
    """Write a run of 60 steps, whose sampled accuracy rises by 0.6 from `start`; the greedy one is 0.1 higher."""
    records = []
    for step in range(61):
        record = {"step": step, "loss": float(step)}
        if step == 0:
            # Not a point of the curve.
            record |= {f"before_warm_start/eval/sums/accuracy_{kind}": 0.0 for kind in ("sampled", "greedy")}
        if step % 10 == 0:
            record |= {
                f"eval/sums/accuracy_{kind}": start + step / 100 + higher
                for kind, higher in (("sampled", 0.0), ("greedy", 0.1))
            }
        records.append(record)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (run / "config.yaml").write_text(f"seed: {seed}\nrun_dir: {run}\nadvantage:\n  type: {name}\n")
    return str(run)


@pytest.mark.medium
def test_runs_that_differ_in_their_seed_are_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [
        write_run(tmp_path / f"{name}-seed{seed}", seed, name, 0.2 + seed / 100)
        for name in ("rloo", "grpo")
        for seed in (1, 2)
    ]
    argv = [str(picture := tmp_path / "plots" / "plot.png"), *runs, "--metrics", "loss", "kl"]
    main(argv)
    cells = "0.210, 0.220 → 0.810, 0.820 | 0.310, 0.320 → 0.910, 0.920 | 48, 48 | ,  |"
    assert capsys.readouterr().out.splitlines()[2:] == [f"| {name} (2 seeds) | {cells}" for name in ("rloo", "grpo")]
    assert picture.read_bytes().startswith(b"\x89PNG")
    main(argv)
    picture.write_bytes(other := b"\x89PNG of another program")
    with pytest.raises(OutputExistsError, match=r"plot\.png"):
        main(argv)
    assert picture.read_bytes() == other


def test_a_run_without_held_out_scores_is_named(tmp_path: Path):
    run = write_run(tmp_path / "run", 1, "rloo", 0.2)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="run has 0 held-out scores"):
        main([str(tmp_path / "plot.png"), run])
