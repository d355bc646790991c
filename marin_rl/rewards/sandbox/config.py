# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of the sandbox, and the settings and command lines of its workers."""

import dataclasses
import functools
import os
import site
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

import marin_rl
from marin_rl.rewards.sandbox.isolation import OLDEST_LANDLOCK, Isolation
from marin_rl.rewards.sandbox.protocol import CallLimits, WorkerSpec
from marin_rl.utils.settings.checks import ConfigSection, check_fields

if TYPE_CHECKING:
    from marin_rl.rewards.sandbox.pool import Sandbox


@dataclasses.dataclass(frozen=True)
class SandboxConfig(ConfigSection):
    """Isolation of reward functions and model-written programs, and resource limits of each call."""

    require: Isolation = Isolation.PARTIAL
    """Minimum isolation: `full`, `partial` or `none`. The run does not start on a machine that offers less."""
    workers: Annotated[int, Ge(1)] = 2
    """Number of worker processes, and so of concurrent calls."""
    wall_seconds: Annotated[float, Gt(0)] = 10.0
    """Seconds from the start of a call to its answer."""
    cpu_seconds: Annotated[float, Gt(0)] = 10.0
    """Seconds of CPU time of a call, rounded up to whole seconds. Each process that a call starts has the same
    limit."""
    memory_mb: Annotated[int, Ge(64)] = 2048
    """Mebibytes of address space that a call may use in addition to the loaded file, and limit for loading the file.
    Threads count, about 8 MiB each by default. Each process that a call starts has the same limit."""
    processes: Annotated[int, Ge(0)] = 0
    """Concurrent processes of a call, including those that it does not wait for. With 0 it can start neither processes
    nor programs. All processes stay in the call's session and process group."""
    threads: Annotated[int, Ge(1)] = 64
    """Concurrent threads of a call, including those of its processes. Enforced on Linux only."""
    file_mb: Annotated[int, Ge(1)] = 16
    """Mebibytes of a single file that a call writes. All its files together, including deleted ones that
    are still open, use at most four times as much, and each counts as at least 32 KiB; enforced on Linux only."""
    output_kb: Annotated[int, Ge(1)] = 1024
    """Kibibytes of a call's answer, of its stdout and of its stderr, each."""
    start_seconds: Annotated[float, Gt(0)] = 60.0
    """Time limit in seconds for loading a user's file."""
    read_paths: tuple[str, ...] = ()
    """Further files and folders that reward functions may read; folders are added to the Python path. The folder that
    contains the function's file is always readable."""

    def __post_init__(self) -> None:
        check_fields(self)
        for path in self.read_paths:
            if not Path(path).exists():
                raise ValueError(f"sandbox.read_paths: {path} does not exist; correct or remove it")

    def build(self) -> "Sandbox":
        """Return a sandbox that is not started."""
        from marin_rl.rewards.sandbox.pool import Sandbox

        return Sandbox(self)

    def limits(self) -> CallLimits:
        """Return the resource limits of one call, in bytes and seconds."""
        return CallLimits(
            wall_seconds=float(self.wall_seconds),
            cpu_seconds=float(self.cpu_seconds),
            memory_bytes=self.memory_mb * 2**20,
            processes=self.processes,
            threads=self.threads,
            file_bytes=self.file_mb * 2**20,
            output_bytes=self.output_kb * 2**10,
        )


PACKAGE_ROOT = str(Path(marin_rl.__file__).resolve().parent.parent)
"""Folder that the package `marin_rl` is imported from."""

_PACKAGE = os.path.join(PACKAGE_ROOT, "marin_rl")
SCRATCH = "/run/calls"
"""Folder for the scratch folders of calls, when the worker runs in namespaces."""

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

_START = (
    "import sys; sys.path.insert(0, sys.argv[2]); from marin_rl.rewards.sandbox.worker import main; main(sys.argv[1])"
)


