# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from marin_rl.runs.lock import holder, lock
from marin_rl.runs.run_directory import (
    OutputExistsError,
    RunDirectory,
    check_output,
    create_or_open,
    exported_step,
    mistaken_for,
    open_existing,
    write_atomically,
)
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath

CONFIG = "name: a\nseed: 0\ntrainer:\n  seed: 1\n  tracker: []\n"


def begin(path: Path, config: str = CONFIG) -> RunDirectory:
    """Run directory with a record of a step."""
    directory = create_or_open(path, config)
    directory.metrics.write_text("")
    return directory


def test_the_config_of_a_run_with_results_stays(tmp_path):
    begin(tmp_path)
    create_or_open(tmp_path, CONFIG.replace("seed: 1", "seed: 2"))
    assert (tmp_path / "config.yaml").read_text() == CONFIG


def test_a_folder_with_a_config_is_a_run_if_it_has_results(tmp_path):
    (tmp_path / "config.yaml").touch()
    assert mistaken_for(tmp_path / "model") is None
    RunDirectory(tmp_path).metrics.touch()
    assert mistaken_for(tmp_path / "model") == f"it is a part of a run; give --run {str(tmp_path)!r}"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"step": "x"}', "\x00"])
def test_the_step_of_an_export_is_unknown_if_its_file_is_not_complete(tmp_path, content):
    directory = RunDirectory(tmp_path)
    assert exported_step(directory) is None
    directory.hf.mkdir()
    (directory.hf / "training_step.json").write_text('{"step": 3}')
    assert exported_step(directory) is None
    (directory.hf / "config.json").write_text("{}")
    assert exported_step(directory) == 3
    (directory.hf / "training_step.json").unlink()
    if content is not None:
        (directory.hf / "training_step.json").write_text(content)
    assert exported_step(directory) is None


