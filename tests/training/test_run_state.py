# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""State of a run, and files that it reads or has written and that were changed when it resumes."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marin_rl.config.input_files import digest_inputs, input_changes
from marin_rl.config.sections import Mode, ReplayConfig
from marin_rl.distributed.scheduler import StalenessLimits
from marin_rl.environments.agent import AgentConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.dataset import HuggingFaceConfig, JsonlConfig
from marin_rl.environments.file import FileConfig
from marin_rl.evaluate import main as evaluate
from marin_rl.rewards.component import FunctionRewardConfig
from marin_rl.rollouts.config import ResampleGroupsConfig
from marin_rl.runs.metrics_file import read_records, rewind_records
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.training.run_state import RUN_FILES, Progress, RunFiles, compare_on_resume
from marin_rl.utils.errors import RunDirectoryError
from tests.tiny_run import TinyRun, copy_of, interrupted_after, outcome
from tests.training.bare_run import make_config, make_state

REPLAY = ReplayConfig(max_staleness=2, max_uses=3)
RESAMPLE = ResampleGroupsConfig(max_batches=3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": Mode.SYNC}, StalenessLimits(4, 0, 1, 0, last_step=9)),
        ({"mode": Mode.SYNC, "filter": RESAMPLE}, StalenessLimits(4, 0, 1, 8, last_step=9)),
        ({"mode": Mode.ASYNC}, StalenessLimits(4, 2, 3, 0, last_step=9)),
        ({"mode": Mode.ASYNC, "filter": RESAMPLE}, StalenessLimits(4, 2, 3, 8, last_step=9)),
    ],
)
def test_sampling_runs_ahead_only_in_async_mode(changes: dict[str, Any], expected: StalenessLimits) -> None:
    state = make_state(make_config(**{"num_steps": 9, "replay": REPLAY, **changes}), Progress())
    assert state.scheduler.limits == expected


def configs_with_files() -> list[Any]:
    """Configs with every kind of local input; relative paths start at the working directory."""
    rewards = (FunctionRewardConfig("code/reward.py", "score", options={"words": ["lists/words.txt", "not a file"]}),)
    words = "python", "code/agent.py", "--data=lists/data.txt", "lists/agent.txt", "-m", "own_library.main"
    command = AgentConfig(ArithmeticConfig(), command=words)
    return [
        make_config(environment=JsonlConfig("data/train.jsonl", "data/held_out.jsonl", rewards=rewards)),
        make_config(environment=HuggingFaceConfig("data/folder")),
        make_config(environment=FileConfig("code/environment.py", "make", options={"a": {"path": "lists/game.txt"}})),
        make_config(environment=command),
        make_config(tokenizer=TokenizerConfig(path="tokenizer", chat_template="chat.jinja")),
    ]


