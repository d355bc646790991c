# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trainer's side of a sandbox worker: its settings and command line, requests, and its failures."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import marin_rl
from marin_rl.rewards.functions import RewardCallError, RewardFailure
from marin_rl.rewards.sandbox import protocol
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.folders import remove
from marin_rl.rewards.sandbox.isolation import OLDEST_LANDLOCK, Isolation
from marin_rl.rewards.sandbox.protocol import WorkerSpec

logger = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Seconds to wait for a worker to exit by itself."""

PACKAGE_ROOT = str(Path(marin_rl.__file__).resolve().parent.parent)
"""Folder that the package `marin_rl` is imported from."""

_PACKAGE = os.path.join(PACKAGE_ROOT, "marin_rl")
_SCRATCH = "/run/calls"
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

    Its calls may read system programs, Python and the user's code; programs do not read `read_paths`.

    Args:
        file: the user's file, absolute; None for a worker that runs programs.
        config: limits and further readable paths.
        level: isolation of the worker.
        landlock: Landlock version of the kernel.
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

    Args:
        spec: settings of the worker.
        bubblewrap: path of `bwrap`, or None to start the worker without it.
    """
    # -P and -s keep the user's folders off the Python path; -B writes no bytecode next to the code.
    command = [sys.executable, "-P", "-s", "-B", "-c", _START, spec.to_json(), PACKAGE_ROOT]
    if bubblewrap is None:
        return command
    size = str(spec.limits.folder_bytes)
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    # Writing to a shared mapping of /dev/zero takes memory that no limit counts. Nothing mounted here is a device.
    arguments += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", os.devnull, "/dev/zero", "--remount-ro", "/dev"]
    arguments += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", _SCRATCH]
    # The worker itself imports this package, even if it runs no user code.
    for path in sorted({*spec.read, _PACKAGE}):
        arguments += ["--ro-bind", path, path]
    # The root is a file system in memory. Everything that calls share is read-only, so that no call can pass data to
    # the next one.
    arguments += ["--remount-ro", "/tmp", "--remount-ro", "/", "--chdir", _SCRATCH, "--clearenv"]
    for name, value in worker_environment(_SCRATCH).items():
        arguments += ["--setenv", name, value]
    return [bubblewrap, *arguments, "--", *command]


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


class WorkerLostError(RuntimeError):
    """A worker did not answer; it has been killed."""

    def __init__(self, detail: str, began: bool):
        super().__init__(detail)
        self.began = began
        """Whether user code may have run."""


