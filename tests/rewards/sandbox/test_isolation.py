# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import os
import select
import subprocess
import sys
import types
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox import isolation
from marin_rl.rewards.sandbox.isolation import (
    IS_LINUX,
    OLDEST_LANDLOCK,
    Isolation,
    address_space,
    counts_threads_by_namespace,
    find_holes,
    landlock_version,
    self_test,
)

linux = pytest.mark.skipif(not IS_LINUX, reason="these are calls of Linux")


def test_levels_are_ordered():
    assert sorted(Isolation, key=lambda level: level.rank) == [Isolation.NONE, Isolation.PARTIAL, Isolation.FULL]


def test_unconfined_program_finds_every_hole(tmp_path: Path):
    """Run the program without a sandbox, to check that it detects every hole."""
    secret = tmp_path / 'it\'s "outside"\n'
    secret.write_text("readable")
    command = [sys.executable, "-I", "-c", self_test(str(secret))]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(find_holes(printed, processes=0, has_namespaces=True)) == {
        "reads a file outside",
        "changes files outside",
        "opens sockets",
        "starts processes",
        "sees a file outside",
    }
    assert Path(f"{secret}.new").exists()


@pytest.mark.parametrize(
    ("processes", "has_namespaces", "holes"),
    [
        (0, True, ["starts processes", "sees a file outside"]),
        (1, True, ["sees a file outside"]),
        (0, False, ["starts processes"]),
        (1, False, []),
    ],
)
def test_allowed_actions_are_not_holes(processes: int, has_namespaces: bool, holes: list[str]):
    tried = {"reads a file outside": False, "starts processes": True, "sees a file outside": True}
    assert find_holes(json.dumps(tried), processes, has_namespaces) == holes
    assert find_holes('{"opens sockets": true}', processes, has_namespaces) == ["opens sockets"]
    for printed in ("", "Killed", "{"):
        with pytest.raises(ValueError, match="Expecting"):
            find_holes(printed, processes, has_namespaces)


# Programs run in separate processes, because restrictions cannot be undone.

IMPORT = "import os, signal, sys\nfrom marin_rl.rewards.sandbox import isolation\n"


