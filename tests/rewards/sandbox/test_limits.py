# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys
import types

import pytest

from marin_rl.rewards.sandbox.limits import address_space, counts_threads_by_namespace

LIMITED = """
import resource
from marin_rl.rewards.sandbox.limits import CallLimits, address_space, limit_call, limit_import
from marin_rl.rewards.sandbox.limits import counts_threads_by_namespace

taken = address_space()
limits = CallLimits(1.0, 1.5, 2**28, 0, 9, 2000, 1000)
limit_import(limits)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
assert taken + 2**28 <= soft <= taken + 2**28 + 2**24 and hard - soft == 2**28, (taken, soft, hard)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (2000, 2000)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)
limits = CallLimits(1.0, 1.5, 2**27, 0, 9, 1000, 1000)
processes = resource.getrlimit(resource.RLIMIT_NPROC)
limit_call(limits, taken, has_namespaces=False)
assert resource.getrlimit(resource.RLIMIT_NPROC) == processes
assert resource.getrlimit(resource.RLIMIT_AS) == (taken + 2**27, taken + 2**27)
assert resource.getrlimit(resource.RLIMIT_CPU) == (2, 3)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (1000, 1000)
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
limit_call(limits, taken, has_namespaces=True)
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
    [
        ("5.14.0-427.el9.x86_64", True),
        ("6.1.0-18-amd64", True),
        ("6.18-rc1", True),
        ("5.13.19", False),
        ("4.18.0-513.el8.x86_64", False),
    ],
)
def test_kernels_that_count_threads_by_namespace(release: str, counts: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.uname", lambda: types.SimpleNamespace(release=release))
    monkeypatch.setattr("sys.platform", "linux")
    assert counts_threads_by_namespace() is counts
