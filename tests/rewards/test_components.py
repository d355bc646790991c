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


def test_all_component_types_are_registered():
    # Runs in a separate process, because other tests have registered the types here.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["code", "function", "llm_judge"]
