# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Splits of tasks: deduplication of problems and their division into three disjoint splits."""

import dataclasses
import enum
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from marin_rl.types import Message, Task

logger = logging.getLogger(__name__)


class Split(enum.StrEnum):
    """Split of an environment's tasks; no problem text is in two splits."""

    TRAIN = "train"
    """Tasks for the warm start and RL training."""
    VALIDATION = "validation"
    """Tasks for tuning and for the stopping criterion of the warm start."""
    HELD_OUT = "held_out"
    """Tasks for the reported accuracy only."""


TaskSplits = Mapping[Split, Sequence[Task]]
"""Tasks of each split, in their original order."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A task with the text that identifies it."""

    text: str
    """Question without system prompt and template; problems with equal texts are duplicates."""
    task: Task
    """The task."""
    where: str
    """Origin (file and line, item), for messages."""
    copies: int = 1
    """Number of problems with this text, before duplicates were removed."""


def problem_id(text: str) -> str:
    """Return an id shared by equal problem texts: 16 hexadecimal digits.

    >>> problem_id("12+34=")
    'c6668a5137bbbd2d'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_problem_id(id: str) -> bool:
    """Return whether an id has the form of a `problem_id`, so that it identifies a problem in every environment."""
    return re.fullmatch("[0-9a-f]{16}", id) is not None


def question_text(messages: Sequence[Message]) -> str:
    """Return the text that identifies a question: the content of a single user message, JSON of other messages.

    System messages and differences in white space are ignored, because copies of a question often differ in them only
    and must be in the same split.

    >>> question_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12 +  34 ="}])
    '12 + 34 ='
    """
    # System messages alone are the question.
    asked = [message for message in messages if message["role"] != "system"] or messages
    texts = [" ".join(message["content"].split()) for message in asked]
    if len(asked) == 1 and asked[0]["role"] == "user":
        return texts[0]
    roles = [message["role"] for message in asked]
    return json.dumps([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])


def split_of(problem: str, held_out: float, validation: float) -> Split:
    """Return the split of a problem, determined by the hash of its text on every machine and for every seed.

    `problem` is the complete text. `held_out` and `validation` are shares of all problems, in [0, 1).

    >>> split_of("2+3=", 0.1, 0.1) is split_of("2+3=", 0.1, 0.1)
    True
    """
    position = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8], "big") / 2**64
    if position < held_out:
        return Split.HELD_OUT
    if position < held_out + validation:
        return Split.VALIDATION
    return Split.TRAIN


def check_shares(held_out: float, validation: float) -> None:
    """Check that the held-out and validation splits leave training tasks.

    Raises:
        ValueError: if their shares add up to 1 or more.
    """
    if held_out + validation >= 1.0:
        raise ValueError(
            f"held_out {held_out} and validation {validation} add up to {held_out + validation}, "
            "which leaves no training tasks; lower one of them"
        )


def without_duplicates(problems: Iterable[Problem], source: str) -> list[Problem]:
    """Keep the first problem of each text, with its number of copies, and log the number of removed duplicates.

    Messages name the origin of the problems, `source`.

    Raises:
        ValueError: if there are no problems, or two different problems share an id.
    """
    first: dict[str, Problem] = {}
    ids: dict[str, Problem] = {}
    copies = Counter[str]()
    contradicting: list[Problem] = []
    for problem in problems:
        copies[problem.text] += 1
        earlier = first.setdefault(problem.text, problem)
        if earlier is not problem:
            if earlier.task.answer != problem.task.answer:
                contradicting.append(problem)
            continue
        same_id = ids.setdefault(problem.task.id, problem)
        if same_id is not problem:
            raise ValueError(
                f"{problem.where}: id {problem.task.id!r} is also the id of another problem at {same_id.where}; "
                "make ids unique, or omit them"
            )
    if not first:
        raise ValueError(f"{source} is empty: it has no problems")
    if contradicting:
        second = contradicting[0]
        logger.warning(
            "%s: the answer of %d of the repeated problems differs from that of the first copy, which is kept; %s has "
            "%r, %s has %r",
            source,
            len(contradicting),
            first[second.text].where,
            first[second.text].task.answer,
            second.where,
            second.task.answer,
        )
    logger.info("%s: %d distinct problems, %d duplicates removed", source, len(first), copies.total() - len(first))
    return [dataclasses.replace(problem, copies=copies[text]) for text, problem in first.items()]


class EmptySplitError(ValueError):
    """A split with a positive share would be empty."""


def split_problems(problems: Sequence[Problem], held_out: float, validation: float, source: str) -> TaskSplits:
    """Divide distinct problems by the hash of their texts.

    `held_out` and `validation` are shares of all problems, in [0, 1). A split is empty only if its share is 0. Messages
    name the origin of the problems, `source`.

    Raises:
        EmptySplitError: if a split with a positive share would be empty.
    """
    splits: dict[Split, list[Task]] = {split: [] for split in Split}
    for problem in problems:
        splits[split_of(problem.text, held_out, validation)].append(problem.task)
    shares = {Split.TRAIN: 1.0, Split.VALIDATION: validation, Split.HELD_OUT: held_out}
    for split, tasks in splits.items():
        if shares[split] > 0 and not tasks:
            total = sum(problem.copies for problem in problems)
            repeated = f" ({total - len(problems)} of all {total} are duplicates)" if total > len(problems) else ""
            raise EmptySplitError(
                f"{source}: none of its {len(problems)} distinct problems{repeated} fell into the {split.value} split; "
                f"add problems with other texts, or use other shares than held_out {held_out} and validation "
                f"{validation}"
            )
    return splits
