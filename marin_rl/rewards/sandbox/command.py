# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Command line of a sandbox worker, with or without bubblewrap, and the files that it can read."""

import functools
import os
import site
import sys
from collections.abc import Iterable
from pathlib import Path

import marin_rl
from marin_rl.rewards.sandbox.limits import FOLDER_FILES
from marin_rl.rewards.sandbox.protocol import WorkerSpec

_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
)
"""Files of the operating system that programs need; paths that do not exist are left out."""

SCRATCH = "/run/calls"
"""Folder for the scratch folders of calls, when the worker runs in namespaces."""

_START = (
    "import sys; sys.path.insert(0, sys.argv[2]); from marin_rl.rewards.sandbox.worker import main; main(sys.argv[1])"
)


def package_root() -> str:
    """Return the folder that the package `marin_rl` is imported from."""
    return str(Path(marin_rl.__file__).resolve().parent.parent)


def readable_paths(file: str | None, read_paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that a worker's calls may read: system programs, Python and the user's code.

    Args:
        file: the user's file, absolute, if any.
        read_paths: further files and folders from the config.
    """
    paths = [*_python_paths(), *(os.path.abspath(path) for path in read_paths)]
    if file is not None:
        paths += [os.path.join(package_root(), "marin_rl"), code_path(file)]
    return tuple(dict.fromkeys(path for path in (*_SYSTEM, *paths) if os.path.exists(path)))


def code_path(file: str) -> str:
    """Return the readable path for a user's file: its folder, so that it can import modules from there.

    If the folder is the home folder or one of its parents, only the file itself is readable.
    """
    folder = Path(file).parent
    if folder in (Path.home(), *Path.home().parents):
        return file
    return str(folder)


def python_path(file: str | None, read_paths: Iterable[str]) -> tuple[str, ...]:
    """Return the folders to append to a worker's Python path."""
    folders = tuple(os.path.abspath(path) for path in read_paths if os.path.isdir(path))
    return folders if file is None else (package_root(), *folders)


def hidden_path() -> tuple[str, ...]:
    """Return the folder of this package, unless other packages are installed there too."""
    return () if package_root() in site.getsitepackages() else (package_root(),)


@functools.cache
def _python_paths() -> tuple[str, ...]:
    binary = os.path.realpath(sys.executable)
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(binary)]
    if os.path.basename(os.path.dirname(binary)) == "bin":
        prefixes.append(os.path.dirname(os.path.dirname(binary)))
    prefixes += [path for path in site.getsitepackages() if os.path.isdir(path)]
    prefixes += [os.path.dirname(os.path.dirname(link)) for link in _links(sys.executable)]
    narrow = [os.path.abspath(path) for path in prefixes if Path(path) not in (Path("/"), *Path.home().parents)]
    return tuple(dict.fromkeys(path for path in narrow if path != str(Path.home())))


def _links(path: str) -> list[str]:
    """Return the chain of symbolic links from a path to its target, each absolute."""
    links = []
    while os.path.islink(path):
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
        links.append(path)
    return links


def worker_command(spec: WorkerSpec, bubblewrap: str | None) -> list[str]:
    """Return the command line of a worker.

    Args:
        spec: settings of the worker.
        bubblewrap: path of `bwrap`, or None to start the worker without it.
    """
    # -P and -s keep the user's folders off the Python path; -B writes no bytecode next to the code.
    command = [sys.executable, "-P", "-s", "-B", "-c", _START, spec.to_json(), package_root()]
    return command if bubblewrap is None else [bubblewrap, *_bubblewrap_arguments(spec), *command]


def _bubblewrap_arguments(spec: WorkerSpec) -> list[str]:
    size = str(FOLDER_FILES * spec.limits.file_bytes)
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    arguments += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", SCRATCH]
    # The worker itself imports this package, even if it runs no user code.
    for path in sorted({*spec.read, os.path.join(package_root(), "marin_rl")}):
        arguments += ["--ro-bind", path, path]
    # The root is a file system in memory. Everything that calls share is read-only, so that no call can pass data to
    # the next one.
    arguments += ["--remount-ro", "/tmp", "--remount-ro", "/", "--chdir", SCRATCH, "--clearenv"]
    for name, value in worker_environment(SCRATCH).items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--"]


def worker_environment(folder: str) -> dict[str, str]:
    """Return the environment variables of a worker; none are inherited from the trainer.

    Args:
        folder: folder for temporary files.
    """
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        # The iteration order of sets must not change scores between runs.
        "PYTHONHASHSEED": "0",
        # A process with threads cannot be forked safely.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # The C library reserves 64 MiB of address space for each allocating thread, which counts towards the limit.
        "MALLOC_ARENA_MAX": "1",
    }
