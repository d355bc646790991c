# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import io
import itertools
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from marin_rl.runs.metrics_file import append_record
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.sessions.console import (
    MAX_PLAIN_LINES,
    ProgressDisplay,
    describe_step,
    is_live,
    print_closing_table,
    print_summary,
)
from marin_rl.training.run_state import Progress
from tests.training.bare_run import make_config


class Stream(io.StringIO):
    """Text stream with the attributes that the type checker requires."""

    mode, name, buffer = "w", "stream", None


class Terminal(Stream):
    def isatty(self):
        return True


METRICS = {
    "seconds/total": 5.0,
    "eps": 12.25,
    "train/rewards": 0.25,
    "objective/kl": 0.0125,
    "train/output_length": 5.25,
    "tokens/sampled_per_second": 8123.0,
    "policy/entropy_avg": 0.5,
}
ACCURACY = {"eval/sums/accuracy_sampled": 0.625, "eval/sums/accuracy_greedy": 0.75}

FOLDER = Path("runs/a-rather-long-name-for-a-run-directory/that-does-not-fit-on-a-narrow-terminal")
EVALUATIONS = {
    "before RL": {"eval/sums/accuracy_sampled": 0.25, "eval/sums/accuracy_greedy": 0.5, "eval/sums/tasks": 512.0},
    "after RL": {"eval/sums/accuracy_sampled": 0.625, "eval/sums/accuracy_greedy": 0.75, "eval/sums/pass@4": 0.9},
}


def plain(total: int, steps, metrics=METRICS, clock=None) -> list[str]:
    stream = Stream()
    with ProgressDisplay(total, stream, clock=clock or itertools.count(0, 2).__next__) as progress:
        for step in steps:
            progress.update(step, metrics)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"TERM": "xterm", "CI": "true"}, False),
        (Stream(), {"TERM": "xterm"}, False),
    ],
)
def test_lines_are_redrawn_only_on_capable_terminals(stream, environment, expected):
    assert is_live(stream, environment) is expected


def test_plain_line_contains_all_metrics():
    assert plain(10, [1, 2]) == [
        "step 1/10   reward 0.250   KL 0.013   length 5.2   tok/s 8.1k   rollouts/s 12   entropy 0.500",
        "step 2/10   reward 0.250   KL 0.013   length 5.2   tok/s 8.1k   rollouts/s 12   entropy 0.500   left 16.0s",
    ]


def silent(count: int) -> dict[str, float]:
    return {"groups/no_signal": count, "filter/kept_groups": 60, "filter/dropped_zero_spread": 4}


def test_lines_tell_steps_without_signal_from_others():
    stream = Stream()
    with ProgressDisplay(10, stream) as progress:
        for step, count in enumerate((54, 28, 60), start=1):
            progress.update(step, METRICS | silent(count))
    first, second, third = stream.getvalue().splitlines()
    assert "reward 0.250   no signal in 58 of 64 groups   KL 0.013" in first
    assert "no signal" not in second
    assert "no signal in 64 of 64 groups" in third
    assert "no signal in 58 of 64 groups" in describe_step(1, 10, METRICS | silent(54))
    assert "no signal" not in describe_step(2, 10, METRICS | silent(28))


@pytest.mark.parametrize(("count", "expected"), [(54, "in 116 of 128 groups"), (20, None)])
def test_the_summary_counts_what_taught_nothing(tmp_path: Path, count: int, expected: str | None):
    directory = RunDirectory(tmp_path)
    for step in (1, 2):
        append_record(directory.metrics, step, {**silent(count), "updates/skipped": 3.0})
    stream = Stream()
    config = make_config(run_dir=str(tmp_path))
    print_summary(Console(file=stream, width=120), directory, config, Progress(updates=8), {})
    rows = dict(line.split("  ", 1) for line in stream.getvalue().splitlines() if "  " in line)
    assert rows["updates"].strip() == "8; 6 without a gradient were left out"
    assert rows.get("no signal", "").strip() == (expected or "")


