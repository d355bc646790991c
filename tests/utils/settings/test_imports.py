# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import re
import sys
from pathlib import Path

import pytest
import yaml

from marin_rl.config.command_line import parse_config
from marin_rl.config.input_files import digest_inputs
from marin_rl.config.train_config import TrainConfig
from marin_rl.objectives import AdvantageConfig
from marin_rl.utils.settings.option_parser import HelpShown
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, to_yaml
from tests import fork_server
from tests.tiny_run import TINY, TinyRun, changed, set_num_steps

PAGE = Path(__file__).parents[3] / "docs" / "pages" / "contributing.md"
EXAMPLES = "".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S))
"""The environment, the advantage and the policy term of the page on extending, as one file."""
WORDS = ["ant", "bee", "gnu", "heron", "ibex", "jackdaw", "kiwi", "lark", "mole", "newt", "owl", "pike", "quail"]
BASE = ["--run_dir", "run", "--environment.type", "arithmetic", "--model.type", "llama"]
OWN = """
import dataclasses
from marin_rl.objectives import AdvantageConfig
from .scale import SCALE

@AdvantageConfig.register_subclass("{name}")
@dataclasses.dataclass(frozen=True)
class Own(AdvantageConfig):
    '''An advantage.'''

    scale: float = SCALE
    '''Its scale.'''

    def compute(self, groups):
        return []
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with two files that register an advantage each; the registry is restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AdvantageConfig, "_choice_registry", dict(AdvantageConfig.get_known_choices()))
    (tmp_path / "scale.py").write_text("SCALE = 3.0\n")
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(OWN.format(name=name))
    return tmp_path


def parse(*arguments: str) -> TrainConfig:
    return parse_config(TrainConfig, [*BASE, *arguments]).config


def test_types_can_be_used_in_yaml_on_the_command_line_and_after_a_round_trip(folder: Path) -> None:
    (folder / "a.yaml").write_text("imports: [first.py]\nadvantage: {type: first}\n")
    config = parse("--config", "a.yaml")
    assert config.advantage.scale == 3.0
    assert from_yaml(TrainConfig, to_yaml(config), "config.yaml") == config
    assert parse("--config=a.yaml", "--advantage.scale", "2").advantage.scale == 2.0
    # Lists replace: the types of the file that was imported before stay known in this process.
    assert parse("--config=a.yaml", "--imports", "[second.py]", "--advantage.type", "second").imports == ("second.py",)


def test_a_file_is_an_input_with_the_files_that_it_imports(folder: Path) -> None:
    assert set(digest_inputs(parse("--imports", "[first.py]"))["imports"]) == {"first.py", "scale.py"}


@pytest.mark.parametrize("arguments", [["--help", "advantage.first", "--imports=[first.py]"], ["--imports=[first.py]"]])
def test_help_describes_the_types(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*arguments, *([] if "--help" in arguments else ["--help=advantage.first"])]
    with pytest.raises(HelpShown):
        parse_config(TrainConfig, arguments)
    assert "advantage.scale (a number; default: 3.0)\n        Its scale." in capsys.readouterr().out


def test_a_module_is_named_with_dots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lab_of_test").mkdir()
    (folder / "lab_of_test" / "__init__.py").touch()
    (folder / "lab_of_test" / "scale.py").write_text("SCALE = 4.0\n")
    (folder / "lab_of_test" / "objectives.py").write_text(OWN.format(name="third"))
    monkeypatch.syspath_prepend(folder)
    assert parse("--imports", "[lab_of_test.objectives]", "--advantage.type=third").advantage.scale == 4.0


@pytest.mark.parametrize(
    ("imports", "text", "message"),
    [
        ("[gone.py]", "", "imports: file 'gone.py' does not exist (resolved to "),
        ("[bad.py]", "def", "imports: bad.py raised during import: SyntaxError: invalid syntax (bad.py, line 1)"),
        ("[bad.py]", "X = 1\nY = Z", "NameError: name 'Z' is not defined\n  {folder}/bad.py:2: Y = Z"),
        ("[bad.py]", "import sys\nsys.exit(0)", "SystemExit: 0\n  {folder}/bad.py:2: sys.exit(0)"),
        ("[bad.py]", "from .gone import X", "No module named '.gone'\n  {folder}/bad.py:1: from .gone import X"),
        ("[bad.py]", OWN.format(name="rloo"), "type 'rloo' is registered already, by marin_rl.objectives.advan"),
        ("[data]", "", "imports: there is no module 'data'; data is a folder: name a Python file in it"),
        ("[first]", "", "imports: there is no module 'first'; did you mean the file first.py?"),
    ],
)
def test_mistakes_end_in_a_sentence(folder: Path, imports: str, text: str, message: str) -> None:
    (folder / "bad.py").write_text(text)
    (folder / "data").mkdir()
    with pytest.raises(ConfigError) as caught:
        parse("--imports", imports)
    sentence, *frames = str(caught.value).split("\n")
    assert message.format(folder=folder.resolve()) in str(caught.value)
    assert all(str(folder.resolve()) in frame for frame in frames)
    assert "marin_rl_user" not in sentence


def test_all_bad_files_are_named_and_the_file_of_the_config(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(TrainConfig, "imports: [gone.py, lost.py]", "runs/a/config.yaml")
    assert [problem.partition(" does")[0] for problem in caught.value.problems] == [
        "runs/a/config.yaml: imports: file 'gone.py'",
        "runs/a/config.yaml: imports: file 'lost.py'",
    ]


def test_an_unknown_type_names_the_setting(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"advantage.type is 'q9'.*A type of your own needs its file in `imports`"):
        parse("--advantage.type", "q9")


@pytest.mark.slow
def test_a_run_with_own_types_in_every_command(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "run", tmp_path / "tiny.yaml")
    (tmp_path / "my_objectives.py").write_text(EXAMPLES)
    changes = {
        "imports": ["my_objectives.py"],
        "run_dir": "run",
        "environment": {"type": "count_letters", "words": WORDS},
        "advantage": {"type": "best_of_group"},
        "policy_loss": {"type": "damped_reinforce"},
        "mode": "async",
        "workers": {"num_workers": 1},
        "replay": {"max_staleness": 0},
        "num_steps": 1,
        "warm_start.max_steps": 0,
        "evaluation": {"tasks": 2},
        "checkpoint": {"every": 1, "keep_every": 1},
    }
    run.config.write_text(yaml.safe_dump(changed(TINY, changes)))

    def command(name: str, *arguments: str) -> str:
        done = fork_server.run([sys.executable, "-m", f"marin_rl.{name}", *arguments], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command("train", "--config", "tiny.yaml")
    assert [record["step"] for record in run.records()] == [0, 1]
    assert "count_letters" in command("evaluate", "--run", "run")
    assert "count_letters" in command("view", "run")
    command("replay", "--run", "run", "--step", "1")
    command("export", "--run", "run", "--output", "exported")
    command("plan", "--config", "tiny.yaml", "--topology", "cpu:1")
    set_num_steps(run, 2)
    assert "the run resumes after step 1 of 2" in command("train", "--config", "run/config.yaml", "--dry_run")
