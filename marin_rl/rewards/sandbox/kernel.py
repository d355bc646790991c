# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Linux system calls that the sandbox needs and Python does not wrap."""

import ctypes
import functools
import os
import signal
import struct
import sys

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

WAIT_ALL = 0x40000000 if sys.platform == "linux" else 0
"""`__WALL` for waitpid: also wait for children that were cloned without SIGCHLD."""

IS_LINUX = sys.platform == "linux"
"""Whether the functions of this module can be called."""

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


def signal_on_parent_exit(number: int) -> None:
    """Have the kernel send a signal to this process when its parent process ends for any reason."""
    prctl(PR_SET_PDEATHSIG, number)


def exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent process ends for any reason.

    Args:
        parent: id of the parent process. If it has already ended, this process exits at once.
    """
    signal_on_parent_exit(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
