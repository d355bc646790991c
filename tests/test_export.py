# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
from pathlib import Path

import jax.numpy as jnp
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from safetensors.numpy import load_file

from marin_rl.export import main
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.sessions.run_export import export_run
from tests.tiny_run import TinyRun, contents, copy_of

Capture = pytest.CaptureFixture[str]


def test_newest_checkpoint_gives_the_files_of_the_run(finished_run: TinyRun, tmp_path: Path, capfd: Capture) -> None:
    before = contents(finished_run.path)
    assert main(["--run", str(finished_run.path), "--output", str(tmp_path / "hf")]) == 0
    assert capfd.readouterr().out == f"step 6 of {finished_run.path} is exported to {tmp_path / 'hf'}\n"
    found, expected = contents(tmp_path / "hf"), contents(finished_run.path / "hf")
    # As numbers, because the stored config of the run has another form of some defaults.
    assert json.loads(found.pop("config.json")) == json.loads(expected.pop("config.json"))
    assert found == expected
    assert contents(finished_run.path) == before


def test_step_and_type_are_options(finished_run: TinyRun, tmp_path: Path) -> None:
    argv = ["--run", str(finished_run.path), "--step", "3", "--export.dtype", "bfloat16"]
    assert main([*argv, "--output", str(tmp_path / "hf")]) == 0
    last = load_file(finished_run.path / "hf" / "model.safetensors")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == last.keys()
    assert {array.dtype for array in found.values()} == {jnp.dtype("bfloat16")}
    assert any((found[name] != last[name].astype(jnp.bfloat16)).any() for name in last)
    assert '"dtype": "bfloat16"' in (tmp_path / "hf" / "config.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "7"], "has no checkpoint of step 7; it has [0, 1, 2, 3, 4, 5, 6]"),
        (["--output", "{path}"], "exists and is not replaced; name another folder"),
        (["--output", "{path}/config.yaml"], "config.yaml', which the run in '{path}' writes itself"),
        (["--output", "{path}/rollouts/weights"], "which the run in '{path}' writes itself"),
        (["--output", "{tmp}/file"], "file', which exists and is not replaced"),
        (["--output", "{tmp}/file/hf"], "but '{tmp}/file' is not a folder"),
        (["--output", "{tmp}/link"], "link', which is a link"),
        (["--run", "{path}/absent"], "absent"),
        (["--export.dtype", "int8"], "parameter, float32, bfloat16"),
    ],
)
def test_bad_arguments(finished_run: TinyRun, tmp_path: Path, capfd: Capture, options: list[str], message: str) -> None:
    names = {"path": finished_run.path, "tmp": tmp_path}
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("absent")
    before = contents(finished_run.path), contents(tmp_path)
    given = {"--run": str(finished_run.path), "--output": str(tmp_path / "hf")}
    given |= {options[0]: options[1].format(**names)}
    assert main([text for pair in given.items() for text in pair]) == 1
    assert message.format(**names) in capfd.readouterr().err
    assert (contents(finished_run.path), contents(tmp_path)) == before
    assert (tmp_path / "link").is_symlink()


def test_an_empty_folder_takes_the_export(finished_run: TinyRun, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "hf").mkdir()
    assert main(["--run", str(finished_run.path), "--output", str(tmp_path / "hf")]) == 0
    assert capfd.readouterr().out.startswith("step 6 of ")
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.medium
def test_a_damaged_checkpoint_is_skipped_or_named(finished_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "run")
    state = run.checkpoints / "step-00000006" / "state"
    for file in state.iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"step-00000006 is damaged: state/.* differs from what was written"):
        export_run(str(run.path), tmp_path / "six", step=6)
    assert not (tmp_path / "six").exists()
    assert export_run(str(run.path), tmp_path / "five") == 5
    assert (tmp_path / "five" / "model.safetensors").exists()
