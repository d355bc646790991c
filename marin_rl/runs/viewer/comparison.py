# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compare runs: metrics of groups over each other, and the rollouts of a task side by side.

The data of the page are those of `html_page.page_data`, with an overview, and rollouts that belong to tasks and runs.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marin_rl.runs.metrics_file import COLORS, Plot, Record, plots_of
from marin_rl.runs.rollout_store import EVALUATION, TRAINING, StoredFile, list_files, read_file
from marin_rl.runs.run_directory import differing_keys, show_value
from marin_rl.runs.run_groups import ComparedRun, RunGroup, band
from marin_rl.runs.viewer import html_page
from marin_rl.runs.viewer.html_page import MAX_RECORDS, MAX_TOKENS
from marin_rl.runs.viewer.selection import Selection
from marin_rl.runs.viewer.summary import Row
from marin_rl.runs.viewer.terminal import MISSING
from marin_rl.utils.output import escape, escape_line, shorten

MAX_ROLLOUTS_PER_CELL = 4
"""Maximum rollouts of a task in one run."""
MAX_SETTINGS = 30
"""Maximum settings in an overview."""
MAX_SETTING = 60
"""Maximum characters of a setting."""


def _plots(groups: Sequence[RunGroup]) -> Iterator[tuple[str, str, Plot]]:
    """Title and name of the metrics that `plots_of` draws of any of the runs, in the same order, with their plot."""
    for plot in plots_of([record for group in groups for run in group.runs for record in run.records]):
        for curve in plot.curves:
            yield f"{plot.title}: {curve.label}" if plot.has_legend else plot.title, curve.name, plot


def overview(groups: Sequence[RunGroup]) -> list[tuple[str, list[str]]]:
    """Summarize groups: their runs, first → last value of metrics (means over the runs), and settings that differ.

    Each row is a label, and a cell for each group; the last value has the range of the runs. Not escaped.
    """
    rows = [("runs", [", ".join(run.name for run in group.runs) for group in groups])]
    rows.append(("steps", [_steps(group) for group in groups]))
    rows += [(title, [_first_and_last(group, name) for group in groups]) for title, name, _ in _plots(groups)]
    configs = [group.runs[0].config for group in groups]
    keys = dict.fromkeys(key for config in configs[1:] for key in differing_keys(dict(configs[0]), dict(config)))
    settings = [key for key in keys if key not in ("run_dir", "seed")]
    rows += [
        (key, [shorten(show_value(config, key), MAX_SETTING) for config in configs]) for key in settings[:MAX_SETTINGS]
    ]
    if len(settings) > MAX_SETTINGS:
        rows.append((f"{len(settings) - MAX_SETTINGS} more settings differ", ["…"] * len(groups)))
    return rows


def _steps(group: RunGroup) -> str:
    last = sorted({int(run.records[-1]["step"]) if run.records else 0 for run in group.runs})
    return str(last[0]) if len(last) == 1 else f"{last[0]}–{last[-1]}"


def _first_and_last(group: RunGroup, name: str) -> str:
    bands = band([run.records for run in group.runs], name)
    if not bands:
        return MISSING
    first, last = bands[0], bands[-1]
    ends = f"{first.mean:.3g} → {last.mean:.3g}" if len(bands) > 1 else f"{last.mean:.3g}"
    return ends if len(group.runs) == 1 else f"{ends} ({last.low:.3g} to {last.high:.3g})"


