# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Problems and scores of reasoning-gym, in a [grading process][marin_rl.rewards.grading_process].

Some tasks of reasoning-gym depend on Python's global random state or on the iteration order of sets. Here the state is
seeded for each problem, and the grading processes share one hash seed, so that every process draws the same problems.
"""

import ast
import builtins
import dataclasses
import functools
import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


class DatasetError(ValueError):
    """A task cannot be created, or cannot score; the message names the task and the reason."""


def open_grader() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Import reasoning-gym, whose import must not count towards a reply, and return `answer`."""
    import reasoning_gym  # noqa: F401
    import sympy.parsing.sympy_parser as sympy_parser

    # Scorers pass replies to `eval`, directly or through sympy's parser.
    for name, module in [*sys.modules.items(), (sympy_parser.__name__, sympy_parser)]:
        if name.startswith("reasoning_gym.") or module is sympy_parser:
            vars(module)["eval"] = evaluate
    return answer


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request.

    Args:
        request: `dataset` with `task`, `options`, `seed` and `size`. To create problems, `items`: the first item and
            the one after the last, and `score_answers`. To score, `item`, its `question`, and the `reply`.

    Returns:
        `problems`, a list of questions, answers and, with `score_answers`, the scores of the answers; or `score`; or
        `error` with the reason why there is none.
    """
    dataset = json.dumps(request["dataset"])
    try:
        if "items" in request:
            problem = _scored_problem if request.get("score_answers") else _problem
            return {"problems": [problem(dataset, item) for item in range(*request["items"])]}
        return {"score": _score(dataset, request["item"], request["question"], request["reply"])}
    except DatasetError as error:
        return {"error": str(error)}


def _problem(dataset: str, item: int) -> tuple[str, str | None, float | None]:
    entry = _entry(dataset, item)
    return entry["question"], None if entry["answer"] is None else str(entry["answer"]), None


def _scored_problem(dataset: str, item: int) -> tuple[str, str | None, float | None]:
    question, answer, _ = _problem(dataset, item)
    return question, answer, _score(dataset, item, question, answer or "")


@functools.lru_cache(maxsize=16)
def _dataset(dataset: str) -> "ProceduralDataset":
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    from marin_rl.utils.errors import nearest

    settings = json.loads(dataset)
    task, options = settings["task"], settings["options"]
    if task not in DATASETS:
        raise DatasetError(f"reasoning-gym has no task {task!r}; {nearest(task, sorted(DATASETS))}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for option in options:
        if option not in known:
            raise DatasetError(
                f"reasoning-gym task {task!r} has no option {option!r}; {nearest(option, sorted(known))}"
            )
    try:
        return reasoning_gym.create_dataset(task, seed=settings["seed"], size=settings["size"], **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DatasetError(f"reasoning-gym task {task!r} rejects the options {options}: {error}") from error


@functools.lru_cache(maxsize=20_000)
def _entry(dataset: str, item: int) -> Mapping[str, Any]:
    source = _dataset(dataset)
    random.seed(f"{dataset} {item}")
    try:
        return source[item]
    except Exception as error:
        settings = json.loads(dataset)
        raise DatasetError(
            f"reasoning-gym task {settings['task']!r} with the options {settings['options']} cannot create item "
            f"{item}: {error!r}"
        ) from error


def _score(dataset: str, item: int, question: str, reply: str) -> float:
    entry, source = _entry(dataset, item), _dataset(dataset)
    task = json.loads(dataset)["task"]
    if entry["question"] != question:
        raise DatasetError(
            f"reasoning-gym task {task!r} is not repeatable: item {item} is {entry['question'][:200]!r} in one process "
            f"and {question[:200]!r} in another; use another task"
        )
    # The name of the task, also if the problem is of a task that combines several.
    metadata = entry.get("metadata", {})
    if metadata.get("source_dataset") in _NUMBER_TASKS and not uses_numbers(reply, metadata["numbers"]):
        return 0.0
    try:
        return float(source.score_answer(reply, dict(entry)))
    except Exception:
        # Some scorers raise for text without the expected form (`int("hello")`). Such a reply is wrong, provided that
        # the scorer works: it accepts the answer of the problem, or of problems without one an empty reply.
        right = "" if entry["answer"] is None else entry["answer"]
        try:
            source.score_answer(right, dict(entry))
        except Exception as error:
            raise DatasetError(f"the scorer of reasoning-gym task {task!r} raised for {right!r}: {error!r}") from error
        return 0.0


_NUMBER_TASKS = ("countdown", "puzzle24")
"""Tasks that ask for an expression of given numbers, whose scorers do not read the expression. That of puzzle24 accepts
any four numbers; neither sees those in `True + True`, `1e2`, `0x5e`, `ceiling(pi)` and `~3`."""
_ARITHMETIC = re.compile(r"(?:[-+()0-9\s]|\*(?!\*)|/(?!/))*+")


def uses_numbers(reply: str, numbers: Sequence[int]) -> bool:
    """Return whether an expression has only `+ - * /`, brackets, and each of the numbers once.

    >>> uses_numbers("(8 - 5) * 10 - 6", [5, 6, 8, 10]), uses_numbers("(8 - 5) * 10 - 6 + 1", [5, 6, 8, 10])
    (True, False)
    """
    used = re.findall(r"[0-9]+", reply)
    return _ARITHMETIC.fullmatch(reply) is not None and sorted(used) == sorted(map(str, numbers))


_SYNTAX = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.unaryop, ast.operator, ast.boolop, ast.cmpop),
)
"""Literals, operators, names and calls: no attributes, functions and comprehensions."""
_FUNCTIONS = frozenset({"abs", "cbrt", "max", "min", "pow", "real_root", "root", "round", "sqrt"})


def evaluate(source: str, names: dict[str, Any] | None = None, local: Mapping[str, Any] | None = None) -> Any:
    """Evaluate an expression like `eval`, but only if it consists of literals, operators and mathematics of sympy.

    Args:
        source: the expression.
        names: the names that it may use; sympy passes all of its own, and Python's built-in functions.
        local: further names.

    Raises:
        ValueError: if it contains anything else.

    >>> evaluate("(3 + 4) * 2, [1, 'a']")
    (14, [1, 'a'])
    """
    tree = ast.parse(source.strip(), mode="eval")
    values = {**(names or {}), **(local or {})}
    for node in ast.walk(tree):
        if not isinstance(node, _SYNTAX):
            raise ValueError(f"{type(node).__name__} is not allowed in an expression")
        if isinstance(node, ast.Name) and not _is_mathematics(node.id, values.get(node.id)):
            raise ValueError(f"the name {node.id!r} is not allowed in an expression")
    return builtins.eval(compile(tree, "<reply>", "eval"), {**values, "__builtins__": {}})


def _is_mathematics(name: str, value: object) -> bool:
    import sympy

    return (isinstance(value, type) and issubclass(value, sympy.Basic)) or (
        isinstance(value, sympy.Basic) or (name in _FUNCTIONS and value is not None)
    )
