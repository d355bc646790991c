# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Validation of launches and of the training arguments, before any command of gcloud."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from marin_rl.config.decode import decode
from marin_rl.config.section_types import ConfigError
from marin_rl.errors import UserError
from marin_rl.launch.tpu import TpuConfig, open_launch, training_run
from marin_rl.launch.upload import UploadError

VALID: dict[str, Any] = {"tpu_name": "pod", "zone": "us-east5-a", "slices": {"tpu_type": "v5p-16"}}
ROLLOUTS = {"rollout_slices": {"tpu_type": "v5litepod-8"}}
ASYNC = ["--config", "run.yaml", "--run_dir", "/mnt/a", "--mode", "async", "--weights.host", "0.0.0.0"]
RUN = "environment: {type: arithmetic}\nmodel: {type: llama}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tpu_name": "Pod"}, "tpu_name is 'Pod'; it must have at most 54 lower-case letters"),
        ({"tpu_name": "a" * 55}, "it must have at most 54"),
        (
            {"tpu_name": "a" * 52, "rollout_slices": {"tpu_type": "v5p-8", "num_slices": 18}},
            "; it must have at most 51 characters, because the last of the rollout_slices is named "
            "TPU_NAME-rollouts-17; shorten it",
        ),
        ({"zone": "us-east5"}, "zone is 'us-east5'; it must be a zone, such as us-east5-a"),
        ({"slices": {"tpu_type": "v5p"}}, "slices: tpu_type is 'v5p': it is not a slice of TPUs; "),
        ({"slices": {"tpu_type": "v5litpod-8"}}, "nearest: v5litepod-8"),
        ({"slices": {"tpu_type": "v5e-x"}}, "tpu_type is 'v5e-x': it is not a slice of TPUs; nearest: v5e-"),
        ({"slices": {"tpu_type": "2xv5e-8"}}, "it is 2 slices; write the type of one, and set num_slices: 2"),
        ({"slices": {"tpu_type": "v7x-8"}}, "tpu_type is tpu7x-8, of which the runtime version is not known"),
        ({"slices": {"tpu_type": "v5p-8", "num_slices": 0}}, "slices.num_slices is 0; it must be at least 1"),
        ({"slices": {"tpu_type": "v5p-8", "capacity_type": "cheap"}}, "it takes one of on-demand, spot, reserved"),
        ({"slices": {"tpu_type": "v5p-8", "create_flags": ["--spot"]}}, "create_flags contains '--spot'"),
        ({"slices": {"tpu_type": "v5p-8", "create_flags": ["--zone=b"]}}, "create_flags contains '--zone=b'"),
        ({"slices": {"tpu_type": "v5p-8", "create_flags": ["spot"]}}, "create_flags contains 'spot'"),
        ({"slices": {"tpu_typ": "v5p-8"}}, "unknown key slices.tpu_typ; did you mean 'tpu_type'"),
        ({"worker": "first"}, "worker is 'first'; it must be the index of a host, or all"),
        ({"supervisor": {"folder": "x"}}, "supervisor.folder is set by this command; remove it"),
        ({"jobs": {"poll_seconds": -1.0}}, "jobs.poll_seconds is -1.0; it must be at least 0"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str) -> None:
    decode(TpuConfig, VALID)
    with pytest.raises(ConfigError) as raised:
        decode(TpuConfig, VALID | changes)
    assert message in str(raised.value)


@pytest.mark.parametrize("common", ["v5e-8", "v5lite-8", "V5E-8", "v5litepod-8", "v5e:2x4", " v5e-8"])
def test_common_names_of_types_become_googles(common: str) -> None:
    changes = {"slices": {"tpu_type": common}, "rollout_slices": {"tpu_type": common}}
    config = decode(TpuConfig, VALID | changes)
    assert config.rollout_slices is not None
    assert config.slices.tpu_type == config.rollout_slices.tpu_type == "v5litepod-8"


