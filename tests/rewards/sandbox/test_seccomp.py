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
NUMBERS = {
    "x86_64": {
        "open": 2,
        "creat": 85,
        "openat2": 437,
        "fallocate": 285,
        "flock": 73,
        "sendmsg": 46,
        "sendmmsg": 307,
        "setsockopt": 54,
        "io_setup": 206,
        "vmsplice": 278,
        "splice": 275,
        "tee": 276,
        "sendfile": 40,
        "close_range": 436,
        "landlock_create_ruleset": 444,
        "memfd_create": 319,
        "shmget": 29,
        "add_key": 248,
        "read": 0,
        "openat": 257,
        "mmap": 9,
        "socketpair": 53,
        "fork": 57,
        "clone": 56,
        "clone3": 435,
        "execve": 59,
        "kill": 62,
        "tgkill": 234,
        "socket": 41,
        "ptrace": 101,
        "prctl": 157,
        "fcntl": 72,
        "ioctl": 16,
        "prlimit64": 302,
        "setrlimit": 160,
        "io_uring_setup": 425,
        "inotify_init1": 294,
        "inotify_add_watch": 254,
        "fanotify_mark": 301,
        "fchmodat": 268,
        "unshare": 272,
        "setsid": 112,
        "setpgid": 109,
    },
    "aarch64": {
        "openat2": 437,
        "fallocate": 47,
        "flock": 32,
        "sendmsg": 211,
        "sendmmsg": 269,
        "setsockopt": 208,
        "io_setup": 0,
        "vmsplice": 75,
        "splice": 76,
        "tee": 77,
        "sendfile": 71,
        "close_range": 436,
        "landlock_create_ruleset": 444,
        "memfd_create": 279,
        "shmget": 194,
        "add_key": 217,
        "read": 63,
        "openat": 56,
        "mmap": 222,
        "socketpair": 199,
        "clone": 220,
        "clone3": 435,
        "execve": 221,
        "kill": 129,
        "tgkill": 131,
        "socket": 198,
        "ptrace": 117,
        "prctl": 167,
        "fcntl": 25,
        "ioctl": 29,
        "prlimit64": 261,
        "setrlimit": 164,
        "io_uring_setup": 425,
        "inotify_init1": 26,
        "inotify_add_watch": 27,
        "fanotify_mark": 263,
        "fchmodat": 53,
        "unshare": 97,
        "setsid": 157,
        "setpgid": 154,
    },
}
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
    number = NUMBERS[machine][name]
    found = {interpret(program, ARCHITECTURES[machine], number, *arguments) for program in filters(machine, left)}
    [strictest] = found - {ALLOWED} or {ALLOWED}
    return strictest


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_system_calls_allowed_for_every_call(machine: str, left: str):
    for name in ("read", "openat", "mmap"):
        assert verdict(machine, left, name) == ALLOWED


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_system_calls_blocked_for_every_call(machine: str, left: str):
    refused = ("socket", "ptrace", "io_uring_setup", "fchmodat", "unshare")
    for name in (*refused, "inotify_init1", "inotify_add_watch", "fanotify_mark"):
        assert verdict(machine, left, name) == REFUSED
    assert verdict(machine, left, "clone3") == UNKNOWN


def test_processes(machine: str):
    for left, expected in ((NOTHING, REFUSED), (EVERYTHING, ALLOWED)):
        assert verdict(machine, left, "clone", 17) == expected
        assert verdict(machine, left, "execve") == expected
        assert verdict(machine, left, "clone", CLONE_THREAD | 0x3D0F00) == ALLOWED
    for left in (NOTHING, EVERYTHING):
        for flag in (CLONE_NEWUSER, CLONE_PARENT):
            assert verdict(machine, left, "clone", flag | 17) == REFUSED
            assert verdict(machine, left, "clone", flag | CLONE_THREAD) == REFUSED
        # A thread with its own table of descriptors.
        assert verdict(machine, left, "clone", CLONE_THREAD | 0x3D0F00 & ~CLONE_FILES) == REFUSED
    if machine == "x86_64":
        assert verdict(machine, NOTHING, "fork") == REFUSED


def test_signals(machine: str):
    for name in ("kill", "tgkill"):
        assert verdict(machine, NOTHING, name) == REFUSED
        assert verdict(machine, EVERYTHING, name) == ALLOWED


def test_limits(machine: str):
    for pointer in (1, 1 << 32, 0x7FFFFFFFE000):
        assert verdict(machine, NOTHING, "prlimit64", 0, 9, pointer) == REFUSED
        assert verdict(machine, EVERYTHING, "prlimit64", 0, 9, pointer) == ALLOWED
    assert verdict(machine, NOTHING, "prlimit64", 0, 9, 0) == ALLOWED
    assert verdict(machine, NOTHING, "setrlimit") == REFUSED
    assert verdict(machine, NOTHING, "prctl", PR_SET_PDEATHSIG) == REFUSED
    for left in (NOTHING, EVERYTHING):
        assert verdict(machine, left, "prctl", PR_SET_DUMPABLE) == REFUSED
    # The kernel reads prctl's first argument as an int.
    assert verdict(machine, NOTHING, "prctl", (1 << 32) | PR_SET_PDEATHSIG) == REFUSED
    assert verdict(machine, NOTHING, "prctl", 15) == ALLOWED


