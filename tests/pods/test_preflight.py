# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of the training arguments and of the files to copy, before any command of gcloud."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from marin_rl.pods.config import CodeConfig, TpuConfig
from marin_rl.pods.preflight import UploadError, check_training, code_files, environment_script
from marin_rl.pods.tpu import job_script
from marin_rl.utils.errors import UserError
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError
from tests.pods.conftest import Project

VALID: dict[str, Any] = {"tpu_name": "pod", "zone": "us-east5-a", "slices": {"tpu_type": "v5p-16"}}
ROLLOUTS = {"rollout_slices": {"tpu_type": "v5litepod-8"}}
ASYNC = ["--config", "run.yaml", "--run_dir", "/mnt/a", "--mode", "async", "--weights.host", "0.0.0.0"]
ELSEWHERE = Path(__file__).parents[2] / "experiments" / "rloo.yaml"
RUN = "environment: {type: arithmetic}\nmodel: {type: llama}\n"


def checked(config: TpuConfig, arguments: list[str], report: Callable[[str], None] = print) -> str:
    return check_training(config, arguments, report)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "hidden.yaml").write_text(RUN)
    (tmp_path / ".gitignore").write_text("hidden.yaml\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["--config", "run.yaml"], "run_dir is missing"),
        ({}, ["--config", "run.yaml", "--run_dirr", "a"], "unknown key run_dirr; did you mean 'run_dir'"),
        ({}, ["--config", "run.yaml", "--run_dir", "runs/a"], "run_dir is 'runs/a', on the disk of each host"),
        ({}, ["--config", "hidden.yaml", "--run_dir", "runs/a"], "--config hidden.yaml is not copied to the hosts"),
        (
            {},
            ["--config", "run.yaml", "--run_dir", "a", "--mode", "async"],
            "set rollout_slices of the launch, such as {tpu_type: v5p-8}",
        ),
        (ROLLOUTS, ["--config", "run.yaml", "--run_dir", "a"], "rollout_slices needs --mode async"),
        (ROLLOUTS, [*ASYNC, "--ray_address", "h:1"], "the launch sets ray_address; remove it from the training"),
        (ROLLOUTS, [*ASYNC[:-2]], "weights.host is 127.0.0.1, which only this machine can reach"),
        (
            {"rollout_slices": {"tpu_type": "v5p-16"}},
            [*ASYNC, "--workers.resources.TPU", "8"],
            "with 8 TPU chips each, but the rollout_slices, 1 x v5p-16 with hosts of 4 chips, have room for 0; correct",
        ),
        (ROLLOUTS, [*ASYNC, "--workers.resources.TPU", "4", "--workers.num_workers", "3"], "have room for 2; correct"),
        (ROLLOUTS, ASYNC, "with 0 TPU chips each, but the rollout_slices, "),
        (
            ROLLOUTS,
            [*ASYNC, "--workers.tpu_slice", "v6e:2x4"],
            "with tpu_slice v6e:2x4, but the rollout_slices, 1 x v5",
        ),
        (
            ROLLOUTS,
            [*ASYNC, "--workers.tpu_slice", "v5e:2x4", "--workers.num_workers", "2"],
            "have room for 1; correct workers.tpu_slice, workers.resources or rollout_slices",
        ),
        (
            {},
            [f"--config={ELSEWHERE}", "--run_dir", "a"],
            "is not copied to the hosts; give the path of a file in",
        ),
        ({"code": {"secrets": ["ABSENT_1"]}}, ["--config", "run.yaml", "--run_dir", "a"], "secrets names ABSENT_1"),
    ],
)
def test_bad_training_arguments(folder: Path, changes: dict[str, Any], arguments: list[str], message: str) -> None:
    with pytest.raises((ConfigError, UploadError)) as raised:
        checked(decode(TpuConfig, VALID | changes), arguments)
    assert message in str(raised.value)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("slices", "arguments"),
    [
        (None, ["--config", "run.yaml", "--run_dir", "/mnt/a"]),
        (None, ["--config", "run.yaml", "--run_dir", "gs://bucket/runs/a"]),
        ("v5litepod-8", [*ASYNC, "--workers.tpu_slice", "v5e:2x4"]),
        ("v5litepod-8", [*ASYNC, "--workers.resources.TPU", "4"]),
        # Different names of one type.
        ("v5e:2x8", [*ASYNC, "--workers.tpu_slice", "v5e-16", "--workers.num_workers", "4"]),
        ("v5litepod-16", [*ASYNC, "--workers.tpu_slice", "v5e:2x8", "--workers.num_workers", "4"]),
    ],
)
def test_valid_arguments(folder: Path, slices: str | None, arguments: list[str]) -> None:
    config = VALID if slices is None else VALID | {"rollout_slices": {"tpu_type": slices}}
    assert checked(decode(TpuConfig, config), arguments) == arguments[3]


