# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions that attack the machine. Run them only in a sandbox."""

import contextlib
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from marin_rl.rewards import EvaluateResult, reward_function

CALLS = []


@reward_function
def honest(messages, ground_truth, **kwargs):
    CALLS.append(1)
    return EvaluateResult(score=float(messages[-1]["content"] == ground_truth), metrics={"calls": len(CALLS)})


@reward_function
def loops_for_ever(messages, ground_truth, **kwargs):
    while True:
        pass


@reward_function
def sleeps_for_ever(messages, ground_truth, **kwargs):
    time.sleep(1e6)


@reward_function
def ignores_signals_and_loops(messages, ground_truth, **kwargs):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


@reward_function
def ignores_signals_and_sleeps(messages, ground_truth, **kwargs):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1e6)


@reward_function
def allocates_ten_gigabytes(messages, ground_truth, **kwargs):
    return float(len(bytearray(10 * 2**30)))


@reward_function
def allocates_step_by_step(messages, ground_truth, **kwargs):
    held = []
    while True:
        held.append(bytearray(2**20))


@reward_function
def bombs_with_threads(messages, ground_truth, **kwargs):
    while True:
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()


@reward_function
def bombs_with_small_threads(messages, ground_truth, **kwargs):
    """Starts threads with little memory; at most 2,000, so that the test does not endanger its machine."""
    threading.stack_size(32768)
    for _ in range(2000):
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
    time.sleep(1e6)


@reward_function
def starts_threads(messages, ground_truth, count, **kwargs):
    barrier = threading.Barrier(count)
    for _ in range(count - 1):
        threading.Thread(target=barrier.wait).start()
    barrier.wait()
    return 1.0


@reward_function
def bombs_with_forks(messages, ground_truth, **kwargs):
    while True:
        os.fork()


@reward_function
def starts_many(messages, ground_truth, **kwargs):
    for _ in range(30):
        if os.fork() == 0:
            time.sleep(1e6)
    time.sleep(1e6)


@reward_function
def leaves_a_daemon(messages, ground_truth, **kwargs):
    if os.fork() == 0:
        with contextlib.suppress(PermissionError):
            os.setsid()
        if os.fork() == 0:
            time.sleep(1e6)
        os._exit(0)
    os.wait()
    return 1.0


@reward_function
def flees(messages, ground_truth, **kwargs):
    """Continues in a chain of short-lived descendants for half a minute."""
    end = time.monotonic() + 30
    if os.fork():
        return 1.0
    while time.monotonic() < end:
        with contextlib.suppress(PermissionError):
            os.setsid()
        if os.fork():
            os._exit(0)
    os._exit(0)


@reward_function
def forgets_its_children(messages, ground_truth, **kwargs):
    for _ in range(100):
        if os.fork() == 0:
            os._exit(0)
        time.sleep(0.01)
    return 1.0


NUMBERS = {
    "clone": {"x86_64": 56, "aarch64": 220},
    "inotify_init1": {"x86_64": 294, "aarch64": 26},
    "inotify_add_watch": {"x86_64": 254, "aarch64": 27},
    "fallocate": {"x86_64": 285, "aarch64": 47},
    "flock": {"x86_64": 73, "aarch64": 32},
    "timer_create": {"x86_64": 222, "aarch64": 107},
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "shmget": {"x86_64": 29, "aarch64": 194},
    "msgget": {"x86_64": 68, "aarch64": 186},
    "semget": {"x86_64": 64, "aarch64": 190},
    "mq_open": {"x86_64": 240, "aarch64": 180},
    "add_key": {"x86_64": 248, "aarch64": 217},
    "io_setup": {"x86_64": 206, "aarch64": 0},
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
    "userfaultfd": {"x86_64": 323, "aarch64": 282},
    "perf_event_open": {"x86_64": 298, "aarch64": 241},
    "bpf": {"x86_64": 321, "aarch64": 280},
    "vmsplice": {"x86_64": 278, "aarch64": 75},
    "mount": {"x86_64": 165, "aarch64": 40},
    "pivot_root": {"x86_64": 155, "aarch64": 41},
    "unshare": {"x86_64": 272, "aarch64": 97},
    "openat2": {"x86_64": 437, "aarch64": 437},
    "close_range": {"x86_64": 436, "aarch64": 436},
    "landlock_create_ruleset": {"x86_64": 444, "aarch64": 444},
}


