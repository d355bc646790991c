# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of a command and of the files to copy, before a job is submitted."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from marin_rl.pods import preflight
from marin_rl.pods.config import LaunchConfig
from marin_rl.pods.preflight import UploadError, check_command
from marin_rl.utils.settings.section_types import ConfigError
from tests.needs_iris import NEEDS_IRIS

pytestmark = pytest.mark.both_lines

ELSEWHERE = Path(__file__).parents[2] / "experiments" / "rloo.yaml"
RUN = "environment: {type: arithmetic}\nmodel: {type: llama}\n"
ONE_HOST = LaunchConfig()
VALID = ["--config", "run.yaml", "--run_dir", "/mnt/a"]


def checked(
    *arguments: str,
    command: str = "train",
    config: LaunchConfig = ONE_HOST,
    report: Callable[[str], None] = print,
    is_local: bool = False,
) -> str | None:
    return check_command(config, [command, *arguments], report, is_local=is_local)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "tests").mkdir()
    for name in ("run.yaml", "hidden.yaml", "tests/run.yaml"):
        (tmp_path / name).write_text(RUN)
    (tmp_path / ".gitignore").write_text("hidden.yaml\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [("trian", "unknown command 'trian'; did you mean 'train'"), ("types", "'types'"), ("launch", "'launch'")],
)
def test_unknown_commands(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(command=command)


def test_secrets_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESENT_1", "x")
    config = LaunchConfig(secrets=("PRESENT_1", "ABSENT_1"))
    with pytest.raises(UploadError, match="secrets names ABSENT_1, which is not set in the environment of this comm"):
        checked(command="evaluate", config=config)
    monkeypatch.setenv("ABSENT_1", "")
    assert checked(command="evaluate", config=config) is None


@pytest.mark.medium
@pytest.mark.parametrize("run_dir", ["runs/a", "/mnt/a", "gs://bucket/runs/a"])
def test_run_directories_of_hosts_on_this_machine(folder: Path, run_dir: str) -> None:
    expected = str(folder / run_dir) if run_dir == "runs/a" else run_dir
    assert checked("--config", "hidden.yaml", "--run_dir", run_dir, is_local=True) == expected


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "run.yaml"], "run_dir is missing"),
        (["--config", "run.yaml", "--run_dirr", "a"], "unknown key run_dirr; did you mean 'run_dir'"),
        ([*VALID, "--trainer.train_batch_size", "2"], "train_batch_size"),
    ],
)
@pytest.mark.parametrize("is_local", [True, False])
def test_mistakes_in_the_config(arguments: list[str], message: str, is_local: bool) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(*arguments, is_local=is_local)


@NEEDS_IRIS
@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "run.yaml", "--run_dir", "runs/a"], "run_dir is 'runs/a', on the disk of each host"),
        (["--config", "run.yaml", "--run_dir", "/tmp/a"], "run_dir is '/tmp/a', on the disk of each host"),
        (["--config", "hidden.yaml", "--run_dir", "runs/a"], "--config hidden.yaml is not copied to the hosts: Iris"),
        (["--config", "tests/run.yaml", "--run_dir", "a"], "--config tests/run.yaml is not copied to the hosts"),
        ([f"--config={ELSEWHERE}", "--run_dir", "a"], "rloo.yaml is not copied to the hosts"),
    ],
)
def test_hosts_must_reach_the_config_and_the_run_directory(arguments: list[str], message: str) -> None:
    with pytest.raises((ConfigError, UploadError), match=message):
        checked(*arguments)


@NEEDS_IRIS
@pytest.mark.medium
@pytest.mark.parametrize("run_dir", ["/mnt/a", "gs://bucket/runs/a"])
def test_run_directories_that_hosts_reach(run_dir: str) -> None:
    assert checked("--config", "./run.yaml", "--run_dir", run_dir) == run_dir


# Files that training reads.

JSONL = ["--environment", "{type: jsonl, path: data/a.jsonl, grader: {type: exact}}"]
REWARD = ["--environment.rewards", "[{type: function, path: rewards.py, function: score}]"]


@NEEDS_IRIS
@pytest.mark.medium
@pytest.mark.parametrize(
    ("hidden", "options", "message"),
    [
        ("data", JSONL, "environment.path data/a.jsonl is not copied to the hosts"),
        ("rewards.py", REWARD, r"rewards.py is not copied to the hosts"),
        ("helpers.py", REWARD, r"helpers.py is not copied to the hosts"),
        ("rewards.py", ["--imports", "[./rewards.py]"], r"imports .*rewards.py is not copied to the hosts"),
        ("helpers.py", ["--imports", "[./rewards.py]"], r"imports .*helpers.py is not copied to the hosts"),
        ("weights", ["--tokenizer.path", "weights"], "tokenizer.path weights is not copied to the hosts"),
        ("", ["--tokenizer.chat_template", "~/a.jinja"], "~/a.jinja is not copied to the hosts"),
        ("", [*JSONL, "--environment.path", "absent.jsonl"], "environment.path absent.jsonl is not copied to the"),
        ("", [*JSONL, *REWARD, "--tokenizer.path", "weights"], None),
        ("", ["--tokenizer.path", "owner/name"], None),
    ],
)
def test_files_that_training_reads_must_be_copied(
    folder: Path, hidden: str, options: list[str], message: str | None
) -> None:
    files = {
        "data/a.jsonl": "{}",
        "rewards.py": "from .helpers import *\n",
        "helpers.py": "",
        "weights/tokenizer.json": "{}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / ".gitignore").write_text(f"{hidden}\n")
    if message is None:
        assert checked(*VALID, *options) == "/mnt/a"
        return
    with pytest.raises(UploadError, match=message):
        checked(*VALID, *options)


@NEEDS_IRIS
@pytest.mark.medium
def test_absolute_paths_are_reported() -> None:
    lines: list[str] = []
    checked(*VALID, *JSONL, "--environment.path", "/mnt/a.jsonl", report=lines.append)
    assert lines == [
        "environment.path /mnt/a.jsonl is not copied to the hosts, and is not checked: every host must mount it"
    ]


# Memory.


@NEEDS_IRIS
@pytest.mark.medium
@pytest.mark.parametrize(("status", "reported"), [(0, "the plan"), (1, "the memory of the run is not checked")])
def test_the_plan_is_reported(status: int, reported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    planned = fake_plan(status, monkeypatch)
    # A plan has no run to resume.
    checked(*VALID, "--accept-changes", config=LaunchConfig(slice="v5p-32"), report=lines.append)
    assert lines == [reported]
    assert planned == [[sys.executable, "-m", "marin_rl.plan", "--topology", "v5p-32", *VALID]]


@NEEDS_IRIS
@pytest.mark.medium
def test_a_run_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_plan(preflight.DOES_NOT_FIT, monkeypatch)
    with pytest.raises(ConfigError, match=r"the run does not fit v5p-32:\nthe plan$"):
        checked(*VALID, config=LaunchConfig(slice="v5p-32"))


def fake_plan(status: int, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Replace the plan, which takes minutes; return its commands."""
    planned: list[Sequence[str]] = []

    def run(command: Sequence[str], **options: object) -> SimpleNamespace:
        planned.append(command)
        return SimpleNamespace(returncode=status, stdout="the plan\n")

    monkeypatch.setattr("marin_rl.pods.preflight.importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("marin_rl.pods.preflight.subprocess", SimpleNamespace(run=run, PIPE=None))
    return planned
