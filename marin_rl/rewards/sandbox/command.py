# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The command line that starts a worker, in bubblewrap or without, and the files that it may see."""

import functools
import os
import site
import sys
from collections.abc import Iterable
from pathlib import Path

import marin_rl
from marin_rl.rewards.sandbox.limits import FOLDER_FILES
from marin_rl.rewards.sandbox.spec import WorkerSpec

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
"""What programs of the operating system need, where it exists."""

SCRATCH = "/run/calls"
"""Where calls get their folders, in namespaces."""

_START = (
    "import sys; sys.path.insert(0, sys.argv[2]); from marin_rl.rewards.sandbox.worker import main; main(sys.argv[1])"
)


def package_root() -> str:
    """The folder that the package `marin_rl` is imported from."""
    return str(Path(marin_rl.__file__).resolve().parent.parent)


def readable_paths(file: str | None, read_paths: Iterable[str]) -> tuple[str, ...]:
    """What a worker's calls may read: the system's programs, Python, and where the user's code lies.

    Args:
        file: the user's file, absolute, if any.
        read_paths: what the user names besides.
    """
    paths = [*_python_paths(), *(os.path.abspath(path) for path in read_paths)]
    if file is not None:
        paths += [os.path.join(package_root(), "marin_rl"), code_path(file)]
    return tuple(dict.fromkeys(path for path in (*_SYSTEM, *paths) if os.path.exists(path)))


def code_path(file: str) -> str:
    """What becomes readable of the place where a user's file lies: its folder, so that it can import its neighbours.

    The file alone where its folder is, or holds, the home folder or the file system.
    """
    folder = Path(file).parent
    if folder in (Path.home(), *Path.home().parents):
        return file
    return str(folder)


def python_path(file: str | None, read_paths: Iterable[str]) -> tuple[str, ...]:
    """The folders that a worker's Python path gets."""
    folders = tuple(os.path.abspath(path) for path in read_paths if os.path.isdir(path))
    return folders if file is None else (package_root(), *folders)


def hidden_path() -> tuple[str, ...]:
    """The folder of this package, unless others are installed there too."""
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
    """The symbolic links from a path to the file behind it, each absolute."""
    found = []
    while os.path.islink(path):
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
        found.append(path)
    return found


def worker_command(spec: WorkerSpec, bubblewrap: str | None) -> list[str]:
    """The command line of a worker.

    Args:
        spec: what the worker is told.
        bubblewrap: path of `bwrap`, or None to start it without.
    """
    # -P, -s and -B: no folder of the user's on the path unasked, and nothing written beside the code.
    command = [sys.executable, "-P", "-s", "-B", "-c", _START, spec.to_json(), package_root()]
    return command if bubblewrap is None else [bubblewrap, *_bubblewrap_arguments(spec), *command]


def _bubblewrap_arguments(spec: WorkerSpec) -> list[str]:
    size = str(FOLDER_FILES * spec.limits.file_bytes)
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    arguments += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", SCRATCH]
    # The worker itself needs its package, also where no user's code is to be run.
    for path in sorted({*spec.read, os.path.join(package_root(), "marin_rl")}):
        arguments += ["--ro-bind", path, path]
    # The root itself is a file system in memory. Nothing that calls share can be written: none speaks to the next.
    arguments += ["--remount-ro", "/tmp", "--remount-ro", "/", "--chdir", SCRATCH, "--clearenv"]
    for name, value in worker_environment(SCRATCH).items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--"]


def worker_environment(folder: str) -> dict[str, str]:
    """The environment of a worker: nothing of the trainer's.

    Args:
        folder: where temporary files go.
    """
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        # The order of sets must not change a score from one run to the next.
        "PYTHONHASHSEED": "0",
        # A process with threads cannot be forked safely.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # The C library reserves 64 MiB of address space for each thread that allocates, which the limit would count.
        "MALLOC_ARENA_MAX": "1",
    }
