# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Seccomp: block system calls that reward functions do not need.

A filter is a classic BPF program (`include/uapi/linux/filter.h`, seccomp(2)), assembled here because libseccomp is not
installed everywhere. It is a deny list: it blocks system calls that reach other processes, the network, the kernel's
configuration, a file's attributes, or the users of a file (leases, watches, locks), which Landlock does not restrict,
and those that use disk space or memory without a limit; it allows all others. A process that loads a file has
the first filter. Its calls inherit it, and add the second. System call numbers are from `asm/unistd_64.h` (x86-64) and
`asm-generic/unistd.h` (64-bit Arm).
"""

import errno
import functools
import os
import struct
import sys
from collections.abc import Iterable, Mapping

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Architecture numbers (`include/uapi/linux/audit.h`), in the order of the columns below."""


def _table(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Read system calls with their numbers on x86-64 and on 64-bit Arm; `-` if the machine does not have it."""
    rows = (row.split() for row in text.split(","))
    return {name: (None if x86 == "-" else int(x86), None if arm == "-" else int(arm)) for name, x86, arm in rows}


# A message of sendmsg can hold descriptors, so that a file stays open though no process has it open. The options of
# setsockopt include the size of queues.
_NETWORK = _table(
    """socket 41 198, connect 42 203, bind 49 200, listen 50 201, sendmsg 46 211, sendmmsg 307 269, setsockopt 54 208"""
)
_SIGNALS = _table(
    """kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
    pidfd_send_signal 424 424"""
)
# A process that leaves the process group of its call could escape when the group is killed.
_GROUPS = _table("setsid 112 157, setpgid 109 154")
_PROGRAMS = _table("fork 57 -, vfork 58 -, execve 59 221, execveat 322 281")
_OTHER_PROCESSES = _table(
    """ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, kcmp 312 272,
    pidfd_open 434 434, pidfd_getfd 438 438, setpriority 141 140, ioprio_set 251 30, sched_setaffinity 203 122,
    sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274, migrate_pages 256 238,
    move_pages 279 239, process_mrelease 448 448"""
)
_NAMESPACES = _table(
    """mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, setns 308 268, unshare 272 97, open_tree 428 428,
    open_tree_attr 467 467, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
    mount_setattr 442 442, open_by_handle_at 304 265, name_to_handle_at 303 264"""
)
_KERNEL = _table(
    """add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    io_setup 206 0, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, init_module 175 105,
    finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, reboot 169 142,
    swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60, quotactl_fd 443 443, settimeofday 164 170,
    clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, sethostname 170 161, setdomainname 171 162,
    syslog 103 116, iopl 172 -, ioperm 173 -, modify_ldt 154 -, vhangup 153 58"""
)
# Watches report accesses to files and folders that the process may not even be allowed to read.
_WATCHES = _table(
    """inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27, fanotify_init 300 262,
    fanotify_mark 301 263"""
)
# Memory and queues that outlive the process, belong to others, or are not counted by its limits.
# With vmsplice, pipes hold pages that their process has freed.
_SHARED_MEMORY = _table(
    """memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186,
    msgsnd 69 189, msgrcv 70 188, msgctl 71 187, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192,
    mq_open 240 180, mq_unlink 241 181, vmsplice 278 75"""
)
_ATTRIBUTES = _table(
    """chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -,
    fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
    removexattrat 466 466, file_setattr 469 469"""
)
_FILTERED_BY_ARGUMENTS = _table(
    """open 2 -, openat 257 56, clone 56 220, prctl 157 167, fcntl 72 25, ioctl 16 29, socketpair 53 199,
    prlimit64 302 261, mmap 9 222, close_range 436 436"""
)
# The arguments of clone3 and openat2 are in memory, which a filter cannot read; programs fall back to clone and openat.
# With the others, pipes and sockets hold pages of a file that has been truncated; programs fall back to read and write.
_UNKNOWN_CALLS = _table("clone3 435 435, openat2 437 437, splice 275 76, tee 276 77, sendfile 40 71")
# It reserves space beyond the end of a file, to which no limit applies.
_UNSUPPORTED = _table("fallocate 285 47")
_FLOCK = _table("flock 73 32")
_LIMITS = _table("setrlimit 160 164")
# A call is already restricted, and the rules of further rulesets are memory of the kernel.
_LANDLOCK = _table("landlock_create_ruleset 444 444")

_SIGNALS_BY_FCNTL = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX: make a file send signals to any process of the user."""
_WATCHES_BY_FCNTL = (1024, 1026)
"""F_SETLEASE, which blocks processes that open the file to write, and F_NOTIFY, which reports changes in a folder."""
_PIPE_SIZE_BY_FCNTL = (1031,)
"""F_SETPIPE_SZ: the memory of pipes is limited for all processes of the user together."""
_LOCKS_BY_FCNTL = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW and those of open file descriptions (F_OFD_SETLK, F_OFD_SETLKW)."""
_SIGNALS_BY_IOCTL = (0x8901, 0x8902)
"""FIOSETOWN and SIOCSPGRP: the same by ioctl."""
_ATTRIBUTES_BY_IOCTL = (0x40086602, 0x401C5820, 0x40087602, 0x40086604, 0x40806685, 0x800C6613)
"""FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION, EXT4_IOC_SETVERSION, FS_IOC_ENABLE_VERITY and
FS_IOC_SET_ENCRYPTION_POLICY: change attributes of the user's files through a read-only descriptor."""
_SPACE_BY_IOCTL = (0x4030580A, 0x40305824, 0x40305828, 0x4030582A, 0x40305839)
"""XFS_IOC_ALLOCSP and its form of 64 bits, FS_IOC_RESVSP and its form of 64 bits, and FS_IOC_ZERO_RANGE: reserve space
like `fallocate`."""
_TEMPORARY_FILE = 0x400000
"""The bit of `O_TMPFILE` that no other flag of open contains. Such a file has no name, by which it could be counted."""

_SHARED_ANONYMOUS = 0x01 | 0x20
"""MAP_SHARED and MAP_ANONYMOUS: the memory stays allocated while a single page of it is mapped, which alone counts as
address space."""
_CLOSE_RANGE_UNSHARE = 0x2
"""The calling thread gets its own table of descriptors; see `_unless_foreign`."""

_UNIX_DOMAIN = 1
_SOCKET_KIND_MASK = 0xF
_STREAM, _SEQUENCED_PACKETS = 1, 5

_X32_BIT = 0x40000000
_CLONE_FILES = 0x00000400
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
_CLONE_PARENT = 0x00008000
"""The child becomes a sibling of its creator, so that the forkserver would have to reap it."""

_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x45, 0x35, 0x06
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERROR = 0x00050000
_REFUSE = _ERROR | errno.EPERM
_UNKNOWN = _ERROR | errno.ENOSYS
_UNSUPPORTED_HERE = _ERROR | errno.EOPNOTSUPP
_PRETEND = _ERROR
"""The system call returns 0 and has no effect."""
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16


def seccomp_is_supported() -> bool:
    """Return whether this module has the machine's system call numbers."""
    return sys.platform == "linux" and os.uname().machine in _MACHINES and struct.calcsize("P") == 8


@functools.cache
def import_filter(machine: str, may_signal: bool) -> bytes:
    """Assemble the filter of a process that loads a file and forks its calls, eight bytes per instruction.

    The process can start processes, and change its own limits, parent-death signal, session and process group.
    `machine` is `x86_64` or `aarch64`. `may_signal` permits signals to all reachable processes.
    """
    tables = [_NETWORK, _OTHER_PROCESSES, _NAMESPACES, _KERNEL, _WATCHES, _SHARED_MEMORY, _ATTRIBUTES]
    column, number = _numbers(machine)
    program = _for_all((*tables, *([] if may_signal else [_SIGNALS])), column, _REFUSE)
    program += _for_all((_UNKNOWN_CALLS,), column, _UNKNOWN)
    program += _for_all((_UNSUPPORTED,), column, _UNSUPPORTED_HERE)
    program += _for_all((_FLOCK,), column, _PRETEND)
    for name, argument in (("open", 1), ("openat", 2)):
        if name in number:
            program += _when(number[name], _unless_set(argument, _TEMPORARY_FILE, _UNSUPPORTED_HERE))
    program += _when(number["mmap"], _unless_set(3, _SHARED_ANONYMOUS, _REFUSE))
    program += _when(number["close_range"], _unless_set(2, _CLOSE_RANGE_UNSHARE, _REFUSE))
    program += _when(number["clone"], _unless_foreign())
    refused = _SIGNALS_BY_FCNTL + _WATCHES_BY_FCNTL + _PIPE_SIZE_BY_FCNTL
    program += _when(
        number["fcntl"], [*_if_among(1, refused, _REFUSE), *_if_among(1, _LOCKS_BY_FCNTL, _PRETEND), _answer(_ALLOW)]
    )
    refused = _SIGNALS_BY_IOCTL + _ATTRIBUTES_BY_IOCTL
    program += _when(
        number["ioctl"],
        [*_if_among(1, refused, _REFUSE), *_if_among(1, _SPACE_BY_IOCTL, _UNSUPPORTED_HERE), _answer(_ALLOW)],
    )
    # It would hide its open files.
    program += _when(number["prctl"], [*_if_among(0, (PR_SET_DUMPABLE,), _REFUSE), _answer(_ALLOW)])
    program += _when(number["socketpair"], _if_permanently_connected())
    # The process can change its own limits, but not those of other processes.
    program += _when(number["prlimit64"], _unless_null(0))
    return b"".join([*_check_machine(machine), *program, _answer(_ALLOW)])


@functools.cache
def call_filter(machine: str, may_start_processes: bool) -> bytes:
    """Assemble the filter that a call adds to the one that it inherits.

    It is short, because the kernel evaluates a new filter once for every system call number. `machine` is `x86_64` or
    `aarch64`. Threads are always allowed.
    """
    column, number = _numbers(machine)
    program = _for_all((_GROUPS, _LIMITS, _LANDLOCK, *([] if may_start_processes else [_PROGRAMS])), column, _REFUSE)
    if not may_start_processes:
        threads = [_instruction(_LOAD, _ARGUMENTS), _instruction(_JUMP_SET, _CLONE_THREAD, 1, 0), _answer(_REFUSE)]
        program += _when(number["clone"], [*threads, _answer(_ALLOW)])
    program += _when(number["prlimit64"], _unless_null(2))
    program += _when(number["prctl"], [*_if_among(0, (PR_SET_PDEATHSIG,), _REFUSE), _answer(_ALLOW)])
    return b"".join([*_check_machine(machine), *program, _answer(_ALLOW)])


def _numbers(machine: str) -> tuple[int, dict[str, int]]:
    """Return the machine's column of the tables, and its numbers of `_FILTERED_BY_ARGUMENTS`."""
    column = list(_MACHINES).index(machine)
    numbers = {name: row[column] for name, row in _FILTERED_BY_ARGUMENTS.items()}
    return column, {name: number for name, number in numbers.items() if number is not None}


def _check_machine(machine: str) -> list[bytes]:
    """Kill processes that use the numbers of another architecture, and load the system call's number."""
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, _MACHINES[machine], 1, 0),
        _answer(_KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        # System calls have other numbers in the x32 ABI.
        program += [_instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), _answer(_KILL_PROCESS)]
    return program


