# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys

PROGRAM = """
import json
from marin_rl.rewards.components import RewardComponentConfig
print(json.dumps(sorted(RewardComponentConfig.get_known_choices())))
"""


def test_whoever_takes_the_config_from_here_can_choose_every_type():
    # In a process of its own: here other tests have registered them.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["code", "function", "llm_judge"]
