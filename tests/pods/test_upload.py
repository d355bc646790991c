# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys
import tarfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from marin_rl.pods.config import CodeConfig
from marin_rl.pods.upload import UploadError, code_files, environment_script, job_script, write_upload
from tests.pods.conftest import Project


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
    monkeypatch.setattr("marin_rl.pods.upload.MAX_MEGABYTES", 1e-5)
    with pytest.raises(UploadError, match=r"more than 1e-05; list large files in \.gitignore.* The largest: train\.py"):
        code_files(project.folder)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.sampled_from(
    [
        "$(touch x)",
        "`touch x`",
        "';touch x;'",
        '";touch x;"',
        "\ntouch x\n",
        "-x=1",
        "--",
        "~",
        "*",
        "a\\",
        "!!",
        "\r",
        "$'\\x41'",
    ]
)


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


@pytest.mark.parametrize("value", ["a\0b", "a\udcff"])
def test_values_that_no_script_can_contain_are_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"env\.A has a zero byte or half a character"):
        CodeConfig(env={"A": value})
    monkeypatch.setattr("os.environ", {"TOKEN": value})
    with pytest.raises(UploadError, match="the value of the secret TOKEN is not UTF-8 text"):
        environment_script(CodeConfig(secrets=("TOKEN",)))


def test_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CodeConfig(secrets=("TOKEN",))
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(UploadError, match="secrets names TOKEN, which is not set in the environment of this command"):
        environment_script(config)
    with pytest.raises(ValueError, match=r"invalid name of an environment variable: 'A B', '1'"):
        CodeConfig(env={"A B": ""}, secrets=("1",))
    with pytest.raises(ValueError, match="A is in both env and secrets; keep one of them"):
        CodeConfig(env={"A": ""}, secrets=("A",))


def test_written_files(project: Project, tmp_path: Path) -> None:
    target = tmp_path / "upload"
    target.mkdir()
    write_upload(target, CodeConfig(str(project.folder)), code_files(project.folder))
    with tarfile.open(target / "code.tar.gz") as archive:
        assert sorted(archive.getnames()) == [".gitignore", "run.yaml", "train.py"]
    assert (target / "environment.sh").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in target.iterdir()} == {"code.tar.gz", "environment.sh", "host.sh", "install.sh"}