def test_groups(machine: str):
    for name in ("setsid", "setpgid"):
        assert verdict(machine, NOTHING, name) == REFUSED
        assert verdict(machine, EVERYTHING, name) == ALLOWED


def test_limits_of_other_processes(machine: str):
    for pid in (1, 1 << 32):
        assert verdict(machine, EVERYTHING, "prlimit64", pid, 9, 0) == REFUSED


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_fcntl_signals_and_watches_are_blocked(machine: str, left: str):
    for command in (*range(32), *range(1020, 1040)):
        expected = REFUSED if command in (8, 10, 15, fcntl.F_SETLEASE, fcntl.F_NOTIFY, fcntl.F_SETPIPE_SZ) else ALLOWED
        if command in (fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW):
            expected = PRETENDED
        assert verdict(machine, left, "fcntl", 3, command) == expected
    for request, expected in {
        0x8901: REFUSED,
        0x8902: REFUSED,
        0x8900: ALLOWED,
        0x8903: ALLOWED,
        0x5401: ALLOWED,
    }.items():
        assert verdict(machine, left, "ioctl", 3, request) == expected
        assert verdict(machine, left, "ioctl", 3, (1 << 32) | request) == expected


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_ioctl_attribute_changes_are_blocked(machine: str, left: str):
    # _IOW('f', 2, long), _IOW('X', 32, struct fsxattr) and _IOW('f', 133, struct fsverity_enable_arg), computed.
    for direction, size, kind, number in ((1, 8, "f", 2), (1, 28, "X", 32), (1, 128, "f", 133)):
        request = direction << 30 | size << 16 | ord(kind) << 8 | number
        assert verdict(machine, left, "ioctl", 3, request) == REFUSED
    reads_flags = 2 << 30 | 8 << 16 | ord("f") << 8 | 1
    assert verdict(machine, left, "ioctl", 3, reads_flags) == ALLOWED


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_system_calls_that_use_space_without_a_limit_are_blocked(machine: str, left: str):
    names = ("sendmsg", "sendmmsg", "setsockopt", "io_setup", "vmsplice", "memfd_create", "shmget", "add_key")
    for name in names:
        assert verdict(machine, left, name) == REFUSED
    assert verdict(machine, left, "fallocate") == UNSUPPORTED
    for name in ("openat2", "splice", "tee", "sendfile"):
        assert verdict(machine, left, name) == UNKNOWN
    assert verdict(machine, left, "flock") == PRETENDED
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECTORY | os.O_CLOEXEC
    for name, before in (("open", (0,)), ("openat", (0, 0))):
        if name in NUMBERS[machine]:
            assert verdict(machine, left, name, *before, flags) == ALLOWED
            assert verdict(machine, left, name, *before, flags | 0x400000) == UNSUPPORTED
    # _IOW('X', number, struct space_resv), computed.
    for number in (10, 36, 40, 42, 57):
        request = 1 << 30 | 48 << 16 | ord("X") << 8 | number
        assert verdict(machine, left, "ioctl", 3, request) == UNSUPPORTED


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_anonymous_mappings_are_private(machine: str, left: str):
    shared, private, fixed, anonymous = mmap.MAP_SHARED, mmap.MAP_PRIVATE, 0x10, mmap.MAP_ANONYMOUS
    for flags in (shared, private, private | anonymous, private | anonymous | fixed, 0):
        assert verdict(machine, left, "mmap", 0, 4096, 3, flags) == ALLOWED
    for flags in (shared | anonymous, shared | anonymous | fixed, 1 << 32 | shared | anonymous):
        assert verdict(machine, left, "mmap", 0, 4096, 3, flags) == REFUSED


@pytest.mark.parametrize("left", [NOTHING, EVERYTHING])
def test_no_thread_gets_its_own_table_of_descriptors(machine: str, left: str):
    for flags, expected in ((0, ALLOWED), (4, ALLOWED), (2, REFUSED), (6, REFUSED), (1 << 32 | 2, REFUSED)):
        assert verdict(machine, left, "close_range", 3, 5, flags) == expected


def test_calls_cannot_add_rules_for_files(machine: str):
    # The forkserver's children restrict themselves.
    assert verdict(machine, EVERYTHING, "landlock_create_ruleset") == ALLOWED
    assert verdict(machine, NOTHING, "landlock_create_ruleset") == REFUSED


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
