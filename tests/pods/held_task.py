# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""`marin_rl.pods.task` with runs that can be held: `python -m tests.pods.held_task '["train", "--config", "a.yaml"]'`.

A run does not record a step while the step's file exists, so it cannot end before a test has removed the file.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def hold_file(run_dir: Path, step: int) -> Path:
    """Return the file that holds a run before the record of a step."""
    return run_dir.with_name(f"hold-{step}")


def held(append: Callable[..., bytes], path: Path, step: int, *values: Any) -> bytes:
    """Wait, and append the record of a step to `metrics.jsonl`."""
    while hold_file(path.parent, step).exists():
        time.sleep(0.01)
    return append(path, step, *values)


if __name__ == "__main__":
    from marin_rl.pods.task import main
    from marin_rl.sessions import step_records

    step_records.append_record = functools.partial(held, step_records.append_record)
    sys.exit(main())
