# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Python environments with the programs with which marin_rl is compared, in the user's cache folder."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.lab.benchmarks.measurement import say

PEERS = {
    "trl": (("trl==1.16.0", "torch==2.13.0+cpu"), ("trl==1.16.0", "torch")),
    "tunix": (("google-tunix==0.1.7", "jax==0.12.0.1"), ("google-tunix==0.1.7", "jax")),
}
"""Requirements of each program in order of preference: PyTorch wheels without CUDA libraries, if pip is configured to
find them, and the jax with which Tunix was measured, which needs Python 3.12; and others."""
INSTALL_SECONDS = 1800
"""Time limit of each attempt to install."""
TAIL_CHARACTERS = 2000


class PeerInstallError(RuntimeError):
    """A program cannot be installed; the message contains the reason and the remedy."""


def default_folder(peer: str) -> Path:
    """Return the folder of a program's environment: in the user's cache, by its version."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "marin_rl" / PEERS[peer][0][0].replace("==", "-")


def peer_python(peer: str, folder: Path, timeout: float = INSTALL_SECONDS) -> Path:
    """Return the interpreter of an environment with a program, which is created if it does not exist.

    Args:
        peer: the program.
        folder: folder of the environment. A folder without a complete environment is replaced.
        timeout: seconds for each attempt to install.

    Raises:
        PeerInstallError: if the environment cannot be created.
    """
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    say(f"installing {PEERS[peer][0][0]} in {folder} ...")
    failures = [_run([sys.executable, "-m", "venv", str(folder)], timeout)]
    if failures[-1] is None:
        for requirements in PEERS[peer]:
            failures.append(_run([str(python), "-m", "pip", "install", *requirements], timeout))
            if failures[-1] is None:
                complete.touch()
                return python
            say(f"{' '.join(requirements)} could not be installed")
    shutil.rmtree(folder, ignore_errors=True)
    wanted = PEERS[peer][0][0]
    raise PeerInstallError(
        f"{wanted} could not be installed. Check the network and pip's settings (`pip config list`), or create an "
        f"environment with {wanted} and give its interpreter as --peer_python. Output of the last attempt:\n"
        f"{failures[-1]}"
    )


def peer_versions(peer: str, python: Path) -> dict[str, str]:
    """Return the versions of a program's packages in an environment.

    Raises:
        subprocess.CalledProcessError: if one is not installed there; the reason is on standard error.
    """
    names = [requirement.partition("==")[0] for requirement in PEERS[peer][0]]
    code = "import json, sys; from importlib.metadata import version; print(json.dumps([*map(version, sys.argv[1:])]))"
    found = subprocess.run([str(python), "-c", code, *names], stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(names, json.loads(found.stdout), strict=True))


def compilation_cache(folder: Path) -> dict[str, str]:
    """Return the variables that keep jax's compiled programs in a folder, with marin_rl's threshold."""
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}


def _run(command: Sequence[str], timeout: float) -> str | None:
    """Run a command; return None if it succeeds, otherwise the end of its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} did not end within {timeout:.0f} s"
    return f"{done.stdout}{done.stderr}"[-TAIL_CHARACTERS:] if done.returncode else None