def print_overview(console: Console, groups: Sequence[RunGroup]) -> None:
    """Print the overview of groups, a column each."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", *map(str, groups)):
        table.add_column(Text(escape_line(heading), "bold"), overflow="fold")
    for label, cells in overview(groups):
        table.add_row(Text(escape_line(label), "dim"), *(Text(escape_line(cell)) for cell in cells))
    console.print(table)


def comparison_data(groups: Sequence[RunGroup], selection: Selection, max_rollouts: int) -> dict[str, Any]:
    """Collect the data, as JSON values, of the page that compares groups, at least one.

    Without steps in the selection, evaluations are shown if at least two runs have stored some. Of the selected steps,
    the newest that all runs have stored is shown, or without one that of each run. The page has at most `max_rollouts`.

    Raises:
        RolloutStoreError: if a file of rollouts is damaged.
    """
    runs = [run for group in groups for run in group.runs]
    steps, num_steps = _drawn_steps(groups)
    curves_data = html_page.curves_data(_merged(groups, steps))
    side_by_side, notes = _side_by_side(runs, selection, max_rollouts)
    if len(steps) < num_steps:
        notes.insert(0, f"The curves show {len(steps)} of {num_steps} steps, and every evaluation.")
    return {
        "run": escape(" · ".join(group.label for group in groups)),
        "about": f"{len(runs)} runs · line: mean of a group; band: its smallest to its largest run",
        "notes": [*_lengths(groups), *notes],
        "groups": [escape(str(group)) for group in groups],
        "overview": [(escape(label), [escape(cell) for cell in cells]) for label, cells in overview(groups)],
        "curves": curves_data,
        "plots": [
            {"title": escape(title), "unit": plot.unit, "span": plot.span, "curves": curves}
            for title, name, plot in _plots(groups)
            if (curves := _curves(groups, name, curves_data["series"]))
        ],
        "phases": {"names": [], "bars": []},
        "runs": [
            {"name": escape(run.name), "group": index} for index, group in enumerate(groups) for run in group.runs
        ],
        **side_by_side,
    }


def _drawn_steps(groups: Sequence[RunGroup]) -> tuple[set[int], int]:
    """The steps of the curves: evenly spaced, with evaluations and the last of each run; the number of all steps."""
    records: dict[int, dict[str, int | float]] = {}
    for run in (run for group in groups for run in group.runs):
        for record in run.records:
            records.setdefault(int(record["step"]), {}).update(record)
    thinned = html_page.thinned([records[step] for step in sorted(records)], max(MAX_RECORDS // len(groups), 2))
    ends = {int(run.records[-1]["step"]) for group in groups for run in group.runs if run.records}
    return ends | {int(record["step"]) for record in thinned}, len(records)


def _merged(groups: Sequence[RunGroup], steps: Container[int]) -> list[Record]:
    """One record per step; `NAME#2` is the mean of group 2, `NAME#2<` and `NAME#2>` its smallest and largest run."""
    merged: dict[int, dict[str, int | float]] = {}
    for index, group in enumerate(groups):
        runs = [[record for record in run.records if int(record["step"]) in steps] for run in group.runs]
        for name in {name for records in runs for record in records for name in record} - {"step"}:
            for one in band(runs, name):
                record = merged.setdefault(one.step, {"step": one.step})
                record[f"{name}#{index}"] = one.mean
                if len(group.runs) > 1:
                    record |= {f"{name}#{index}<": one.low, f"{name}#{index}>": one.high}
    return [merged[step] for step in sorted(merged)]


def _curves(groups: Sequence[RunGroup], name: str, series: Container[str]) -> list[dict[str, Any]]:
    """The curves of the groups that have a metric, in the form of `metrics_file.Curve`."""
    return [
        {"name": key, "label": escape(str(group)), "color": index % len(COLORS)}
        for index, group in enumerate(groups)
        if (key := escape(f"{name}#{index}")) in series
    ]


def _lengths(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Notes on runs without records, and on groups that end with their shortest run."""
    for group in groups:
        yield from (f"{escape(run.name)} has no metrics yet." for run in group.runs if not run.records)
        last = {int(run.records[-1]["step"]) for run in group.runs if run.records}
        if len(last) > 1:
            label = escape(group.label)
            yield f"{label} is drawn up to step {min(last)}, where its shortest run ends; its longest has {max(last)}."


Key = tuple[str, str]
"""Environment and id of a task."""


class Score(NamedTuple):
    """A stored rollout of a task."""

    reward: float | None
    num_tokens: int


