# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from marin_rl.runs.curves import draw, plot_curves
from marin_rl.runs.metrics_file import COLORS, append_record, plots_of
from marin_rl.runs.viewer import html_page


def write(path, records):
    for step, record in enumerate(records, start=1):
        append_record(path, step, record)


def picture(path) -> np.ndarray:
    """Image of shape `[height, width, color]` with values from 0 to 1."""
    return matplotlib.image.imread(path)


def colored(pixels: np.ndarray) -> int:
    """Number of pixels that are neither white nor grey, which are those of the curves."""
    return int((np.ptp(pixels[..., :3], axis=-1) > 0.2).sum())


@pytest.mark.medium
def test_curves_of_a_run(tmp_path):
    records = [
        {"train/rewards": step / 40, "policy/entropy_avg": 1.0, "objective/kl": 0.1, "loss/policy_avg": -0.1}
        | {"train/output_length": 5.0, "grad_norm": 1.0, "policy/approxkl_avg": 0.1}
        | ({"eval/sums/accuracy_sampled": step / 50, "eval/sums/accuracy_greedy": step / 45} if step % 10 == 0 else {})
        for step in range(40)
    ]
    write(tmp_path / "metrics.jsonl", records)
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "a run")
    pixels = picture(tmp_path / "curves.png")
    assert pixels.shape[0] > 600
    assert pixels.shape[1] > 1000
    assert colored(pixels) > 1000


def test_missing_metrics_take_no_space_and_single_points_are_drawn(tmp_path):
    write(tmp_path / "one.jsonl", [{"train/rewards": 1.0, "grad_norm": math.nan}, {"train/rewards": math.inf}])
    write(tmp_path / "two.jsonl", [{"train/rewards": 1.0, "grad_norm": 1.0}, {"unknown": 2.0}])
    for name in ("one", "two"):
        assert plot_curves(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.png")
        assert colored(picture(tmp_path / f"{name}.png")) > 5
    assert picture(tmp_path / "two.png").shape[1] == 2 * picture(tmp_path / "one.png").shape[1]


def test_held_out_rewards_have_a_plot_for_each_kind_if_there_are_several_environments():
    records = [{"step": 0, "eval/a/reward_sampled": 0.5, "eval/a/reward_greedy": 0.7}]
    [plot] = plots_of(records)
    assert (plot.title, [curve.label for curve in plot.curves]) == ("Held-out reward", ["sampled", "greedy"])
    plots = plots_of([{**records[0], "eval/b/reward_sampled": 2.0}])
    assert [plot.title for plot in plots] == ["Held-out reward, sampled", "Held-out reward, greedy"]
    assert [curve.label for curve in plots[0].curves] == ["a", "b"]


@pytest.mark.parametrize("records", [[], [{}], [{"unknown": 1.0}], [{"train/rewards": math.nan}]])
def test_no_image_without_values(tmp_path, records):
    write(tmp_path / "metrics.jsonl", records)
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png") is False
    assert not (tmp_path / "curves.png").exists()


LARGE, TINY = -1.5e6, 2e-7
ALL = {
    **{"train/rewards": LARGE, "train/correct_rewards": 0.1, "train/format_rewards": 0.2, "objective/kl": 0.1},
    **{"policy/entropy_avg": 1.0, "policy/approxkl_avg": 2e-6, "mismatch/logprob_difference_max": 2e-3},
    **{"loss/policy_avg": TINY, "train/output_length": 5e7, "grad_norm": TINY, "eval/a/accuracy_greedy": 0.5},
    **{"groups/all_good_share": 0.1, "groups/all_bad_share": 0.2},
}


@pytest.mark.parametrize("names", [list(ALL), ["grad_norm"], ["grad_norm", "policy/approxkl_avg", "loss/policy_avg"]])
def test_plots_do_not_touch_each_other(names: list[str]):
    records = [{"step": step} | {name: ALL[name] * (1 + step / 10) for name in names} for step in range(30)]
    figure = draw(plots_of(records), records)
    renderer = FigureCanvasAgg(figure).get_renderer()
    # With titles, labels and the numbers at the axes.
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    whole = figure.get_window_extent()
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1 for box in boxes)


def test_a_name_has_one_color_and_accuracy_begins_at_0():
    first = {"step": 1, "train/rewards": 2.0, "train/correct_rewards": 0.5, "train/format_rewards": 1.5}
    accuracies = {"eval/a/accuracy_greedy": 0.3, "eval/a/accuracy_sampled": 0.2}
    records = [first | accuracies, {"step": 2, "train/rewards": 1.0, "train/format_rewards": 1.0} | accuracies]
    figure = draw(plots_of(records), records)
    rewards, accuracy = figure.axes
    assert [line.get_color() for line in rewards.lines] == list(COLORS[:3])
    assert [(line.get_label(), line.get_color()) for line in accuracy.lines] == [
        ("sampled", COLORS[0]),
        ("greedy", COLORS[1]),
    ]
    assert accuracy.get_ylim()[0] == pytest.approx(0, abs=0.02)
    style = Path(html_page.__file__).with_name("page.css").read_text()
    light = dict(re.findall(r"--c(\d): (#\w+)", style.partition("prefers-color-scheme: dark")[0]))
    assert [light[str(index)] for index in range(len(COLORS))] == list(COLORS)


def test_pyplot_is_not_imported():
    code = "import sys, marin_rl.runs.curves; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
