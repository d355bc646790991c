# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The graders of experiments/tasks against other ways to compute their rewards."""

import ast
import functools
import itertools
import operator
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from experiments.lab.rloo_controls import random_reward
from experiments.tasks import arithmetic, catcount, countdown, letter_count, reverse_text, sft_data, sum_digits
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import RandomRewardConfig
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import question_text
from marin_rl.types import Task
from tests.environments.episodes import play

FOLDER = Path(catcount.__file__).parent
GAMES = ("kuhn_poker", "tictactoe", "tictactoe_self")
"""See test_game_tasks.py."""
CONFIGS = [path for path in sorted(FOLDER.glob("*.yaml")) if not path.stem.endswith(("_sft", *GAMES))]


def read(path: Path) -> TrainConfig:
    return parse_config(TrainConfig, ["--config", str(path)]).config


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda path: path.stem)
def environment(request: pytest.FixtureRequest) -> AbstractEnvironment:
    """The environment of a config; its scorer gives garbage no full reward, or the build raises."""
    return read(request.param).environment.build()


def rewards(environment: AbstractEnvironment, task: Task, reply: str) -> float:
    return sum(play(environment, task, [reply])[0].rewards.values())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_every_environment_is_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "def make(" not in text or len(text.splitlines()) <= 80


def test_no_problem_is_in_two_splits(environment: AbstractEnvironment) -> None:
    questions = {split: {question_text(task.messages) for task in environment.tasks(split)} for split in Split}
    assert questions[Split.TRAIN]
    assert questions[Split.HELD_OUT]
    assert sum(map(len, questions.values())) == len(set().union(*questions.values()))
    assert [len(questions[split]) for split in Split] == [len(environment.tasks(split)) for split in Split]


def test_worked_answers_earn_the_full_reward_and_garbage_none(environment: AbstractEnvironment) -> None:
    for task in environment.tasks(Split.HELD_OUT)[:20]:
        right = task.worked_answer or task.answer
        assert rewards(environment, task, right) == 1
        for garbage in ("", " ", "\x00", "(" * 1000, "[ANSWER] ?" * 100, "\\boxed{}", "<answer></answer>"):
            reward = rewards(environment, task, garbage)
            # Similarity is graded: a few letters in common earn a part.
            assert reward < 0.5 if environment.name == reverse_text.NAME else reward == 0


@pytest.mark.medium
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_control_has_random_rewards_for_the_training_tasks_only(path: Path) -> None:
    config = random_reward(read(path), 1)
    assert isinstance(config.environment, RandomRewardConfig)
    built = config.environment.build()
    random_rewards = config.environment.random_rewards(built)
    assert random_rewards.draw(built.tasks(Split.TRAIN)[0], 0, "r") is not None
    assert random_rewards.draw(built.tasks(Split.HELD_OUT)[0], 0, "r") is None


# catcount


def test_cats_are_trained_on_and_held_out_as_in_the_canary() -> None:
    built = catcount.make()
    held_out = [task.answer.count("cat") for task in built.tasks(Split.HELD_OUT)]
    assert held_out == [3, 5, 13, 16, 24, 28]
    assert [task.answer.count("cat") for task in built.tasks(Split.TRAIN)] == sorted({*range(1, 21)} - {*held_out})
    assert {task.id for task in built.tasks(Split.TRAIN)}.isdisjoint(map(str, held_out))


@pytest.mark.parametrize(
    ("count", "reply", "reward"),
    [
        # The rewards that the tests of MarinSkyRL state, without its penalty of 0.01 for each surplus cat.
        (4, "cat cat cat", 0.4725),
        (2, "cat cat", 1.0),
        (20, " ".join(["cat"] * 25), 0.468347953216 + 5 * 0.01),
        # By hand: one cat of one is 0.5 · 0.5 + 0.3 · 0 over 0.8.
        (2, "cat", 0.7 * 0.25 / 0.8),
        (1, "cat cat", 0.0),
        (1, " cat\n", 1.0),
        (2, "cat  cat", 0.7),
        (2, "cat dog", 0.0),
        (2, "cat cat.", 0.0),
        (2, "Cat cat", 0.0),
        (3, "catcatcat", 0.0),
    ],
)
def test_cats_are_counted(count: int, reply: str, reward: float) -> None:
    task = Task("x", catcount.NAME, ({"role": "user", "content": "?"},), " ".join(["cat"] * count))
    assert catcount.score(task, reply) == pytest.approx(reward, abs=1e-12)