def worker_spec(file: str | None, config: SandboxConfig, level: Isolation, landlock: int) -> WorkerSpec:
    """Return the settings of a worker, except its scratch folder.

    Its calls may read system programs, Python and the user's code; programs do not read `read_paths`. `file` is
    absolute; None for a worker that runs programs. `landlock` is the Landlock version of the kernel.
    """
    read, python_path = [*_SYSTEM, *_python_paths()], []
    if file is not None:
        further = [os.path.abspath(path) for path in config.read_paths]
        read += [*further, _PACKAGE, code_path(file)]
        python_path = [PACKAGE_ROOT, *(path for path in further if os.path.isdir(path))]
    return WorkerSpec(
        file=file,
        scratch="",
        read=tuple(dict.fromkeys(path for path in read if os.path.exists(path))),
        python_path=tuple(python_path),
        # Other packages may be installed in the same folder.
        hidden_path=() if PACKAGE_ROOT in site.getsitepackages() else (PACKAGE_ROOT,),
        has_namespaces=level is Isolation.FULL,
        landlock=landlock if level is not Isolation.NONE and landlock >= OLDEST_LANDLOCK else 0,
        seccomp=level is not Isolation.NONE,
        start_seconds=float(config.start_seconds),
        limits=config.limits(),
    )


def code_path(file: str) -> str:
    """Return the readable path for a user's file: its folder, so that it can import modules from there.

    If the folder is the home folder or one of its parents, only the file itself is readable.
    """
    folder = Path(file).parent
    return file if folder in (Path.home(), *Path.home().parents) else str(folder)


@functools.cache
def _python_paths() -> tuple[str, ...]:
    binary = os.path.realpath(sys.executable)
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(binary)]
    if os.path.basename(os.path.dirname(binary)) == "bin":
        prefixes.append(os.path.dirname(os.path.dirname(binary)))
    prefixes += [path for path in site.getsitepackages() if os.path.isdir(path)]
    # The interpreter may be started through a chain of symbolic links.
    link = sys.executable
    while os.path.islink(link):
        link = os.path.abspath(os.path.join(os.path.dirname(link), os.readlink(link)))
        prefixes.append(os.path.dirname(os.path.dirname(link)))
    narrow = [os.path.abspath(path) for path in prefixes if Path(path) not in (Path("/"), *Path.home().parents)]
    return tuple(dict.fromkeys(path for path in narrow if path != str(Path.home())))


def worker_command(spec: WorkerSpec, bubblewrap: str | None) -> list[str]:
    """Return the command line of a worker.

    `bubblewrap` is the path of `bwrap`, or None to start the worker without it.
    """
    # -P and -s keep the user's folders off the Python path; -B writes no bytecode next to the code.
    command = [sys.executable, "-P", "-s", "-B", "-c", _START, spec.to_json(), PACKAGE_ROOT]
    if bubblewrap is None:
        return command
    size = str(spec.limits.folder_bytes)
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    # Writing to a shared mapping of /dev/zero takes memory that no limit counts. Nothing mounted here is a device.
    arguments += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", os.devnull, "/dev/zero", "--remount-ro", "/dev"]
    arguments += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", SCRATCH]
    # The worker itself imports this package, even if it runs no user code.
    for path in sorted({*spec.read, _PACKAGE}):
        arguments += ["--ro-bind", path, path]
    # The root is a file system in memory. Everything that calls share is read-only, so that no call can pass data to
    # the next one.
    arguments += ["--remount-ro", "/tmp", "--remount-ro", "/", "--chdir", SCRATCH, "--clearenv"]
    for name, value in worker_environment(SCRATCH).items():
        arguments += ["--setenv", name, value]
    return [bubblewrap, *arguments, "--", *command]


def worker_environment(folder: str) -> dict[str, str]:
    """Return the environment variables of a worker; none are inherited from the trainer.

    `folder` is for temporary files.
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
