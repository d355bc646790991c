# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import subprocess
import sys

from marin_rl.config.command_line import parse_config
from marin_rl.environments import EnvironmentConfig, JsonlConfig, RandomRewardConfig
from marin_rl.rewards.grading import MathVerifyConfig
from marin_rl.utils.settings.help import help_text


def test_import_is_light():
    heavy = "jax", "datasets", "reasoning_gym", "latex2sympy2_extended", "sympy", "transformers", "numpy", "gymnasium"
    code = f"import sys, marin_rl.environments; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@dataclasses.dataclass(frozen=True)
class Holder:
    environment: EnvironmentConfig


def test_help_shows_every_choice():
    shown = " ".join(help_text(Holder, section="all").split())
    for words in ("held out, by hash of their text", "Probability of reward 1 instead of 0", "Name of the task"):
        assert words in shown


def test_command_line_reaches_nested_fields():
    flags = {"": "random_control", ".environment": "jsonl", ".environment.grader": "math_verify"}
    argv = [text for key, name in flags.items() for text in (f"--environment{key}.type", name)]
    config = parse_config(Holder, [*argv, "--environment.environment.path", "a.jsonl"]).config
    assert isinstance(config.environment, RandomRewardConfig)
    assert isinstance(config.environment.environment, JsonlConfig)
    assert config.environment.environment.grader == MathVerifyConfig()
