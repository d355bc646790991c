# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import builtins

import pytest
import reasoning_gym
import reasoning_gym.factory
import sympy

from marin_rl.rewards import grading_process, reasoning_gym_worker
from marin_rl.rewards.grading_process import ask
from marin_rl.rewards.reasoning_gym_worker import answer, evaluate

GRADER = "marin_rl.rewards.reasoning_gym_worker:open_grader"
# The names that sympy's parser passes.
NAMES = {**vars(sympy), **vars(builtins)}


def request(task: str, size: int = 5, **fields) -> dict:
    return {"dataset": {"task": task, "options": {}, "seed": 0, "size": size}, **fields}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("(3 + 4) * 2", 14),
        (" [['Q', '_'], ['_', 'Q']] ", [["Q", "_"], ["_", "Q"]]),
        ("{'a': (1, -2.5), 'b': {3}}", {"a": (1, -2.5), "b": {3}}),
        ("0x1f ^ 3 << 2", 0x1F ^ 3 << 2),
        ("True and 1 < 2", True),
        ("Integer(24)/Integer(5)", sympy.Rational(24, 5)),
        ("sqrt(Symbol('x')**2) + pi", sympy.sqrt(sympy.Symbol("x") ** 2) + sympy.pi),
        ("abs(Integer(-3))", sympy.Integer(3)),
    ],
)
def test_expressions_of_literals_operators_and_mathematics(source: str, value: object):
    assert evaluate(source, NAMES) == value == evaluate(source, {}, NAMES)


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os').abort()", "().__class__.__base__.__subclasses__()", "exit()", "open('/etc/passwd')",
        "eval('1')", "exec('1')", "getattr(1, 'real')", "print(1)", "type('X', (str,), {})", "lambdify([], '1')",
        "sympify('1')", "preview(1)", "(lambda: 1)()", "[x for x in (1,)]", "[*[1]]", "f'{1}'", "(x := 1)",
        "Symbol.__init__", "[1][0]", "undefined",
    ],
)  # fmt: skip
def test_other_expressions_are_refused(source: str):
    for names in ((NAMES,), (), ({}, NAMES)):
        with pytest.raises(ValueError, match="is not allowed in an expression"):
            evaluate(source, *names)


@pytest.mark.parametrize(
    ("right", "raised"), [("7", None), (None, None), ("8", "raised for '8': ValueError"), (None, "raised for ''")]
)
def test_a_reply_is_wrong_if_only_its_scoring_raises(monkeypatch, right: str | None, raised: str | None):
    def score(self, text, entry) -> float:
        if text == "odd" or raised:
            raise ValueError("odd")
        return 0.5

    dataset = reasoning_gym.factory.DATASETS["chain_sum"][0]
    monkeypatch.setattr(dataset, "score_answer", score)
    monkeypatch.setattr(dataset, "__getitem__", lambda self, item: {"question": "3+4=", "answer": right})
    reasoning_gym_worker._entry.cache_clear()
    response = answer(request("chain_sum", item=0, question="3+4=", reply="odd"))
    reasoning_gym_worker._entry.cache_clear()
    assert response == {"score": 0.0} if raised is None else raised in response["error"]


@pytest.mark.medium
@pytest.mark.parametrize("task", ["countdown", "puzzle24"])
def test_only_arithmetic_with_the_given_numbers_is_right(task: str):
    source = reasoning_gym.create_dataset(task, seed=0, size=20)
    for item in range(20):
        entry = source[item]
        numbers = entry["metadata"]["numbers"]
        difference = entry["metadata"].get("target", 24) - sum(numbers)
        total, steps = "+".join(map(str, numbers)), abs(difference)
        if steps == 0:
            continue
        wrong = [
            f"{' and '.join(map(str, numbers))} and {'+'.join(['True'] * (difference + sum(numbers)))}",
            f"{'-~' * steps if difference > 0 else '~-' * steps}({total})",
            f"{total}{'+' if difference > 0 else '-'}{steps}e0",
            f"{total}{'+' if difference > 0 else '-'}{hex(steps)}",
            total + ("+sign(pi)" if difference > 0 else "-sign(pi)") * steps,
            f"{total}{'+' if difference > 0 else '-'}{steps}",
            "6*4+1-1" if sorted(numbers) != [1, 1, 4, 6] else "24",
        ]
        fields = {"item": item, "question": entry["question"]}
        assert [answer(request(task, 20, reply=reply, **fields))["score"] for reply in wrong] == [0.0] * len(wrong)
        assert answer(request(task, 20, reply=f" {entry['answer']}\n", **fields))["score"] == 1.0


def test_another_problem_of_the_same_number_is_an_error():
    assert "is not repeatable: item 0 is" in answer(request("gcd", item=0, question="another", reply="1"))["error"]


@pytest.mark.medium
def test_processes_draw_the_same_problems():
    # The problems of these tasks depend on the order of sets, or on Python's global random state.
    tasks = "isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note"
    drawn = [ask(GRADER, request(task, items=[0, 3]), 60.0)["problems"] for task in tasks]
    # Ends the processes; the next request starts another.
    grading_process._pool.cache_clear()
    for task, problems in zip(tasks, drawn, strict=True):
        assert ask(GRADER, request(task, items=[2, 3]), 60.0)["problems"] == problems[2:]