def _for_all(tables: Iterable[Mapping[str, tuple[int | None, int | None]]], column: int, value: int) -> list[bytes]:
    numbers = [row[column] for table in tables for row in table.values()]
    return [line for number in numbers if number is not None for line in _when(number, [_answer(value)])]


def _unless_foreign() -> list[bytes]:
    # A thread with its own table of descriptors could keep files open that its process does not list.
    return [
        _instruction(_LOAD, _ARGUMENTS),
        _instruction(_JUMP_SET, _CLONE_NAMESPACES | _CLONE_PARENT, 2, 0),
        _instruction(_JUMP_SET, _CLONE_THREAD, 0, 2),
        _instruction(_JUMP_SET, _CLONE_FILES, 1, 0),
        _answer(_REFUSE),
        _answer(_ALLOW),
    ]


def _unless_set(argument: int, bits: int, value: int) -> list[bytes]:
    """Return `value` if an argument has all of the bits."""
    tests = [_instruction(_AND, bits), _instruction(_JUMP_EQUAL, bits, 0, 1)]
    return [_instruction(_LOAD, _ARGUMENTS + 8 * argument), *tests, _answer(value), _answer(_ALLOW)]


def _unless_null(argument: int) -> list[bytes]:
    low = _ARGUMENTS + 8 * argument
    return [
        _instruction(_LOAD, low),
        _instruction(_JUMP_EQUAL, 0, 0, 2),
        _instruction(_LOAD, low + 4),
        _instruction(_JUMP_EQUAL, 0, 1, 0),
        _answer(_REFUSE),
        _answer(_ALLOW),
    ]


