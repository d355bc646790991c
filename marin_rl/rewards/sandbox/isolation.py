# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Isolation of user code: levels, their self-test, and the Linux mechanisms that confine a process.

A confined process has resource limits, no capabilities, a Landlock ruleset and a seccomp filter. Children inherit all
of them, and a process can only remove further rights.
"""

import ctypes
import enum
import functools
import json
import math
import os
import re
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterable

from marin_rl.rewards.sandbox.protocol import CallLimits, WorkerSpec
from marin_rl.rewards.sandbox.seccomp import (
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    call_filter,
    import_filter,
    seccomp_is_supported,
)


class Isolation(enum.StrEnum):
    """Isolation of user code from the trainer and the machine. Resource limits apply at every level."""

    FULL = "full"
    """Bubblewrap and seccomp: no network, a read-only file system that contains only Python and the function's folder,
    a writable folder for each call, other processes are invisible."""
    PARTIAL = "partial"
    """Landlock and seccomp, in the machine's own namespaces: no network, no signals, no new processes; the same files
    can be read and written, but names and sizes of other files are visible."""
    NONE = "none"
    """Only processes with resource limits: user code has the permissions of the trainer's user."""

    @property
    def rank(self) -> int:
        """Strength of the level: 0 for `none`, 1 for partial, 2 for full."""
        return (Isolation.NONE, Isolation.PARTIAL, Isolation.FULL).index(self)


_SELF_TEST = """
import json, os, socket

def works(attempt):
    try:
        attempt()
    except OSError:
        return False
    return True

def fork():
    if os.fork() == 0:
        os._exit(0)

print(json.dumps({
    "reads a file outside": works(lambda: open(SECRET).read()),
    "changes files outside": works(lambda: open(SECRET + ".new", "w").close()),
    "opens sockets": works(lambda: socket.socket().close()),
    "starts processes": works(fork),
    "sees a file outside": os.path.exists(SECRET),
}))
"""


def self_test(secret: str) -> str:
    """Return a program that tries to escape from the sandbox, and to read the file `secret` outside it."""
    return f"SECRET = {secret!r}\n{_SELF_TEST}"


def find_holes(printed: str, processes: int, has_namespaces: bool) -> list[str]:
    """Return the forbidden actions that succeeded in the program `self_test`.

    `processes` is the number that the sandbox allows. With namespaces the file must not even be visible.

    Raises:
        ValueError: if the output is not JSON.
    """
    allowed = {"starts processes"} if processes else set()
    if not has_namespaces:
        allowed.add("sees a file outside")
    return [name for name, succeeded in json.loads(printed).items() if succeeded and name not in allowed]


IS_LINUX = sys.platform == "linux"

PR_SET_CHILD_SUBREAPER = 36
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38

_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int, pointer: object = None) -> None:
    """Change an attribute of this process, as described in its manual page.

    Raises:
        OSError: if the kernel refuses.
    """
    zero = ctypes.c_ulong(0)
    if _libc().prctl(option, ctypes.c_ulong(value), pointer or zero, zero, zero) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def system_call(number: int, *arguments: object) -> int:
    """Make a system call by number. Each argument is a ctypes value, an int or None.

    Raises:
        OSError: if it fails.
    """
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc().syscall(ctypes.c_long(number), *values)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent process ends for any reason.

    If the parent has already ended, this process exits at once.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def drop_capabilities() -> None:
    """Drop all capabilities, so that root can neither raise limits nor bypass file permissions.

    Raises:
        OSError: if the kernel refuses, or the machine is neither x86-64 nor 64-bit Arm.
    """
    machine = os.uname().machine
    if machine not in _SYS_CAPSET:
        raise OSError(0, f"the system call number of capset is unknown for {machine}")
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    # Three sets (effective, permitted, inheritable) of 64 bits, in two halves.
    system_call(_SYS_CAPSET[machine], header, ctypes.create_string_buffer(24))


def restrict_system_calls(program: bytes) -> None:
    """Add a filter of `seccomp` to those of this process and its future children.

    Raises:
        OSError: if the kernel refuses.
    """
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, then, aligned, their address.
    description = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, 2, ctypes.byref(description))


# Landlock: constants from the kernel's `include/uapi/linux/landlock.h`; see landlock(7).