FILES = {
    "data/train.jsonl": "{}",
    "data/held_out.jsonl": "{}",
    "data/folder/train/part.parquet": "rows",
    "data/folder/dataset_info.json": "{}",
    "code/reward.py": "from .helpers import x\nimport deeper.module\n",
    "code/helpers.py": "def load():\n    from . import lazy\n",
    "code/lazy.py": "import helpers\n",
    "code/deeper/__init__.py": "",
    "code/deeper/module.py": "from ..shared import y\n",
    "code/shared.py": "import own_library.part\n",
    "own_library/part.py": "",
    "own_library/main.py": "from . import of_main\n",
    "own_library/of_main.py": "",
    "code/environment.py": "from .game import rules\n",
    "code/game/rules.py": "",
    "code/agent.py": "import agent_tools\n",
    "code/agent_tools.py": "this is ( not Python\n",
    "lists/words.txt": "a",
    "lists/agent.txt": "a",
    "lists/game.txt": "a",
    "lists/data.txt": "a",
    "tokenizer/tokenizer.json": "{}",
    "tokenizer/chat_template.jinja": "{}",
    "chat.jinja": "{{ x }}",
}
OTHER_FILES = {
    "code/unused.py": "",
    "code/__pycache__/reward.pyc": "",
    "tokenizer/model.safetensors": "weights",
    "tokenizer/.cache/x": "",
    "data/other.jsonl": "",
    "data/folder/cache-1.arrow": "",
    "data/folder/dataset_info.json~": "",
    "tokenizer/#tokenizer.json#": "",
    "tokenizer/tokenizer.json.bak": "",
    "tokenizer/runs/other/config.yaml": "",
    "tokenizer/runs/other/metrics.jsonl": "",
    "tokenizer/runs/other/checkpoints/step-1/manifest.json": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (FILES | OTHER_FILES).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def all_inputs() -> list[dict[str, dict[str, str]]]:
    return [digest_inputs(config) for config in configs_with_files()]


def all_changes(before: list[dict[str, dict[str, str]]]) -> list[str]:
    return [line for old, new in zip(before, all_inputs(), strict=True) for line in input_changes(old, new)]


@pytest.mark.medium
@pytest.mark.parametrize("name", FILES)
def test_every_changed_input_is_named(folder: Path, name: str):
    before = all_inputs()
    assert all_changes(before) == []
    file = folder / name
    # Of the same size and with the same times.
    times, content = file.stat(), file.read_bytes()
    file.write_bytes(content[:-1] + b"#" if content else b"\n")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [line.partition(": ")[2] for line in all_changes(before)] == [f"{name} was changed"]
    file.write_bytes(content)
    assert all_changes(before) == []
    file.unlink()
    assert f"{name} is missing" in [line.partition(": ")[2] for line in all_changes(before)]


def test_other_files_may_change(folder: Path):
    before = all_inputs()
    for name in OTHER_FILES:
        (folder / name).write_text("changed")
    assert all_changes(before) == []


def test_added_files_and_targets_of_links_are_named(folder: Path):
    outside = folder / "outside"
    outside.mkdir()
    (outside / "part.parquet").write_text("a")
    (folder / "data/folder/linked").symlink_to(outside)
    (outside / "loop").symlink_to(outside)
    before = all_inputs()
    assert all_changes(before) == []
    (outside / "part.parquet").write_text("b")
    (folder / "data/folder/new.parquet").write_text("c")
    assert all_changes(before) == [
        "environment: data/folder/linked/part.parquet was changed",
        "environment: data/folder/new.parquet was added",
    ]


def test_another_user_has_the_same_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch):
    environment = FileConfig("~/code/environment.py", "make", options={"a": "~/lists/game.txt"})
    config = make_config(environment=environment, tokenizer=TokenizerConfig(path="~/tokenizer"))
    shutil.copytree(folder, folder / "home")
    monkeypatch.setenv("HOME", str(folder))
    before = digest_inputs(config)
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert input_changes(before, digest_inputs(config)) == []
    (folder / "home/code/game/rules.py").write_text("x = 1")
    assert input_changes(before, digest_inputs(config)) == ["environment: ~/code/game/rules.py was changed"]


def test_a_named_file_that_the_run_creates_is_an_output(folder: Path):
    config = make_config(environment=FileConfig("code/environment.py", "make", options={"log": "log.txt"}))
    checkpoint = folder / "run/checkpoints/step-1"
    files = RunFiles(digest_inputs(config))
    for text in ("a", "b"):
        (folder / "log.txt").write_text(text)
        files, messages = compare_on_resume(files, checkpoint, digest_inputs(config), accept=False)
        assert messages == []


# Outputs.


def edited(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b'"episode": ', b'"episode": 1'), *lines[3:]]


