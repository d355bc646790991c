# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A rollout in one line: its prompt, the right answer, its reply, and the reason of its reward."""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from marin_rl.utils.output import shorten

Row = Mapping[str, Any]
"""A stored rollout, as a mapping of its columns."""

COLUMNS = (
    *("answer", "status", "error", "not_trained", "rewards", "evaluations", "metrics", "num_turns", "turns", "info"),
    "num_generated_tokens",
)
"""Columns that `summarize` reads."""
MAX_TEXT = 200
"""Maximum characters of a text in a list; the middle of longer ones is left out."""
SHORT_PROMPT = 40
"""Characters of a prompt that is shown whole, even if others begin or end like it."""

_TESTS = re.compile(r'\s*\{\s*"(?:calls|cases|tolerance)"\s*:')
"""Start of the tests of the reward component `code`, which are no answer."""


class Summary(NamedTuple):
    """The texts of a rollout in a list; empty if it has none."""

    prompt: str
    """The last message of the user, or another role, before the first reply; whole."""
    answer: str
    """The right answer."""
    reply: str
    """The last reply."""
    reason: str
    """Why the rollout has its reward, or none."""


def summarize(row: Row) -> Summary:
    """Return the texts of a rollout, a row with `COLUMNS`."""
    answer = row["answer"] or ""
    texts = "" if _TESTS.match(answer) else answer, _last_reply(row), reason_of(row)
    return Summary(_prompt(row), *(shorten(text, MAX_TEXT) for text in texts))


def _prompt(row: Row) -> str:
    messages = row["turns"][0]["messages"][:-1] if row["turns"] else ()
    asked = [message for message in messages if message["role"] == "user"] or messages
    return (asked[-1]["content"] or "") if asked else ""


def _last_reply(row: Row) -> str:
    messages = row["turns"][-1]["messages"] if row["turns"] else ()
    return (messages[-1]["content"] or "") if messages else ""


def reason_of(row: Row) -> str:
    """Explain the reward of a rollout: why it has none or was cut off, and what its rewards are for."""
    if row["error"]:
        return f"{row['status'].replace('_', ' ')}: {_first_line(row['error'])}"
    # Where the middle of a reason is left out, what differs between rollouts and the limit remain.
    parts = [*_explanations(row), _limit(row)]
    return "; ".join(part for part in parts if part)


def _first_line(error: str) -> str:
    """The sentence of an error, without the frames of the user's code below it."""
    return error.partition("\n")[0]


def _limit(row: Row) -> str:
    """State the limit that cut a rollout off, and whether it was left out of training for that."""
    if row["status"] != "truncated":
        return ""
    masked = ", not trained" if row["not_trained"] == "masked" else ""
    if row["turns"] and row["turns"][-1]["stop_reason"] != "length":
        return f"stopped at {row['num_turns']} turns{masked}"
    return f"cut off at {row['num_generated_tokens']} tokens{masked}"


def _explanations(row: Row) -> Iterator[str]:
    """The environment's reason, and that of the component with the lowest reward; else the worst turn."""
    given = _info(row).get("reason")
    if isinstance(given, str):
        yield given
    explained = [(_reward(result), text) for result in row["evaluations"] if (text := _explanation(result))]
    if explained:
        text = min(explained, key=lambda pair: pair[0])[1]
        yield text
    elif given is None and row["num_turns"] > 1:
        yield _worst_turn(row)


def _reward(result: Row) -> float:
    return 0.0 if result["score"] is None else result["weight"] * result["score"]


def _explanation(result: Row) -> str:
    """A component's own text, or that of the step with its lowest reward."""
    texts = [result["reason"], _first_line(result["error"] or "")]
    steps = [step for step in result["steps"] if step["reason"]]
    if steps and not result["reason"]:
        worst = min(steps, key=lambda step: result["weight"] * step["base_reward"])
        texts.append(f"turn {worst['turn']}: {worst['reason']}")
    return " · ".join(text for text in texts if text)


def _worst_turn(row: Row) -> str:
    """The turn with the lowest reward below 0, or the number of invalid actions of a game."""
    rewards = [(reward, turn, name) for turn, each in enumerate(row["turns"]) for name, reward in each["rewards"]]
    reward, turn, name = min(rewards, default=(0.0, 0, ""))
    if reward < 0:
        return f"turn {turn}: {name} {reward:g}"
    invalid = dict(row["metrics"]).get("invalid_actions", 0.0)
    return f"{invalid:g} replies without a valid action" if invalid else ""


def _info(row: Row) -> dict[str, Any]:
    try:
        info = json.loads(row["info"] or "{}")
    except ValueError:
        # An edited file is shown as it is.
        info = None
    return info if isinstance(info, dict) else {}


def info_text(row: Row) -> str:
    """Return the metadata of a rollout without its reason, as JSON; empty if there is none."""
    info = _info(row)
    if "reason" not in info:
        return row["info"] or ""
    del info["reason"]
    return json.dumps(info) if info else ""


def shorten_prompts(prompts: Sequence[str], environments: Sequence[str]) -> list[str]:
    """Shorten prompts for a list. Words with which all long prompts of an environment begin or end are left out.

    >>> shorten_prompts([f"Solve the problem and reply with a number: {a}+1" for a in "12"], ["sums", "sums"])
    ['…1+1', '…2+1']
    """
    distinct: dict[str, set[str]] = {}
    for prompt, environment in zip(prompts, environments, strict=True):
        if prompt:
            distinct.setdefault(environment, set()).add(prompt)
    shared = {environment: _shared_ends(texts) for environment, texts in distinct.items()}
    return [
        _inside(prompt, *shared.get(name, (0, 0))) if prompt else ""
        for prompt, name in zip(prompts, environments, strict=True)
    ]


def _shared_ends(prompts: Collection[str]) -> tuple[int, int]:
    """Number of characters in the whole words that all prompts begin with, and of those that they end with."""
    if len(prompts) < 2 or max(map(len, prompts)) <= SHORT_PROMPT:
        return 0, 0
    start = _shared_start(prompts)
    return start, _shared_start([prompt[start:][::-1] for prompt in prompts])


def _shared_start(texts: Collection[str]) -> int:
    # All texts share what the first and the last in alphabetical order share.
    pairs = zip(min(texts), max(texts), strict=False)
    shared = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return len(shared) if not shared or shared[-1].isspace() else len(shared) - len(shared.split()[-1])


def _inside(prompt: str, start: int, end: int) -> str:
    text = prompt[start : len(prompt) - end].strip()
    return shorten(f"{'…' if start else ''}{text}{'…' if end else ''}", MAX_TEXT)