class WorkerProcess:
    """A running worker; handles one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, spec: WorkerSpec, source: bytes):
        self._process = process
        self._spec = spec
        self._source = source
        self.is_loaded = False
        """Whether it has answered a request, so that its file is loaded."""
        self._is_answer_pending = False

    @classmethod
    async def start(cls, spec: WorkerSpec, source: bytes, bubblewrap: str | None) -> Self:
        """Start a worker.

        Args:
            spec: settings of the worker; `scratch` is filled in here.
            source: content of the user's file; empty for a worker that runs programs.
            bubblewrap: path of `bwrap`, needed if the worker has namespaces.
        """
        scratch = _SCRATCH if spec.has_namespaces else tempfile.mkdtemp(prefix="marin_rl_calls_")
        spec = dataclasses.replace(spec, scratch=scratch)
        try:
            process = await asyncio.create_subprocess_exec(
                *worker_command(spec, bubblewrap if spec.has_namespaces else None),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=worker_environment(scratch),
                cwd="/" if spec.has_namespaces else scratch,
                # Ctrl-C in the terminal must not reach the worker: the trainer needs rewards to finish its step.
                start_new_session=True,
            )
        except BaseException:
            if not spec.has_namespaces:
                remove(scratch)
            raise
        return cls(process, spec, source)

    @property
    def file(self) -> str | None:
        """The user's file; None if the worker runs programs."""
        return self._spec.file

    @property
    def pid(self) -> int:
        """Id of the started process: bubblewrap's, or the worker's."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it can take a request: it is not known to have ended, and no answer is pending."""
        return self._process.returncode is None and not self._is_answer_pending

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            request: the request, as JSON values.
            seconds: time limit in seconds.

        Raises:
            WorkerLostError: if the worker does not answer.
        """
        began = False
        self._is_answer_pending = True
        if not self.is_loaded:
            request = {**request, "source": self._source.decode("latin-1")}
        try:
            async with asyncio.timeout(seconds):
                stdin = self._process.stdin
                assert stdin is not None
                stdin.write(protocol.encode(request))
                await stdin.drain()
                began = (await self._read()) == {"began": True}
                answer = await self._read()
        except TimeoutError:
            await self.end()
            raise WorkerLostError(f"the worker did not answer within {seconds:g} s", began) from None
        except (OSError, asyncio.IncompleteReadError):
            # The worker is already exiting, and a signal would hide the reason.
            await self._wait_or_kill()
            raise WorkerLostError(f"the worker died: {await self._death_reason()}", began) from None
        except ValueError:
            await self.end()
            raise WorkerLostError(f"the worker died: {await self._death_reason()}", began) from None
        except BaseException:
            # Cancelled before the answer was read, so the next request would receive it. The flag stays set, because a
            # second cancellation can interrupt `end`.
            await self.end()
            raise
        self._is_answer_pending = False
        self.is_loaded = True
        for warning in answer.get("warnings", []):
            logger.warning("sandbox: %s", warning)
        return answer

    async def close(self) -> None:
        """Ask the worker to exit, and kill it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._wait_or_kill()

    async def _wait_or_kill(self) -> None:
        await self._wait()
        await self.end()

    async def end(self) -> None:
        """Terminate the worker and all processes that it started, and remove its scratch folder."""
        # In namespaces all processes end with bubblewrap, which does not forward SIGTERM.
        signals = [signal.SIGKILL] if self._spec.has_namespaces else [signal.SIGTERM, signal.SIGKILL]
        for number in signals:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
                await self._wait()
        if not self._spec.has_namespaces:
            scratch = self._spec.scratch
            error = await asyncio.to_thread(remove, scratch)
            if error is not None:
                logger.warning("sandbox: could not remove %s, remove it yourself: %s", scratch, error)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        size = protocol.length(await stdout.readexactly(protocol.HEADER_BYTES))
        return json.loads(await stdout.readexactly(size))

    async def _death_reason(self) -> str:
        assert self._process.stderr is not None
        stderr = (await self._process.stderr.read()).decode("utf-8", errors="replace").strip()
        return stderr[-1000:] or f"it exited with status {self._process.returncode}"


_VIOLATIONS = {
    "timeout": (RewardFailure.TIMEOUT, "no answer within sandbox.wall_seconds"),
    "output": (RewardFailure.OUTPUT, "more output than sandbox.output_kb"),
    "cpu": (RewardFailure.CPU, "more CPU time than sandbox.cpu_seconds"),
    "threads": (RewardFailure.THREADS, "more threads than sandbox.threads"),
    "files": (RewardFailure.FILE_SIZE, "its files use more space than four times sandbox.file_mb"),
    "processes": (RewardFailure.PROCESSES, "more processes than sandbox.processes"),
}
_SIGNALS = {
    signal.SIGXCPU: _VIOLATIONS["cpu"],
    signal.SIGXFSZ: (RewardFailure.FILE_SIZE, "a file larger than sandbox.file_mb"),
}


def failure_of(report: dict[str, Any], cpu_seconds: float) -> RewardCallError | None:
    """Return the reason for which a call failed, or None if its process exited with status 0.

    Args:
        report: the worker's report on the call's process.
        cpu_seconds: the limit on CPU time in seconds.
    """
    if report["violation"] is not None:
        return RewardCallError(*_VIOLATIONS[report["violation"]])
    if report["status"] is None:
        return RewardCallError(RewardFailure.WORKER, "the forkserver of the loaded file died")
    code = os.waitstatus_to_exitcode(report["status"])
    stderr = report["stderr"][-500:]
    if code >= 0 and not report["confined"]:
        return RewardCallError(RewardFailure.WORKER, f"the call could not be confined and was not run: {stderr}")
    if code == 0:
        return None
    if code > 0:
        return RewardCallError(RewardFailure.EXITED, f"its process exited with status {code}: {stderr}")
    if -code in _SIGNALS:
        return RewardCallError(*_SIGNALS[signal.Signals(-code)])
    if -code == signal.SIGKILL and report["cpu"] >= cpu_seconds:
        return RewardCallError(*_VIOLATIONS["cpu"])
    known = {number.value: number.name for number in signal.Signals}
    return RewardCallError(RewardFailure.SIGNAL, f"terminated by {known.get(-code, f'signal {-code}')}")
