# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from marin_rl.runs.metrics_file import plots_of
from marin_rl.runs.run_groups import group_runs
from marin_rl.runs.viewer import comparison
from marin_rl.runs.viewer.comparison import comparison_data
from marin_rl.runs.viewer.html_page import page_data
from marin_rl.runs.viewer.selection import Selection, open_rollouts
from marin_rl.types import Rollout, RolloutGroup, RolloutStatus, Task
from marin_rl.view import main
from tests.rollouts.rollout_cases import rollout_of, turn_of, write
from tests.runs.viewer.run_cases import empty_run, small_run, write_records


def new_run(folder: Path, config: str = "seed: 0\n", records: Sequence[dict] = ()) -> Path:
    run = empty_run(folder)
    (run / "config.yaml").write_text(config)
    write_records(run, list(records))
    return run


def of_task(task: str, id: str, reward: float | None = 1.0, reply: str = "5", environment: str = "sums") -> Rollout:
    asked = Task(task, environment, ({"role": "user", "content": f"question {task}"},), "5")
    rollout = rollout_of(id, reward=reward, reply=reply)
    if reward is None:
        return dataclasses.replace(rollout, task=asked)
    turn = dataclasses.replace(turn_of(f"question {task}", reply, reward=reward))
    return dataclasses.replace(rollout, task=asked, turns=(turn,))


def store(run: Path, step: int, rollouts: Sequence[Rollout], purpose: str = "training") -> None:
    write(run / "rollouts", step, [RolloutGroup("g", list(rollouts))], purpose=purpose)


def data_of(*runs: Path | str, selection: Selection | None = None, limit: int = 500) -> dict:
    data = comparison_data(group_runs([str(run) for run in runs]), selection or Selection(), limit)
    return json.loads(json.dumps(data, allow_nan=False))


def tasks_of(data: dict) -> list[tuple[str, list[list[str]]]]:
    """Prompt of each task, and the ids of the rollouts of each run."""
    rows = []
    for task in range(len(data["tasks"])):
        shown = [one for one in data["rollouts"] if one["task"] == task]
        assert len({one["prompt"] for one in shown}) == 1
        rows.append(
            (
                shown[0]["prompt"],
                [[one["id"] for one in shown if one["run"] == run] for run in range(len(data["runs"]))],
            )
        )
    return rows


@pytest.fixture
def four(tmp_path):
    """Two seeds of two settings, of 4, 4, 4 and 3 steps; the second setting measures no entropy."""
    rng = np.random.default_rng(0)
    runs = []
    for name, lengths in (("a", (4, 4)), ("b", (4, 3))):
        for seed, length in enumerate(lengths):
            records = [{"step": step, "train/rewards": float(rng.random())} for step in range(length)]
            for record in records if name == "a" else ():
                record["policy/entropy_avg"] = float(rng.random())
            runs.append(new_run(tmp_path / f"{name}-seed{seed}", f"seed: {seed}\nlr: {name}\n", records))
    return runs


def test_curves_are_means_and_ranges_of_the_seeds(four):
    data = data_of(*four)
    records = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in four]
    values = np.array([[record["train/rewards"] for record in one[:3]] for one in records])
    series = data["curves"]["series"]
    assert data["curves"]["steps"] == [0, 1, 2, 3]
    for group in (0, 1):
        of_group = values[2 * group : 2 * group + 2]
        for ending, expected in (("", of_group.mean(0)), ("<", of_group.min(0)), (">", of_group.max(0))):
            np.testing.assert_allclose(series[f"train/rewards#{group}{ending}"][:3], expected, rtol=1e-5)
    # The second group ends with its shorter run.
    assert series["train/rewards#0"][3] is not None
    assert series["train/rewards#1"][3] is None
    assert "b is drawn up to step 2, where its shortest run ends; its longest has 3." in data["notes"]


def test_plots_are_those_of_a_single_run_and_omit_groups_without_the_metric(four):
    data = data_of(*four)
    assert [plot["title"] for plot in data["plots"]] == ["Reward per rollout: reward", "Entropy"]
    assert [[curve["label"] for curve in plot["curves"]] for plot in data["plots"]] == [
        ["a (2 seeds)", "b (2 seeds)"],
        ["a (2 seeds)"],
    ]
    assert data["plots"][0]["span"] == [0, 1]


def test_plots_have_the_order_of_the_page_of_one_run(tmp_path):
    runs = [small_run(tmp_path / name) for name in "ab"]
    single = page_data(open_rollouts(runs[0]), Selection(), 9)
    drawn = [curve["name"] for plot in single["plots"] for curve in plot["curves"]]
    assert [plot["curves"][0]["name"] for plot in data_of(*runs)["plots"]] == [f"{name}#0" for name in drawn]
    assert len(drawn) > 4


