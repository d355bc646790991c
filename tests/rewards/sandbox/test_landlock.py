# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
import sys
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox.landlock import OLDEST_VERSION, landlock_version

pytestmark = pytest.mark.skipif(
    landlock_version() < OLDEST_VERSION, reason=f"the kernel has Landlock {landlock_version()}"
)

# Runs in a separate process, because restrictions cannot be undone.
TRY = """
import os, sys
from marin_rl.rewards.sandbox.landlock import landlock_version, restrict_files, restrict_writes

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


@pytest.mark.parametrize(
    ("restrict", "expected"),
    [
        ("restrict_files([], [inside], landlock_version())", "1111111100"),
        ("restrict_files([inside], [], landlock_version())", "1111111101"),
        ("restrict_writes([inside], landlock_version())", "0111111000"),
        # Further layers can only remove rights.
        ("restrict_writes([], 3); restrict_files([], [inside], 3)", "1111111101"),
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