@pytest.mark.parametrize("total", [1, 7, 50, 51, 200, 10_000])
def test_run_prints_about_fifty_lines_with_the_first_and_last(total):
    lines = plain(total, range(1, total + 1))
    assert len(lines) <= MAX_PLAIN_LINES + 2
    assert len(lines) >= min(total, MAX_PLAIN_LINES // 2)
    assert lines[0].startswith(f"step 1/{total} ")
    assert lines[-1].startswith(f"step {total}/{total} ")


def test_evaluations_are_always_printed_and_not_repeated():
    stream = Stream()
    with ProgressDisplay(1000, stream) as progress:
        progress.update(7, METRICS | ACCURACY)
        progress.update(20, METRICS)
        progress.update(21, METRICS)
    first, second = stream.getvalue().splitlines()
    assert "held-out 0.625   greedy 0.750" in first
    assert second.startswith("step 20/1000 ")
    assert "held-out" not in second


def test_remaining_time_excludes_the_first_update():
    times = iter([100.0, 101.0, 102.0, 103.0])
    lines = plain(10, [1, 2, 3, 4], clock=times.__next__)
    assert "left" not in lines[0]
    assert lines[-1].endswith("left 6.0s")


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_live_lines_fit_and_keep_the_most_important_metrics(width):
    # Rich does not detect a terminal, so it draws the lines once, at the end, without control characters.
    stream = Stream()
    with ProgressDisplay(10, stream, live=True, width=width, clock=itertools.count(0, 2).__next__) as progress:
        progress.update(1, METRICS | ACCURACY)
        progress.update(2, METRICS)
    bar, line = stream.getvalue().splitlines()
    assert len(bar) <= width
    assert len(line) <= width
    assert line.startswith("reward 0.250")
    if width >= 60:
        assert bar.startswith("step 2/10 ")
        assert bar.endswith("16.0s left")
        assert "KL 0.013" in line
    if width >= 80:
        assert "held-out 0.625" in line


@pytest.mark.parametrize("width", [60, 80, 120])
def test_closing_table(width):
    stream = Stream()
    console = Console(file=stream, width=width, highlight=False)
    seconds, totals = {"step": 60.0, "sample": 180.0}, {"updates": 200.0, "tokens sampled": 5123456.0}
    command = {"start": 20.0, "RL steps": 240.0}
    print_closing_table(console, FOLDER, EVALUATIONS, seconds, totals, command, 60.0, 78.0)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    rows = {line.strip().split("  ")[0]: line.split() for line in lines if line}
    assert rows["sampled"] == ["sampled", "0.250", "0.625", "+0.375"]
    assert rows["greedy"] == ["greedy", "0.500", "0.750", "+0.250"]
    assert rows["pass@4"] == ["pass@4", "0.900"]
    assert rows["sample"] == ["sample", "3:00", "75%"]
    assert [line.split() for line in lines if line.startswith(" total")] == [["total", "4:00"], ["total", "4:20"]]
    compiling = [line.split()[-2:] for line in lines if line.startswith(" of which compilation")]
    assert compiling == [["1:00", "25%"], ["1:18", "30%"]]
    assert rows["RL steps"][-2:] == ["4:00", "92%"]
    assert rows["tokens sampled"][-1] == "5,123,456"
    assert f"run directory   {FOLDER}" in lines
    # A wrapped command could not be copied.
    assert f"  python -m marin_rl.evaluate --run {FOLDER}" in lines
    assert f"  python -m marin_rl.view {FOLDER}" in lines
    assert max(len(line) for line in lines if "marin_rl.train" not in line and "runs/" not in line) <= width


@pytest.mark.parametrize("width", [60, 80])
def test_closing_table_has_a_row_for_each_metric(width: int):
    names = [f"eval/{name}/{kind}" for name in ("countdown", "gsm8k") for kind in ("accuracy_sampled", "pass@2")]
    names += [f"eval/a_long_name_of_an_environment/pass@{k}" for k in (2, 4, 16)]
    metrics = [*names, "eval/gsm8k/pass@1"]
    evaluations = {"before warm start": dict.fromkeys(metrics, 0.25), "after RL": dict.fromkeys(metrics, 0.5)}
    stream = Stream()
    print_closing_table(Console(file=stream, width=width), Path("x"), evaluations, {}, {})
    text = stream.getvalue()
    assert "before warm start   after RL   change" in text
    assert text.count("  0.250      0.500   +0.250") == len(names)
    assert "\n countdown pass@2 " in text
    assert "pass@1 " not in text
    assert "…" not in text
    assert max(map(len, text.partition("run directory")[0].splitlines())) <= width


def test_commands_are_quoted_for_the_shell():
    stream = Stream()
    print_closing_table(Console(file=stream, width=80), Path("runs/Anne's first"), {}, {}, {})
    commands = [line.split("marin_rl.")[1] for line in stream.getvalue().splitlines() if "python -m" in line]
    assert shlex.split(commands[0]) == ["view", "runs/Anne's first"]
    assert shlex.split(commands[1]) == ["evaluate", "--run", "runs/Anne's first"]
    assert "runs/Anne's first" in shlex.split(commands[2])


def test_names_and_messages_are_escaped():
    stream = Stream()
    progress = ProgressDisplay(10, stream, live=False, width=200)
    progress.say("warming up on '\x1b]0;title\x07ascii'\nand more")
    hostile = {"eval/\x1b[31mred[bold]/accuracy_greedy": 0.5, "eval/plain/accuracy_greedy": 0.5}
    print_closing_table(Console(file=stream, width=200), Path("runs/\x1b[2J\x07"), {"before RL": hostile}, {}, {})
    printed = stream.getvalue()
    assert "\x1b" not in printed
    assert "\x07" not in printed
    for text in (
        r"'\x1b]0;title\x07ascii'",
        r"\x1b[31mred[bold] greedy",
        r"run directory  runs/\x1b[2J\x07",
        r"--run 'runs/\x1b[2J\x07'",
        "\nand more",
    ):
        assert text in printed
