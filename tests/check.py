# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run the checks: `python -m tests.check` in minutes, `python -m tests.check --all` whole. Stops at the first failure.

The version of Python decides which of levanter's two lines is installed (docs/pages/getting_started.md). Without
options: format, lint, types, layers, and the tests that are not marked `medium` or `slow`. `--all` adds docs, all other
tests, and tests that depend on levanter on its other line, in an environment that is made in the checkout and kept for
the next time. `--rest` runs what `--all` adds, `--other_line` only the other line.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
# xdist would run the files with the fewest tests last, but these are the slowest; tests/conftest.py sorts them. A
# worker that dies must end the tests, because xdist would wait forever for its tests.
PYTEST = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
OTHER_PYTHON = "3.12" if sys.version_info < (3, 12) else "3.11"
"""A Python that levanter's other line is installed on."""
OTHER_TESTS = (
    # The longest file begins first.
    "tests/pods/test_iris_jobs.py",
    "tests/models",
    "tests/learner",
    "tests/sampling",
    "tests/tokenization",
    "tests/batching/test_rl_example.py",
    "tests/config",
    "tests/experiments/test_experiment_configs.py",
    "tests/pods/test_launch.py",
    "tests/pods/test_preflight.py",
    "tests/pods/test_task.py",
    "tests/runs/test_array_files.py",
    "tests/runs/test_checkpoint.py",
    "tests/serving/tinker/test_trainer.py",
    "tests/training/test_loop.py",
    "tests/utils/devices",
    "tests/utils/settings",
    "tests/utils/test_iris_hosts.py",
    "tests/utils/test_levanter_line.py",
)
"""Files and folders of the tests that run on both lines: what calls levanter, haliax, jax, transformers or Iris
directly, and short runs. Of those marked `medium`, only those marked `both_lines` too."""

Checks = list[tuple[str, list[str]]]
"""The name and command of each check."""


def static_checks() -> Checks:
    """Return the checks that run no code of the package, fastest first."""
    return [
        ("format", [str(BIN / "ruff"), "format", "--check", "."]),
        ("lint", [str(BIN / "ruff"), "check", "."]),
        ("types", [str(BIN / "pyrefly"), "check"]),
        ("layers", [str(BIN / "lint-imports")]),
    ]


def fast_tests() -> Checks:
    """Return the tests without options."""
    return [("fast tests", [sys.executable, *PYTEST, "-m", "not slow and not medium"])]


def all_tests() -> Checks:
    """Return all tests on this Python, in one run, so that the tests of a file share programs."""
    return [("tests", [sys.executable, *PYTEST, "--durations", "40"])]


def other_tests() -> Checks:
    """Return the tests that are not fast."""
    return [("other tests", [sys.executable, *PYTEST, "--durations", "40", "-m", "slow or medium"])]


def docs(site: str) -> Checks:
    """Return the build of the docs into a folder."""
    command = ["-m", "mkdocs", "build", "--strict", "-q", "-f", "docs/mkdocs.yml", "-d", site]
    return [("docs", [sys.executable, *command])]


def checks_of_other_line() -> Checks:
    """Return the commands that make an environment of `OTHER_PYTHON` and, as the last one, test in it.

    There are none without such a Python.
    """
    folder = ROOT / f".venv-{OTHER_PYTHON}"
    python = str(folder / "bin" / "python")
    found = next(find_pythons(OTHER_PYTHON), None)
    if found is None:
        return []
    # Nothing of this environment may reach the other one.
    path = f"PATH={folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    clean = ["env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", f"VIRTUAL_ENV={folder}", path]
    make = ("environment", [*clean, found, "-m", "venv", "--clear", str(folder)])
    install = [*clean, python, "-m", "pip", "install", "-q", "-e", ".[test]"]
    selected = ["-m", "not slow and (not medium or both_lines)", *OTHER_TESTS]
    checks = [
        (f"installation on Python {OTHER_PYTHON}", install),
        (f"tests on Python {OTHER_PYTHON}", [*clean, python, *PYTEST, "--durations", "20", *selected]),
    ]
    return checks if is_usable(python, OTHER_PYTHON) else [make, *checks]


def find_pythons(version: str) -> Iterator[str]:
    """Yield the usable Pythons of a version, such as "3.12", on `PATH` and of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # On PATH, pyenv has a program that fails unless its version is selected.
    for candidate in (shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")):
        if candidate is not None and is_usable(str(candidate), version):
            yield str(candidate)


def is_usable(python: str, version: str) -> bool:
    """Whether a Python exists, has this version, and can make and fill environments."""
    program = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        completed = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return completed.returncode == 0 and completed.stdout.strip() == version


def run(checks: Checks) -> int:
    """Run checks until one fails; return its exit status, or 0."""
    for name, command in checks:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        print(f"== {name}: {'ok' if status == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
        if status != 0:
            return status
    return 0


def run_with_other_line(first: Checks, tests: Checks, other_line: Checks) -> int:
    """Run checks, docs and tests; the environment of the other line is installed beside those that run no tests."""
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as site:
        installation = pool.submit(run, other_line[:-1])
        status = run([*first, *docs(site)]) or installation.result()
    return status or run([*tests, *other_line[-1:]])


def main() -> int:
    """Run the checks.

    Returns:
        The exit status of the first failed check, or 0. 1 if only the other line was requested and has no Python.
    """
    parser = argparse.ArgumentParser(description="Run checks and tests; stop at the first failure.")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--all", action="store_true", help="also docs, all other tests and the other line of levanter")
    parts.add_argument("--rest", action="store_true", help="only what --all adds")
    parts.add_argument("--other_line", action="store_true", help=f"only test on Python {OTHER_PYTHON}")
    options = parser.parse_args()
    if not (options.all or options.rest or options.other_line):
        return run([*static_checks(), *fast_tests()])
    other_line = checks_of_other_line()
    if options.other_line:
        status = run(other_line)
    else:
        first, tests = ([], other_tests()) if options.rest else (static_checks(), all_tests())
        status = run_with_other_line(first, tests, other_line)
    if other_line or status:
        return status
    line = "=" * 100
    print(f"{line}\nSKIPPED: no usable Python {OTHER_PYTHON} on PATH or in pyenv, so NOTHING WAS TESTED ON THE OTHER")
    print(f"LINE OF LEVANTER. Install Python {OTHER_PYTHON}, and run: python -m tests.check --other_line\n{line}")
    return int(options.other_line)


if __name__ == "__main__":
    sys.exit(main())
