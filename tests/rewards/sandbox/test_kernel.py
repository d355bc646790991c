# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tests in separate processes, because the restrictions cannot be undone."""

import os
import select
import subprocess
import sys

import pytest

from marin_rl.rewards.sandbox import kernel

pytestmark = pytest.mark.skipif(not kernel.IS_LINUX, reason="these are calls of Linux")

IMPORT = "import os, signal, sys\nfrom marin_rl.rewards.sandbox import kernel\n"


def run(program: str) -> str:
    command = [sys.executable, "-c", IMPORT + program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_refused_system_call_is_named():
    with pytest.raises(OSError, match=r"prctl\(1234567\): Invalid argument"):
        kernel.prctl(1234567, 0)
    with pytest.raises(OSError, match="system call 1000000: Function not implemented"):
        kernel.system_call(1000000)


def test_capabilities_are_dropped_for_good():
    shown = run(
        "kernel.drop_capabilities()\n"
        "print(*(line for line in open('/proc/self/status') if line.startswith('Cap')), sep='')\n"
        "kernel.drop_capabilities()"
    )
    left = {name: int(value, 16) for name, value in (line.split(":") for line in shown.split("\n") if line)}
    assert [left[name] for name in ("CapInh", "CapPrm", "CapEff")] == [0, 0, 0]


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_process_ends_with_its_parent(end: str):
    """The child keeps the pipe open; only its end closes it."""
    reader, writer = os.pipe()
    program = (
        f"{IMPORT}"
        "parent = os.getpid()\n"
        "ready, writing = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    kernel.exit_with_parent(parent)\n"
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


def test_process_with_dead_parent_exits():
    # No process has this id, like the id of a parent that has ended.
    assert run(
        "print('before', flush=True)\nif os.fork() == 0:\n    kernel.exit_with_parent(-1)\n    print('after')"
    ) == ("before\n")
