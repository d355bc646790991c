# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write middle_digits.jsonl, 1,000 problems: `python experiments/data/make_middle_digits.py`."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).with_name("middle_digits.jsonl")


def problems() -> Iterator[dict[str, str]]:
    """Yield the problems in file order: three digits, of which the answer is the middle one."""
    for digits in itertools.product("0123456789", repeat=3):
        yield {"prompt": "".join(digits), "answer": digits[1], "worked_answer": digits[1]}


if __name__ == "__main__":
    OUTPUT.write_text("".join(f"{json.dumps(problem)}\n" for problem in problems()), encoding="utf-8")
