# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Export a run as one self-contained HTML page, without network access or libraries.

Texts of models cannot become markup or code: they are embedded as JSON that cannot close its element, the script
inserts them with `textContent` only, and the content security policy blocks other scripts and all requests.
"""

import base64
import codecs
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from marin_rl.runs.metrics_file import plots_of, read_records
from marin_rl.runs.rollout_store import StoredFile, read_file
from marin_rl.runs.run_directory import check_output
from marin_rl.runs.viewer.selection import Selection, StoredRollouts, group_key, logprob_differences, unequal_groups
from marin_rl.runs.viewer.summary import Row, info_text, shorten_prompts, summarize
from marin_rl.utils.output import escape
from marin_rl.utils.storage import write_bytes, writing

SCRIPTS = ("charts.js", "rollouts.js", "side_by_side.js", "page.js")
"""Parts of the script of a page, in order."""
MARK = b'<meta name="generator" content="marin_rl.view">'
"""Line at the start of every page, which tells pages from other files."""
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(data: Mapping[str, Any], target: Path) -> None:
    """Write a page.

    Args:
        data: content of the page, from `page_data` or `comparison.comparison_data`.
        target: output file; an earlier page is replaced atomically.

    Raises:
        OutputExistsError: if the file exists and is not a page.
        RunDirectoryError: if the file cannot be written.
    """
    check_output(target, "--html", MARK)
    with writing(target, "--html"):
        write_bytes(target, render(data).encode())


def render(data: Mapping[str, Any]) -> str:
    """Render the page.

    Returns:
        The HTML text.
    """
    style, script = _asset("page.css"), "".join(map(_asset, SCRIPTS))
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": html.escape(policy, quote=False),
        "title": html.escape(data["run"]),
        "style": style,
        "data": escaped_json(data),
        "script": script,
    }
    parts = _asset("page.html").split("%%")
    return "".join(part if index % 2 == 0 else values[part] for index, part in enumerate(parts))


def escaped_json(value: Any) -> str:
    r"""Encode a value as JSON that is safe inside a script element.

    >>> escaped_json("</script>")
    '"\\u003c/script\\u003e"'
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _asset(name: str) -> str:
    return resources.files("marin_rl.runs.viewer").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


MAX_STEPS = 10
"""Maximum number of steps with rollouts; they are evenly spaced over the run."""
MAX_TOKENS = 1_000_000
"""Maximum tokens in all rollouts of a page together."""
MAX_RECORDS = 1000
"""Maximum points of a curve, not counting evaluations."""
MAX_BARS = 60
"""Maximum bars of the phase timings; in longer runs each bar is the mean of consecutive steps."""

Record = Mapping[str, int | float]


def page_data(source: StoredRollouts, selection: Selection, max_rollouts: int) -> dict[str, Any]:
    """Collect the data of the page.

    Args:
        source: the run, or one file of rollouts, which has no curves.
        selection: filter of the rollouts.
        max_rollouts: maximum rollouts on the page.

    Returns:
        Nested plain values that JSON can represent.

    Raises:
        RunDirectoryError: if metrics.jsonl is damaged.
        RolloutNotFoundError: if none of the selected steps is stored.
        RolloutStoreError: if a file of rollouts is damaged.
    """
    records = [] if source.metrics is None else read_records(source.metrics)
    rollouts, notes = _rollouts(source, selection, max_rollouts)
    kept = thinned(records, MAX_RECORDS)
    if len(kept) < len(records):
        notes.append(f"The curves show {len(kept)} of {len(records)} records, evenly spaced, and every evaluation.")
    return {
        "run": escape(source.path.resolve().name if isinstance(source.path, Path) else source.path.name),
        "about": f"{int(records[-1]['step']) if records else 0} steps recorded · {len(rollouts)} rollouts on this page",
        "notes": notes,
        "curves": curves_data(kept),
        "plots": [
            {
                "title": plot.title,
                "unit": plot.unit,
                "curves": [
                    {**vars(curve), "name": escape(curve.name), "label": escape(curve.label)} for curve in plot.curves
                ],
                "span": plot.span,
            }
            for plot in plots_of(kept)
        ],
        "phases": _phases(records),
        "rollouts": rollouts,
    }


