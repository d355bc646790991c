# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of the training arguments and of the files to copy, before any command of gcloud."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marin_rl.pods.config import TpuConfig
from marin_rl.pods.preflight import check_training
from marin_rl.pods.upload import UploadError
from marin_rl.utils.errors import UserError
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError

VALID: dict[str, Any] = {"tpu_name": "pod", "zone": "us-east5-a", "slices": {"tpu_type": "v5p-16"}}
ROLLOUTS = {"rollout_slices": {"tpu_type": "v5litepod-8"}}
ASYNC = ["--config", "run.yaml", "--run_dir", "/mnt/a", "--mode", "async", "--weights.host", "0.0.0.0"]
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
            "2 hosts of 4 chips, which is room for 0 workers",
        ),
        (
            ROLLOUTS,
            [*ASYNC, "--workers.resources.TPU", "4", "--workers.num_workers", "3"],
            "workers.num_workers is 3, with 4 TPU chips each, but the 1 rollout_slices have 1 hosts of 8 chips, which "
            "is room for 2 workers; lower it, or raise rollout_slices.num_slices",
        ),
        (ROLLOUTS, ASYNC, "workers.resources has no TPU, so workers would run on the CPUs of the rollout slices"),
        (
            {"rollout_slices": {"tpu_type": "v5e-8"}},
            [*ASYNC, "--workers.tpu_slice", "v6e:2x4"],
            "a v6e-8, but rollout_slices.tpu_type is v5litepod-8",
        ),
        (ROLLOUTS, [*ASYNC, "--workers.tpu_slice", "v6e:2x4"], "a v6e-8, but rollout_slices.tpu_type is v5litepod-8"),
        (
            ROLLOUTS,
            [*ASYNC, "--workers.tpu_slice", "v5e:2x4", "--workers.num_workers", "2"],
            "workers.num_workers is 2, with 8 TPU chips each",
        ),
        ({"code": {"secrets": ["ABSENT_1"]}}, ["--config", "run.yaml", "--run_dir", "a"], "secrets names ABSENT_1"),
    ],
)
def test_bad_training_arguments(folder: Path, changes: dict[str, Any], arguments: list[str], message: str) -> None:
    with pytest.raises((ConfigError, UploadError)) as raised:
        checked(decode(TpuConfig, VALID | changes), arguments)
    assert message in str(raised.value)


@pytest.mark.medium
@pytest.mark.parametrize("run_dir", ["gs://bucket/runs/a", "/mnt/runs/a"])
def test_returns_the_run_directory(folder: Path, run_dir: str) -> None:
    arguments = ["--config", "run.yaml", "--run_dir", run_dir]
    assert checked(decode(TpuConfig, VALID), arguments) == run_dir


@pytest.mark.medium
def test_config_files_are_those_of_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tools").mkdir()
    monkeypatch.chdir(folder / "tools")
    config = decode(TpuConfig, VALID | {"code": {"folder": ".."}})
    assert checked(config, ["--config", "run.yaml", "--run_dir", "/mnt/a"]) == "/mnt/a"
    assert Path.cwd() == folder / "tools"


@pytest.mark.medium
@pytest.mark.parametrize("hardware", [["--workers.tpu_slice", "v5e:2x4"], ["--workers.resources.TPU", "4"]])
def test_workers_on_rollout_slices(folder: Path, hardware: list[str]) -> None:
    assert checked(decode(TpuConfig, VALID | ROLLOUTS), [*ASYNC, *hardware]) == "/mnt/a"


@pytest.mark.medium
@pytest.mark.parametrize("reserved", ["v5e:2x8", "v5e-16"])
@pytest.mark.parametrize("requested", ["v5e:2x8", "v5litepod-16", "v5e:4x4"])
def test_workers_and_slices_may_have_different_names_of_one_type(folder: Path, requested: str, reserved: str) -> None:
    config = decode(TpuConfig, VALID | {"rollout_slices": {"tpu_type": requested}})
    arguments = [*ASYNC, "--workers.tpu_slice", reserved, "--workers.num_workers", "4"]
    assert checked(config, arguments) == "/mnt/a"


@pytest.mark.medium
def test_slices_that_ray_cannot_reserve_are_refused(folder: Path) -> None:
    arguments = [*ASYNC, "--workers.tpu_slice", "v5e:6x2", "--workers.num_workers", "3"]
    with pytest.raises(UserError, match="Ray knows no v5e slices of shape 6x2"):
        checked(decode(TpuConfig, VALID | ROLLOUTS), arguments)


@pytest.mark.medium
@pytest.mark.parametrize(("hidden", "named"), [("mine.py", "mine.py"), ("helpers.py", "helpers.py"), ("other", None)])
def test_imports_that_are_not_copied_are_refused(folder: Path, hidden: str, named: str | None) -> None:
    (folder / "mine.py").write_text("from .helpers import X\n")
    (folder / "helpers.py").write_text("X = 1\n")
    (folder / ".gitignore").write_text(f"{hidden}\n")
    arguments = ["--config", "run.yaml", "--run_dir", "/mnt/a", "--imports", "[./mine.py]"]
    if named is None:
        assert checked(decode(TpuConfig, VALID), arguments) == "/mnt/a"
        return
    with pytest.raises(UploadError, match=rf"imports .*{named} is not copied to the hosts; give the path of a file in"):
        checked(decode(TpuConfig, VALID), arguments)


JSONL = ["--environment", "{type: jsonl, path: data/a.jsonl, grader: {type: exact}}"]
REWARD = ["--environment.rewards", "[{type: function, path: rewards.py, function: score}]"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("hidden", "options", "message"),
    [
        ("data", JSONL, "environment.path data/a.jsonl is not copied to the hosts"),
        ("rewards.py", REWARD, r"rewards.py is not copied to the hosts"),
        ("helpers.py", REWARD, r"helpers.py is not copied to the hosts"),
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
    files = {"data/a.jsonl": "{}", "rewards.py": "import helpers\n", "helpers.py": "", "weights/tokenizer.json": "{}"}
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


@pytest.mark.medium
def test_a_config_outside_the_folder_is_refused(folder: Path) -> None:
    config = decode(TpuConfig, VALID)
    with pytest.raises(UploadError, match="is not copied to the hosts; give the path of a file in"):
        checked(config, [f"--config={folder}/run.yaml", "--run_dir", "a"])
