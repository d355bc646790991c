# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from marin_rl.errors import RunDirectoryError
from marin_rl.training.curves import accuracy_panel, plot_curves
from marin_rl.training.metrics_file import append_record


def write(path, records):
    for step, record in enumerate(records, start=1):
        append_record(path, step, record)


def picture(path) -> np.ndarray:
    """Image of shape `[height, width, color]` with values from 0 to 1."""
    return matplotlib.image.imread(path)


def colored(pixels: np.ndarray) -> int:
    """Number of pixels that are neither white nor grey, which are those of the curves."""
    return int((np.ptp(pixels[..., :3], axis=-1) > 0.2).sum())


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


def test_missing_metrics_take_no_space(tmp_path):
    write(tmp_path / "one.jsonl", [{"train/rewards": 1.0}, {"train/rewards": 2.0}])
    write(tmp_path / "two.jsonl", [{"train/rewards": 1.0, "grad_norm": 1.0}, {"unknown": 2.0}])
    for name in ("one", "two"):
        assert plot_curves(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.png")
    assert picture(tmp_path / "two.png").shape[1] == 2 * picture(tmp_path / "one.png").shape[1]


def test_non_finite_values_are_omitted(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"train/rewards": value, "grad_norm": math.nan} for value in (1, math.inf, 2)])
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert colored(picture(tmp_path / "curves.png")) > 100


def test_single_update_is_visible(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"train/rewards": 1.0}])
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert colored(picture(tmp_path / "curves.png")) > 5


@pytest.mark.parametrize("records", [[], [{}], [{"unknown": 1.0}], [{"train/rewards": math.nan}]])
def test_no_image_without_values(tmp_path, records):
    write(tmp_path / "metrics.jsonl", records)
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png") is False
    assert not (tmp_path / "curves.png").exists()


def test_environments_are_named_if_there_are_several():
    records = [{"eval/a/b/accuracy_greedy": 0.5}, {"eval/a/c/accuracy_greedy": 0.5}]
    assert list(accuracy_panel(records).names.values()) == ["a/b, greedy", "a/c, greedy"]
    assert list(accuracy_panel(records[:1]).names.values()) == ["greedy"]


def test_unwritable_image_is_named(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"train/rewards": 1.0}])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot write .*curves\.png'"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "file" / "curves.png")


def test_pyplot_is_not_imported():
    code = "import sys, marin_rl.training.curves; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