def thinned(records: Sequence[Record], limit: int) -> list[Record]:
    """Return evenly spaced records, at most `limit`, with the first and the last, and all that have an evaluation."""
    if len(records) <= limit:
        return list(records)
    chosen = set(evenly_spaced(len(records), limit))
    return [
        record
        for index, record in enumerate(records)
        if index in chosen or any(name.startswith("eval/") for name in record)
    ]


def evenly_spaced(count: int, selected: int) -> list[int]:
    """Return evenly spaced indices of `selected` of `count` items, including both ends; a single index is the last.

    >>> evenly_spaced(9, 3), evenly_spaced(2, 5), evenly_spaced(9, 1)
    ([0, 4, 8], [0, 1], [8])
    """
    if selected >= count:
        return list(range(count))
    if selected == 1:
        return [count - 1]
    return [round(index * (count - 1) / (selected - 1)) for index in range(selected)]


def curves_data(records: Sequence[Record]) -> dict[str, Any]:
    """Return the steps of records, and their metrics by name; None where a record lacks a metric."""
    names = sorted({name for record in records for name in record} - {"step"})
    return {
        "steps": [int(record["step"]) for record in records],
        "series": {escape(name): [rounded(record.get(name)) for record in records] for name in names},
    }


def _phases(records: Sequence[Record]) -> dict[str, Any]:
    """Seconds by phase, with a bar for each step or for several consecutive steps."""
    prefix = "seconds/"
    timed = [record for record in records if f"{prefix}total" in record]
    measured = dict.fromkeys(name for record in timed for name in record)
    # Compilation is a part of the phases.
    no_phases = f"{prefix}total", f"{prefix}compile"
    names = [name for name in measured if name.startswith(prefix) and name not in no_phases]
    width = max(1, math.ceil(len(timed) / MAX_BARS))
    parts = [timed[start : start + width] for start in range(0, len(timed), width)]
    return {
        "names": [escape(name.removeprefix(prefix)) for name in names],
        "bars": [
            {
                "first": int(part[0]["step"]),
                "last": int(part[-1]["step"]),
                "seconds": [rounded(sum(record.get(name, 0.0) for record in part) / len(part)) for name in names],
                "total": rounded(sum(record[f"{prefix}total"] for record in part) / len(part)),
            }
            for part in parts
        ],
    }


def _rollouts(
    source: StoredRollouts, selection: Selection, max_rollouts: int
) -> tuple[list[dict[str, Any]], list[str]]:
    files = selection.files(source)
    chosen = [files[index] for index in evenly_spaced(len(files), MAX_STEPS)]
    notes = []
    if len(chosen) < len(files):
        steps = ", ".join(str(file.step) for file in chosen)
        notes.append(f"The page shows rollouts of {len(chosen)} of {len(files)} stored steps: {steps}.")
    shown: list[dict[str, Any]] = []
    matching, tokens_left = 0, MAX_TOKENS
    for index, file in enumerate(chosen):
        # Later steps use the capacity that earlier steps leave.
        steps_left = len(chosen) - index
        capacity, least_left = (max_rollouts - len(shown)) // steps_left, tokens_left - tokens_left // steps_left
        rows = _selected(file, selection)
        matching += len(rows)
        for row in rows[:capacity]:
            if tokens_left - _num_tokens(row) < least_left:
                break
            tokens_left -= _num_tokens(row)
            shown.append(rollout_data(row))
    # Of the same kind, the newest first.
    shown.sort(key=lambda rollout: (not rollout["unequal"], -rollout["step"]))
    prompts = shorten_prompts([one["prompt"] for one in shown], [one["environment"] for one in shown])
    shown = [{**one, "prompt": prompt} for one, prompt in zip(shown, prompts, strict=True)]
    if len(shown) < matching:
        notes.append(
            f"The page contains {len(shown)} of {matching} rollouts of these steps, first those of groups with "
            f"different rewards (at most {max_rollouts} rollouts and {MAX_TOKENS:,} tokens); select others with --step "
            "or a filter, or raise --limit."
        )
    return shown, notes


