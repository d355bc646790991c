# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attacks on the machine by a reward function. Run them only in a sandbox."""

import array
import asyncio
import builtins
import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types

from marin_rl.rewards import EvaluateResult, reward_function
from marin_rl.rewards.sandbox import functions

CALLS = []
FOREVER = 1e6


@reward_function
def honest(messages, ground_truth, **kwargs):
    CALLS.append(1)
    return EvaluateResult(score=float(messages[-1]["content"] == ground_truth), metrics={"calls": len(CALLS)})


@reward_function
def attack(messages, ground_truth, task_id, environment, status, num_prompt_messages, name, options, **kwargs):
    """Run a function below. Its result is that of the call; None is 1."""
    result = ATTACKS[name](**options)
    return 1.0 if result is None else result


# Time, memory, threads and processes.


def loops_for_ever():
    while True:
        pass


def ignores_signals(then):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        ATTACKS[then]()


def allocates_step_by_step():
    held = []
    while True:
        held.append(bytearray(2**20))


def bombs_with_threads():
    while True:
        threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True).start()


def bombs_with_small_threads():
    """Starts threads with little memory; at most 2,000, so that the test does not endanger its machine."""
    threading.stack_size(32768)
    for _ in range(2000):
        threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True).start()
    time.sleep(FOREVER)


def starts_threads(count):
    barrier = threading.Barrier(count)
    for _ in range(count - 1):
        threading.Thread(target=barrier.wait).start()
    barrier.wait()


def starts_threads_that_allocate(count):
    end = threading.Event()
    threads = [threading.Thread(target=lambda: (bytearray(1000), end.wait())) for _ in range(count)]
    for thread in threads:
        thread.start()
    end.set()


def bombs_with_forks():
    while True:
        os.fork()


def starts_many():
    for _ in range(30):
        if os.fork() == 0:
            time.sleep(FOREVER)
    time.sleep(FOREVER)


def leaves_a_daemon():
    if os.fork() == 0:
        with contextlib.suppress(PermissionError):
            os.setsid()
        if os.fork() == 0:
            time.sleep(FOREVER)
        os._exit(0)
    os.wait()


def flees():
    """Continues in a chain of short-lived descendants for half a minute."""
    end = time.monotonic() + 30
    if os.fork():
        return
    while time.monotonic() < end:
        with contextlib.suppress(PermissionError):
            os.setsid()
        if os.fork():
            os._exit(0)
    os._exit(0)


def forgets_its_children():
    for _ in range(100):
        if os.fork() == 0:
            os._exit(0)
        time.sleep(0.01)


def clones_siblings(exit_signal=int(signal.SIGCHLD), stays=False):
    """Creates children of the forkserver, which only the forkserver can reap."""
    clone_parent = 0x8000
    for _ in range(2):
        if system_call("clone", clone_parent | exit_signal, 0, 0, 0, 0) == 0:
            if stays:
                time.sleep(FOREVER)
            os._exit(0)


# System calls that Python does not wrap: numbers on x86-64 and 64-bit Arm.
NUMBERS = {
    "clone": (56, 220), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "fallocate": (285, 47),
    "timer_create": (222, 107), "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "io_setup": (206, 0),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "bpf": (321, 280),
    "vmsplice": (278, 75), "mount": (165, 40), "pivot_root": (155, 41), "unshare": (272, 97),
    "close_range": (436, 436), "landlock_create_ruleset": (444, 444),
}  # fmt: skip


def system_call(name, *arguments):
    number = NUMBERS[name][("x86_64", "aarch64").index(os.uname().machine)]
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *values)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


# Files, the network and other processes.


def reads(path):
    with open(path) as file:
        return EvaluateResult(score=1.0, reason=file.read())


def overwrites(path):
    with open(path, "w") as file:
        file.write("overwritten")


def looks_for_secrets(processes=100_000):
    found = [json.dumps(dict(os.environ))]
    for place in range(1, processes):
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError), open(f"/proc/{place}/{name}", errors="replace") as file:
                found.append(file.read())
    return EvaluateResult(score=1.0, reason="".join(found))


def connects(port):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"secret")


