# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write sums.jsonl, 3,000 demonstrations of the tasks of `rloo.yaml`: `python experiments/data/make_sums.py`.

They are training tasks only, so that the held-out tasks of RL stay unseen.
"""

import json
from pathlib import Path

from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import Split
from marin_rl.utils.settings.yaml_text import from_yaml

OUTPUT = Path(__file__).with_name("sums.jsonl")
ROWS = 3000


def write() -> None:
    """Write the first training tasks with their worked answers."""
    config = Path(__file__).parents[1] / "rloo.yaml"
    environment = from_yaml(TrainConfig, config.read_text(), str(config)).environment.build()
    demonstrated = (environment.demonstrate(task) for task in environment.tasks(Split.TRAIN)[:ROWS])
    rows = ({"prompt": prompt["content"], "completion": reply["content"]} for prompt, reply in demonstrated)
    OUTPUT.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write()
