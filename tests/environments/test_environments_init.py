# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import subprocess
import sys

import draccus
import pytest

from marin_rl.environments import EnvironmentConfig


def test_the_registry_is_complete():
    assert {
        "arithmetic",
        "reasoning_gym",
        "text_game",
        "mixture",
        "curriculum",
        "jsonl",
        "hf",
        "random_control",
    } <= set(EnvironmentConfig.get_known_choices())


def test_import_is_light():
    heavy = "jax", "datasets", "reasoning_gym", "math_verify", "sympy", "transformers", "numpy", "gymnasium"
    code = f"import sys, marin_rl.environments; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@dataclasses.dataclass(frozen=True)
class Holder:
    environment: EnvironmentConfig


def test_help_shows_every_choice(capsys):
    with pytest.raises(SystemExit):
        draccus.parse(Holder, args=["--help"])
    shown = capsys.readouterr().out
    for words in ("held out, by hash of their text", "Probability that an attempt earns 1", "Name of the task"):
        assert words in " ".join(shown.split())


def test_command_line_reaches_nested_fields():
    config = draccus.parse(
        Holder,
        args=[
            "--environment.type=random_control",
            "--environment.environment.type=jsonl",
            "--environment.environment.path=a.jsonl",
            "--environment.environment.grader.type=math_verify",
        ],
    )
    assert config.environment.environment.grader.timeout == 5.0