def sends(path, kind):
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SocketKind(kind))
    ours.sendto(b"secret", path)


def changes_flags(path):
    flags = array.array("l", [0])
    with open(path) as file:
        fcntl.ioctl(file, 0x80086601, flags)
        # FS_NODUMP_FL, which every owner of a file can set.
        flags[0] ^= 0x40
        fcntl.ioctl(file, 0x40086602, flags)


def takes_a_lease(path):
    with open(path) as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def watches(path):
    watch = system_call("inotify_init1", 0)
    system_call("inotify_add_watch", watch, ctypes.c_char_p(path.encode()), 0x100)


def locks(path, kind):
    """Locks a file that others use, twice. A lock that has an effect excludes the second one."""
    with open(path) as first, open(path) as second:
        for file, how in ((first, fcntl.F_RDLCK), (second, fcntl.F_WRLCK)):
            if kind == "flock":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                commands = {"lockf": fcntl.F_SETLK, "waits": fcntl.F_SETLKW, "ofd": fcntl.F_OFD_SETLK}
                fcntl.fcntl(file, commands[kind], struct.pack("hhqqi", how, 0, 0, 0, 0))


def changes_attributes(path, kind):
    {
        "utime": lambda: os.utime(path),
        "xattr": lambda: os.setxattr(path, "user.x", b"x"),
        "link": lambda: os.link(path, "link"),
        "own xattr": lambda: os.setxattr(".", "user.x", b"x"),
    }[kind]()


