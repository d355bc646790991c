# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environment of `benchmark_end_to_end`: prompts of random words from a file, scored by `even_share`."""

import json
from pathlib import Path

from experiments.lab.benchmarks.word_reward import even_share
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Split
from marin_rl.types import Task

NAME = "words"


def make_words(path: str) -> SingleTurnEnvironment:
    """For `environment: {type: file, path: …, name: make_words, options: {path: prompts.json}}`.

    Args:
        path: JSON file with a list of prompts.
    """
    prompts = json.loads(Path(path).read_text())
    tasks = [
        Task(str(index), NAME, ({"role": "user", "content": prompt},), "", None) for index, prompt in enumerate(prompts)
    ]
    splits = {Split.TRAIN: tasks, Split.VALIDATION: [], Split.HELD_OUT: []}
    return SingleTurnEnvironment(NAME, splits, score=lambda _, reply: even_share(reply))
