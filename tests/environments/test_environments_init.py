# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys


def test_import_is_light():
    heavy = "jax", "datasets", "reasoning_gym", "latex2sympy2_extended", "sympy", "transformers", "numpy", "gymnasium"
    code = f"import sys, marin_rl.environments; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_commands_have_the_types_of_python_programs():
    # In a process of its own, because this one may have imported the trainers, which import the types themselves.
    code = (
        "from marin_rl.config.train_config import TrainConfig\n"
        "from marin_rl.environments import EnvironmentConfig\n"
        "from marin_rl.rewards.component import RewardComponentConfig\n"
        "print(*('in_process' in kind.get_known_choices() for kind in (EnvironmentConfig, RewardComponentConfig)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