def signals_through_a_file(process):
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, process)
    fcntl.fcntl(ours, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
    theirs.send(b"x")


def raises_limits():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return float(len(bytearray(10 * 2**30)))


def reads_its_parents_memory():
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        return float(len(memory.read(1)))


# Disk space, and files that are difficult to count or to remove.


def locks_files(flags):
    """Sets `chattr` flags on a file, then on its folder."""
    os.makedirs("inner/folder")
    with open("inner/folder/file", "w") as file:
        fcntl.ioctl(file, 0x40086602, array.array("l", [flags]))
    fcntl.ioctl(os.open("inner/folder", os.O_RDONLY), 0x40086602, array.array("l", [flags]))


def mounts():
    """Creates a mount point, which cannot be removed."""
    os.mkdir("inner")
    if ctypes.CDLL(None, use_errno=True).mount(b"none", b"inner", b"tmpfs", 0, None) < 0:
        raise OSError(ctypes.get_errno(), "mount")
    return EvaluateResult(score=1.0, reason=os.path.abspath("inner"))


def writes_a_gigabyte():
    with tempfile.TemporaryFile() as file:
        for _ in range(1024):
            file.write(bytes(2**20))


def fills(name):
    """Open a new file that uses a mebibyte."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT)
    os.write(descriptor, bytes(2**20))
    return descriptor


def writes_many_files():
    for index in range(100):
        os.close(fills(os.path.join(tempfile.gettempdir(), str(index))))
    time.sleep(FOREVER)


def nests_folders():
    # Deeper than Python's limit of recursion, and with a path longer than the system's limit.
    os.umask(0)
    for _ in range(1050):
        os.mkdir("deeper")
        os.chdir("deeper")


def hides_many_files():
    nests_folders()
    os.mkdir("hidden", 0o300)
    for index in range(100):
        os.close(fills(f"hidden/{index}"))
    time.sleep(FOREVER)


def hides_a_file():
    os.umask(0)
    os.mkdir("outer")
    os.mkdir("outer/inner", 0o300)
    with open("outer/inner/file", "w") as file:
        file.write("hidden")


def maps(descriptor, flags):
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    place = library.mmap(None, ctypes.c_size_t(4096), 1, flags, descriptor, ctypes.c_long(0))
    assert place != ctypes.c_void_p(-1).value
    os.close(descriptor)


def deletes_an_open_file():
    fills("file")
    os.remove("file")


def replaces_an_open_file():
    fills("new")
    os.rename("new", "old")


def deletes_a_mapped_file(flags=1):
    descriptor = fills("file")
    os.remove("file")
    maps(descriptor, flags)


def writes_through_a_mapping():
    with open("file", "w+b") as file:
        file.truncate(2**20)
        mapping = mmap.mmap(file.fileno(), 2**20)
    mapping.write(bytes([1]) * 2**20)
    os.remove("file")
    CALLS.append(mapping)


SPACE = [
    "deletes_an_open_file",
    "replaces_an_open_file",
    "deletes_a_mapped_file",
    "deletes_a_private_mapping",
    "writes_through_a_mapping",
]


def uses_space(kind):
    for _ in range(40):
        ATTACKS[kind]()
    time.sleep(FOREVER)


def deletes_many_files():
    for _ in range(40):
        os.close(fills("file"))
        os.remove("file")


def creates(kind):
    """Creates entries of a folder that use no space of their own."""
    create = {"files": os.mknod, "folders": os.mkdir, "links": functools.partial(os.symlink, "to"), "pipes": os.mkfifo}
    for number in range(10**6):
        create[kind](str(number))


def reserves_space(control=None):
    descriptor = os.open("file", os.O_RDWR | os.O_CREAT)
    if control is None:
        # Without changing the size of the file.
        system_call("fallocate", descriptor, 1, 0, 2**31)
    else:
        fcntl.ioctl(descriptor, control, struct.pack("hhqqiI16s", 0, 0, 0, 2**31, 0, 0, b""))


def uses_files():
    """Uses files in the ways of honest programs."""

    async def wait():
        return await asyncio.to_thread(lambda: 1)

    with tempfile.TemporaryFile() as file, tempfile.NamedTemporaryFile() as other, tempfile.TemporaryDirectory():
        file.write(b"x")
        os.posix_fallocate(other.fileno(), 0, 4096)
        shutil.copyfile(other.name, "copy")
    for mode in ("delete", "wal"):
        with contextlib.closing(sqlite3.connect(f"{mode}.db")) as table:
            table.execute(f"PRAGMA journal_mode={mode}")
            table.execute("CREATE TABLE numbers (number)")
            table.execute("INSERT INTO numbers VALUES (1)")
            table.commit()
    return float(asyncio.run(wait()))


# Memory of the kernel.


def sends_a_descriptor():
    ours, _ = socket.socketpair()
    socket.send_fds(ours, [b"x"], [fills("file")])


def enlarges_a_queue(kind):
    if kind == "pipe":
        fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 2**20)
    else:
        socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)


def fills_queues(kind):
    """Returns the bytes that all sockets or pipes of a process hold."""
    total = 0
    held = []
    with contextlib.suppress(OSError):
        while True:
            held += socket.socketpair() if kind == "sockets" else map(open_end, os.pipe(), "rw")
    for one in held:
        with contextlib.suppress(OSError):
            os.set_blocking(one.fileno(), False)
            while True:
                total += os.write(one.fileno(), bytes(2**16))
    return float(total)


def open_end(descriptor, mode):
    return open(descriptor, mode + "b", buffering=0)


def counts_what_it_opens(kind):
    held = []
    open_one = {
        "timers": lambda: system_call("timer_create", 0, None, ctypes.create_string_buffer(8)),
        "files": lambda: os.open(os.devnull, os.O_RDONLY),
        "polls": select.epoll,
    }[kind]
    with contextlib.suppress(OSError):
        while len(held) < 10_000:
            held.append(open_one())
    return float(len(held))


def keeps_shared_pages(kind):
    """Holds memory of shared mappings of which only a page is still mapped, and so counts as address space."""
    if kind == "anonymous":
        mmap.mmap(-1, 4096)
    with open("/dev/zero", "r+b") as file:
        mmap.mmap(file.fileno(), 4096)


def keeps_pages_in_a_pipe(kind):
    _, writing = os.pipe()
    file = fills("file")
    if kind == "splice":
        os.splice(file, writing, 1, offset_src=0)
    else:
        os.sendfile(writing, file, 0, 1)


# Output, answers and ends.


def prints_for_ever():
    while True:
        print("x" * 1000)


def warns_for_ever():
    while True:
        sys.stderr.write("x" * 1000)


def forges(text):
    os.write(3, text.encode())
    os._exit(0)


def raises_a_surrogate():
    raise ValueError("half a character: \ud800")


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(0)


def raises_what_cannot_be_said():
    raise Unspeakable


class Unflushable:
    def write(self, text):
        pass

    def flush(self):
        raise SystemExit(0)


def leaves_an_output_that_cannot_be_flushed():
    sys.stdout = Unflushable()


def recurses():
    sys.setrecursionlimit(10**9)

    def deeper(count):
        return deeper(count + 1) + 1

    return deeper(0)


def overflows_the_stack():
    """Overflows a small stack: Python 3.12 limits nested calls of C functions, whatever the limit of recursion."""
    sys.setrecursionlimit(10**9)
    nested = []
    for _ in range(10**6):
        nested = [nested]
    threading.stack_size(32768)
    thread = threading.Thread(target=repr, args=(nested,))
    thread.start()
    thread.join()


# State that later calls could find.


def patches_everything():
    functions.RewardFunction.__call__ = lambda *a, **k: EvaluateResult(score=99.0)
    functions.evaluate = lambda *a, **k: [EvaluateResult(score=99.0)]
    os.fork = os.wait4 = os._exit = lambda *a: 0
    json.loads = json.dumps = lambda *a: {}
    builtins.len = lambda *a: 7
    CALLS.extend([1] * 1000)
    for thing in gc.get_objects():
        if isinstance(thing, socket.socket):
            thing.close()


def leaves_notes():
    """Reads notes of earlier calls from all writable folders, and writes new ones."""
    found = []
    shared = os.path.dirname(tempfile.gettempdir())
    for folder in ("/tmp", "/var/tmp", "/dev/shm", shared):
        with contextlib.suppress(OSError), open(os.path.join(folder, "note")) as file:
            found.append(file.read())
        with contextlib.suppress(OSError), open(os.path.join(folder, "note"), "w") as file:
            file.write(folder)
    with contextlib.suppress(OSError):
        os.rmdir(tempfile.gettempdir())
        os.symlink("/usr", tempfile.gettempdir())
    return EvaluateResult(score=float(len(found)), reason=" ".join(found))


def remembers_files():
    found = os.listdir(tempfile.gettempdir())
    with open(os.path.join(tempfile.gettempdir(), "left"), "w") as file:
        file.write("behind")
    return float(bool(found))


ATTACKS = {name: value for name, value in globals().items() if isinstance(value, types.FunctionType)} | {
    "sleeps_for_ever": lambda: time.sleep(FOREVER),
    "allocates_ten_gigabytes": lambda: float(len(bytearray(10 * 2**30))),
    "runs_a_program": lambda: float(subprocess.run(["/bin/true"], check=True).returncode),
    "makes_a_system_call": lambda system, arguments: float(system_call(system, *arguments)),
    "deletes": lambda path: os.remove(path),
    "truncates": lambda path: os.truncate(path, 0),
    "makes_readable": lambda path: os.chmod(path, 0o777),
    "asks_for_notices": lambda path: fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE),
    "signals": lambda process=None: os.kill(process or os.getppid(), signal.SIGKILL),
    "limits_the_trainer": lambda process: resource.prlimit(process, resource.RLIMIT_NOFILE, (3, 3)),
    "outlives_its_parent": lambda: float(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)),
    "opens_without_a_name": lambda: os.open(".", os.O_TMPFILE | os.O_RDWR),
    "deletes_a_private_mapping": lambda: deletes_a_mapped_file(2),
    "exits": lambda code: os._exit(code),
    "raises_system_exit": lambda: sys.exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "closes_descriptors": lambda: os.closerange(0, 100),
    "answers_infinity": lambda: float("inf"),
    "answers_a_huge_number": lambda: EvaluateResult(score=10**400),
    "answers_text": lambda: "1.0",
    "answers_endlessly": lambda: EvaluateResult(score=1.0, reason="x" * 10_000_000),
    "answers_twice": lambda: os.write(3, b'{"results": [{"score": 1000000}]}') and 1.0,
    "names_metrics": lambda names: EvaluateResult(score=1.0, metrics=dict.fromkeys(names, 1.0)),
}