HOSTILE = [
    *("$(touch x)", "`touch x`", "a;touch x", "a'b", 'a"b', "a\nb", "a\0b", "-x", "--x", "--", "a b", "a|b", "a&b"),
    *("a>x", "*", "~", "$HOME", "a\\b", "#a", "!a", "{a,b}", "\ud800", "\u202e", "--zone=b", "--zone=b\nc", "=a"),
    "--command=touch x",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "key", ["tpu_name", "zone", "project", "worker", "ssh_flags", "tpu_type", "runtime_version", "create_flags"]
)
def test_text_for_gcloud_is_a_name_or_a_flag(key: str, text: str) -> None:
    if (key == "create_flags" and text == "--command=touch x") or ("flags" in key and text == "--x"):
        pytest.skip("gcloud refuses flags that it does not know")
    value: Any = [text] if "flags" in key else text
    in_slices = key in ("tpu_type", "runtime_version", "create_flags")
    changes = {"slices": VALID["slices"] | {key: value}} if in_slices else {key: value}
    with pytest.raises(ConfigError, match=rf"{key} (is|contains) "):
        decode(TpuConfig, VALID | changes)


@pytest.mark.parametrize(("length", "num_slices"), [(52, 10), (51, 100)])
def test_names_of_rollout_slices_have_at_most_63_characters(length: int, num_slices: int) -> None:
    rollouts = {"tpu_type": "v5p-8", "num_slices": num_slices}
    launch = open_launch(decode(TpuConfig, VALID | {"tpu_name": "a" * length, "rollout_slices": rollouts}), [], print)
    assert len(launch.groups[-1].name) == 63


def test_requests_of_rollout_slices() -> None:
    rollouts = {"tpu_type": "v6e-8", "num_slices": 2, "capacity_type": "spot", "create_flags": ["--network=n"]}
    launch = open_launch(decode(TpuConfig, VALID | {"rollout_slices": rollouts}), [], print)
    assert [group.name for group in launch.groups] == ["pod", "pod-rollouts-0", "pod-rollouts-1"]
    assert [group.resource.slices.num_slices for group in launch.groups] == [1, 1, 1]
    assert [group.resource.slices.create_flags for group in launch.groups] == [(), ("--network=n",), ("--network=n",)]


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
        ({}, [], "no training arguments; give those of marin_rl.train after --"),
        ({}, ["--config", "run.yaml"], "run_dir is missing"),
        ({}, ["--config", "run.yaml", "--run_dirr", "a"], "unknown key run_dirr; did you mean 'run_dir'"),
        ({}, ["--config", "run.yaml", "--run_dir", "runs/a"], "run_dir is 'runs/a', on the disk of each host"),
        ({}, ["--config", "hidden.yaml", "--run_dir", "runs/a"], "--config hidden.yaml is not copied to the hosts"),
        ({}, ["--config", "run.yaml", "--run_dir", "a", "--mode", "async"], "use `launch ray` with rollout_slices"),
        (ROLLOUTS, ["--config", "run.yaml", "--run_dir", "a"], "rollout_slices needs --mode async"),
        (ROLLOUTS, [*ASYNC, "--ray_address", "h:1"], "this command sets ray_address; remove it from the arguments"),
        (ROLLOUTS, [*ASYNC[:-2]], "weights.host is 127.0.0.1, which only this machine can reach"),
        (
            {"rollout_slices": {"tpu_type": "v5p-16"}},
            [*ASYNC, "--workers.resources.TPU", "8"],
            "2 hosts of 4 chips, which is room for 0 workers",
        ),
        (
            ROLLOUTS,
            [*ASYNC, "--workers.resources.TPU", "4", "--workers.num_workers", "3"],
            "workers.num_workers is 3 and workers.resources.TPU is 4, but the rollout_slices have 1 hosts of 8 chips",
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
            "which needs 2 slices of 1 hosts, but rollout_slices.num_slices is 1",
        ),
        ({"code": {"secrets": ["ABSENT_1"]}}, ["--config", "run.yaml", "--run_dir", "a"], "secrets names ABSENT_1"),
    ],
)
def test_bad_training_arguments(folder: Path, changes: dict[str, Any], arguments: list[str], message: str) -> None:
    with pytest.raises((ConfigError, UploadError)) as raised:
        training_run(decode(TpuConfig, VALID | changes), arguments)
    assert message in str(raised.value)


