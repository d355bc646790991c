# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys


def test_the_worker_needs_only_the_standard_library():
    code = (
        "import sys; import marin_rl.rewards.sandbox.worker\n"
        "assert not {'pydantic', 'jax', 'numpy', 'draccus'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
