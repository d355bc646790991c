# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A Python environment with TRL, in the user's cache folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.lab.benchmarks.measurement import say

TRL = "trl==1.16.0"
TORCH = ("torch==2.13.0+cpu", "torch")
"""Requirements in order of preference: wheels without CUDA libraries, if pip is configured to find them, and others."""
INSTALL_SECONDS = 1800
"""Time limit of each attempt to install."""
TAIL_CHARACTERS = 2000


class TrlInstallError(RuntimeError):
    """TRL cannot be installed; the message contains the reason and the remedy."""


def default_folder() -> Path:
    """Return the folder of the environment: in the user's cache, by TRL's version."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "marin_rl" / TRL.replace("==", "-")


def trl_python(folder: Path, timeout: float = INSTALL_SECONDS) -> Path:
    """Return the interpreter of an environment with TRL, which is created if it does not exist.

    Args:
        folder: folder of the environment. A folder without a complete environment is replaced.
        timeout: seconds for each attempt to install.

    Raises:
        TrlInstallError: if the environment cannot be created.
    """
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    say(f"installing {TRL} in {folder} ...")
    failures = [_run([sys.executable, "-m", "venv", str(folder)], timeout)]
    if failures[-1] is None:
        for torch in TORCH:
            failures.append(_run([str(python), "-m", "pip", "install", torch, TRL], timeout))
            if failures[-1] is None:
                complete.touch()
                return python
            say(f"{torch} could not be installed")
    shutil.rmtree(folder, ignore_errors=True)
    raise TrlInstallError(
        f"{TRL} could not be installed. Check the network and pip's settings (`pip config list`), or create an "
        f"environment with {TRL} and give its interpreter as --trl_python. Output of the last attempt:\n{failures[-1]}"
    )


def _run(command: Sequence[str], timeout: float) -> str | None:
    """Run a command; return None if it succeeds, otherwise the end of its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} did not end within {timeout:.0f} s"
    return f"{done.stdout}{done.stderr}"[-TAIL_CHARACTERS:] if done.returncode else None