def system_call(name, *arguments):
    """Make a system call that Python does not wrap."""
    import ctypes

    number = NUMBERS[name][os.uname().machine]
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *values)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


@reward_function
def makes_a_system_call(messages, ground_truth, system, arguments=(), **kwargs):
    return float(system_call(system, *arguments))


@reward_function
def clones_siblings(messages, ground_truth, exit_signal=int(signal.SIGCHLD), stays=False, **kwargs):
    """Creates children of the forkserver, which only the forkserver can reap."""
    clone_parent = 0x8000
    for _ in range(2):
        if system_call("clone", clone_parent | exit_signal, 0, 0, 0, 0) == 0:
            if stays:
                time.sleep(1e6)
            os._exit(0)
    return 1.0


@reward_function
def runs_a_program(messages, ground_truth, **kwargs):
    return float(subprocess.run(["/bin/true"], check=True).returncode)


@reward_function
def reads(messages, ground_truth, path, **kwargs):
    with open(path) as file:
        return EvaluateResult(score=1.0, reason=file.read())


@reward_function
def deletes(messages, ground_truth, path, **kwargs):
    os.remove(path)
    return 1.0


@reward_function
def overwrites(messages, ground_truth, path, **kwargs):
    with open(path, "w") as file:
        file.write("overwritten")
    return 1.0


@reward_function
def truncates(messages, ground_truth, path, **kwargs):
    os.truncate(path, 0)
    return 1.0


@reward_function
def makes_readable(messages, ground_truth, path, **kwargs):
    os.chmod(path, 0o777)
    return 1.0


@reward_function
def looks_for_secrets(messages, ground_truth, processes=100_000, **kwargs):
    found = [json.dumps(dict(os.environ))]
    for place in range(1, processes):
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError), open(f"/proc/{place}/{name}", errors="replace") as file:
                found.append(file.read())
    return EvaluateResult(score=1.0, reason="".join(found))


@reward_function
def connects(messages, ground_truth, port, **kwargs):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"secret")
    return 1.0


@reward_function
def sends(messages, ground_truth, path, kind, **kwargs):
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SocketKind(kind))
    ours.sendto(b"secret", path)
    return 1.0


@reward_function
def changes_flags(messages, ground_truth, path, **kwargs):
    import array
    import fcntl

    flags = array.array("l", [0])
    with open(path) as file:
        fcntl.ioctl(file, 0x80086601, flags)
        # FS_NODUMP_FL, which every owner of a file can set.
        flags[0] ^= 0x40
        fcntl.ioctl(file, 0x40086602, flags)
    return 1.0


@reward_function
def takes_a_lease(messages, ground_truth, path, **kwargs):
    import fcntl

    with open(path) as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return 1.0


@reward_function
def asks_for_notices(messages, ground_truth, path, **kwargs):
    import fcntl

    folder = os.open(path, os.O_RDONLY)
    fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_CREATE)
    return 1.0


@reward_function
def watches(messages, ground_truth, path, **kwargs):
    import ctypes

    watch = system_call("inotify_init1", 0)
    system_call("inotify_add_watch", watch, ctypes.c_char_p(path.encode()), 0x100)
    return 1.0


@reward_function
def locks_files(messages, ground_truth, flags, **kwargs):
    """Sets `chattr` flags on a file, then on its folder."""
    import array
    import fcntl

    os.makedirs("inner/folder")
    with open("inner/folder/file", "w") as file:
        fcntl.ioctl(file, 0x40086602, array.array("l", [flags]))
    fcntl.ioctl(os.open("inner/folder", os.O_RDONLY), 0x40086602, array.array("l", [flags]))
    return 1.0


