# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Print stored rollouts to the terminal: a list, one rollout in full, or several side by side.

Texts of models, environments and rewards are escaped and passed to rich as `Text`, never as markup.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from marin_rl.escaping import escape, escape_line, shown_bytes
from marin_rl.viewing.selection import Listing, Row, logprob_differences

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
MISSING = "–"
ANCHOR_CHARACTERS = 12
"""Displayed characters of an anchor state's hash."""
MIN_REPLY = 10
"""Minimum characters of a reply in a list; on a console without room for them, the list has no replies."""
COLUMN_GAP = 3
"""Characters between two columns of a list."""
MAX_NAME = 24
"""Maximum characters per line of a component's name in a table header."""


def print_listing(console: Console, listing: Listing) -> None:
    """Print one line for each rollout."""
    if not listing.rows:
        console.print(Text("0 rollouts match the filters", "dim"))
        return
    table = _list_table(listing.rows)
    # A measurement is limited by its own width.
    width = console.measure(table, options=console.options.update(width=10**6)).maximum
    room = console.width - width - COLUMN_GAP
    console.print(_list_table(listing.rows, room) if room >= MIN_REPLY else table)
    shown = len(listing.rows)
    console.print(Text(f"{shown} of {listing.total} rollouts" if shown < listing.total else f"{shown} rollouts", "dim"))


def _list_table(rows: Sequence[Row], reply_width: int = 0) -> Table:
    """Return the table of a list, with the last reply of each rollout if `reply_width` is above 0."""
    components = list(dict.fromkeys(name for row in rows for name, _ in row["rewards"]))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("id", "step", "environment", "status"):
        table.add_column(name, no_wrap=True, justify="right" if name == "step" else "left")
    for name in ("reward", *components, "advantage", "turns", "tokens"):
        table.add_column(Text(escape_line(name)), justify="right", overflow="fold", max_width=MAX_NAME)
    table.add_column("not trained", no_wrap=True)
    if reply_width:
        table.add_column("last reply", no_wrap=True, max_width=reply_width)
    for row in rows:
        rewards = dict(row["rewards"])
        cells = [
            _plain(row["id"]),
            str(row["step"]),
            _plain(row["environment"]),
            _plain(row["status"]),
            number(row["reward"]),
            *(number(rewards.get(name)) for name in components),
            number(row["advantage"]),
            str(row["num_turns"]),
            str(row["num_generated_tokens"]),
            _plain(row["not_trained"] or ""),
        ]
        table.add_row(*cells, *([_plain(row["last_reply"])] if reply_width else []))
    return table


def print_rollout(console: Console, row: Row, *, tokens: bool) -> None:
    """Print one rollout in full.

    Args:
        console: output console.
        row: the rollout.
        tokens: whether to list every sampled token with its values.
    """
    console.print(Group(*_rollout(row, tokens=tokens)))


def print_side_by_side(console: Console, rows: Sequence[Row], *, tokens: bool) -> None:
    """Print rollouts in columns with aligned turns.

    Args:
        console: output console.
        rows: the rollouts, usually two.
        tokens: whether to list every sampled token with its values.
    """
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in rows:
        table.add_column(ratio=1, overflow="fold")
    for parts in itertools.zip_longest(*(_rollout(row, tokens=tokens) for row in rows), fillvalue=Text("")):
        table.add_row(*parts)
    console.print(table)


def _rollout(row: Row, *, tokens: bool) -> Iterator[RenderableType]:
    """Summary, rewards and turns of a rollout."""
    yield Rule(Text(escape_line(row["id"]), "bold"), align="left")
    yield _summary(row)
    yield _rewards(row)
    for index, turn in enumerate(row["turns"]):
        yield _turn(index, turn, tokens=tokens)
    if row["last_observation"] is not None:
        yield Group(Text("last observation · not answered", "dim"), *_messages(row["last_observation"]))


def _summary(row: Row) -> RenderableType:
    facts = {
        "step": str(row["step"]),
        "purpose": row["purpose"],
        "group": row["group_id"],
        "task": row["task_id"],
        "environment": row["environment"],
        "answer": row["answer"],
        "status": row["status"],
        "not trained": row["not_trained"],
        "error": row["error"],
        "advantage": None if row["advantage"] is None else number(row["advantage"]),
        "metrics": _named_numbers(row["metrics"]),
        "seconds": _named_numbers(row["seconds"]),
        "info": row["info"],
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


def _plain(text: str) -> Text:
    return Text(escape_line(text))
