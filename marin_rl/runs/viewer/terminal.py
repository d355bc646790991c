# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Print stored rollouts to the terminal: a list, or one rollout in full.

Texts of models, environments and rewards are escaped and passed to rich as `Text`, never as markup.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from marin_rl.runs.viewer.selection import Listing, logprob_differences
from marin_rl.runs.viewer.summary import Row, info_text, reason_of
from marin_rl.utils.output import escape, escape_line, shown_bytes

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
MISSING = "–"
ANCHOR_CHARACTERS = 12
"""Displayed characters of an anchor state's hash."""
SHORTENED = {"prompt": 21, "answer": 14, "reply": 21, "reason": 28}
"""Columns of a list that are shortened on a narrow console, and the widths below which other columns are left out."""
WORDS = ("status", "environment", "not trained")
"""Further columns of text."""
NAMES = frozenset(("id", "reward", "step", "turns", "tokens", "advantage", *SHORTENED, *WORDS))
"""Columns that are no reward components."""
COLUMN_GAP = 2
"""Characters between two columns of a list."""


def print_listing(console: Console, listing: Listing, command: str) -> None:
    """Print one line for each rollout.

    A value that all rollouts share is printed once, below the list. On a narrow console texts are cut off, and columns
    left out. `command` shows the first of them in full.
    """
    rows = listing.rows
    if not rows:
        console.print(Text("0 rollouts match the filters", "dim"))
        return
    texts, (others, shared) = _text_columns(rows), _other_columns(rows)
    columns, left_out = _fitting(texts, others, console.width)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, COLUMN_GAP - 1, 0, 0))
    for name in columns:
        is_number = name not in (*texts, *WORDS) or name == "reward"
        # Rich narrows only columns that may wrap; their cells do not.
        may_wrap = name in SHORTENED
        table.add_column(
            Text(escape_line(name), "bold"), justify="right" if is_number else "left", no_wrap=not may_wrap
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    console.print(table)
    for line in _footer(listing, shared, left_out):
        console.print(Text(line, "dim"))
    console.print(Text(f"one in full: {command}", "dim"), soft_wrap=True)


def _footer(listing: Listing, shared: Mapping[str, str], left_out: Sequence[str]) -> Iterator[str]:
    shown = len(listing.rows)
    count = f"{shown} of {listing.total} rollouts" if shown < listing.total else f"{shown} rollouts"
    yield count if shown == 1 else f"{count}, first those of groups with different rewards"
    if shared:
        yield f"the same in all: {', '.join(f'{escape_line(name)} {value}' for name, value in shared.items())}"
    if left_out:
        yield f"not shown for lack of width: {', '.join(map(escape_line, left_out))}"


Columns = dict[str, list[str]]
"""Escaped cells by the names of columns."""


def _text_columns(rows: Sequence[Row]) -> Columns:
    """The columns of every list, without those that are empty."""
    columns = {
        "id": [row["id"] for row in rows],
        "reward": [number(row["reward"]) for row in rows],
        **{name: [row[name] for row in rows] for name in ("prompt", "answer", "reply", "reason")},
    }
    return {name: [escape_line(cell) for cell in cells] for name, cells in columns.items() if any(cells)}


def _other_columns(rows: Sequence[Row]) -> tuple[Columns, dict[str, str]]:
    """The columns that lists have if there is room, and the values that all rollouts share."""
    rewards = [dict(row["rewards"]) for row in rows]
    components = list(dict.fromkeys(name for each in rewards for name in each))
    columns = {
        # A single component is the reward.
        **{
            f"{name} (reward)" if name in NAMES else name: [number(each.get(name)) for each in rewards]
            for name in components
            if len(components) > 1
        },
        **{name: [str(row[key]) for row in rows] for name, key in (("step", "step"), ("turns", "num_turns"))},
        "tokens": [str(row["num_generated_tokens"]) for row in rows],
        "advantage": [number(row["advantage"]) for row in rows],
        **{name: [escape_line(row[name]) for row in rows] for name in ("status", "environment")},
        "not trained": [escape_line(row["not_trained"] or "") for row in rows],
    }
    shared = {name: cells[0] for name, cells in columns.items() if len(set(cells)) == 1}
    differing = {name: cells for name, cells in columns.items() if name not in shared}
    return differing, {name: value for name, value in shared.items() if value not in ("", MISSING)}


def _fitting(texts: Columns, others: Columns, width: int) -> tuple[Columns, list[str]]:
    """Return the columns that fit on a console, the texts first, and the names of the others."""

    def width_of(name: str, cells: Sequence[str]) -> int:
        widest = max(map(cell_len, (escape_line(name), *cells)))
        return COLUMN_GAP + min(widest, SHORTENED.get(name, widest))

    room = width + COLUMN_GAP - sum(width_of(*column) for column in texts.items())
    fitting: Columns = {}
    for name, cells in others.items():
        room -= width_of(name, cells)
        if room < 0:
            break
        fitting[name] = cells
    return texts | fitting, [name for name in others if name not in fitting]


def print_rollout(console: Console, row: Row, *, tokens: bool) -> None:
    """Print one rollout in full; `tokens` lists every sampled token with its values."""
    parts: list[RenderableType] = [
        Rule(Text(escape_line(row["id"]), "bold"), align="left"),
        _summary(row),
        _rewards(row),
    ]
    parts += [_turn(index, turn, tokens=tokens) for index, turn in enumerate(row["turns"])]
    if row["last_observation"] is not None:
        parts += [Text("last observation · not answered", "dim"), *_messages(row["last_observation"])]
    console.print(Group(*parts))


def _summary(row: Row) -> RenderableType:
    facts = {
        "step": str(row["step"]),
        "purpose": row["purpose"],
        "group": row["group_id"],
        "task": row["task_id"],
        "environment": row["environment"],
        "answer": row["answer"],
        "status": row["status"],
        "reason": None if row["error"] else reason_of(row),
        "not trained": row["not_trained"],
        "error": row["error"],
        "advantage": None if row["advantage"] is None else number(row["advantage"]),
        "metrics": _named_numbers(row["metrics"]),
        "seconds": _named_numbers(row["seconds"]),
        "info": info_text(row),
    }
    return _facts({name: value for name, value in facts.items() if value})


def _facts(facts: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(name, Text(escape(value)))
    return grid


def _rewards(row: Row) -> RenderableType:
    evaluations = {evaluation["component"]: evaluation for evaluation in row["evaluations"]}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("component", "reward", "score", "weight"):
        table.add_column(name, justify="left" if name == "component" else "right")
    table.add_column("reason", overflow="fold")
    rewards = dict(row["rewards"])
    for name in dict.fromkeys([*rewards, *evaluations]):
        result = evaluations.get(name, {})
        reason = " · ".join(part for part in (result.get("reason"), result.get("failure"), result.get("error")) if part)
        values = (rewards.get(name), result.get("score"), result.get("weight"))
        table.add_row(Text(escape_line(name)), *map(number, values), Text(escape(reason)))
        for step in result.get("steps", ()):
            label = Text(f"  turn {step['turn']}", "dim")
            table.add_row(label, "", number(step["base_reward"]), "", Text(escape(step["reason"] or ""), "dim"))
    table.add_row(Text("total", "bold"), number(row["reward"]), "", "", "")
    return table


def _turn(index: int, turn: Row, *, tokens: bool) -> RenderableType:
    parts: list[RenderableType] = [_turn_title(index, turn), *_messages(turn)]
    rewards = _named_numbers(turn["rewards"]) if len(turn["rewards"]) > 1 else None
    facts = {"action": turn["action"], "rewards": rewards, "info": turn["info"]}
    if shown := {name: value for name, value in facts.items() if value is not None}:
        parts.append(_facts(shown))
    if tokens:
        parts.append(_token_table(turn))
    return Group(*parts)


def _messages(part: Row) -> Iterator[RenderableType]:
    """Messages of a turn or of the last observation."""
    for message in part["messages"]:
        yield Text(escape_line(message["role"]), f"bold {ROLE_STYLES.get(message['role'], 'white')}")
        yield Padding(Text(escape((message["content"] or "") + (message["more"] or "")), overflow="fold"), (0, 0, 0, 2))


def _turn_title(index: int, turn: Row) -> RenderableType:
    facts = [f"turn {index}", f"{len(turn['token_ids'])} tokens", f"stop: {escape_line(turn['stop_reason'])}"]
    for name in ("reward", "episode_advantage", "step_return", "step_advantage"):
        if turn[name] is not None:
            facts.append(f"{name.replace('_', ' ')} {number(turn[name])}")
    if turn["anchor_state"]:
        facts.append(f"anchor {escape_line(turn['anchor_state'][:ANCHOR_CHARACTERS])}")
    first, last = turn["first_version"], turn["last_version"]
    facts.append(f"weights {first}" if first == last else f"weights {first}–{last}")
    return Text(" · ".join(facts), "dim")


def _token_table(turn: Row) -> RenderableType:
    columns = {
        "logprob": turn["logprobs"],
        "learner": turn["learner_logprobs"],
        "policy−learner": logprob_differences(turn),
        "reference": turn["reference_logprobs"],
        "advantage": turn["advantages"],
        "value": turn["values"],
        "value target": turn["value_targets"],
    }
    present = {name: values for name, values in columns.items() if values is not None}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("#", "id", "token", *present):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=name != "token")
    for index, (token, piece) in enumerate(zip(turn["token_ids"], turn["pieces"], strict=True)):
        numbers = (f"{values[index]:.4g}" for values in present.values())
        table.add_row(str(index), str(token), Text(shown_bytes(piece), "bold"), *numbers)
    return table


def number(value: float | None) -> str:
    """Format a number for display.

    >>> number(0.25), number(-0.0), number(None)
    ('0.25', '0', '–')
    """
    return MISSING if value is None else f"{value + 0.0:.4g}"


def _named_numbers(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in pairs)
