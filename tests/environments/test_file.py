# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import pytest

from marin_rl.environments import EnvironmentConfig, FileConfig, Split
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.user_code import UserFileError

FILE = '''
import dataclasses
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.rewards.grading import FormatConfig

@dataclasses.dataclass(frozen=True)
class Sums(EnvironmentConfig):
    """Sums."""
    size: int = 50
    format: FormatConfig | None = None

    def build(self) -> AbstractEnvironment:
        return ArithmeticConfig(size=self.size, digits=1, name="sums", format=self.format).build()

def as_config(size):
    return Sums(size)

def as_environment(size=30):
    return Sums(size).build()

def nothing():
    return None

X = 3
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return str(file)


@pytest.mark.parametrize(
    ("name", "options", "tasks"),
    [("Sums", {}, 50), ("Sums", {"size": 40}, 40), ("as_config", {"size": 60}, 60), ("as_environment", {}, 30)],
)
def test_classes_and_functions_build_environments(path: str, name: str, options: dict, tasks: int):
    config = decode(EnvironmentConfig, {"type": "file", "path": path, "name": name, "options": options})
    assert config == FileConfig(path, name, options)
    environment = config.build()
    assert environment.name == "sums"
    assert sum(len(environment.tasks(split)) for split in Split) == tasks
    # Options of a class are decoded like those of a config.
    made = FileConfig(path, "Sums", {"format": {"regex": "[0-9]+", "weight": 0.5}}).build()
    assert made.format.weight == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("X", {}, "'X' of .*mine.py is int; it must be a function"),
        ("nothing", {}, "'nothing' of .*returned NoneType, which is not an environment: extend AbstractEnvironment"),
        ("as_config", {"sise": 3}, "'as_config' of .* with options {'sise': 3} raised TypeError"),
        ("Sums", {"sise": 3}, "'Sums' of .* with options {'sise': 3} raised .*sise"),
    ],
)
def test_invalid_files_and_options_are_rejected(path: str, name: str, options: dict, message: str):
    with pytest.raises(UserFileError, match=message):
        FileConfig(path, name, options).build()
