# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
import sys

import pytest

from tests.rewards.sandbox.conftest import descendants

# Programs run in separate processes, because they kill or stop all descendants.

# Descendants are killed except the spared one.
TREE = """
import os, sys, time
from marin_rl.rewards.sandbox.isolation import PR_SET_CHILD_SUBREAPER, prctl
from marin_rl.rewards.sandbox.processes import end_descendants, list_descendants

def descendants(root):
    return {number: process.group for number, process in list_descendants(root).items() if not process.has_ended}

prctl(PR_SET_CHILD_SUBREAPER, 1)
ready, started = os.pipe()

def sleep():
    os.write(started, b"x")
    time.sleep(1e6)

spared = os.fork()
if spared == 0:
    sleep()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            sleep()
        sleep()
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    os.write(started, b"x")
    # Forks until it is killed; only a few processes at a time, so that the test does not endanger its machine.
    while True:
        child = os.fork()
        if child == 0:
            time.sleep(0.01)
            os._exit(0)
        os.waitpid(child, 0)
for _ in range(4):
    os.read(ready, 1)
found = descendants(os.getpid())
assert len(found) >= 4 and found[spared] == os.getpgrp(), found
assert end_descendants(spared, 30)
assert set(descendants(os.getpid())) == {spared}
assert end_descendants(None, 30)
assert descendants(os.getpid()) == {}
"""


def test_a_process_without_children():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants(os.getpid())
        assert descendants(child.pid) == {}
    assert child.pid not in descendants(os.getpid())


# Descendants are stopped except the spared one.
STOPPED = """
import os, time
from marin_rl.rewards.sandbox.isolation import PR_SET_CHILD_SUBREAPER, prctl
from marin_rl.rewards.sandbox.processes import end_descendants, list_descendants, stopped_descendants

prctl(PR_SET_CHILD_SUBREAPER, 1)
spared = os.fork()
if spared == 0:
    time.sleep(1e6)
ticking, ticks = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        time.sleep(1e6)
    # Each process starts the next one and ends.
    while os.fork() == 0:
        os.write(ticks, b"x")
    os._exit(0)
os.set_blocking(ticking, False)

def wait_for_a_tick():
    while True:
        try:
            return os.read(ticking, 1)
        except BlockingIOError:
            time.sleep(0.001)

for _ in range(20):
    wait_for_a_tick()
    with stopped_descendants(spared, 600):
        found = {number: one for number, one in list_descendants(os.getpid()).items() if not one.has_ended}
        assert not found.pop(spared).is_stopped
        assert found and all(one.is_stopped for one in found.values()), found
        try:
            while os.read(ticking, 1 << 16):
                pass
        except BlockingIOError:
            pass
    wait_for_a_tick()
assert end_descendants(None, 30)
"""


# Both listings of descendants agree.
WALKS = """
import os, threading
from marin_rl.rewards.sandbox.processes import end_descendants, list_descendants, scan_descendants

ready, started = os.pipe()
go_on, ends = os.pipe()

def wait(depth):
    if depth and os.fork() == 0:
        wait(depth - 1)
    threading.Thread(target=lambda: (os.write(started, b"x"), os.read(go_on, 1))).start()
    threading.Event().wait()

def fork():
    if os.fork() == 0:
        os.close(ends)
        wait(2)

# Children of threads other than the main thread count too.
thread = threading.Thread(target=fork)
thread.start()
thread.join()
for _ in range(3):
    os.read(ready, 1)
found = list_descendants(os.getpid())
assert len(found) == 3 and {process.threads for process in found.values()} == {2}, found
assert scan_descendants(os.getpid()) == found
assert end_descendants(None, 30)
"""


# A process is alone when the others have ended.
WAIT = """
import os, time
from marin_rl.rewards.sandbox.isolation import PR_SET_CHILD_SUBREAPER, prctl
from marin_rl.rewards.sandbox.processes import wait_until_alone

prctl(PR_SET_CHILD_SUBREAPER, 1)
kept = os.fork()
if kept == 0:
    time.sleep(1e6)
ending, end = os.pipe()
other = os.fork()
if other == 0:
    os.close(end)
    os.read(ending, 1)
    os._exit(0)
assert not wait_until_alone(kept, 0.05)
os.close(end)
assert wait_until_alone(kept, 30)
os.kill(kept, 9)
os.waitpid(kept, 0)
"""

# As on kernels that do not list the children of a process in /proc.
NO_LISTS = "import os\nos.path.exists = lambda path: False\n"


@pytest.mark.parametrize(
    "program", [TREE, STOPPED, WALKS, NO_LISTS + WALKS, WAIT], ids=["kill", "stop", "list", "list all", "wait"]
)
def test_programs(program: str):
    subprocess.run([sys.executable, "-c", program], check=True)