ALTERATIONS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "empty": (lambda lines: [], "is empty"),
    "a value edited": (edited, "was changed"),
    "a line removed": (lambda lines: lines[:2] + lines[3:], "was changed, at line 3"),
    "the last line removed": (lambda lines: lines[:-1], "was cut off"),
    "cut in a line": (lambda lines: [*lines[:-1], lines[-1][:50]], "was cut off"),
    "garbage": (lambda lines: [*lines[:3], b"\x00\xff\x80\n", *lines[3:]], "was changed, at line 4"),
}


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_altered_records_are_named_and_can_be_accepted(finished_run: TinyRun, tmp_path: Path, alteration: str):
    run = copy_of(finished_run, tmp_path / "copy")
    saved = RunFiles.decode((run.checkpoint(6) / RUN_FILES).read_bytes())
    path, (alter, message) = run.path / "metrics.jsonl", ALTERATIONS[alteration]
    assert compare_on_resume(saved, run.checkpoint(6), saved.inputs, accept=False)[1] == []
    altered = b"".join(alter(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(altered)
    with pytest.raises(RunDirectoryError) as raised:
        compare_on_resume(saved, run.checkpoint(6), saved.inputs, accept=False)
    assert message in str(raised.value)
    assert "--accept_changes" in str(raised.value)
    assert path.read_bytes() == altered
    files, messages = compare_on_resume(saved, run.checkpoint(6), saved.inputs, accept=True)
    assert [message in line for line in messages] == [True]
    rewind_records(path, files.metrics, 6)
    steps = [record["step"] for record in read_records(path)]
    assert steps == sorted(set(steps))
    assert len(steps) >= len(altered.splitlines()) - 4 or alteration == "another encoding"
    assert len(files.accepted) == 1


@pytest.mark.parametrize("kind", ["cut off", "a byte flipped", "empty", "of another step"])
def test_altered_rollouts_are_named_and_absent_ones_reported(finished_run: TinyRun, tmp_path: Path, kind: str):
    run = copy_of(finished_run, tmp_path / "copy")
    saved = RunFiles.decode((run.checkpoint(6) / RUN_FILES).read_bytes())
    assert sorted(saved.rollouts) == sorted(path.name for path in (run.path / "rollouts").iterdir())
    path = run.path / "rollouts" / "step-00000002.parquet"
    data = path.read_bytes()
    flipped = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    other = (run.path / "rollouts" / "step-00000003.parquet").read_bytes()
    path.write_bytes({"cut off": data[:-9], "a byte flipped": flipped, "empty": b"", "of another step": other}[kind])
    with pytest.raises(RunDirectoryError, match=r"rollouts/step-00000002\.parquet was changed"):
        compare_on_resume(saved, run.checkpoint(6), saved.inputs, accept=False)
    files, _ = compare_on_resume(saved, run.checkpoint(6), saved.inputs, accept=True)
    assert path.name not in files.rollouts
    # The documented remedy.
    path.unlink()
    files, messages = compare_on_resume(saved, run.checkpoint(6), saved.inputs, accept=False)
    assert messages == ["1 rollout files of former steps were removed, the last is step-00000002.parquet"]
    assert path.name not in files.rollouts


def test_other_software_is_reported(finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch):
    checkpoint = finished_run.checkpoint(6)
    saved = RunFiles.decode((checkpoint / RUN_FILES).read_bytes())
    older = {**saved.software, "transformers": "1.0"}
    now = saved.software["transformers"]
    files, messages = compare_on_resume(
        RunFiles(saved.inputs, older, saved.metrics, saved.rollouts), checkpoint, saved.inputs, accept=False
    )
    assert messages == [f"transformers is {now}, and was 1.0"]
    assert files.software == saved.software


# A whole run.


@pytest.mark.medium
def test_resume_with_a_changed_data_file(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    run = interrupted_after(finished_run, 4, tmp_path / "copy")
    data = tmp_path / "problems.jsonl"
    original = finished_run.path.parent / "problems.jsonl"
    # The path of the data is equal in both runs.
    for file in (run.config, run.path / "config.yaml"):
        file.write_text(file.read_text().replace(str(original), str(data)))
    for manifest in run.checkpoints.glob("*/" + RUN_FILES):
        assert str(original) in manifest.read_text()
    shutil.copy(original, data)
    assert run.train() == 1
    error = capfd.readouterr().err
    assert f"environment: {data} was added" in error
    assert f"environment: {original} is missing" in error
    assert len(run.records()) == 5
    assert run.train("--accept_changes") == 0
    assert "changed file accepted: environment: " in (run.path / "log.txt").read_text()
    assert [record["step"] for record in run.records()] == list(range(7))
    assert run.train() == 0
    (accepted,) = json.loads((run.checkpoint(6) / RUN_FILES).read_text())["accepted"]
    assert accepted["checkpoint"] == "step-00000004"
    assert len(accepted["changes"]) == 2
    # The content is that of the uninterrupted run.
    assert outcome(run)["state"] == outcome(finished_run)["state"]
    data.write_text(data.read_text() + "\n")
    # A finished run reads its files only to be exported.
    assert run.train() == 0
    shutil.rmtree(run.path / "hf")
    assert run.train() == 1
    assert f"environment: {data} was changed" in capfd.readouterr().err
    with caplog.at_level(logging.WARNING, "marin_rl"):
        assert evaluate(["--run", str(run.path), "--evaluation.tasks", "2"]) == 0
    assert any(f"environment: {data} was changed since" in message for message in caplog.messages)