def test_one_run_per_group_has_no_range(tmp_path):
    runs = [new_run(tmp_path / name, f"lr: {name}\n", [{"step": 0, "m": 1.0}]) for name in "ab"]
    data = data_of(*runs)
    assert data["curves"]["series"] == {"m#0": [1.0], "m#1": [1.0]}
    assert data["groups"] == ["a", "b"]


def test_overview_lists_the_settings_that_differ_and_the_values(tmp_path):
    config = "seed: {seed}\nadvantage: {{type: {kind}}}\nrun_dir: {kind}{seed}\nnum_steps: 3\n"
    runs = [
        new_run(
            tmp_path / f"{kind}{seed}",
            config.format(seed=seed, kind=kind),
            [{"step": 0, "train/rewards": 0.0}, {"step": 3, "train/rewards": seed / 8}],
        )
        for kind in ("rloo", "grpo")
        for seed in (1, 3)
    ]
    range_of_seeds = "0 → 0.25 (0.125 to 0.375)"
    assert comparison.overview(group_runs(list(map(str, runs)))) == [
        ("runs", ["rloo1, rloo3", "grpo1, grpo3"]),
        ("steps", ["3", "3"]),
        ("Reward per rollout: reward", [range_of_seeds, range_of_seeds]),
        ("advantage.type", ['"rloo"', '"grpo"']),
    ]


def test_long_runs_share_the_points_of_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "MAX_RECORDS", 40)
    records = [{"step": step, "m": 1.0, **({"eval/m": 1.0} if step % 50 == 7 else {})} for step in range(200)]
    runs = [new_run(tmp_path / name, f"lr: {name}\n", records[:end]) for name, end in (("a", 200), ("b", 124))]
    data = data_of(*runs)
    steps = data["curves"]["steps"]
    # Evaluations, both ends, and the end of the shorter run.
    assert {0, 7, 57, 107, 123, 157, 199} <= set(steps)
    assert 20 <= len(steps) <= 25
    assert data["curves"]["series"]["m#1"] == [1.0 if step < 124 else None for step in steps]
    assert data["notes"][0] == f"The curves show {len(steps)} of 200 steps, and every evaluation."


def test_tasks_of_several_runs_are_matched_and_sorted_by_difference(tmp_path):
    first, second, third = (new_run(tmp_path / name, f"lr: {name}\n") for name in "abc")
    store(first, 1, [of_task("same", "f-0"), of_task("only", "f-1"), of_task("differs", "f-2", 0.5)])
    store(second, 1, [of_task("differs", "s-0", 0.0), of_task("same", "s-1"), of_task("elsewhere", "s-2")])
    # The same id in another environment is another task.
    store(third, 1, [of_task("differs", "t-0", 1.0), of_task("only", "t-1", environment="other")])
    data = data_of(first, second, third)
    assert tasks_of(data) == [
        ("question differs", [["f-2"], ["s-0"], ["t-0"]]),
        ("question same", [["f-0"], ["s-1"], []]),
    ]
    assert [[cell and cell["mean"] for cell in row] for row in data["tasks"]] == [[0.5, 0.0, 1.0], [1.0, 1.0, None]]
    assert data["purpose"] == "training"


def test_cells_have_the_mean_of_all_rollouts_and_show_the_first(tmp_path):
    runs = [new_run(tmp_path / name, f"lr: {name}\n") for name in "ab"]
    rewards = [1.0, 0.0, None, 1.0, 0.5, 0.0]
    store(runs[0], 1, [of_task("t", f"a-{index}", reward) for index, reward in enumerate(rewards)])
    store(runs[1], 1, [of_task("t", "b-0", None)])
    data = data_of(*runs)
    assert data["tasks"] == [[{"mean": 0.5, "count": 6}, {"mean": None, "count": 1}]]
    assert [one["id"] for one in data["rollouts"]] == ["a-0", "a-1", "a-2", "a-3", "b-0"]


