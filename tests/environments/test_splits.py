# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import logging

import pytest

from marin_rl.environments.splits import Problem, Split, split_of, split_problems, without_duplicates
from marin_rl.types import Message, Task


def problem(text: str, answer: str = "1", id: str | None = None) -> Problem:
    task = Task(
        id=text if id is None else id,
        environment="test",
        messages=(Message(role="user", content=text),),
        answer=answer,
    )
    return Problem(text, task, where=f"row {text}")


def test_splits_of_known_texts_are_fixed():
    # A change would move held-out problems of finished runs into training.
    texts = [f"{a}+{b}=" for a in range(5) for b in range(5)]
    held_out = [text for text in texts if split_of(text, 0.1, 0.1) is Split.HELD_OUT]
    validation = [text for text in texts if split_of(text, 0.1, 0.1) is Split.VALIDATION]
    assert (held_out, validation) == (["4+0=", "4+2="], ["2+1=", "2+2="])


@pytest.mark.parametrize(("held_out", "validation"), [(0.1, 0.05), (0.3, 0.2), (0.0, 0.0)])
def test_splits_have_the_requested_shares(held_out: float, validation: float):
    splits = split_problems([problem(str(i)) for i in range(10_000)], held_out, validation, "test")
    assert len(splits[Split.HELD_OUT]) == pytest.approx(10_000 * held_out, abs=150)
    assert len(splits[Split.VALIDATION]) == pytest.approx(10_000 * validation, abs=150)
    assert sum(len(tasks) for tasks in splits.values()) == 10_000


def test_a_larger_held_out_share_contains_the_smaller_one():
    problems = [f"{a}x{b}" for a in range(50) for b in range(50)]
    small = {problem for problem in problems if split_of(problem, 0.1, 0.0) is Split.HELD_OUT}
    large = {problem for problem in problems if split_of(problem, 0.3, 0.0) is Split.HELD_OUT}
    assert small < large


@pytest.mark.parametrize(
    ("texts", "number"), [("a", "1 distinct problems"), ("aaaab", r"2 distinct problems \(3 of all 5 are duplicates\)")]
)
def test_empty_split_names_the_number_of_problems_and_duplicates(texts: str, number: str):
    with pytest.raises(ValueError, match=rf"test: none of its {number} fell into the \w+ split; .*held_out 0.1"):
        split_problems(without_duplicates(map(problem, texts), "test"), 0.1, 0.1, "test")


def test_duplicates_are_removed_and_logged(caplog):
    with caplog.at_level(logging.INFO):
        kept = without_duplicates([problem("a"), problem("b"), problem("a"), problem("a", "2")], "test")
    assert [kept_one.text for kept_one in kept] == ["a", "b"]
    assert kept[0].task.answer == "1"
    assert "2 distinct problems, 2 duplicates removed" in caplog.text
    assert "row a has '1', row a has '2'" in caplog.text
    for problems, message in (
        ([problem("a", id="x"), problem("b", id="x")], "row b: id 'x' is also the id of another problem at row a"),
        ([], "test is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            without_duplicates(problems, "test")
