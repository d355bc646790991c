# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.rewards.grading import FormatConfig
from tests.one_reply import answer


def all_tasks(environment: AbstractEnvironment):
    return [task for split in Split for task in environment.tasks(split)]


def prompts(environment: AbstractEnvironment, split: Split) -> list[str]:
    return [task.messages[-1]["content"] for task in environment.tasks(split)]


@given(
    terms=st.integers(2, 4),
    digits=st.integers(1, 3),
    operations=st.sampled_from(["+", "-", "+-"]),
    reverse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_answers_are_right_and_worked_answers_earn_the_full_reward(terms, digits, operations, reverse, seed):
    config = ArithmeticConfig(
        terms=terms,
        digits=digits,
        operations=operations,
        reverse_answer=reverse,
        seed=seed,
        size=20,
        held_out=0.0,
        validation=0.0,
    )
    environment = config.build()
    for task in all_tasks(environment):
        text = task.messages[-1]["content"]
        numbers = text.rstrip("=").replace("-", "+").split("+")
        assert len(numbers) == terms
        assert all(len(number) <= digits for number in numbers)
        # eval is the oracle; numbers have no leading zeros.
        result = str(eval(text.rstrip("=")))
        assert task.worked_answer == task.answer == (result[::-1] if reverse else result)
        assert answer(environment, task, task.worked_answer).rewards == {"correct": 1.0}


def test_all_distinct_problems_can_be_drawn():
    environment = ArithmeticConfig(terms=2, digits=1, size=200).build()
    again = ArithmeticConfig(terms=2, digits=1, size=200).build()
    assert [environment.tasks(split) for split in Split] == [again.tasks(split) for split in Split]
    # The number of problems may exceed a machine word.
    assert len(all_tasks(ArithmeticConfig(terms=5, digits=9, size=10, held_out=0.0, validation=0.0).build())) == 10
    expected = {f"{a}{sign}{b}=" for a in range(10) for b in range(10) for sign in "+-"}
    assert {task.messages[-1]["content"] for task in all_tasks(environment)} == expected


def test_exact_reply_is_required():
    format = FormatConfig(regex=r"\d\d", weight=0.1)
    environment = ArithmeticConfig(size=200, reverse_answer=True, format=format).build()
    task = next(task for task in environment.tasks(Split.TRAIN) if len(task.answer) == 2 and len(set(task.answer)) == 2)
    for reply, form in ((task.answer[::-1], 0.1), (task.answer + "0", 0.0), (" " + task.answer, 0.0), ("", 0.0)):
        assert answer(environment, task, reply).rewards == {"correct": 0.0, "format": form}


def test_splits_are_disjoint_and_do_not_depend_on_the_seed():
    built = [ArithmeticConfig(seed=seed, size=5000).build() for seed in (1, 2)]
    train, validation, held_out = ({text for made in built for text in prompts(made, split)} for split in Split)
    assert min(map(len, (train, validation, held_out))) > 0
    assert len(train | validation | held_out) == len(train) + len(validation) + len(held_out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operations": "*"}, r"operations is '\*'"),
        ({"size": 0}, "size is 0"),
        ({"digits": 1, "size": 201}, "size is 201; .* 1 to 200 distinct"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig(**fields)