def test_the_newest_common_evaluation_is_shown_by_default(tmp_path):
    runs = [new_run(tmp_path / name, f"lr: {name}\n") for name in "ab"]
    for run, steps in zip(runs, ((2, 4, 6), (2, 4)), strict=True):
        for step in steps:
            store(run, step, [of_task("held", f"e-{step}")], "evaluation")
        store(run, 5, [of_task("trained", "t-5")])
    data = data_of(*runs)
    assert (data["purpose"], data["steps"]) == ("evaluation", [4, 4])
    assert tasks_of(data) == [("question held", [["e-4"], ["e-4"]])]
    # A selected step is one of training, like for a single run.
    data = data_of(*runs, selection=Selection(steps=range(3, 9)))
    assert (data["purpose"], data["steps"], tasks_of(data)[0][0]) == ("training", [5, 5], "question trained")
    data = data_of(*runs, selection=Selection(steps=range(5, 7), evaluation=True))
    assert (data["steps"], data["tasks"]) == ([6, None], [])
    assert "No rollouts of evaluation are stored at these steps: b." in data["notes"]


def test_without_a_common_step_each_run_shows_its_newest(tmp_path):
    runs = [new_run(tmp_path / name, f"lr: {name}\n") for name in "abc"]
    for run, steps in zip(runs, ((1, 3), (2,), ()), strict=True):
        for step in steps:
            store(run, step, [of_task("t", f"r-{step}")])
    data = data_of(*runs)
    assert data["steps"] == [3, 2, None]
    assert tasks_of(data) == [("question t", [["r-3"], ["r-2"], []])]


def test_one_run_with_evaluations_does_not_hide_the_rollouts_of_training(tmp_path):
    runs = [new_run(tmp_path / name, f"lr: {name}\n") for name in "ab"]
    for run in runs:
        store(run, 1, [of_task("t", "r")])
    store(runs[0], 1, [of_task("held", "e")], "evaluation")
    assert data_of(*runs)["purpose"] == "training"


def test_filters_select_rollouts(tmp_path):
    runs = [new_run(tmp_path / name, f"lr: {name}\n") for name in "ab"]
    for run in runs:
        cut = dataclasses.replace(of_task("t", "cut", 0.0), status=RolloutStatus.TRUNCATED)
        store(run, 1, [of_task("t", "good"), cut, of_task("u", "bad", 0.0)])
    assert tasks_of(data_of(*runs, selection=Selection(status=RolloutStatus.TRUNCATED))) == [
        ("question t", [["cut"], ["cut"]])
    ]
    assert tasks_of(data_of(*runs, selection=Selection(min_reward=0.5))) == [("question t", [["good"], ["good"]])]


def test_limits_keep_whole_tasks_and_are_noted(tmp_path, monkeypatch):
    runs = [new_run(tmp_path / name, f"lr: {name}\n") for name in "ab"]
    for run in runs:
        store(run, 1, [of_task(f"t{index}", f"r{index}") for index in range(4)])
    data = data_of(*runs, limit=5)
    assert tasks_of(data) == [("question t0", [["r0"], ["r0"]]), ("question t1", [["r1"], ["r1"]])]
    assert "contains 2 of 4 tasks that several runs have" in data["notes"][-1]
    # A prompt has 11 tokens of its text and 3 around it, a reply 2, and a task a rollout in both runs.
    for num_tokens, num_tasks in ((2 * 16, 1), (4 * 16 - 1, 1), (4 * 16, 2)):
        monkeypatch.setattr(comparison, "MAX_TOKENS", num_tokens)
        assert len(data_of(*runs)["tasks"]) == num_tasks


def test_runs_without_metrics_or_rollouts_are_noted(tmp_path):
    supervised = new_run(tmp_path / "sft", "lr: 1\n", [{"step": 1, "loss/ce_avg": 2.0}])
    fresh = empty_run(tmp_path / "fresh")
    (fresh / "config.yaml").write_text("lr: 2\n")
    data = data_of(supervised, fresh)
    assert [(plot["title"], len(plot["curves"])) for plot in data["plots"]] == [("Cross-entropy: training", 1)]
    assert data["notes"] == [
        "fresh has no metrics yet.",
        "No rollouts of training are stored: sft, fresh.",
    ]
    assert data["tasks"] == data["rollouts"] == []
    assert data_of(fresh, empty_run(tmp_path / "other"))["plots"] == plots_of([])


def test_command_prints_a_table_or_writes_a_page(four, tmp_path, capsys):
    arguments = [str(run) for run in four]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for text in ("a (2 seeds)", "b (2 seeds)", "Reward per rollout: reward", "a-seed0, a-seed1", "2–3"):
        assert text in shown
    page = tmp_path / "page.html"
    assert main([*arguments, "--html", str(page)]) == 0
    assert f"{page}: 0 rollouts\n" in capsys.readouterr().out
    assert "<title>a · b</title>" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("options", ["--id r --html page.html", "--step 3", "--min_reward 0", "--limit 9"])
def test_command_refuses_options_without_effect(four, tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    assert main([str(four[0]), str(four[1]), *options.split()]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert not Path("page.html").exists()
