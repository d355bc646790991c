# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""CPU seconds until a command reports a mistake in its arguments, for each mistake of `tests/config/mistakes.py`.

    python -m experiments.benchmarks.mistake_times

Each mistake is made in a process of its own.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.config.mistakes import MISTAKES, OTHER_COMMANDS, write_files


def main() -> int:
    """Print a line for each mistake, and the largest time."""
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for case, mistake in (MISTAKES | OTHER_COMMANDS).items():
            before = os.times()
            command = [sys.executable, "-m", f"marin_rl.{mistake.program}", *mistake.argv]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            after = os.times()
            times[case] = sum(after[2:4]) - sum(before[2:4])
            print(f"| {case} | {times[case]:.2f} | {done.stderr.strip()} |", flush=True)
    print(f"at most {max(times.values()):.2f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
