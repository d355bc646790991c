# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from experiments.lab import rloo_controls
from experiments.lab.results import __main__ as results
from experiments.lab.results import page, runs
from experiments.lab.results.__main__ import quick
from experiments.lab.results.runs import Record, add, read, scores
from experiments.lab.results.tasks import COMPARED, TASKS, compared_runs
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig

RECORD = Record("rloo", 1, "marin_rl.train", "2026-11-28", {"jax": "1"}, 60.0, (0, 10), (0.2, 0.5), (0.3, 0.6))


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RECORDS", tmp_path)
    return tmp_path


def write_metrics(folder, *records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_scores_are_those_of_the_evaluations(tmp_path):
    write_metrics(
        tmp_path,
        {"step": 0, "eval/sums/accuracy_sampled": 0.1, "eval/sums/accuracy_greedy": 0.2, "eval/sums/tasks": 8.0},
        {"step": 1, "train/rewards": 0.5},
        {"step": 2, "eval/sums/accuracy_sampled": 0.3, "eval/sums/accuracy_greedy": 0.4},
    )
    assert scores(tmp_path) == ((0, 2), (0.1, 0.3), (0.2, 0.4))


@pytest.mark.parametrize(
    ("record", "problem"),
    [({"step": 1, "train/rewards": 0.5}, "no evaluation"), ({"step": 0}, "no evaluation")],
)
def test_a_run_without_evaluation_is_refused(tmp_path, record, problem):
    write_metrics(tmp_path, record)
    with pytest.raises(ValueError, match=problem):
        scores(tmp_path)


def test_a_run_with_two_environments_is_refused(tmp_path):
    names = [f"eval/{name}/accuracy_{kind}" for name in ("a", "b") for kind in ("sampled", "greedy")]
    write_metrics(tmp_path, {"step": 0, **dict.fromkeys(names, 0.5)})
    with pytest.raises(ValueError, match="several environments"):
        scores(tmp_path)


def test_a_record_replaces_that_of_the_same_seed(records):
    for record in (RECORD, dataclasses.replace(RECORD, seed=2), dataclasses.replace(RECORD, cpu_seconds=30.0)):
        add("sums", record)
    assert [(record.seed, record.cpu_seconds) for record in read("sums")] == [(1, 30.0), (2, 60.0)]


def test_records_that_are_added_at_the_same_time_are_all_kept(records):
    """A lock of a file that is opened twice excludes threads as it excludes processes."""
    seeds = range(8)
    with ThreadPoolExecutor(len(seeds)) as pool:
        list(pool.map(lambda seed: add("sums", dataclasses.replace(RECORD, seed=seed)), seeds))
    assert [record.seed for record in read("sums")] == list(seeds)


def test_a_reader_sees_whole_records_only(records, monkeypatch):
    add("sums", RECORD)
    seen = []

    def sync(descriptor):
        seen.append([record.seed for record in read("sums")])

    monkeypatch.setattr("os.fsync", sync)
    add("sums", dataclasses.replace(RECORD, seed=2))
    # Before the new file has the name, and when the folder is written.
    assert seen == [[1], [1, 2]]


def test_quick_versions_run_although_one_is_outside_its_band(monkeypatch):
    monkeypatch.setattr(results, "TASKS", {"first": None, "second": None})
    monkeypatch.setattr("sys.argv", ["results", "--quick"])
    done = []
    monkeypatch.setattr(results, "quick", lambda name: done.append(name))
    assert results.main() == 1
    assert done == ["first", "second"]


def test_a_comparison_has_no_quick_version(monkeypatch):
    monkeypatch.setattr("sys.argv", ["results", "--quick", next(iter(COMPARED))])
    with pytest.raises(SystemExit, match="2"):
        results.main()


def test_intervals_cover_the_mean_as_often_as_they_say():
    generator = np.random.default_rng(0)
    samples = generator.normal(3.0, 2.0, (2000, 5))
    covered = [abs(mean - 3.0) <= half for mean, half in map(page.interval, samples)]
    # Four standard errors of a share of 0.95.
    assert np.mean(covered) == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 2000) ** 0.5)
    mean, half = page.interval(samples[0], 0.8)
    low, high = stats.t.interval(0.8, 4, loc=np.mean(samples[0]), scale=stats.sem(samples[0]))
    assert (mean - half, mean + half) == pytest.approx((low, high))


def test_a_difference_is_significant_only_if_its_interval_excludes_0(records):
    numbers = random.Random(0)
    for seed in range(1, 6):
        base = numbers.uniform(0.4, 0.6)
        for label, shift in (("rloo", 0.0), ("grpo", 0.1 + 0.001 * seed), ("ppo", 0.1 * (-1) ** seed)):
            record = dataclasses.replace(RECORD, label=label, seed=seed, sampled=(0.2, base + shift))
            add("objectives_countdown", record)
    lines = page.objective_table("objectives_countdown").splitlines()
    counts = {line.split("`")[1]: line.count(", significant") for line in lines[2:]}
    # At the end, and on average over the run.
    assert counts == {"grpo": 2, "ppo": 0, "rloo": 0}