def _if_among(argument: int, values: tuple[int, ...], value: int) -> list[bytes]:
    """Return `value` if an argument is one of `values`; continue otherwise. Commands are ints: the low half counts."""
    tests = [_instruction(_JUMP_EQUAL, one, len(values) - index, 0) for index, one in enumerate(values)]
    return [_instruction(_LOAD, _ARGUMENTS + 8 * argument), *tests, _instruction(_JUMP, 1), _answer(value)]


def _if_permanently_connected() -> list[bytes]:
    # A pair of datagram sockets can send to any named socket of the machine.
    return [
        _instruction(_LOAD, _ARGUMENTS),
        _instruction(_JUMP_EQUAL, _UNIX_DOMAIN, 0, 4),
        _instruction(_LOAD, _ARGUMENTS + 8),
        _instruction(_AND, _SOCKET_KIND_MASK),
        _instruction(_JUMP_EQUAL, _STREAM, 2, 0),
        _instruction(_JUMP_EQUAL, _SEQUENCED_PACKETS, 1, 0),
        _answer(_REFUSE),
        _answer(_ALLOW),
    ]


def _when(number: int, rule: list[bytes]) -> list[bytes]:
    # Every rule ends in a return, so the system call number is still loaded when the rule is skipped.
    return [_instruction(_JUMP_EQUAL, number, 0, len(rule)), *rule]


def _answer(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
