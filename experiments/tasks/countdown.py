# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reach a target with each number once, for `countdown.yaml`: the task of Jiayi-Pan/TinyZero.

The prompt is that of TinyZero without its chat, and so is the reward of 1 for an expression; its 0.1 for the format is
left out. It publishes curves: 0.5B parameters guess an expression and stop, 1.5B to 3B learn to search.
"""

import ast
import random
import re
from fractions import Fraction
from operator import add, mul, sub, truediv

from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Problem, split_problems
from marin_rl.types import Message, Task

NAME = "countdown"
INSTRUCTIONS = """ You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. \
Show your work in <think> </think> tags. And return the final answer in <answer> </answer> tags, \
for example <answer> (1 + 2) / 3 </answer>."""


def make(
    counts: tuple[int, ...] = (3, 4), largest: int = 100, operations: str = "+-*/", instructions: bool = True
) -> SingleTurnEnvironment:
    """Return 20,000 solvable puzzles with targets up to 100; a target with its numbers in any order is in one split."""
    rng, puzzles, problems = random.Random(0), {}, []
    while len(puzzles) < 20_000:
        numbers = rng.choices(range(1, largest + 1), k=rng.choice(counts))
        worked = _combine(rng, [str(number) for number in numbers], operations)
        target = evaluate(worked, numbers)
        question = f"Using the numbers {numbers}, create an equation that equals {target}."
        if target not in range(1, 101) or question in puzzles:
            continue
        puzzles[question] = numbers, target
        prompt = Message(role="user", content=question + INSTRUCTIONS * instructions)
        task = Task(question, NAME, (prompt,), "", f"<answer>{worked}</answer>" if instructions else worked)
        problems.append(Problem(f"{target} {sorted(numbers)}", task, where=question))

    def score(task: Task, reply: str) -> float:
        numbers, target = puzzles[task.id]
        _, tag, tagged = reply.rpartition("</answer>")[0].rpartition("<answer>")
        answer = reply if not instructions else tagged if tag else ""
        return float(evaluate(answer, numbers) == target)

    return SingleTurnEnvironment(NAME, split_problems(problems, 0.1, 0.05, NAME), score)


def evaluate(text: str, numbers: list[int]) -> Fraction | None:
    """Return the value of an expression of + - * / and brackets that has each number once; None if it is none."""
    if not re.fullmatch(r"[-+*/() 0-9]{1,100}", text) or sorted(map(int, re.findall("[0-9]+", text))) != sorted(
        numbers
    ):
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operation, right):
            function = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}[type(operation)]
            return function(_value(left), _value(right))
    raise SyntaxError(f"{node} is not allowed")


def _combine(rng: random.Random, terms: list[str], operations: str) -> str:
    while len(terms) > 1:
        rng.shuffle(terms)
        terms = [f"({terms[0]}{rng.choice(operations)}{terms[1]})", *terms[2:]]
    return terms[0][1:-1]
