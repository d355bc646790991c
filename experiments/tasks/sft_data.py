# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write the data of `catcount_sft.yaml` and `reverse_text_sft.yaml`: `python -m experiments.tasks.sft_data`.

The start of `catcount` counts other words, and writes a random number of cats: RL has to make it count cats. Its
tokenizer has bytes, and a token for each word. The demonstrations of `reverse_text` are training tasks.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from experiments.tasks import catcount, reverse_text
from marin_rl.environments.base import Split
from marin_rl.tokenization.load import byte_tokenizer

FOLDER = Path("runs/tasks")
OTHER_WORDS = ("dog", "hen", "fox", "cow", "pig", "owl", "bee", "ant")


def counting() -> Iterable[dict[str, str]]:
    """Yield every other word with every count up to 30, and five numbers of cats for each count to train on."""
    rng = random.Random(0)
    for word in OTHER_WORDS:
        for count in range(1, 31):
            yield _counted(word, count, count)
    for count in catcount.TRAIN * 5:
        yield _counted("cat", count, rng.randint(1, 20))


def reversals() -> Iterable[dict[str, str]]:
    """Yield the training tasks of `reverse_text.yaml`."""
    for task in reverse_text.make(words=2, instructions=False).tasks(Split.TRAIN):
        yield {"prompt": task.messages[-1]["content"], "completion": task.answer}


def _counted(word: str, asked: int, written: int) -> dict[str, str]:
    return {
        "prompt": catcount.PROMPT.format(word=word, count=asked),
        "completion": " ".join([word] * written),
    }


def _write(name: str, rows: Iterable[dict[str, str]]) -> None:
    (FOLDER / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"{space}{word}" for word in ("cat", *OTHER_WORDS) for space in ("", " ")])
    tokenizer.save_pretrained(FOLDER / "catcount_tokenizer")
    _write("catcount.jsonl", counting())
    _write("reverse_text.jsonl", reversals())