@pytest.mark.medium
def test_config_files_are_those_of_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tools").mkdir()
    monkeypatch.chdir(folder / "tools")
    config = decode(TpuConfig, VALID | {"code": {"folder": ".."}})
    assert checked(config, ["--config", "run.yaml", "--run_dir", "/mnt/a"]) == "/mnt/a"
    assert Path.cwd() == folder / "tools"


@pytest.mark.medium
def test_slices_that_ray_cannot_reserve_are_refused(folder: Path) -> None:
    arguments = [*ASYNC, "--workers.tpu_slice", "v5e:6x2", "--workers.num_workers", "3"]
    with pytest.raises(UserError, match="Ray knows no v5e slices of shape 6x2"):
        checked(decode(TpuConfig, VALID | ROLLOUTS), arguments)


JSONL = ["--environment", "{type: jsonl, path: data/a.jsonl, grader: {type: exact}}"]
REWARD = ["--environment.rewards", "[{type: function, path: rewards.py, function: score}]"]


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
        ("", ["--tokenizer.chat_template", "~/a.jinja"], "~/a.jinja is not copied to the hosts; give the path of"),
        (
            "",
            [*JSONL, "--environment.path", "absent.jsonl"],
            "environment.path absent.jsonl is not copied to the hosts",
        ),
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
    arguments = ["--config", "run.yaml", "--run_dir", "/mnt/a", *options]
    if message is None:
        assert checked(decode(TpuConfig, VALID), arguments) == "/mnt/a"
        return
    with pytest.raises(UploadError, match=message):
        checked(decode(TpuConfig, VALID), arguments)


@pytest.mark.medium
def test_absolute_paths_are_reported(folder: Path) -> None:
    lines: list[str] = []
    options = [*JSONL, "--environment.path", "/mnt/a.jsonl"]
    checked(decode(TpuConfig, VALID), ["--config", "run.yaml", "--run_dir", "/mnt/a", *options], lines.append)
    assert lines == [
        "environment.path /mnt/a.jsonl is not copied to the hosts, and is not checked: every host must mount it"
    ]


# Files to copy.


def test_tracked_and_untracked_files_are_listed_and_ignored_ones_are_not(project: Project) -> None:
    (project.folder / "sub folder").mkdir()
    (project.folder / "sub folder" / "ä.txt").write_text("")
    subprocess.run(["git", "-C", str(project.folder), "add", "train.py", "run.yaml"], check=True)
    (project.folder / "run.yaml").unlink()
    assert code_files(project.folder) == [".gitignore", "sub folder/ä.txt", "train.py"]
    assert code_files(project.folder / "sub folder") == ["ä.txt"]


def test_bad_folders(tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UploadError, match="It must be a git work tree, because files that git ignores"):
        code_files(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True)
    with pytest.raises(UploadError, match="has no files; set it to the root of your repository"):
        code_files(tmp_path / "empty")
    monkeypatch.setattr("marin_rl.pods.preflight.MAX_MEGABYTES", 1e-5)
    with pytest.raises(
        UploadError, match=r"more than 1e-05; list large files in \.gitignore.* The largest is train\.py"
    ):
        code_files(project.folder)


SHELL = ["$(touch x)", "`touch x`", "';touch x;'", '";touch x;"', "\ntouch x\n", "-x=1", "~", "*", "a\\", "!!", "\r"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.sampled_from(SHELL)


@pytest.mark.medium
@hypothesis.given(value=TEXTS, other=TEXTS)
@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_no_shell_interprets_values_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", other)
    script = environment_script(CodeConfig(env={"A": value}, secrets=("TOKEN",)))
    show = [sys.executable, "-c", "import os, sys; print(ascii([os.environ['A'], os.environ['TOKEN'], *sys.argv[1:]]))"]
    script = f"set -a; {script}{job_script([*show, value, other])}"
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == (f"{[value, other, value, other]!a}\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "secrets", "message"),
    [
        ({"A": "a\0b"}, (), "the value of the variable A has a zero byte or half a character"),
        ({}, ("HALF",), "the value of the variable HALF has a zero byte or half a character"),
        ({}, ("ABSENT_1",), "secrets names ABSENT_1, which is not set in the environment of this command"),
        ({"A B": ""}, ("1",), "invalid name of an environment variable: 'A B', '1'"),
        ({"A": ""}, ("A",), "A is in both env and secrets; keep one of them"),
    ],
)
def test_bad_variables(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], secrets: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("os.environ", {"HALF": "a\udcff"})
    with pytest.raises((UploadError, ValueError), match=message):
        environment_script(CodeConfig(env=env, secrets=secrets))