@pytest.mark.parametrize("data", ["text ä\n", b"\x00\xff"])
def test_atomic_writes_replace_the_whole_file(tmp_path, data):
    path = tmp_path / "file"
    path.write_text("something longer than the new content, so that a part of it would show")
    (tmp_path / ".file.partial").write_text("left over from a killed process, also longer than the new content")
    write_atomically(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


ODD_NAMES = [
    *(" a b ", "e\u0301 \u00e9", "\U0001f600", "\u202eabc", "a\nb\r\t", "x" * 255, "-x", "--", "%20%s%(a)s", "a #b?c"),
    *("'\"`", "$HOME ${HOME} $(id)", "~", "\\n", "*[a]{b,c}", "a;b&c|d<e>", "...", "\x1b[31m", "null", "a:b=c,d@e"),
    "\ufeff\x7f\x85",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_of_a_folder_is_taken_as_it_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for path in (Path(name), tmp_path / name):
        with lock(RunDirectory(path)):
            begin(path)
            assert create_or_open(path, CONFIG).config.read_text() == CONFIG
            assert holder(RunDirectory(path)) is not None
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_config_without_results_is_replaced_and_a_failed_start_repeated(tmp_path, monkeypatch):
    def fail(*_):
        raise RunDirectoryError("the disk is full")

    path = tmp_path / "runs" / "a"
    with monkeypatch.context() as patch:
        patch.setattr("marin_rl.runs.run_directory.write_atomically", fail)
        with pytest.raises(RunDirectoryError, match="full"):
            create_or_open(path, CONFIG)
    create_or_open(path, "# of a failed start\n" + CONFIG)
    corrected = CONFIG.replace("seed: 1", "seed: 2")
    directory = create_or_open(path, corrected)
    assert directory == open_existing(path) == RunDirectory(path)
    assert directory.config.read_text() == corrected
    assert directory.rollouts.is_dir()
    assert directory.checkpoints.is_dir()


BAD_PLACES = {
    "no run": (
        lambda path: (path / "config.yaml").write_text("# my"),
        r"contains a config\.yaml, but no run",
    ),
    "no config": (lambda path: (path / "metrics.jsonl").write_text(""), r"contains a run without config\.yaml"),
    "folder": (lambda path: (path / "config.yaml").mkdir(), r"cannot read .*config\.yaml': .*; repair the file"),
    "pipe": (lambda path: os.mkfifo(path / "config.yaml"), r"cannot read .*config\.yaml': .*; repair the file"),
    "not text": (lambda path: (path / "config.yaml").write_bytes(b"\xff"), r"cannot read .*config\.yaml': .*; repair"),
    "file": (
        lambda path: path.rmdir() or path.write_text(""),
        "cannot write .* is a file, not a folder; choose",
    ),
    "full": (
        lambda path: (path / ".config.yaml.partial").symlink_to("/dev/full"),
        r"cannot write .*config\.yaml': the disk is full; free some space",
    ),
}


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_a_folder_that_cannot_be_used_is_named_and_kept(tmp_path, kind):
    prepare, message = BAD_PLACES[kind]
    (tmp_path / "run").mkdir()
    prepare(tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").glob("[!.]*")}
    for path in (tmp_path / "run", tmp_path / "run" / "a" / "b") if kind == "file" else (tmp_path / "run",):
        with pytest.raises(RunDirectoryError, match=message):
            create_or_open(path, CONFIG)
    assert {path.name for path in (tmp_path / "run").glob("[!.]*")} - {"rollouts", "checkpoints"} == files


def test_a_path_that_is_not_a_run_directory_is_named_with_those_nearby(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"cannot write '/proc/runs/a': .*; choose another run_dir, on"):
        create_or_open(Path("/proc/runs/a"), CONFIG)
    with pytest.raises(RunDirectoryError, match=r"it has no config\.yaml; give the run_dir of a run"):
        open_existing(tmp_path)
    create_or_open(tmp_path / "middle", CONFIG)
    for wrong in ("midle", "."):
        with pytest.raises(RunDirectoryError, match=r"Run directories in .*middle"):
            open_existing(tmp_path / wrong)
    with pytest.raises(RunDirectoryError, match=r"it does not exist; give the run_dir of a run"):
        open_existing(tmp_path / "no" / "run")


def make_link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def make_run(path: Path) -> None:
    (path.parent / "checkpoints").mkdir()
    (path.parent / "config.yaml").write_text("seed: 1\n")


def make_link_to_run(path: Path) -> None:
    (path.parents[1] / "run").mkdir()
    make_run(path.parents[1] / "run" / "hf")
    path.parent.symlink_to("run")


MARK = b"<!-- page -->"
TAKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "file": ("out", lambda path: path.write_bytes(b"mine")),
    "empty file": ("out", lambda path: path.touch()),
    "file with the mark far below": ("out", lambda path: path.write_bytes(bytes(5000) + MARK)),
    "folder with a file": ("out", lambda path: (path / "in").mkdir(parents=True)),
    "dangling link": ("out", make_link("absent")),
    "link to itself": ("out", make_link("out")),
    "link to a file with the mark": ("out", make_link("page")),
    "link to an empty folder": ("out", make_link("empty")),
    "fifo": ("out", os.mkfifo),
    "below a file": ("up/out", lambda path: path.parent.touch()),
    "far below a file": ("up/a/b", lambda path: path.parents[1].touch()),
    "below a dangling link": ("up/out", lambda path: path.parent.symlink_to("absent")),
    "below a link to itself": ("up/out", lambda path: path.parent.symlink_to("up")),
    "folder above": ("a/..", lambda path: path.parent.mkdir()),
    "curves of a run": ("curves.png", make_run),
    "config of a run": ("config.yaml", make_run),
    "export of a run": ("hf", make_run),
    "tokens of a run": ("tokens.arrow", make_run),
    "rollouts of a run": ("rollouts/export", lambda path: make_run(path.parent)),
    "checkpoints of a run": ("checkpoints/step-00000009", lambda path: make_run(path.parent)),
    "link into a run": ("up/hf", make_link_to_run),
}  # fmt: skip


@pytest.mark.parametrize("mark", [None, MARK], ids=["folder", "file"])
@pytest.mark.parametrize("case", TAKEN)
def test_no_output_replaces_what_the_command_did_not_write(case: str, mark: bytes | None, tmp_path: Path) -> None:
    name, make = TAKEN[case]
    make(tmp_path / name)
    if case.startswith("link to a"):
        (tmp_path / "page").write_bytes(MARK)
        (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputExistsError, match=rf"^--out is '{re.escape(str(tmp_path / name))}', .*; name another"):
        check_output(tmp_path / name, "--out", mark)
    assert sorted(tmp_path.rglob("*")) == before


def test_new_names_empty_folders_and_own_files_may_be_written(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "page").write_bytes(MARK + b"old")
    (tmp_path / "link").symlink_to("empty")
    for path in ("new", "empty", "new/er/est", "link/new", "weights"):
        check_output(tmp_path / path, "--out")
    for path in ("new", "page", "link/new", "page.html"):
        check_output(tmp_path / path, "--out", MARK)
    for path, mark in (("empty", MARK), ("page", None)):
        with pytest.raises(OutputExistsError):
            check_output(tmp_path / path, "--out", mark)


def test_objects_of_a_store_are_not_replaced() -> None:
    root = RemotePath("memory://outputs")
    for name, data in (("page", MARK), ("mine", b"mine"), ("run/config.yaml", b""), ("run/checkpoints/a", b"")):
        (root / name).write_bytes(data)
    for path, mark in (("new", None), ("new", MARK), ("page", MARK), ("run/weights", None)):
        check_output(root / path, "--out", mark)
    for path, mark in (("page", None), ("mine", MARK), ("run", None), ("run/hf", None), ("run/rollouts/x", MARK)):
        with pytest.raises(OutputExistsError, match=path):
            check_output(root / path, "--out", mark)