def _num_tokens(row: Row) -> int:
    """Return the number of tokens of a rollout, with those of its observations."""
    parts = [*row["turns"], row["last_observation"] or {}]
    return sum(len(part.get("token_ids", ())) + len(part.get("observation_tokens", ())) for part in parts)


def _selected(file: StoredFile, selection: Selection) -> list[Row]:
    """The selected rollouts of a file, first those of groups with different rewards, which `unequal` marks."""
    table = read_file(file.path)
    rows = [] if table is None else table.to_pylist()
    unequal = unequal_groups(rows)
    marked = [{**row, "unequal": group_key(row) in unequal} for row in rows if selection.accepts(row)]
    return sorted(marked, key=lambda row: not row["unequal"])


_OF_ROLLOUT = (
    *("purpose", "id", "group_id", "task_id", "environment", "answer", "status", "error", "not_trained", "unequal"),
    *("step", "reward", "rewards", "evaluations", "advantage", "num_turns", "num_generated_tokens", "metrics"),
    "seconds",
)
_OF_TURN = (
    *("action", "stop_reason", "reward", "rewards", "episode_advantage", "step_return", "step_advantage"),
    *("anchor_state", "logprobs", "advantages", "values", "value_targets"),
)


def rollout_data(row: Row) -> dict[str, Any]:
    """Return a rollout as plain values, its texts escaped.

    `row` has all columns, and `unequal`: whether its group has different rewards.
    """
    summary = summarize(row)
    return {
        **{name: _plain(row[name]) for name in _OF_ROLLOUT},
        **{name: escape(getattr(summary, name)) for name in ("prompt", "reply", "reason")},
        "expected": escape(summary.answer),
        "info": escape(info_text(row)),
        "turns": [_turn(turn) for turn in row["turns"]],
        "last_observation": None if row["last_observation"] is None else _observation(row["last_observation"]),
    }


def _plain(value: Any) -> Any:
    """Escape the texts in a value, and round its numbers."""
    match value:
        case str():
            return escape(value)
        case float():
            return rounded(value)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def _observation(part: Row) -> dict[str, Any]:
    """Messages of a turn or of the last observation, and the text of the observation's tokens."""
    return {
        "messages": [
            {"role": escape(message["role"]), "content": escape((message["content"] or "") + (message["more"] or ""))}
            for message in part["messages"]
        ],
        "observed": "".join(texts_of(part["observation_pieces"])),
    }


def _turn(turn: Row) -> dict[str, Any]:
    return {
        **_observation(turn),
        **{name: _plain(turn[name]) for name in _OF_TURN},
        "versions": [turn["first_version"], turn["last_version"]],
        "info": escape(turn["info"] or ""),
        "texts": texts_of(turn["pieces"]),
        "ids": turn["token_ids"],
        "learner": _plain(turn["learner_logprobs"]),
        "difference": _plain(logprob_differences(turn)),
        "reference": _plain(turn["reference_logprobs"]),
    }


def texts_of(pieces: Sequence[bytes]) -> list[str]:
    r"""Text of each token; a character that consists of several tokens is part of the last of them.

    >>> texts_of([b"a", b"\xc3", b"\xa9", b"\xff"])
    ['a', '', 'é', '\\xff']
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    last = len(pieces) - 1
    return [escape(decoder.decode(piece, final=index == last)) for index, piece in enumerate(pieces)]


def rounded(value: float | None) -> float | None:
    """Return a number with six significant digits; None for NaN and infinities."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
