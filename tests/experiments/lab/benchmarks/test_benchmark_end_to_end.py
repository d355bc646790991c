# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Comparison of programs with fake runs, and the common problem at a tiny size."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.lab.benchmarks import benchmark_end_to_end, words_problem
from experiments.lab.benchmarks.benchmark_end_to_end import MeasuredStep, ProgramRun, compare, run_peer, summarize
from experiments.lab.benchmarks.peer_environment import PEERS
from experiments.lab.benchmarks.watched_process import WatchedRun, WatchedStep, available_cores
from experiments.lab.benchmarks.words_problem import Size

SIZE = Size(
    hidden=16, intermediate=32, layers=1, heads=2, vocabulary=40, prompts=2, group_size=4, prompt_tokens=4, new_tokens=5
)


def fake_run(
    seconds: Sequence[float], *, sample: float = 0.25, peak: int = 100, compiles: Sequence[float] = ()
) -> ProgramRun:
    """A run with steps of these durations; each has half its time as CPU time."""
    ends = np.cumsum(seconds).tolist()
    watched = tuple(WatchedStep(end, taken, taken / 2, {}) for end, taken in zip(ends, seconds, strict=True))
    step = MeasuredStep({"sample": sample, "reward": 0.0}, loss=0.5, reward=0.75, grad_norm=2.0, new_tokens=5.0)
    return ProgramRun(
        WatchedRun(watched, peak, (0.5, 1.5)), (step,) * len(seconds), tuple((at, 0.125) for at in compiles)
    )


def test_figures_leave_out_the_first_steps() -> None:
    runs = [fake_run([9.0, 1.0, 2.0], compiles=[1.0, 2.0, 10.5, 13.0]), fake_run([5.0, 3.0, 4.0], peak=300)]
    figures = summarize(runs, SIZE, cores=2, rate=1e6, skip=1)
    assert figures["step_seconds"] == {"median": 2.5, "min": 1.0, "max": 4.0, "count": 4}
    assert figures["step_cpu_seconds"]["median"] == 1.25
    assert figures["idle_cores"]["median"] == 1.5
    assert figures["tokens_per_second"]["max"] == 8 * 5 / 1.0
    assert figures["sampled_tokens_per_second"]["median"] == 8 * 5 / 0.25
    assert figures["peak_bytes"]["max"] == 300
    assert figures["first_step_seconds"] == [9.0, 5.0]
    assert figures["compiles"][0] == {"programs": 4, "seconds": 0.5, "programs_in_measured_steps": 1}
    assert figures["floor_seconds"] == pytest.approx((SIZE.sampling_flops + SIZE.training_flops) / 1e6)
    assert figures["share_of_floor"] == pytest.approx(figures["floor_seconds"] / 2.5)
    assert figures["cpu_share_of_floor"] == pytest.approx(2 * figures["floor_seconds"] / 1.25)
    assert figures["rewards"] == [[0.75] * 3] * 2
    json.dumps(figures, allow_nan=False)


def test_ratios_are_paired() -> None:
    ours = [fake_run([9.0, 1.0, 1.0], sample=0.5), fake_run([9.0, 2.0, 2.0], sample=0.5)]
    theirs = [fake_run([1.0, 4.0, 4.0], sample=1.0, peak=400), fake_run([1.0, 4.0, 4.0], sample=1.0, peak=200)]
    compared = compare(ours, theirs, skip=1)
    assert compared["step_seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0, "count": 2}
    assert compared["step_cpu_seconds"] == compared["step_seconds"]
    assert compared["sample_seconds"]["median"] == 2.0
    assert compared["other_seconds"]["max"] == 3.0 / 0.5
    assert compared["peak_bytes"] == {"median": 3.0, "min": 2.0, "max": 4.0, "count": 2}


@pytest.mark.parametrize("peer", PEERS)
def test_another_program_gets_the_problem_and_a_compilation_cache(peer: str, tmp_path: Path) -> None:
    # An interpreter that writes a step with its own command line and cache in it.
    python = tmp_path / "python"
    line = {"step": 1, "loss": 0.5, "reward": 0.75, "grad_norm": 2.0, "new_tokens": 5.0, "phases": {"sample": 0.25}}
    code = f"""#!{sys.executable}
import json, os, sys
given = {{"given": sys.argv[1:], "cache": os.environ["JAX_COMPILATION_CACHE_DIR"]}}
open(sys.argv[sys.argv.index("--output") + 1], "w").write(json.dumps({line} | given) + "\\n")
"""
    python.write_text(code)
    python.chmod(0o755)
    cores = available_cores()[:1]
    run = run_peer(peer, tmp_path / "problem", tmp_path / "caches", python, 3, 16, 60.0, cores, tmp_path)
    assert run.steps == (MeasuredStep({"sample": 0.25}, loss=0.5, reward=0.75, grad_norm=2.0, new_tokens=5.0),)
    seen = run.watched.steps[0].line
    module, *options = seen["given"][1:]
    assert module == f"experiments.lab.benchmarks.{peer}_run"
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--problem": str(tmp_path / "problem"),
        "--output": str(tmp_path / "steps.jsonl"),
        "--steps": "3",
        "--rows": "16",
    }
    assert seen["cache"] == str(tmp_path / "caches" / f"{peer}-1-cores")


def test_operations_agree_with_a_loop_over_tokens() -> None:
    def forward(position: int, head: bool) -> int:
        """Multiplications and additions for one token after `position` others."""
        total = 0
        for _ in range(SIZE.layers):
            total += 2 * 4 * SIZE.hidden**2 + 2 * 3 * SIZE.hidden * SIZE.intermediate
            total += 2 * 2 * (position + 1) * SIZE.hidden
        return total + head * 2 * SIZE.hidden * SIZE.vocabulary

    prompt = sum(forward(position, False) for position in range(4))
    read = sum(forward(position, False) for position in range(4, 8))
    heads = 5 * (forward(0, True) - forward(0, False))
    assert SIZE.sampling_flops == 2 * prompt + 8 * (read + heads)
    whole = sum(forward(position, False) for position in range(9))
    assert SIZE.training_flops == 3 * 8 * (whole + heads)


@pytest.mark.slow
def test_marin_rl_runs_on_the_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_problem, "SIZES", {"tiny": SIZE})
    words_problem.main(["prepare", str(tmp_path), "--size", "tiny"])
    assert len(json.loads((tmp_path / "prompts.json").read_text())) == 2
    assert json.loads((tmp_path / "problem.json").read_text()).items() >= dataclasses.asdict(SIZE).items()
    run_dir = tmp_path / "run"
    arguments = ["train", str(tmp_path), "--run_dir", str(run_dir), "--steps", "2", "--cache", str(tmp_path / "cache")]
    assert words_problem.main(arguments) == 0
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [benchmark_end_to_end.read_marin_step(record) for record in records if record["step"] >= 1]
    assert [step.new_tokens for step in steps] == [5.0, 5.0]
    assert all(0 <= step.reward <= 1 and step.phases["sample"] > 0 for step in steps)
    assert all(step.grad_norm > 0 for step in steps)
    compiles = (tmp_path / "run.compiles.jsonl").read_text().splitlines()
    assert all(json.loads(line)["seconds"] > 0 for line in compiles)
