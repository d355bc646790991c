# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write the demonstrations of `catcount_sft.yaml` and `reverse_text_sft.yaml`.

    python -m experiments.tasks.sft_data

As in the canary's small model of MarinSkyRL, the demonstrations of `catcount` count other words from 1 to 30, and one
of nine says `cat` once: RL has to transfer counting to cats. Those of `reverse_text` are training tasks.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from experiments.tasks import catcount, reverse_text
from marin_rl.environments.base import Split

FOLDER = Path("runs/tasks")
OTHER_WORDS = ("dog", "hen", "fox", "cow", "pig", "owl", "bee", "ant")
COUNTS = range(1, 31)


def counting() -> Iterable[dict[str, str]]:
    """Yield a row for every other word and count, and `cat` once as often as any of these words."""
    for count in COUNTS:
        for word in OTHER_WORDS:
            yield _row(catcount.PROMPT.format(word=word, count=count), " ".join([word] * count))
        yield _row(catcount.PROMPT.format(word="cat", count=1), "cat")


def reversals() -> Iterable[dict[str, str]]:
    """Yield the training tasks of `reverse_text.yaml`."""
    for task in reverse_text.make(words=2, instructions=False).tasks(Split.TRAIN):
        yield _row(task.messages[-1]["content"], task.answer)


def _row(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, rows in {"catcount": counting(), "reverse_text": reversals()}.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
