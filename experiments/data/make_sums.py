# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write demonstrations of the sums of `rloo.yaml`: `python experiments/data/make_sums.py`.

`sums.jsonl` has 3,000 training tasks of `rloo.yaml`, and `three_terms.jsonl` 500 different sums of three digits. They
are training tasks only, so that the held-out tasks of RL stay unseen.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import ReasoningGymConfig
from marin_rl.environments.base import Split
from marin_rl.utils.settings.yaml_text import from_yaml

FOLDER = Path(__file__).parent
ROWS = 3000
"""Rows of `sums.jsonl`."""


def demonstrations(environment: ReasoningGymConfig) -> Iterator[dict[str, str]]:
    """Yield the training tasks of an environment with their worked answers."""
    built = environment.build()
    for prompt, reply in map(built.demonstrate, built.tasks(Split.TRAIN)):
        yield {"prompt": prompt["content"], "completion": reply["content"]}


def write() -> None:
    """Write both files."""
    config = FOLDER.parent / "rloo.yaml"
    environment = from_yaml(TrainConfig, config.read_text(), str(config)).environment
    assert isinstance(environment, ReasoningGymConfig)
    terms = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    three = dataclasses.replace(environment, options={**environment.options, **terms})
    different = {row["prompt"]: row for row in demonstrations(three)}.values()
    files = {"sums.jsonl": (demonstrations(environment), ROWS), "three_terms.jsonl": (different, 500)}
    for name, (rows, count) in files.items():
        lines = (f"{json.dumps(row)}\n" for row in itertools.islice(rows, count))
        (FOLDER / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write()