@reward_function
def mounts(messages, ground_truth, **kwargs):
    """Creates a mount point, which cannot be removed."""
    import ctypes

    os.mkdir("inner")
    if ctypes.CDLL(None, use_errno=True).mount(b"none", b"inner", b"tmpfs", 0, None) < 0:
        raise OSError(ctypes.get_errno(), "mount")
    return EvaluateResult(score=1.0, reason=os.path.abspath("inner"))


@reward_function
def writes_a_gigabyte(messages, ground_truth, **kwargs):
    with tempfile.TemporaryFile() as file:
        for _ in range(1024):
            file.write(bytes(2**20))
    return 1.0


@reward_function
def writes_many_files(messages, ground_truth, **kwargs):
    for index in range(100):
        with open(os.path.join(tempfile.gettempdir(), str(index)), "wb") as file:
            file.write(bytes(2**20))
    time.sleep(1e6)


@reward_function
def hides_many_files(messages, ground_truth, **kwargs):
    os.umask(0)
    for _ in range(1500):
        os.mkdir("deeper")
        os.chdir("deeper")
    os.mkdir("hidden", 0o300)
    for index in range(100):
        with open(f"hidden/{index}", "wb") as file:
            file.write(bytes(2**20))
    time.sleep(1e6)


@reward_function
def nests_folders(messages, ground_truth, **kwargs):
    for _ in range(1500):
        os.mkdir("deeper")
        os.chdir("deeper")
    return 1.0


@reward_function
def hides_a_file(messages, ground_truth, **kwargs):
    os.umask(0)
    os.mkdir("outer")
    os.mkdir("outer/inner", 0o300)
    with open("outer/inner/file", "w") as file:
        file.write("hidden")
    return 1.0


@reward_function
def prints_for_ever(messages, ground_truth, **kwargs):
    while True:
        print("x" * 1000)


@reward_function
def warns_for_ever(messages, ground_truth, **kwargs):
    while True:
        sys.stderr.write("x" * 1000)


@reward_function
def answers_endlessly(messages, ground_truth, **kwargs):
    return EvaluateResult(score=1.0, reason="x" * 10_000_000)


@reward_function
def forges(messages, ground_truth, text, **kwargs):
    os.write(3, text.encode())
    os._exit(0)


@reward_function
def answers_twice(messages, ground_truth, **kwargs):
    os.write(3, b'{"results": [{"score": 1000000}]}')
    return 1.0


@reward_function
def exits(messages, ground_truth, code, **kwargs):
    os._exit(code)


@reward_function
def raises_system_exit(messages, ground_truth, **kwargs):
    sys.exit(0)


@reward_function
def signals(messages, ground_truth, process=None, **kwargs):
    os.kill(os.getppid() if process is None else process, signal.SIGKILL)
    return 1.0


@reward_function
def signals_through_a_file(messages, ground_truth, process, **kwargs):
    import fcntl

    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, process)
    fcntl.fcntl(ours, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
    theirs.send(b"x")
    return 1.0


@reward_function
def limits_the_trainer(messages, ground_truth, process, **kwargs):
    import resource

    resource.prlimit(process, resource.RLIMIT_NOFILE, (3, 3))
    return 1.0


@reward_function
def recurses(messages, ground_truth, **kwargs):
    sys.setrecursionlimit(10**9)

    def deeper(count):
        return deeper(count + 1) + 1

    return deeper(0)


@reward_function
def overflows_the_stack(messages, ground_truth, **kwargs):
    """Overflows a small stack: Python 3.12 limits nested calls of C functions, whatever the limit of recursion."""
    sys.setrecursionlimit(10**9)
    nested = []
    for _ in range(10**6):
        nested = [nested]
    threading.stack_size(32768)
    thread = threading.Thread(target=repr, args=(nested,))
    thread.start()
    thread.join()
    return 1.0


@reward_function
def crashes(messages, ground_truth, **kwargs):
    import ctypes

    return ctypes.string_at(0)


@reward_function
def patches_everything(messages, ground_truth, **kwargs):
    import builtins

    from marin_rl.rewards import functions

    functions.RewardFunction.__call__ = lambda *a, **k: EvaluateResult(score=99.0)
    functions.evaluate = lambda *a, **k: [EvaluateResult(score=99.0)]
    os.fork = os.wait4 = os._exit = lambda *a: 0
    json.loads = json.dumps = lambda *a: {}
    builtins.len = lambda *a: 7
    CALLS.extend([1] * 1000)
    for thing in gc.get_objects():
        if isinstance(thing, socket.socket):
            thing.close()
    return 1.0


@reward_function
def closes_descriptors(messages, ground_truth, **kwargs):
    os.closerange(0, 100)
    return 1.0


@reward_function
def raises_limits(messages, ground_truth, **kwargs):
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return float(len(bytearray(10 * 2**30)))


@reward_function
def outlives_its_parent(messages, ground_truth, **kwargs):
    import ctypes

    return float(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))