OLDEST_LANDLOCK = 3
"""Oldest usable version: older ones do not restrict truncate(2), which can empty files outside the sandbox."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READS = _EXECUTE | _READ_FILE | _READ_DIR
_ALL_NET = 0b11
"""Binding and connecting TCP sockets."""
_ALL_SCOPES = 0b11
"""Abstract Unix sockets and signals to processes outside."""


def landlock_version() -> int:
    """Return the Landlock version of the kernel, or 0 if it has no Landlock."""
    if not IS_LINUX:
        return 0
    try:
        return system_call(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict_files(read: Iterable[str] | None, write: Iterable[str], version: int) -> None:
    """Deny this process and its children all other files, TCP, and signals to processes outside.

    Args:
        read: files and folders that stay readable; those that do not exist are left out. If None, read access is
            unchanged.
        write: files and folders that stay writable, and readable unless `read` is None.
        version: the result of `landlock_version`.

    Raises:
        OSError: if the kernel refuses.
    """
    handled = (1 << (16 if version >= 5 else 15)) - 1
    if read is None:
        handled &= ~_READS
    attributes = struct.pack("Q", handled)
    if version >= 4:
        attributes += struct.pack("Q", _ALL_NET)
    if version >= 6:
        attributes += struct.pack("Q", _ALL_SCOPES)
    ruleset = system_call(_CREATE_RULESET, ctypes.create_string_buffer(attributes), len(attributes), 0)
    try:
        for path in read or ():
            _allow(ruleset, path, _READS)
        for path in write:
            _allow(ruleset, path, handled)
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        system_call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


_DEVICES_READ = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_OPEN_FILES = 64
_TASKS_OF_WORKER = 2
"""Tasks in the namespaces of a call besides its own: the worker and the forkserver."""


def confine_import(spec: WorkerSpec) -> None:
    """Confine this process, which is about to load a user's file.

    The hard limit on memory leaves room for the calls, which inherit it and set their own limits.

    Raises:
        OSError: if the kernel refuses.
    """
    _limit_files(spec.limits)
    if IS_LINUX:
        used, memory = address_space(), spec.limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + 2 * memory))
    if spec.counts_open_files:
        # The worker lists its open files, and those of the calls.
        prctl(PR_SET_DUMPABLE, 1)
    if spec.landlock:
        restrict_files((*spec.read, *_DEVICES_READ), (spec.scratch, os.devnull), spec.landlock)
    if spec.seccomp:
        drop_capabilities()
        # The forkserver has to fork, and its children set their own limits.
        restrict_system_calls(import_filter(os.uname().machine, _may_signal(spec)))


def prepare_call(spec: WorkerSpec) -> None:
    """Assemble the filter of `confine_call`, so that processes forked from this one need not do it."""
    if spec.seccomp:
        call_filter(os.uname().machine, spec.limits.processes > 0)


def confine_call(spec: WorkerSpec, folder: str, loaded_bytes: int) -> None:
    """Confine this process, which is about to run a call. It was forked from one that `confine_import` confined.

    `folder` is the only one that the call can write to. The loaded file uses `loaded_bytes` of address space.

    Raises:
        OSError: if the kernel refuses.
    """
    limits = spec.limits
    cpu = math.ceil(limits.cpu_seconds)
    # At the soft limit the kernel sends a signal that a call can ignore, at the hard limit it kills the process.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    _limit_files(limits)
    if spec.has_namespaces and counts_threads_by_namespace():
        # The kernel exempts root; the worker then enforces the limit by counting.
        tasks = limits.threads + _TASKS_OF_WORKER
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    if IS_LINUX:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        space = loaded_bytes + limits.memory_bytes
        if hard_limit != resource.RLIM_INFINITY:
            space = min(space, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    # Python ignores SIGXFSZ. By default it kills the process, which identifies the cause of the failure.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if spec.landlock:
        restrict_files(None, (folder, os.devnull), spec.landlock)
    if spec.seccomp:
        restrict_system_calls(call_filter(os.uname().machine, spec.limits.processes > 0))


def confine_grader(memory_bytes: int) -> None:
    """Confine this process, which runs code of libraries on untrusted texts, as far as the machine permits.

    It cannot write files, start programs, send signals or open connections. `memory_bytes` limits its address space.
    """
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    if IS_LINUX:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if (version := landlock_version()) >= OLDEST_LANDLOCK:
        restrict_files(None, (os.devnull,), version)
    if seccomp_is_supported():
        drop_capabilities()
        machine = os.uname().machine
        restrict_system_calls(import_filter(machine, may_signal=False))
        restrict_system_calls(call_filter(machine, may_start_processes=False))


def _limit_files(limits: CallLimits) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    # With 1, unlike 0, the kernel does not start the program that handles core dumps either; see core(5).
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    if IS_LINUX:
        # Timers of timer_create; their number is limited for all processes of the user together.
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (_OPEN_FILES, _OPEN_FILES))


def _may_signal(spec: WorkerSpec) -> bool:
    # Only calls that start processes need signals, and only in namespaces can they not reach other processes.
    return spec.limits.processes > 0 and spec.has_namespaces


def address_space(process: int | None = None) -> int:
    """Return the bytes of address space of a process (Linux); of this process by default."""
    with open(f"/proc/{process or 'self'}/statm", encoding="ascii") as statistics:
        return int(statistics.read().split()[0]) * resource.getpagesize()


def counts_threads_by_namespace() -> bool:
    """Return whether the kernel counts RLIMIT_NPROC separately in each user namespace (since Linux 5.14).

    Older kernels count all threads of the user on the machine, including the trainer's.
    """
    numbers = [int(number) for number in re.findall(r"\d+", os.uname().release)]
    return IS_LINUX and numbers[:2] >= [5, 14]
