# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys

from marin_rl.rewards.sandbox.limits import address_space

LIMITED = """
import resource
from marin_rl.rewards.sandbox.limits import CallLimits, address_space, limit_call, limit_import

taken = address_space()
limit_import(2**28)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
assert taken + 2**28 <= soft <= taken + 2**28 + 2**24 and hard - soft == 2**28, (taken, soft, hard)
limit_call(CallLimits(1.0, 1.5, 2**27, 0, 1000, 1000), taken)
assert resource.getrlimit(resource.RLIMIT_AS) == (taken + 2**27, taken + 2**27)
assert resource.getrlimit(resource.RLIMIT_CPU) == (2, 3)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (1000, 1000)
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
"""


def test_limits_are_set():
    subprocess.run([sys.executable, "-c", LIMITED], check=True)


def test_address_space_grows_with_what_is_mapped():
    before = address_space()
    held = bytearray(2**26)
    assert address_space() - before >= 2**26 - 2**20
    assert len(held) == 2**26
