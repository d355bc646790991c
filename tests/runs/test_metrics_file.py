# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import math

import numpy as np
import pytest

from marin_rl.runs.metrics_file import append_record, first_odd_line, plots_of, read_records, rewind_records
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.storage import digest_of


def metrics_of(step: int) -> dict[str, float]:
    return {"train/rewards": step / 3, "loss/policy_avg": -1e-7 * step}


def write_run(path, steps):
    for step in steps:
        append_record(path, step, metrics_of(step))


def test_records_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rewind_records(path, None, after_step=3)
    assert not path.exists()
    assert read_records(path) == []
    write_run(path, [1])
    append_record(path, 2, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.1), "e": np.int64(3)})
    before = path.read_bytes(), path.stat().st_ino
    for written in (None, digest_of(path)):
        rewind_records(path, written, after_step=2)
    assert (path.read_bytes(), path.stat().st_ino) == before
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["a"] == "NaN"
    with path.open("a") as file:
        # An incomplete line.
        file.write('{"step": 3}')
    first, second = read_records(path)
    assert first == {"step": 1, **metrics_of(1)}
    assert math.isnan(second.pop("a"))
    assert second == {"step": 2, "b": math.inf, "c": -math.inf, "d": float(np.float32(0.1)), "e": 3.0}


@pytest.mark.parametrize("killed_after", [0, 4, 5, 7])
@pytest.mark.parametrize("torn", ["", '{"step": 8, "train/rew', '{"step": 8}'])
def test_resumed_run_has_the_file_of_an_uninterrupted_run(tmp_path, killed_after, torn):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_run(whole, range(1, 11))
    checkpoint = min(killed_after, 4)
    write_run(resumed, range(1, checkpoint + 1))
    written = digest_of(resumed) if checkpoint else digest_of(b"")
    write_run(resumed, range(checkpoint + 1, killed_after + 1))
    with resumed.open("a") as file:
        file.write(torn)
    rewind_records(resumed, written, after_step=checkpoint)
    write_run(resumed, range(checkpoint + 1, 11))
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "line",
    [
        *("nonsense", "3", '{"a": 1}', '{"step": 2, "a": "x"}', '{"step": 2, "a": null}'),
        *('{"step": Infinity}', f'{{"step": 2, "a": {400 * "9"}}}', 100_000 * "["),
    ],
    ids=lambda line: line[:24],
)
def test_invalid_line_is_named_and_the_file_is_kept(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    write_run(path, [1])
    with path.open("a") as file:
        file.write(f"{line}\n")
    write_run(path, [3, 3, 2])
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2 is not the record of a step"):
        read_records(path)
    assert path.read_bytes() == before
    # Accepted by the user.
    rewind_records(path, None, after_step=3)
    assert [record["step"] for record in read_records(path)] == [1, 3]


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        *(("012345", None), ("", None), ("12", 1), ("0124", 4), ("0132", 3), ("0112", 3), ("01x2", 3)),
        ("\x0001", 1),
    ],
)
def test_first_line_that_is_not_the_next_record(lines, number):
    data = "".join(f'{{"step": {step}}}\n' if step.isdigit() else f"{step}\n" for step in lines)
    assert first_odd_line(data.encode()) == number
    assert first_odd_line(data.encode() + b'{"step": 9') == number


def drawn(*records: dict[str, float]) -> dict[str, list[str]]:
    """Labels of the drawn curves by title of the plot."""
    plots = plots_of([{"step": step, **record} for step, record in enumerate(records)])
    return {plot.title: [curve.label for curve in plot.curves] for plot in plots}


@pytest.mark.parametrize(
    ("name", "rounding", "value"),
    [
        ("policy/approxkl_avg", [5e-13, -2e-14, 0.0], 2e-6),
        ("objective/kl", [0.0, 1e-8], 0.01),
        ("mismatch/logprob_difference_max", [6e-5, 3e-6], 2e-2),
        ("groups/all_bad_share", [0.0, 0.0], 1e-7),
    ],
)
def test_curve_of_rounding_is_not_drawn(name: str, rounding: list[float], value: float):
    assert drawn(*({name: size} for size in rounding)) == {}
    # A single value that is more than rounding.
    assert len(drawn(*({name: size} for size in [*rounding, -value, math.nan]))) == 1
    for other in ("train/rewards", "eval/a/accuracy_greedy", "loss/policy_avg", "grad_norm"):
        assert len(drawn({other: 0.0}, {other: 0.0})) == 1


@pytest.mark.parametrize(
    ("correct", "labels"),
    [
        ([0.5, 0.1 + 0.2], ["reward = correct", "format"]),
        ([0.5, 0.31], ["reward", "correct", "format"]),
        ([0.5, math.nan], ["reward", "correct", "format"]),
    ],
)
def test_equal_curves_are_drawn_as_one(correct: list[float], labels: list[str]):
    records = [
        {"train/rewards": reward, "train/correct_rewards": value, "train/format_rewards": 1.0}
        for reward, value in zip([0.5, 0.3], correct, strict=True)
    ]
    assert drawn(*records) == {"Reward per rollout": labels}


def test_color_of_a_metric_does_not_depend_on_others():
    names = ["eval/a/accuracy_greedy", "eval/a/pass@4", "eval/a/accuracy_sampled", "eval/a/pass@16", "eval/a/pass@1"]
    (all_of_them,) = plots_of([{"step": 0} | {name: index / 10 for index, name in enumerate(names)}])
    colors = {curve.label: curve.color for curve in all_of_them.curves}
    assert list(colors) == ["sampled", "greedy", "pass@4", "pass@16"]
    (two,) = plots_of([{"step": 0, "train/correct_rewards": 1.0, "train/format_rewards": 0.0}])
    assert {curve.label: curve.color for curve in two.curves} == {"correct": 1, "format": 2}


def test_several_environments_have_a_plot_for_each_kind_and_one_color_each():
    a, b = {"eval/x/a/accuracy_greedy": 0.5, "eval/x/a/accuracy_sampled": 0.4}, {"eval/x/b/accuracy_greedy": 0.4}
    c = {"eval/c/accuracy_greedy": 0.3, "eval/c/accuracy_sampled": 0.3}
    assert drawn(a) == {"Held-out accuracy": ["sampled", "greedy"]}
    assert drawn(a | b | c) == {
        "Held-out accuracy, sampled": ["c", "x/a"],
        "Held-out accuracy, greedy": ["c", "x/a", "x/b"],
    }
    plots = plots_of([{"step": 0} | {name: index / 10 for index, name in enumerate(a | b)}])
    assert [[(curve.label, curve.color) for curve in plot.curves] for plot in plots] == [
        [("x/a", 0)],
        [("x/a", 0), ("x/b", 1)],
    ]


@pytest.mark.parametrize(
    ("values", "span"),
    [
        ([0.2, 0.4], (0, 0.44)),
        ([0.2, 0.85], (0, 1)),
        ([0.0, 0.0], (0, 1)),
        ([1.0], (0, 1)),
        ([0.5, 1.2], None),
        ([-0.1, 0.5], None),
    ],
)
@pytest.mark.parametrize("name", ["train/rewards", "eval/a/accuracy_sampled"])
def test_axis_of_shares_begins_at_0(name: str, values: list[float], span: tuple[float, float] | None):
    (plot,) = plots_of([{"step": step, name: value} for step, value in enumerate(values)])
    assert plot.span == (span and pytest.approx(span))