@pytest.mark.medium
@pytest.mark.parametrize("run_dir", ["gs://bucket/runs/a", "/mnt/runs/a"])
def test_returns_the_run_directory(folder: Path, run_dir: str) -> None:
    arguments = ["--config", "run.yaml", "--run_dir", run_dir]
    assert training_run(decode(TpuConfig, VALID), arguments) == run_dir


@pytest.mark.medium
def test_config_files_are_those_of_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tools").mkdir()
    monkeypatch.chdir(folder / "tools")
    config = decode(TpuConfig, VALID | {"code": {"folder": ".."}})
    assert training_run(config, ["--config", "run.yaml", "--run_dir", "/mnt/a"]) == "/mnt/a"
    assert Path.cwd() == folder / "tools"


@pytest.mark.medium
@pytest.mark.parametrize("hardware", [["--workers.tpu_slice", "v5e:2x4"], ["--workers.resources.TPU", "4"]])
def test_workers_on_rollout_slices(folder: Path, hardware: list[str]) -> None:
    assert training_run(decode(TpuConfig, VALID | ROLLOUTS), [*ASYNC, *hardware]) == "/mnt/a"


@pytest.mark.medium
def test_slices_that_ray_cannot_reserve_are_refused(folder: Path) -> None:
    arguments = [*ASYNC, "--workers.tpu_slice", "v5e:6x2", "--workers.num_workers", "3"]
    with pytest.raises(UserError, match="Ray knows no v5e slices of shape 6x2"):
        training_run(decode(TpuConfig, VALID | ROLLOUTS), arguments)


@pytest.mark.medium
@pytest.mark.parametrize(("hidden", "named"), [("mine.py", "mine.py"), ("helpers.py", "helpers.py"), ("other", None)])
def test_imports_that_are_not_copied_are_refused(folder: Path, hidden: str, named: str | None) -> None:
    (folder / "mine.py").write_text("from .helpers import X\n")
    (folder / "helpers.py").write_text("X = 1\n")
    (folder / ".gitignore").write_text(f"{hidden}\n")
    arguments = ["--config", "run.yaml", "--run_dir", "/mnt/a", "--imports", "[./mine.py]"]
    if named is None:
        assert training_run(decode(TpuConfig, VALID), arguments) == "/mnt/a"
        return
    with pytest.raises(UploadError, match=rf"imports .*{named} is not copied to the hosts; give its path relative to"):
        training_run(decode(TpuConfig, VALID), arguments)


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
        ("", ["--tokenizer.chat_template", "~/a.jinja"], "~/a.jinja does not exist in code.folder '.'; correct its"),
        ("", [*JSONL, "--environment.path", "absent.jsonl"], "environment.path absent.jsonl does not exist"),
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
        assert training_run(decode(TpuConfig, VALID), arguments) == "/mnt/a"
        return
    with pytest.raises(UploadError, match=message):
        training_run(decode(TpuConfig, VALID), arguments)


@pytest.mark.medium
def test_absolute_paths_are_reported(folder: Path) -> None:
    lines: list[str] = []
    options = [*JSONL, "--environment.path", "/mnt/a.jsonl"]
    training_run(decode(TpuConfig, VALID), ["--config", "run.yaml", "--run_dir", "/mnt/a", *options], lines.append)
    assert lines == [
        "environment.path /mnt/a.jsonl is not copied to the hosts, and is not checked: every host must mount it"
    ]


@pytest.mark.medium
def test_a_config_outside_the_folder_is_refused(folder: Path) -> None:
    config = decode(TpuConfig, VALID)
    with pytest.raises(UploadError, match="is not copied to the hosts; give its path relative to"):
        training_run(config, [f"--config={folder}/run.yaml", "--run_dir", "a"])