@reward_function
def reads_its_parents_memory(messages, ground_truth, **kwargs):
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        return float(len(memory.read(1)))


@reward_function
def answers_infinity(messages, ground_truth, **kwargs):
    return float("inf")


@reward_function
def answers_a_huge_number(messages, ground_truth, **kwargs):
    return EvaluateResult(score=10**400)


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(0)


@reward_function
def raises_what_cannot_be_said(messages, ground_truth, **kwargs):
    raise Unspeakable


class Unflushable:
    def write(self, text):
        pass

    def flush(self):
        raise SystemExit(0)


@reward_function
def leaves_an_output_that_cannot_be_flushed(messages, ground_truth, **kwargs):
    sys.stdout = Unflushable()
    return 1.0


@reward_function
def starts_threads_that_allocate(messages, ground_truth, count, **kwargs):
    end = threading.Event()
    threads = [threading.Thread(target=lambda: (bytearray(1000), end.wait())) for _ in range(count)]
    for thread in threads:
        thread.start()
    end.set()
    return 1.0


@reward_function
def raises_a_surrogate(messages, ground_truth, **kwargs):
    raise ValueError("half a character: \ud800")


@reward_function
def names_metrics(messages, ground_truth, names, **kwargs):
    return EvaluateResult(score=1.0, metrics=dict.fromkeys(names, 1.0))


@reward_function
def answers_text(messages, ground_truth, **kwargs):
    return "1.0"


@reward_function
def leaves_notes(messages, ground_truth, **kwargs):
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


@reward_function
def remembers_files(messages, ground_truth, **kwargs):
    found = os.listdir(tempfile.gettempdir())
    with open(os.path.join(tempfile.gettempdir(), "left"), "w") as file:
        file.write("behind")
    return EvaluateResult(score=float(bool(found)))


