# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tests of the filters with an independent BPF interpreter."""

import errno
import fcntl
import mmap
import os
import socket
import struct

import pytest

from marin_rl.rewards.sandbox.seccomp import call_filter, import_filter

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, REFUSED, UNKNOWN, UNSUPPORTED, KILLED = "allowed", "refused", "unknown", "unsupported", "killed"
PRETENDED = "pretended"
VERDICTS = {
    0x7FFF0000: ALLOWED,
    0x80000000: KILLED,
    0x50000 | errno.EPERM: REFUSED,
    0x50000 | errno.ENOSYS: UNKNOWN,
    0x50000 | errno.EOPNOTSUPP: UNSUPPORTED,
    0x50000: PRETENDED,
}
NOTHING, EVERYTHING = "nothing", "everything"
"""What a filter leaves: the two filters of a call together, or the first one with signals."""

# From asm/unistd_64.h and asm-generic/unistd.h, independent of the tables under test.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "creat": (85, None), "openat2": (437, 437), "fallocate": (285, 47), "flock": (73, 32),
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "setsockopt": (54, 208), "io_setup": (206, 0),
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71), "close_range": (436, 436),
    "landlock_create_ruleset": (444, 444), "memfd_create": (319, 279), "shmget": (29, 194), "add_key": (248, 217),
    "read": (0, 63), "openat": (257, 56), "mmap": (9, 222), "socketpair": (53, 199), "fork": (57, None),
    "clone": (56, 220), "clone3": (435, 435), "execve": (59, 221), "kill": (62, 129), "tgkill": (234, 131),
    "socket": (41, 198), "ptrace": (101, 117), "prctl": (157, 167), "fcntl": (72, 25), "ioctl": (16, 29),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "io_uring_setup": (425, 425), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27), "fanotify_mark": (301, 263), "fchmodat": (268, 53), "unshare": (272, 97),
    "setsid": (112, 157), "setpgid": (109, 154),
}  # fmt: skip
CLONE_FILES = 0x00000400
CLONE_THREAD = 0x00010000
CLONE_PARENT = 0x00008000
CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def interpret(program: bytes, architecture: int, number: int, *arguments: int) -> str:
    values = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *values)
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, position = 0, 0
    while True:
        operation, if_true, if_false, value = code[position]
        position += 1
        if operation == 0x20:
            [accumulator] = struct.unpack_from("<I", data, value)
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x06:
            return VERDICTS[value]
        elif operation == 0x05:
            position += value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
            position += if_true if holds[operation] else if_false


@pytest.fixture(params=list(ARCHITECTURES))
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def filters(machine: str, left: str) -> list[bytes]:
    if left == EVERYTHING:
        return [import_filter(machine, may_signal=True)]
    return [import_filter(machine, may_signal=False), call_filter(machine, may_start_processes=False)]


def verdict(machine: str, left: str, name: str, *arguments: int) -> str:
    """Return the strictest verdict of the filters, like the kernel."""
    number = NUMBERS[name][list(ARCHITECTURES).index(machine)]
    assert number is not None
    found = {interpret(program, ARCHITECTURES[machine], number, *arguments) for program in filters(machine, left)}
    [strictest] = found - {ALLOWED} or {ALLOWED}
    return strictest


