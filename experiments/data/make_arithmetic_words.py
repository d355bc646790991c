# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write arithmetic_words.jsonl, 200 distinct word problems: `python experiments/data/make_arithmetic_words.py`."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_PROBLEMS = 200
OUTPUT = Path(__file__).with_name("arithmetic_words.jsonl")

_TEMPLATES: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?", lambda a, b: a + b),
    ("{name} has {a} {thing} and gives away {b}. How many {thing} are left?", lambda a, b: a - b),
    ("There are {b} boxes with {a} {thing} in each. How many {thing} are there?", lambda a, b: a * b),
    ("{name} needs {a} {thing} and has {b}. How many {thing} are missing?", lambda a, b: a - b),
    ("What is {a} plus {b}?", lambda a, b: a + b),
    ("What is {a} minus {b}?", lambda a, b: a - b),
    ("What is {a} times {b}?", lambda a, b: a * b),
    ("Which number is {b} larger than {a}?", lambda a, b: a + b),
)
_NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatou", "Goro", "Hana")
_THINGS = ("apples", "books", "coins", "eggs", "keys", "shells", "stamps")


def problems() -> Iterator[dict[str, str]]:
    """Yield the problems in file order."""
    generator = random.Random(0)
    seen: set[str] = set()
    while len(seen) < NUM_PROBLEMS:
        template, solve = _TEMPLATES[len(seen) % len(_TEMPLATES)]
        a, b = generator.randint(5, 30), generator.randint(2, 9)
        a = max(a, b + 1)
        prompt = template.format(name=generator.choice(_NAMES), thing=generator.choice(_THINGS), a=a, b=b)
        if prompt not in seen:
            seen.add(prompt)
            answer = str(solve(a, b))
            yield {"prompt": prompt, "answer": answer, "worked_answer": answer}


if __name__ == "__main__":
    OUTPUT.write_text("".join(json.dumps(problem) + "\n" for problem in problems()), encoding="utf-8")
