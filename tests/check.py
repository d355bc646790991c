# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run all checks and tests: `python -m tests.check`. Stops at the first failure."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def commands(site: str) -> list[tuple[str, list[str]]]:
    """Name and command of each check, fastest first."""
    python = sys.executable
    # xdist would run the files with the fewest tests last, but these are the slowest; tests/conftest.py sorts them. A
    # worker that dies must end the tests, because xdist would wait forever for its tests.
    scheduling = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    pytest = [python, "-m", "pytest", "-q", *scheduling]
    return [
        ("format", [str(BIN / "ruff"), "format", "--check", "."]),
        ("lint", [str(BIN / "ruff"), "check", "."]),
        ("types", [str(BIN / "pyrefly"), "check"]),
        ("floors", [str(BIN / "lint-imports")]),
        ("docs", [python, "-m", "mkdocs", "build", "--strict", "-q", "-f", "docs/mkdocs.yml", "-d", site]),
        ("tests", [*pytest, "--durations", "40"]),
    ]


def main() -> int:
    """Run all checks.

    Returns:
        The exit status of the first failed check, or 0.
    """
    with tempfile.TemporaryDirectory() as site:
        for name, command in commands(site):
            print(f"== {name}", flush=True)
            start = time.monotonic()
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            print(f"== {name}: {'ok' if status == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
            if status != 0:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
