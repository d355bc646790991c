# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Command line of `marin_rl.launch`."""

import importlib.util
import re
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from marin_rl.launch import main
from tests.needs_iris import NEEDS_IRIS

pytestmark = pytest.mark.both_lines

TRAIN = ["--", "train", "--config", "experiments/rloo.yaml"]


@pytest.mark.parametrize(("argv", "status"), [([], 1), (["--help"], 0), (["-h"], 0)])
def test_usage(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        returned = main(argv)
    except SystemExit as end:
        returned = end.code
    output = "".join(capsys.readouterr())
    assert returned == status
    assert "python -m marin_rl.launch (--cluster NAME | --local)" in output
    assert ("max_retries (an integer of at least 0; default: 10)" in output) == (status == 0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--local"], "no command; give it with its arguments after --"),
        (["--local", "--"], "no command; give it with its arguments after --"),
        (TRAIN, "no cluster; give its name or YAML file with --cluster, or --local"),
        (["--local", "--cluster", "marin", *TRAIN], "both --cluster and --local are given; leave one of them out"),
        (["--local", "--slise", "v5p-8", *TRAIN], "unknown key slise; did you mean 'slice'"),
        (["--local", "--slice", "v5p-9", *TRAIN], "slice is 'v5p-9': a slice of 9 has no default shape"),
        (["--local", "--slice", "2xv5p-8", *TRAIN], "slice is '2xv5p-8': Iris places the processes of a job on one"),
        (["--local", "--env", "{A B: x}", *TRAIN], "invalid name of an environment variable: 'A B'"),
        (["--local", "--secrets", "[1A, ä]", *TRAIN], "invalid name of an environment variable: '1A', 'ä'"),
        (["--local", "--env.A", "x", "--secrets", "[A]", *TRAIN], "A is in both env and secrets; keep one of them"),
        (["--local", "--env", '{A: "a\\0b"}', *TRAIN], "env.A has a zero byte, which no environment variable can"),
        (["--local", "--max_retries", "-1", *TRAIN], "max_retries is -1; it must be at least 0"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(argv, capsys)


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence with which the command ends."""
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


def test_an_environment_without_iris(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "finelog_server" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    (error,) = error_of(["--local", *TRAIN], capsys).splitlines()
    assert re.search(r"launch needs .* not installed \(finelog_server\); .* with Python 3\.12 .*'\.\[iris\]'", error)


@NEEDS_IRIS
@pytest.mark.medium
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--local", "--", "trian"], "unknown command 'trian'; did you mean 'train'"),
        (["--local", "--secrets", "[ABSENT_1]", *TRAIN], "secrets names ABSENT_1, which is not set"),
        (["--local", *TRAIN, "--sede", "1"], "unknown key sede"),
        (["--cluster", "marin", *TRAIN], "run_dir is 'runs/rloo', on the disk of each host"),
    ],
)
def test_mistakes_in_the_command(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert message in error_of(argv, capsys)


@NEEDS_IRIS
@pytest.mark.medium
def test_a_dry_run_names_the_job_of_the_run_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    names = set()
    for changes in ([], ["--seed", "1"], ["--run_dir", "gs://bucket/runs/other"]):
        command = [*TRAIN, "--run_dir", "gs://bucket/runs/rloo", *changes]
        assert main(["--cluster", "absent", "--dry_run", *command]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        names.add(line.rpartition(" ")[2])
    first, second = sorted(names)
    assert first.startswith("train-other-")
    assert second.startswith("train-rloo-")