def _side_by_side(
    runs: Sequence[ComparedRun], selection: Selection, max_rollouts: int
) -> tuple[dict[str, Any], list[str]]:
    """Tasks and rollouts of the page, and notes on the omissions."""
    stored = {purpose: _newest(runs, purpose, selection.steps) for purpose in (EVALUATION, TRAINING)}
    num_evaluated = sum(file is not None for file in stored[EVALUATION])
    purpose = EVALUATION if selection.evaluation or (selection.steps is None and num_evaluated > 1) else TRAINING
    files = stored[purpose]
    notes = []
    if absent := [escape(run.name) for run, file in zip(runs, files, strict=True) if file is None]:
        where = "" if selection.steps is None else " at these steps"
        notes.append(f"No rollouts of {purpose} are stored{where}: {', '.join(absent)}.")
    scores = [_scores(file, selection) for file in files]
    keys = dict.fromkeys(key for per_task in scores for key in per_task)
    shared = [key for key in keys if sum(key in per_task for per_task in scores) > 1]
    shared.sort(key=lambda key: -_spread([per_task.get(key, ()) for per_task in scores]))
    shown = _fitting(shared, scores, max_rollouts)
    if not shared and any(files):
        notes.append(f"No task has rollouts of {purpose} in two runs; choose other steps with --step or --evaluation.")
    if len(shown) < len(shared):
        notes.append(
            f"The page contains {len(shown)} of {len(shared)} tasks that several runs have, first those on which they "
            f"differ most (at most {max_rollouts} rollouts and {MAX_TOKENS:,} tokens); select others with --step or a "
            "filter, or raise --limit."
        )
    return {
        "purpose": purpose,
        "steps": [None if file is None else file.step for file in files],
        "tasks": [[_cell(per_task.get(key, ())) for per_task in scores] for key in shown],
        "rollouts": _rollouts(files, selection, shown),
    }, notes


def _newest(runs: Sequence[ComparedRun], purpose: str, steps: range | None) -> list[StoredFile | None]:
    """The file of each run with the newest step that all runs with rollouts have stored, or else its newest file."""
    stored = [
        {
            file.step: file
            for file in list_files(run.directory.rollouts)
            if file.purpose == purpose and (steps is None or file.step in steps)
        }
        for run in runs
    ]
    common = set.intersection(*map(set, filter(None, stored))) if any(stored) else set()
    return [files[max(common or files)] if files else None for files in stored]


def _key(row: Row) -> Key:
    return row["environment"], row["task_id"]


def _scores(file: StoredFile | None, selection: Selection) -> dict[Key, list[Score]]:
    """The selected rollouts by task, in the stored order."""
    columns = ["environment", "task_id", "reward", "status", "step", "purpose", "num_tokens"]
    table = None if file is None else read_file(file.path, columns)
    scores: dict[Key, list[Score]] = {}
    for row in [] if table is None else table.to_pylist():
        if selection.accepts(row):
            scores.setdefault(_key(row), []).append(Score(row["reward"], row["num_tokens"]))
    return scores


def _mean(scores: Sequence[Score]) -> float | None:
    rewards = [score.reward for score in scores if score.reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def _spread(cells: Sequence[Sequence[Score]]) -> float:
    """How much the mean rewards of runs differ on a task."""
    means = [mean for scores in cells if (mean := _mean(scores)) is not None]
    return max(means) - min(means) if means else 0.0


def _cell(scores: Sequence[Score]) -> dict[str, Any] | None:
    return {"mean": html_page.rounded(_mean(scores)), "count": len(scores)} if scores else None


def _fitting(tasks: Sequence[Key], scores: Sequence[Mapping[Key, Sequence[Score]]], max_rollouts: int) -> list[Key]:
    """The first tasks whose rollouts fit on the page."""
    count = tokens = 0
    for index, key in enumerate(tasks):
        shown = [score for per_task in scores for score in per_task.get(key, ())[:MAX_ROLLOUTS_PER_CELL]]
        count, tokens = count + len(shown), tokens + sum(score.num_tokens for score in shown)
        if count > max_rollouts or tokens > MAX_TOKENS:
            return list(tasks[:index])
    return list(tasks)


def _rollouts(files: Sequence[StoredFile | None], selection: Selection, tasks: Sequence[Key]) -> list[dict[str, Any]]:
    """The first rollouts of the tasks in each run, in the order of tasks and runs."""
    place = {key: index for index, key in enumerate(tasks)}
    found: list[dict[str, Any]] = []
    for run, file in enumerate(files):
        left = dict.fromkeys(tasks, MAX_ROLLOUTS_PER_CELL)
        # One row at a time, because as Python objects its tokens take much memory.
        for row in () if file is None else _rows(file):
            if selection.accepts(row) and left.get(key := _key(row), 0):
                left[key] -= 1
                found.append({**html_page.rollout_data({**row, "unequal": False}), "run": run, "task": place[key]})
    return sorted(found, key=lambda one: (one["task"], one["run"]))


def _rows(file: StoredFile) -> Iterator[Row]:
    if (table := read_file(file.path)) is not None:
        yield from (table.slice(at, 1).to_pylist()[0] for at in range(len(table)))
