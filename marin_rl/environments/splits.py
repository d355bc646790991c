# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From a stream of problems to three disjoint splits, without duplicates."""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence

from marin_rl.environments.base import Split, split_of
from marin_rl.types import Task

logger = logging.getLogger(__name__)

TaskSplits = Mapping[Split, Sequence[Task]]
"""The tasks of each split, in the order in which they came."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A task with the text by which it is told from others."""

    text: str
    """What is asked, without system prompt and template: equal texts are one problem."""
    task: Task
    """The task itself."""
    where: str
    """Where it comes from (file and line, item), for messages."""


def problem_id(text: str) -> str:
    """An id that equal problem texts share: 16 hexadecimal digits.

    >>> problem_id("12+34=")
    'c6668a5137bbbd2d'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_shares(held_out: float, validation: float) -> None:
    """Check the shares of the held-out and the validation split.

    Raises:
        ValueError: if one is not in [0, 1), or both together leave nothing to train on.
    """
    for field, share in (("held_out", held_out), ("validation", validation)):
        if not 0.0 <= share < 1.0:
            raise ValueError(f"{field} is {share}; it is a share of all problems, at least 0 and below 1")
    if held_out + validation >= 1.0:
        raise ValueError(
            f"held_out {held_out} and validation {validation} add up to {held_out + validation}; "
            "that leaves nothing to train on: lower one of them"
        )


def without_duplicates(problems: Iterable[Problem], source: str) -> list[Problem]:
    """The first of every problem text; how many were dropped is logged.

    Args:
        problems: in order.
        source: what they come from, for messages.

    Raises:
        ValueError: if there is no problem at all, or if two different ones share an id.
    """
    first: dict[str, Problem] = {}
    ids: dict[str, Problem] = {}
    repeated = contradicting = 0
    for problem in problems:
        earlier = first.setdefault(problem.text, problem)
        if earlier is not problem:
            repeated += 1
            contradicting += earlier.task.answer != problem.task.answer
            continue
        same_id = ids.setdefault(problem.task.id, problem)
        if same_id is not problem:
            raise ValueError(
                f"{problem.where}: id {problem.task.id!r} is already taken by another problem at {same_id.where}; "
                "make ids unique, or leave them out"
            )
    if not first:
        raise ValueError(f"{source} is empty: it has no problem to attempt")
    if contradicting:
        logger.warning("%s: %d repeated problems give another answer; the first is kept", source, contradicting)
    logger.info("%s: %d distinct problems, %d repetitions dropped", source, len(first), repeated)
    return list(first.values())


def split_problems(problems: Sequence[Problem], held_out: float, validation: float, source: str) -> TaskSplits:
    """Divide distinct problems by the hash of their texts.

    Args:
        problems: without duplicates.
        held_out: share of held-out problems, in [0, 1).
        validation: share of validation problems, in [0, 1).
        source: what they come from, for messages.

    Returns:
        The tasks of all three splits; empty only where the share is 0.

    Raises:
        ValueError: if a split that should have problems gets none.
    """
    splits: dict[Split, list[Task]] = {split: [] for split in Split}
    for problem in problems:
        splits[split_of(problem.text, held_out, validation)].append(problem.task)
    shares = {Split.TRAIN: 1.0, Split.VALIDATION: validation, Split.HELD_OUT: held_out}
    for split, tasks in splits.items():
        if shares[split] > 0 and not tasks:
            raise ValueError(
                f"{source}: none of its {len(problems)} problems fell into the {split.value} split; "
                f"give more problems, or other shares than held_out {held_out} and validation {validation}"
            )
    return splits