def differences(scores: dict[str, dict[int, float]]) -> dict[str, str]:
    for label, ends in scores.items():
        for seed, end in ends.items():
            add("objectives_countdown", dataclasses.replace(RECORD, label=label, seed=seed, sampled=(0.2, end)))
    lines = page.objective_table("objectives_countdown").splitlines()[2:]
    return {line.split("`")[1]: line.split("|")[3] for line in lines}


def test_differences_are_those_of_runs_with_the_same_seed(records):
    found = differences({"grpo": {2: 0.7, 3: 0.8, 4: 0.1}, "ppo": {9: 0.5}, "rloo": {1: 0.9, 2: 0.5, 3: 0.6}})
    assert found["grpo"].startswith(" +0.200 ± 0.000")
    assert found["ppo"].strip() == found["rloo"].strip() == ""


@pytest.mark.parametrize("label", ["rloo", "grpo"])
def test_objectives_without_counterpart_have_no_difference(records, label):
    assert {name: text.strip() for name, text in differences({label: {1: 0.5, 2: 0.6}}).items()} == {label: ""}


def test_times_are_those_of_the_first_evaluation_at_the_target(records):
    def add_run(label, seed, sampled, *times):
        record = dataclasses.replace(RECORD, label=label, seed=seed, steps=(0, 10, 20), sampled=sampled, times=times)
        add("against_trl", record)

    add_run("marin_rl", 1, (0.7, 0.5, 0.6), (5.0, 4.0), (9.0, 8.0))
    add_run("marin_rl", 2, (0.2, 0.65, 0.5), (6.0, 5.0), (9.0, 8.0))
    add_run("TRL", 1, (0.7, 0.6, 0.7), (18.0, 4.0), (20.0, 6.0))
    add_run("TRL", 2, (0.2, 0.3, 0.5), (18.0, 4.0), (20.0, 6.0))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.peer_table("against_trl").splitlines()[2:]
    ]
    assert rows == [
        ["TRL", "10, never", "18, never", "4, never", "2.00", "0.50", "0.70, 0.50"],
        ["marin_rl", "20, 10", "9, 6", "8, 5", "", "", "0.60, 0.50"],
    ]


def test_tables_stand_between_their_markers(records):
    for label in ("its own", "random"):
        add("sums", dataclasses.replace(RECORD, label=label))
    text = "# Results\n\n<!-- tasks -->\nold\n<!-- end -->\n\nafter\n"
    once = page.with_tables(text)
    assert once == page.with_tables(once)
    assert "old" not in once
    assert once.startswith("# Results\n\n<!-- tasks -->\n| task")
    assert once.endswith("\n\nafter\n")


def test_the_page_has_the_tables_of_the_records():
    text = page.PAGE.read_text()
    assert text == page.with_tables(text)
    tables = {name for name in re.findall(r"^<!-- (\w+) -->", text, re.MULTILINE) if name != "end"}
    assert tables == {"tasks", *COMPARED, *runs.AGAINST.values()}


@pytest.mark.parametrize("name", TASKS)
def test_runs_of_a_task_differ_in_seed_and_rewards_only(name):
    planned = list(TASKS[name].runs())
    assert len({run.directory for run in planned}) == len(planned)
    for run in planned[:-1]:
        module, *arguments = run.command.split()
        config = parse_config(TrainConfig, arguments).config
        assert (module, config.seed, config.run_dir) == ("marin_rl.train", run.seed, run.directory)


@pytest.mark.parametrize("name", TASKS)
def test_the_control_has_the_directory_of_its_command(name, monkeypatch):
    *_, control = TASKS[name].runs()
    started = []
    monkeypatch.setattr(rloo_controls, "run_session", lambda config, _: started.append(config))
    monkeypatch.setattr("sys.argv", control.command.split())
    monkeypatch.setattr(rloo_controls, "resolve_model", lambda config: config)
    rloo_controls.main()
    assert [(config.run_dir, config.environment.probability) for config in started] == [
        (control.directory, TASKS[name].chance)
    ]


@pytest.mark.parametrize("name", COMPARED)
def test_compared_runs_have_the_start_of_their_seed(name):
    planned = list(compared_runs(COMPARED[name]))
    assert len({run.directory for run in planned}) == len(planned)
    assert {run.before[0].split()[3] for run in planned if run.seed == 2} == {"2"}


@pytest.mark.slow
def test_a_quick_version_is_in_its_band(monkeypatch):
    # It computes longer than it compiles.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    assert quick("sums")
