# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run all checks and tests: `python -m tests.check`. Stops at the first failure.

With `--quick`, docs and tests marked `medium` or `slow` are left out.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def commands(site: str, *, quick: bool) -> list[tuple[str, list[str]]]:
    """Return the name and command of each check, fastest first.

    Args:
        site: folder for the built docs.
        quick: whether to leave out docs and longer tests.
    """
    python = sys.executable
    # xdist would run the files with the fewest tests last, but these are the slowest; tests/conftest.py sorts them. A
    # worker that dies must end the tests, because xdist would wait forever for its tests.
    scheduling = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    pytest = [python, "-m", "pytest", "-q", *scheduling]
    checks = [
        ("format", [str(BIN / "ruff"), "format", "--check", "."]),
        ("lint", [str(BIN / "ruff"), "check", "."]),
        ("types", [str(BIN / "pyrefly"), "check"]),
        ("layers", [str(BIN / "lint-imports")]),
    ]
    if quick:
        return [*checks, ("tests", [*pytest, "-m", "not slow and not medium"])]
    docs = [python, "-m", "mkdocs", "build", "--strict", "-q", "-f", "docs/mkdocs.yml", "-d", site]
    return [*checks, ("docs", docs), ("tests", [*pytest, "--durations", "40"])]


def main() -> int:
    """Run the checks.

    Returns:
        The exit status of the first failed check, or 0.
    """
    parser = argparse.ArgumentParser(description="Run all checks and tests; stop at the first failure.")
    parser.add_argument("--quick", action="store_true", help="leave out docs and tests of more than 2 seconds")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as site:
        for name, command in commands(site, quick=quick):
            print(f"== {name}", flush=True)
            start = time.monotonic()
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            print(f"== {name}: {'ok' if status == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
            if status != 0:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