def run(program: str) -> str:
    command = [sys.executable, "-c", IMPORT + program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@linux
def test_refused_system_call_is_named():
    with pytest.raises(OSError, match=r"prctl\(1234567\): Invalid argument"):
        isolation.prctl(1234567, 0)
    with pytest.raises(OSError, match="system call 1000000: Function not implemented"):
        isolation.system_call(1000000)


@linux
def test_capabilities_are_dropped_for_good():
    shown = run(
        "isolation.drop_capabilities()\n"
        "print(*(line for line in open('/proc/self/status') if line.startswith('Cap')), sep='')\n"
        "isolation.drop_capabilities()"
    )
    left = {name: int(value, 16) for name, value in (line.split(":") for line in shown.split("\n") if line)}
    assert [left[name] for name in ("CapInh", "CapPrm", "CapEff")] == [0, 0, 0]


@linux
@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_process_ends_with_its_parent(end: str):
    """The child keeps the pipe open; only its end closes it."""
    reader, writer = os.pipe()
    program = (
        f"{IMPORT}"
        "parent = os.getpid()\n"
        "ready, writing = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    isolation.exit_with_parent(parent)\n"
        "    os.write(writing, b'x')\n"
        # If the test fails, the process still ends.
        "    signal.alarm(120)\n"
        "    signal.pause()\n"
        "os.read(ready, 1)\n"
        f"{end}\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], pass_fds=[writer])
    os.close(writer)
    parent.wait()
    with os.fdopen(reader, "rb") as pipe:
        assert select.select([pipe], [], [], 60)[0], "the child lives on"
        assert pipe.read() == b""


@linux
def test_process_with_dead_parent_exits():
    # No process has this id, like the id of a parent that has ended.
    assert run(
        "print('before', flush=True)\nif os.fork() == 0:\n    isolation.exit_with_parent(-1)\n    print('after')"
    ) == ("before\n")


TRY = """
import os, sys
from marin_rl.rewards.sandbox.isolation import landlock_version, restrict_files

inside, outside = sys.argv[1:]
{restrict}

def refused(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False

checks = [
    refused(lambda: open(outside + "/file").read()),
    refused(lambda: open(outside + "/file", "w")),
    refused(lambda: os.truncate(outside + "/file", 0)),
    refused(lambda: os.remove(outside + "/file")),
    refused(lambda: os.mkdir(outside + "/folder")),
    refused(lambda: os.symlink("x", outside + "/link")),
    refused(lambda: os.rename(inside + "/file", outside + "/moved")),
    refused(lambda: os.listdir(outside)),
    refused(lambda: open(inside + "/file").read()),
    refused(lambda: open(inside + "/new", "w")),
]
print(*map(int, checks), sep="")
"""


@pytest.mark.skipif(landlock_version() < OLDEST_LANDLOCK, reason=f"the kernel has Landlock {landlock_version()}")
@pytest.mark.parametrize(
    ("restrict", "expected"),
    [
        ("restrict_files([], [inside], landlock_version())", "1111111100"),
        ("restrict_files([inside], [], landlock_version())", "1111111101"),
        ("restrict_files(None, [inside], landlock_version())", "0111111000"),
        # Further layers can only remove rights.
        ("restrict_files(None, [], 3); restrict_files([], [inside], 3)", "1111111101"),
        ("restrict_files(['/no/such/path', inside + '/file'], [], landlock_version())", "1111111101"),
    ],
)
def test_restrictions(restrict: str, expected: str, tmp_path: Path):
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("text")
    command = [sys.executable, "-c", TRY.format(restrict=restrict), *(str(tmp_path / n) for n in ("inside", "outside"))]
    # Landlock does not restrict open files, so load the modules before.
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.stdout.strip() == expected


LIMITED = """
import resource
from marin_rl.rewards.sandbox.isolation import address_space, confine_call, confine_import, counts_threads_by_namespace
from marin_rl.rewards.sandbox.protocol import CallLimits, WorkerSpec

def spec(memory_bytes, file_bytes, has_namespaces=False):
    limits = CallLimits(1.0, 1.5, memory_bytes, 0, 9, file_bytes, 1000)
    return WorkerSpec(None, "", (), (), (), has_namespaces, 0, False, 1.0, limits)

taken = address_space()
confine_import(spec(2**28, 2000))
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
assert taken + 2**28 <= soft <= taken + 2**28 + 2**24 and hard - soft == 2**28, (taken, soft, hard)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (2000, 2000)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)
processes = resource.getrlimit(resource.RLIMIT_NPROC)
confine_call(spec(2**27, 1000), "", taken)
assert resource.getrlimit(resource.RLIMIT_NPROC) == processes
assert resource.getrlimit(resource.RLIMIT_AS) == (taken + 2**27, taken + 2**27)
assert resource.getrlimit(resource.RLIMIT_CPU) == (2, 3)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (1000, 1000)
assert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)
assert resource.getrlimit(resource.RLIMIT_SIGPENDING) == (64, 64)
confine_call(spec(2**27, 1000, has_namespaces=True), "", taken)
# The worker, the forkserver, and nine threads of the call.
limited = (11, 11) if counts_threads_by_namespace() else processes
assert resource.getrlimit(resource.RLIMIT_NPROC) == limited
"""


def test_limits_are_set():
    subprocess.run([sys.executable, "-c", LIMITED], check=True)


def test_address_space_grows_with_what_is_mapped():
    before = address_space()
    held = bytearray(2**26)
    assert address_space() - before >= 2**26 - 2**20
    assert len(held) == 2**26


@pytest.mark.parametrize(
    ("release", "counts"),
    [("5.14.0-427.el9.x86_64", True), ("6.1.0-18-amd64", True), ("6.18-rc1", True), ("5.13.19", False),
     ("4.18.0-513.el8.x86_64", False)],
)  # fmt: skip
def test_kernels_that_count_threads_by_namespace(release: str, counts: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.uname", lambda: types.SimpleNamespace(release=release))
    monkeypatch.setattr(isolation, "IS_LINUX", True)
    assert counts_threads_by_namespace() is counts