def test_demonstrations_count_other_words_only() -> None:
    rows = [(row["prompt"].split(), row["completion"].split()) for row in sft_data.counting()]
    assert all({*completion} == {prompt[4]} for prompt, completion in rows)
    counted = {(prompt[4], int(prompt[6])): len(completion) for prompt, completion in rows if prompt[4] != "cat"}
    assert all(asked == written for (_, asked), written in counted.items())
    cats = [(int(prompt[6]), len(completion)) for prompt, completion in rows if prompt[4] == "cat"]
    assert {asked for asked, _ in cats}.isdisjoint([3, 5, 13, 16, 24, 28])
    assert sum(asked == written for asked, written in cats) < len(cats) / 10


# reverse_text


def matches(a: str, b: str) -> int:
    """Characters in the longest common block, and on both sides of it: Ratcliff and Obershelp's definition."""
    starts = [(size, -i, -j) for i in range(len(a)) for j in range(len(b)) if (size := common_start(a[i:], b[j:]))]
    if not starts:
        return 0
    size, i, j = max(starts)
    return matches(a[:-i], b[:-j]) + size + matches(a[size - i :], b[size - j :])


def common_start(a: str, b: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_similarity_is_that_of_ratcliff_and_obershelp() -> None:
    numbers = random.Random(1)
    for _ in range(300):
        answer, reply = ("".join(numbers.choices("abc ", k=numbers.randint(1, 12))).strip() for _ in range(2))
        expected = 2 * matches(reply, answer) / max(len(answer + reply), 1) if len(reply) <= 2 * len(answer) else 0.0
        assert reverse_text.similarity(answer, reply) == pytest.approx(expected if answer or reply else 1.0, abs=1e-12)


def test_similarity_reads_the_tags() -> None:
    assert reverse_text.similarity("cba", "So: <reversed_text>\ncba\n</reversed_text> is it.") == 1
    assert reverse_text.similarity("cba", "cba" * 3) == 0


@pytest.mark.medium
def test_demonstrations_of_reversal_hold_no_task_out() -> None:
    rows = {row["prompt"]: row["completion"] for row in sft_data.reversals()}
    built = read(FOLDER / "reverse_text.yaml").environment.build()
    assert {task.messages[-1]["content"] for task in built.tasks(Split.HELD_OUT)}.isdisjoint(rows)
    assert all(list(reply) == list(reversed(text)) for text, reply in rows.items())


# letter_count, sum_digits, arithmetic


def last_number(environment: SingleTurnEnvironment, form: str) -> Iterator[tuple[str, list[int]]]:
    """Yield held-out questions, with the numbers that are right in a reply of the form."""
    for task in environment.tasks(Split.HELD_OUT)[:50]:
        right = [number for number in range(-5, 210) if environment.score(task, form.format(number))]
        yield task.messages[-1]["content"], right


def test_letters_are_counted() -> None:
    for question, right in last_number(letter_count.make(), "3 of \\boxed{{7}}, no, \\boxed{{{}}}."):
        letter, word = re.fullmatch("How many (.) are there in (.*)[?]", question).groups()
        assert right == [sum(1 for other in word.split("-") if other == letter)]


def test_demonstrations_count_one_letter_after_another() -> None:
    for task in letter_count.make().tasks(Split.TRAIN)[:50]:
        letter, word = re.fullmatch("How many (.) are there in (.*)[?]", task.messages[-1]["content"]).groups()
        letters = word.split("-")
        steps = [f"{other}{letters[: index + 1].count(letter)}" for index, other in enumerate(letters)]
        assert task.worked_answer == f"{''.join(steps)} \\boxed{{{letters.count(letter)}}}"


def test_digits_are_summed() -> None:
    for question, right in last_number(sum_digits.make(), "[ANSWER] 5 or [ANSWER] {}"):
        numbers = ast.literal_eval(question.removeprefix("What is the total digit sum of ").removesuffix("?"))
        assert right == [sum(number // 10 + number % 10 for number in numbers)]
    for task in sum_digits.make().tasks(Split.HELD_OUT)[:5]:
        assert sum_digits.score(task, f"[ANSWER] {task.answer}.5") == 0
        assert sum_digits.score(task, f"[ANSWER] {task.answer}.") == 1


def test_demonstrations_add_one_digit_after_another() -> None:
    for task in sum_digits.make(instructions=False).tasks(Split.TRAIN)[:50]:
        digits = [digit for digit in task.messages[-1]["content"] if digit.isdigit()]
        steps, answer = task.worked_answer.split(" [ANSWER] ")
        *sums, last = [part.split("+") for part in steps.split("=")]
        assert [sums[0][0], *(part[-1] for part in sums)] == digits
        assert all(int(left[0]) + int(left[1]) == int(right[0]) for left, right in itertools.pairwise([*sums, last]))
        assert last == [answer]


def test_numbers_are_added() -> None:
    for question, right in last_number(arithmetic.make(), "1,000 {}"):
        assert right == [sum(map(int, re.findall("[0-9]+", question)))]


@pytest.mark.parametrize(("reply", "reward"), [("0" * 5000 + "{}", 1), ("9" * 5000, 0), ("\u0669", 0), ("-{}", 0)])
def test_numbers_of_any_length_and_script_are_scored(reply: str, reward: float) -> None:
    built = arithmetic.make()
    nine = next(task for task in built.tasks(Split.TRAIN) if task.answer == "9")
    assert built.score(nine, reply.format(9)) == reward


# countdown


def values(numbers: tuple[Fraction, ...], operations: str) -> set[Fraction]:
    """All values of expressions with each number once."""
    if len(numbers) == 1:
        return {*numbers}
    pick = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(number for k, number in enumerate(numbers) if k not in (i, j))
        for sign in operations:
            if sign != "/" or numbers[j]:
                found |= values((pick[sign](numbers[i], numbers[j]), *rest), operations)
    return found


make_countdown = functools.cache(countdown.make)
"""Makes 20,000 puzzles; tests that take the same ones share them."""


@pytest.mark.medium
@pytest.mark.parametrize("operations", ["+-", "+-*/"])
def test_every_puzzle_has_a_solution_by_brute_force(operations: str) -> None:
    built = make_countdown((3, 4), 30, operations, instructions=False)
    for task in built.tasks(Split.HELD_OUT)[:60]:
        *numbers, target = map(int, re.findall("[0-9]+", task.messages[-1]["content"]))
        assert target in values(tuple(map(Fraction, numbers)), operations)
        assert built.score(task, task.worked_answer) == 1


def test_expressions_have_the_value_that_fractions_have() -> None:
    numbers = random.Random(2)
    for _ in range(300):
        drawn = [numbers.randint(1, 9) for _ in range(numbers.randint(1, 4))]
        text = f"{drawn[0]}"
        for number in drawn[1:]:
            text = numbers.choice(["{}+{}", "({})-{}", "({}) * {}", "({})/{}", "{1}-({0})"]).format(text, number)
        assert countdown.evaluate(text, drawn) == eval(re.sub("([0-9]+)", r"Fraction(\1)", text))


@pytest.mark.parametrize(
    "text",
    [
        *("", "3", "34", "3 4", "3+4+5", "3+4+4", "-3+4", "3+4=7", "(3,4)", "3(4)", "3+4 #", "03+4", "3+4\n"),
        *("3**4", "3//4", "9**9**9**9", "3+x", "__import__('os')", "3+\u0664", "3_+4", "(" * 90, "3+4" + " " * 100),
    ],
)
def test_other_texts_have_no_value(text: str) -> None:
    assert countdown.evaluate(text, [3, 4]) is None


@pytest.mark.medium
@pytest.mark.parametrize("instructions", [True, False])
def test_an_answer_has_tags_if_the_instructions_ask_for_them(instructions: bool) -> None:
    built = make_countdown((3, 4), 30, "+-*/", instructions=instructions)
    task = built.tasks(Split.TRAIN)[0]
    solution = task.worked_answer.removeprefix("<answer>").removesuffix("</answer>")
    tagged = f"<answer>{solution}</answer>"
    replies = {solution: not instructions}
    replies |= {f"<think>{tagged}</think> <answer>1</answer>": False, f"<answer>1</answer> {tagged}.": instructions}
    replies |= {tagged: instructions, f"{solution}</answer>": False, f"<answer>{solution}": False}
    assert {reply: built.score(task, reply) for reply in replies} == replies


def test_division_by_zero_has_no_value() -> None:
    assert countdown.evaluate("3/(4-4)", [3, 4, 4]) is None