# System calls and arguments with the verdict of both filters of a call, and of the first one with signals.
SHARED, PRIVATE, ANONYMOUS, FIXED = mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS, 0x10
CREATES = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECTORY | os.O_CLOEXEC
HIGH = 1 << 32
"""A bit of the upper half of an argument, which the kernel does not read if the argument is an int."""
CASES: list[tuple[str, tuple[int, ...], str, str]] = [
    *((name, (), ALLOWED, ALLOWED) for name in ("read", "openat", "mmap")),
    *(
        (name, (), REFUSED, REFUSED)
        for name in (
            *("socket", "ptrace", "io_uring_setup", "fchmodat", "unshare", "inotify_init1", "inotify_add_watch"),
            *("fanotify_mark", "sendmsg", "sendmmsg", "setsockopt", "io_setup", "vmsplice", "memfd_create", "shmget"),
            "add_key",
        )
    ),
    *((name, (), REFUSED, ALLOWED) for name in ("execve", "fork", "kill", "tgkill", "setsid", "setpgid", "setrlimit")),
    *((name, (), UNKNOWN, UNKNOWN) for name in ("clone3", "openat2", "splice", "tee", "sendfile")),
    ("fallocate", (), UNSUPPORTED, UNSUPPORTED),
    ("flock", (), PRETENDED, PRETENDED),
    # The forkserver's children restrict themselves.
    ("landlock_create_ruleset", (), REFUSED, ALLOWED),
    ("clone", (17,), REFUSED, ALLOWED),
    ("clone", (CLONE_THREAD | 0x3D0F00,), ALLOWED, ALLOWED),
    *(("clone", (flag | 17,), REFUSED, REFUSED) for flag in (CLONE_NEWUSER, CLONE_PARENT)),
    *(("clone", (flag | CLONE_THREAD,), REFUSED, REFUSED) for flag in (CLONE_NEWUSER, CLONE_PARENT)),
    # A thread with its own table of descriptors.
    ("clone", (CLONE_THREAD | 0x3D0F00 & ~CLONE_FILES,), REFUSED, REFUSED),
    *(
        ("close_range", (3, 5, flags), verdict, verdict)
        for flags, verdict in ((0, ALLOWED), (4, ALLOWED), (2, REFUSED), (6, REFUSED), (HIGH | 2, REFUSED))
    ),
    *(("prlimit64", (0, 9, pointer), REFUSED, ALLOWED) for pointer in (1, HIGH, 0x7FFFFFFFE000)),
    ("prlimit64", (0, 9, 0), ALLOWED, ALLOWED),
    *(("prlimit64", (process, 9, 0), REFUSED, REFUSED) for process in (1, HIGH)),
    *(("prctl", (option,), REFUSED, ALLOWED) for option in (PR_SET_PDEATHSIG, HIGH | PR_SET_PDEATHSIG)),
    ("prctl", (PR_SET_DUMPABLE,), REFUSED, REFUSED),
    ("prctl", (15,), ALLOWED, ALLOWED),
    *(
        ("fcntl", (3, command), verdict, verdict)
        for command in (*range(32), *range(1020, 1040))
        for verdict in [
            REFUSED
            if command in (8, 10, 15, fcntl.F_SETLEASE, fcntl.F_NOTIFY, fcntl.F_SETPIPE_SZ)
            else PRETENDED
            if command in (fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)
            else ALLOWED
        ]
    ),
    *(
        ("ioctl", (3, high | request), verdict, verdict)
        for high in (0, HIGH)
        for request, verdict in (
            *((0x8901, REFUSED), (0x8902, REFUSED), (0x8900, ALLOWED), (0x8903, ALLOWED), (0x5401, ALLOWED)),
            # Reading flags; _IOW('f', 2, long), _IOW('X', 32, struct fsxattr), _IOW('f', 133, fsverity_enable_arg).
            (2 << 30 | 8 << 16 | ord("f") << 8 | 1, ALLOWED),
            *(
                (1 << 30 | size << 16 | ord(kind) << 8 | number, REFUSED)
                for size, kind, number in ((8, "f", 2), (28, "X", 32), (128, "f", 133))
            ),
            # _IOW('X', number, struct space_resv).
            *((1 << 30 | 48 << 16 | ord("X") << 8 | number, UNSUPPORTED) for number in (10, 36, 40, 42, 57)),
        )
    ),
    *(
        (name, (*before, CREATES | flag), verdict, verdict)
        for name, before in (("open", (0,)), ("openat", (0, 0)))
        for flag, verdict in ((0, ALLOWED), (0x400000, UNSUPPORTED))
    ),
    *(
        ("mmap", (0, 4096, 3, flags), ALLOWED, ALLOWED)
        for flags in (SHARED, PRIVATE, PRIVATE | ANONYMOUS, PRIVATE | ANONYMOUS | FIXED, 0)
    ),
    *(
        ("mmap", (0, 4096, 3, flags), REFUSED, REFUSED)
        for flags in (SHARED | ANONYMOUS, SHARED | ANONYMOUS | FIXED, HIGH | SHARED | ANONYMOUS)
    ),
]


def test_verdicts(machine: str):
    wrong = [
        (name, arguments, found)
        for name, arguments, *expected in CASES
        if NUMBERS[name][list(ARCHITECTURES).index(machine)] is not None
        and (found := [verdict(machine, left, name, *arguments) for left in (NOTHING, EVERYTHING)]) != expected
    ]
    assert not wrong


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_datagram_socket_pairs_are_blocked(machine: str, left: str):
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    for kind in range(16):
        expected = ALLOWED if kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET) else REFUSED
        for given in (kind, kind | flags, 1 << 32 | kind):
            assert verdict(machine, left, "socketpair", socket.AF_UNIX, given) == expected
    for domain in set(range(50)) - {socket.AF_UNIX}:
        assert verdict(machine, left, "socketpair", domain, socket.SOCK_STREAM) == REFUSED


def test_other_architecture_kills_the_process(machine: str):
    for program in filters(machine, NOTHING):
        for architecture in {0x40000003, *ARCHITECTURES.values()} - {ARCHITECTURES[machine]}:
            assert interpret(program, architecture, 1) == KILLED


def test_x32_system_calls_kill_the_process():
    for program in filters("x86_64", NOTHING):
        for number in (0, 41, 520, 545):
            assert interpret(program, ARCHITECTURES["x86_64"], 0x40000000 | number) == KILLED


def test_filter_is_within_the_kernel_size_limit(machine: str):
    assert sum(len(program) for program in filters(machine, NOTHING)) // 8 < 4096
