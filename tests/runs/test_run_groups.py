# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.runs.run_groups import band, group_runs
from marin_rl.utils.errors import RunDirectoryError

value = st.floats(-100, 100) | st.just(math.nan) | st.just(math.inf)
series = st.dictionaries(st.integers(0, 6), st.none() | value, max_size=7)


def make_run(folder: Path, config: str, records: str = "") -> str:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text(records)
    return str(folder)


def labels(arguments: list[str]) -> list[tuple[str, list[str]]]:
    return [(str(group), [run.name for run in group.runs]) for group in group_runs(arguments)]


@given(st.lists(series, min_size=1, max_size=4))
def test_band_matches_numpy(drawn):
    """`drawn` has the values of a metric by step for each run; None: the record of the step lacks the metric."""
    runs = [
        [{"step": step, **({} if number is None else {"m": number})} for step, number in sorted(one.items())]
        for one in drawn
    ]
    # `[runs, steps]`, NaN without a finite value.
    table = np.full((len(runs), 7), np.nan)
    for place, one in enumerate(drawn):
        for step, number in one.items():
            table[place, step] = number if number is not None and math.isfinite(number) else np.nan
    table = table[np.isfinite(table).any(axis=1)]
    steps = np.flatnonzero(np.isfinite(table).all(axis=0)) if len(table) else np.array([], int)
    actual = band(runs, "m")
    assert [one.step for one in actual] == steps.tolist()
    if len(steps):
        chosen = table[:, steps]
        expected = np.stack([chosen.mean(axis=0), chosen.min(axis=0), chosen.max(axis=0)], axis=1)
        np.testing.assert_allclose([one[1:] for one in actual], expected, rtol=1e-12, atol=1e-12)


def test_runs_that_differ_only_in_their_seed_form_a_group(tmp_path):
    runs = [
        make_run(
            tmp_path / f"{name}-seed{seed}",
            f"seed: {seed}\nrun_dir: {name}-seed{seed}\nadvantage: {{type: {name}}}\n"
            f"initialize_from: runs/start-seed{seed}\n",
        )
        for seed in (1, 2, 11)
        for name in ("rloo", "grpo")
    ]
    assert labels(runs) == [
        ("rloo (3 seeds)", ["rloo-seed1", "rloo-seed2", "rloo-seed11"]),
        ("grpo (3 seeds)", ["grpo-seed1", "grpo-seed2", "grpo-seed11"]),
    ]


def test_another_setting_or_start_separates_runs(tmp_path):
    start = make_run(tmp_path / "a", "seed: 1\nlr: 0.1\ninitialize_from: start-seed1\n")
    other_rate = make_run(tmp_path / "b", "seed: 2\nlr: 0.2\ninitialize_from: start-seed2\n")
    # Not the start of its own seed.
    other_start = make_run(tmp_path / "c", "seed: 3\nlr: 0.1\ninitialize_from: start-seed1\n")
    without = make_run(tmp_path / "d", "seed: 4\nlr: 0.1\n")
    longer = make_run(tmp_path / "e", "seed: 1\nlr: 0.1\ninitialize_from: start-seed10\n")
    runs = [start, other_rate, other_start, without, longer]
    assert labels(runs) == [(name, [name]) for name in "abcde"]


def test_runs_that_repeat_a_seed_are_not_averaged(tmp_path):
    runs = [
        make_run(tmp_path / f"lag{lag}-seed{seed}", f"seed: {seed}\nnum_steps: 3\n")
        for seed in (1, 4)
        for lag in (0, 1, 4)
    ]
    assert labels(runs) == [(f"lag{lag} (2 seeds)", [f"lag{lag}-seed1", f"lag{lag}-seed4"]) for lag in (0, 1, 4)]
    assert labels([make_run(tmp_path / name, "seed: 0\n") for name in ("old", "new")]) == [
        ("old", ["old"]),
        ("new", ["new"]),
    ]


def test_given_names_join_runs_and_rename_groups(tmp_path):
    runs = [make_run(tmp_path / f"r{seed}", f"seed: {seed}\n") for seed in range(4)]
    same_seed = make_run(tmp_path / "again", "seed: 0\nlr: 1\n")
    assert labels([f"base={runs[0]}", runs[1], f"base={same_seed}", runs[2], f"x={runs[3]}"]) == [
        ("base (2 runs)", ["r0", "again"]),
        ("r (2 seeds)", ["r1", "r2"]),
        ("x", ["r3"]),
    ]


def test_a_path_may_contain_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "lr=1", "lr: 1\n")
    make_run(tmp_path / "lr=2", "lr: 2\n")
    assert [label for label, _ in labels(["lr=1", "lr=2"])] == ["lr=1", "lr=2"]
    assert [label for label, _ in labels(["small=lr=1", "./lr=2"])] == ["small", "lr=2"]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("rloo-seed1", "rloo-seed2"), "rloo"),
        (("rloo_s10", "rloo_s11"), "rloo"),
        (("lag4-seed1", "lag4-seed2"), "lag4"),
        (("tests-1", "tests-2"), "tests"),
        (("rloo/seed1", "rloo/seed2"), "rloo"),
        (("rloo/1", "rloo/2"), "rloo"),
        (("sd1", "sd2"), "sd"),
    ],
)
def test_label_is_the_common_part_of_the_names(tmp_path, names, label):
    runs = [make_run(tmp_path / name, f"seed: {seed}\n") for seed, name in enumerate(names)]
    assert [group.label for group in group_runs(runs)] == [label]


def test_equal_names_are_distinguished_by_their_parents(tmp_path):
    runs = [make_run(tmp_path / parent / "run", f"lr: {parent}\n") for parent in "ab"]
    assert labels(runs) == [("a/run", ["a/run"]), ("b/run", ["b/run"])]
    pairs = [
        make_run(tmp_path / parent / f"r{seed}", f"lr: {parent}\nseed: {seed}\n") for parent in "cd" for seed in (1, 2)
    ]
    assert len({label for label, _ in labels(pairs)}) == 2


def test_the_same_run_twice_is_refused(tmp_path):
    run = make_run(tmp_path / "run", "seed: 0\n")
    (tmp_path / "link").symlink_to(run)
    for other in (run, f"{run}/", f"again={run}", str(tmp_path / "link")):
        with pytest.raises(RunDirectoryError, match=r"run' is given twice"):
            group_runs([run, other])


def test_damaged_and_absent_runs_are_named(tmp_path):
    run = make_run(tmp_path / "run", "seed: 0\n", json.dumps({"step": 0, "m": 1.0}) + "\n")
    damaged = make_run(tmp_path / "damaged", "seed: 1\n", '{"step": 0}\nnonsense\n')
    with pytest.raises(RunDirectoryError, match=r"damaged/metrics.jsonl:2 is not the record of a step"):
        group_runs([run, damaged])
    with pytest.raises(RunDirectoryError, match=r"'.*nowhere' is not a run directory"):
        group_runs([run, f"name={tmp_path / 'nowhere'}"])
    Path(damaged, "metrics.jsonl").unlink()
    [group] = group_runs([run, damaged])
    assert [len(one.records) for one in group.runs] == [1, 0]