def fills(name):
    """Open a new file that uses a mebibyte."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT)
    os.write(descriptor, bytes(2**20))
    return descriptor


def maps(descriptor, flags):
    import ctypes

    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    assert (
        library.mmap(None, ctypes.c_size_t(4096), 1, flags, descriptor, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
    )
    os.close(descriptor)


def deletes_an_open_file():
    fills("file")
    os.remove("file")


def replaces_an_open_file():
    fills("new")
    os.rename("new", "old")


def deletes_a_mapped_file(flags):
    descriptor = fills("file")
    os.remove("file")
    maps(descriptor, flags)


def writes_through_a_mapping():
    import mmap

    with open("file", "w+b") as file:
        file.truncate(2**20)
        mapping = mmap.mmap(file.fileno(), 2**20)
    mapping.write(bytes([1]) * 2**20)
    os.remove("file")
    CALLS.append(mapping)


SPACE = {
    "deletes_an_open_file": deletes_an_open_file,
    "replaces_an_open_file": replaces_an_open_file,
    "deletes_a_mapped_file": lambda: deletes_a_mapped_file(1),
    "deletes_a_private_mapping": lambda: deletes_a_mapped_file(2),
    "writes_through_a_mapping": writes_through_a_mapping,
}


@reward_function
def uses_space(messages, ground_truth, kind, **kwargs):
    for _ in range(40):
        SPACE[kind]()
    time.sleep(1e6)


@reward_function
def deletes_many_files(messages, ground_truth, **kwargs):
    for _ in range(40):
        os.close(fills("file"))
        os.remove("file")
    return 1.0


@reward_function
def creates(messages, ground_truth, kind, **kwargs):
    """Creates entries of a folder that use no space of their own."""
    create = {"files": os.mknod, "folders": os.mkdir, "links": functools.partial(os.symlink, "to"), "pipes": os.mkfifo}
    for number in range(10**6):
        create[kind](str(number))


@reward_function
def opens_without_a_name(messages, ground_truth, **kwargs):
    os.open(".", os.O_TMPFILE | os.O_RDWR)


@reward_function
def reserves_space(messages, ground_truth, control=None, **kwargs):
    import fcntl
    import struct

    descriptor = os.open("file", os.O_RDWR | os.O_CREAT)
    if control is None:
        # Without changing the size of the file.
        system_call("fallocate", descriptor, 1, 0, 2**31)
    else:
        fcntl.ioctl(descriptor, control, struct.pack("hhqqiI16s", 0, 0, 0, 2**31, 0, 0, b""))


@reward_function
def sends_a_descriptor(messages, ground_truth, **kwargs):
    ours, _ = socket.socketpair()
    socket.send_fds(ours, [b"x"], [fills("file")])


@reward_function
def enlarges_a_queue(messages, ground_truth, kind, **kwargs):
    import fcntl

    if kind == "pipe":
        fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 2**20)
    else:
        socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)


@reward_function
def fills_queues(messages, ground_truth, kind, **kwargs):
    """Returns the bytes that all sockets or pipes of a process hold."""
    total = 0
    held = []
    with contextlib.suppress(OSError):
        while True:
            held += socket.socketpair() if kind == "sockets" else map(open_writer, os.pipe(), "rw")
    for one in held:
        with contextlib.suppress(OSError):
            os.set_blocking(one.fileno(), False)
            while True:
                total += os.write(one.fileno(), bytes(2**16))
    return float(total)


def open_writer(descriptor, mode):
    return open(descriptor, mode + "b", buffering=0)


@reward_function
def counts_what_it_opens(messages, ground_truth, kind, **kwargs):
    import ctypes
    import select

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


@reward_function
def locks(messages, ground_truth, path, kind, **kwargs):
    """Locks a file that others use, twice. A lock that has an effect excludes the second one."""
    import fcntl
    import struct

    with open(path) as first, open(path) as second:
        for file, how in ((first, fcntl.F_RDLCK), (second, fcntl.F_WRLCK)):
            if kind == "flock":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                commands = {"lockf": fcntl.F_SETLK, "waits": fcntl.F_SETLKW, "ofd": fcntl.F_OFD_SETLK}
                fcntl.fcntl(file, commands[kind], struct.pack("hhqqi", how, 0, 0, 0, 0))
    return 1.0


@reward_function
def keeps_shared_pages(messages, ground_truth, kind, **kwargs):
    """Holds memory of shared mappings of which only a page is still mapped, and so counts as address space."""
    import mmap

    if kind == "anonymous":
        mmap.mmap(-1, 4096)
    with open("/dev/zero", "r+b") as file:
        mmap.mmap(file.fileno(), 4096)


@reward_function
def keeps_pages_in_a_pipe(messages, ground_truth, kind, **kwargs):
    _, writing = os.pipe()
    file = fills("file")
    if kind == "splice":
        os.splice(file, writing, 1, offset_src=0)
    else:
        os.sendfile(writing, file, 0, 1)


@reward_function
def changes_attributes(messages, ground_truth, path, kind, **kwargs):
    {
        "utime": lambda: os.utime(path),
        "xattr": lambda: os.setxattr(path, "user.x", b"x"),
        "link": lambda: os.link(path, "link"),
        "own xattr": lambda: os.setxattr(".", "user.x", b"x"),
    }[kind]()


@reward_function
def uses_files(messages, ground_truth, **kwargs):
    """Uses files in the ways of honest programs."""
    import asyncio
    import shutil
    import sqlite3

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
