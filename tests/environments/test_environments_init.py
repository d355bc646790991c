# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys


def test_import_is_light():
    heavy = "jax", "datasets", "reasoning_gym", "latex2sympy2_extended", "sympy", "transformers", "numpy", "gymnasium"
    code = f"import sys, marin_rl.environments; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
