# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Jobs, and an executor that runs them as steps."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
import yaml

from marin_rl.run_job import main
from marin_rl.sessions import job as job_module
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.storage import path_digest
from marin_rl.utils.user_code import MissingPackageError
from tests.fork_server import popen
from tests.tiny_run import TINY, TinyRun, changed, in_this_process, make_run, outcome
from tests.training.test_preference_run import make_run as make_dpo_run
from tests.training.test_supervised_run import make as make_sft_run

RETRY = os.EX_TEMPFAIL
KillAt = tuple[str, int] | None


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the executor below, as in Marin: its function gets the output path, which other steps read."""

    name: str
    fn: Callable[[str], None]
    deps: tuple["Step", ...] = ()


class Executor:
    """Runs the steps that have not succeeded, after those that they depend on, and a failed step again."""

    def __init__(self, prefix: Path, max_attempts: int = 3) -> None:
        self.attempts: list[str] = []
        self._prefix, self._max_attempts = prefix, max_attempts

    def output_path(self, step: Step) -> str:
        return str(self._prefix / step.name)

    def run(self, step: Step) -> None:
        for dependency in step.deps:
            self.run(dependency)
        status = Path(self.output_path(step)) / ".executor_status"
        if status.exists():
            return
        for attempt in range(self._max_attempts):
            self.attempts.append(step.name)
            try:
                step.fn(self.output_path(step))
            except ConnectionError:
                if attempt + 1 == self._max_attempts:
                    raise
            else:
                status.write_text("SUCCESS")
                return


def run_in_its_environment(output_path: str, config: Any, inputs: Any, kill_at: KillAt = None) -> dict[str, Any]:
    """Run a job in another process; raises ConnectionError, as for a lost machine, if another attempt may succeed."""
    folder = Path(output_path)
    folder.mkdir(parents=True, exist_ok=True)
    job = {"attempt": f"{folder.name}-1", "run_dir": str(folder / "run"), "config": config, "inputs": inputs}
    (folder / "job.json").write_text(json.dumps(job))
    files = [str(folder / "job.json"), str(folder / "result.json")]
    with (folder / "output.txt").open("wb") as output:
        command = [sys.executable, "-m", "marin_rl.run_job", *files]
        code = popen(command, stdout=output, env=os.environ, kill_at=kill_at).wait()
    if code == -signal.SIGKILL:
        assert not (folder / "result.json").exists()
    if code in (-signal.SIGKILL, RETRY):
        raise ConnectionError(code)
    assert code == 0, (folder / "output.txt").read_text()
    return json.loads((folder / "result.json").read_text())


def plain(run: TinyRun) -> dict[str, Any]:
    """The config of a run that has not started."""
    return yaml.safe_load(run.config.read_text())


def two_steps(folder: Path, kill_at: KillAt = None) -> tuple[Executor, dict[str, Any]]:
    """Fine-tune and train from the export, with one kill in the first attempt of RL; return the executor and result."""
    sft_config, rl_config = plain(make_sft_run(folder, num_steps=4)), plain(make_run(folder))
    rl_config = changed(rl_config, {"warm_start.max_steps": 0})
    executor, results, kills = Executor(folder), {}, [kill_at]

    def run_sft(output_path: str) -> None:
        rows = str(folder / "rows.jsonl")
        inputs = {"data.path": {"path": rows, "sha256": path_digest(Path(rows))}}
        results["sft"] = run_in_its_environment(output_path, sft_config, inputs)

    sft = Step("sft", run_sft)

    def run_rl(output_path: str) -> None:
        inputs = {"initialize_from": results["sft"]["export"]}
        kill = kills.pop() if kills else None
        results["rl"] = run_in_its_environment(output_path, rl_config, inputs, kill)

    executor.run(Step("rl", run_rl, deps=(sft,)))
    return executor, results["rl"]


@pytest.mark.slow
def test_a_step_killed_and_run_again_equals_an_undisturbed_one(tmp_path: Path):
    executor, result = two_steps(tmp_path, (r"os\.mkdir .*\.step-00000004\.[^/]*partial$", 3))
    assert executor.attempts == ["sft", "rl", "rl"]
    assert "resuming after step 2" in (tmp_path / "rl" / "output.txt").read_text()
    (tmp_path / "whole").mkdir()
    whole = make_run(tmp_path / "whole", initialize_from=str(tmp_path / "sft" / "run" / "hf"), warm_start__max_steps=0)
    assert whole.train() == 0
    found, expected = outcome(TinyRun(tmp_path / "rl" / "run", Path())), outcome(whole)
    for part in ("records", "progress", "state", "rollouts", "hf"):
        assert found[part] == expected[part], part
    assert (result["state"], result["step"]) == ("succeeded", TINY["num_steps"])
    assert result["export"]["sha256"] == path_digest(whole.path / "hf")
    assert path_digest(Path(result["export"]["path"])) == result["export"]["sha256"]


@dataclasses.dataclass
class Attempts:
    """Attempts of one job in this process."""

    folder: Path
    job: dict[str, Any]

    def run(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the result of an attempt."""
        file, result = self.folder / "job.json", self.folder / "results" / "result.json"
        file.write_text(json.dumps({**self.job, **changes}))
        with in_this_process():
            code = main([str(file), str(result)])
        return code, json.loads(result.read_text())


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    """A job of fine-tuning of two steps, which has not started."""
    config = plain(make_sft_run(tmp_path, num_steps=2))
    del config["run_dir"]
    return Attempts(tmp_path, {"attempt": "first", "run_dir": str(tmp_path / "run"), "config": config})


def fail(*arguments: Any, **options: Any) -> bool:
    raise AssertionError("the run is started again")


@pytest.mark.medium
def test_a_job_that_has_succeeded_is_not_run_again(attempts: Attempts, monkeypatch: pytest.MonkeyPatch):
    code, result = attempts.run()
    assert (code, result["state"], result["attempt"], result["step"]) == (0, "succeeded", "first", 2)
    assert Path(result["export"]["path"]) == attempts.folder / "run" / "hf"
    with monkeypatch.context() as patch:
        patch.setattr("marin_rl.sessions.session.run_session", fail)
        assert attempts.run(attempt="second") == (0, {**result, "attempt": "second"})
        # The inputs may be deleted then; another job is still refused.
        (attempts.folder / "rows.jsonl").unlink()
        assert attempts.run() == (0, result)
        config = changed(attempts.job["config"], {"seed": 8})
        code, other = attempts.run(config=config)
    assert (code, other["state"], other["step"], other["failure"]["retry"]) == (1, "failed", 2, False)
    assert "belongs to another job, which differs in its config" in other["failure"]["message"]


@pytest.mark.medium
def test_an_export_that_was_changed_is_written_again(attempts: Attempts):
    first = attempts.run()
    [weights] = Path(first[1]["export"]["path"]).glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert attempts.run() == first
    assert weights.read_bytes() == content
    weights.unlink()
    assert attempts.run() == first
    assert weights.read_bytes() == content


@pytest.mark.medium
def test_a_run_in_an_object_store(attempts: Attempts):
    """Its export is an input of another job."""
    address = "memory://jobs/run"
    code, remote = attempts.run(run_dir=address)
    assert (code, remote["export"]["path"]) == (0, f"{address}/hf")
    assert attempts.run(run_dir=address, attempt="second") == (0, {**remote, "attempt": "second"})
    config, inputs = changed(attempts.job["config"], {"num_steps": 1}), {"initialize_from": remote["export"]}
    code, local = attempts.run(config=config, inputs=inputs)
    assert (code, local["state"], local["step"]) == (0, "succeeded", 1)


@pytest.mark.medium
def test_dpo_is_a_job(tmp_path: Path):
    config = plain(make_dpo_run(tmp_path, num_steps=1))
    attempts = Attempts(tmp_path, {"run_dir": str(tmp_path / "pairs"), "config": config})
    code, result = attempts.run()
    assert (code, result["state"], result["step"], result["attempt"]) == (0, "succeeded", 1, "")


def test_inputs_are_compared_before_anything_is_written(attempts: Attempts):
    rows, missing = attempts.folder / "rows.jsonl", attempts.folder / "none"
    inputs = {"data.path": {"path": str(rows), "sha256": "0" * 64}, "initialize_from": {"path": str(missing)}}
    code, result = attempts.run(inputs=inputs)
    assert (code, result["failure"]["type"], result["failure"]["retry"]) == (1, "ConfigError", False)
    first, second = result["failure"]["message"].splitlines()
    assert [text in first for text in (str(rows), path_digest(rows), "0" * 64)] == [True] * 3
    assert str(missing) in second
    assert not (attempts.folder / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_directory": "x"}, "unknown key run_directory"),
        ({"run_dir": "ftp://x"}, "run_dir is 'ftp://x', but the protocol ftp:// is unknown"),
        ({"config": {"data": {"path": "no.jsonl"}, "modell": {}}}, "unknown key modell"),
        ({"inputs": {"data.pfad": {"path": __file__}}}, "unknown key data.pfad"),
        ({"inputs": {"data.path": {}}}, "inputs.data.path.path is missing"),
    ],
)
def test_mistakes_of_a_job_are_named(attempts: Attempts, changes: dict[str, Any], message: str):
    code, result = attempts.run(**changes)
    assert (code, result["state"], result["failure"]["retry"]) == (1, "failed", False)
    assert message in result["failure"]["message"]


@pytest.mark.parametrize("value", ['{"seed": 1, "seed": 2}', '{"seed": NaN}', '{"seed": -Infinity}'])
def test_a_job_that_json_does_not_define_is_refused(tmp_path: Path, value: str):
    (job := tmp_path / "job.json").write_text(f'{{"config": {value}, "run_dir": "{tmp_path / "run"}"}}')
    with pytest.raises(ConfigError, match=r"twice|not a JSON value"):
        job_module.read_job(job)


def test_a_result_does_not_replace_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (job := tmp_path / "job.json").write_text("{}")
    (link := tmp_path / "link.json").symlink_to(job)
    (record := tmp_path / "run" / "job.json").parent.mkdir()
    record.write_text("{}")
    assert [main([str(job), str(job)]), main([str(link), str(job)]), main([str(link), str(record)])] == [1, 1, 1]
    assert (job.read_text(), record.read_text()) == ("{}", "{}")
    assert str(job) in capsys.readouterr().err


def test_a_run_without_a_job_is_refused(attempts: Attempts, finished_run: TinyRun):
    shutil.copytree(finished_run.path, attempts.folder / "run")
    code, result = attempts.run()
    assert (code, result["failure"]["type"]) == (1, "RunDirectoryError")
    assert not (attempts.folder / "run" / "job.json").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": {}, "run_dir": "run"}', '{"job": 3, "step": null}'])
def test_another_file_in_the_place_of_the_record_is_refused(attempts: Attempts, content: str):
    """Such as the file of the job itself; another attempt would fail again."""
    (attempts.folder / "run").mkdir()
    (record := attempts.folder / "run" / "job.json").write_text(content)
    code, result = attempts.run()
    assert (code, result["failure"]["type"], result["failure"]["retry"]) == (1, "RunDirectoryError", False)
    assert str(record) in result["failure"]["message"]
    assert record.read_text() == content


@pytest.mark.parametrize(
    "run_dir",
    [
        *(
            "file",
            "file/run",
            "loop",
            "loop/run",
            "dangling/run",
            "fifo",
            "no_record",
            "/dev/null",
            "/proc/run",
        ),
        *(
            "a" * 300,
            "/".join(["a" * 200] * 30),
            "/",
            "//",
            "/../",
            3,
            1.5,
            True,
            None,
            ["run"],
            {},
            "",
            "a\0b",
            "gs://",
        ),
    ],
)
def test_run_dirs_that_no_attempt_can_use_are_failures(
    attempts: Attempts, run_dir: object, monkeypatch: pytest.MonkeyPatch
):
    (folder := attempts.folder / "here").mkdir()
    monkeypatch.chdir(folder)
    (folder / "file").touch()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to("missing/run")
    os.mkfifo(folder / "fifo")
    (folder / "no_record" / "job.json").mkdir(parents=True)
    code, result = attempts.run(run_dir=run_dir)
    assert (code, result["state"], result["failure"]["retry"]) == (1, "failed", False), result


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("the device was lost"), RETRY),
        (SystemExit("user code"), RETRY),
        (OSError(28, "disk full"), RETRY),
        (OSError(5, "a read failed"), RETRY),
        (OSError(36, "too long"), 1),
        (NotADirectoryError(20, "a file"), 1),
        (MissingPackageError("no package"), 1),
        (ValueError("no"), 1),
    ],
)
def test_failures_say_whether_to_retry(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
):
    def run_session(*arguments: Any) -> bool:
        raise error

    monkeypatch.setattr("marin_rl.sessions.session.run_session", run_session)
    found, result = attempts.run()
    assert (found, result["failure"]["retry"]) == (code, code == RETRY)
    assert (result["failure"]["type"], result["failure"]["message"]) == (type(error).__name__, str(error))


@pytest.mark.medium
def test_another_attempt_at_the_same_time_may_retry(attempts: Attempts):
    from marin_rl.runs.lock import lock
    from marin_rl.runs.run_directory import RunDirectory

    with lock(RunDirectory(attempts.folder / "run")):
        code, result = attempts.run()
    assert (code, result["failure"]["type"], result["failure"]["retry"]) == (RETRY, "RunInUseError", True)
    assert attempts.run()[0] == 0


@pytest.mark.medium
def test_sigterm_is_an_interruption_and_the_next_attempt_resumes(attempts: Attempts, monkeypatch: pytest.MonkeyPatch):
    """At a step, which is saved, and while the inputs are read."""
    from marin_rl.training.supervised_run import SupervisedRun

    handler, step = signal.getsignal(signal.SIGTERM), SupervisedRun.train_step

    def interrupted(run: SupervisedRun, *arguments: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        return step(run, *arguments)

    rows = str(attempts.folder / "rows.jsonl")
    attempts.job["inputs"] = {"data.path": {"path": rows, "sha256": path_digest(Path(rows)).upper()}}
    for place, name, function, steps in (
        (job_module, "path_digest", lambda path: signal.raise_signal(signal.SIGTERM), None),
        (SupervisedRun, "train_step", interrupted, 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, function)
            code, result = attempts.run()
        assert (code, result["state"], result["step"], result["failure"]) == (RETRY, "interrupted", steps, None)
        assert signal.getsignal(signal.SIGTERM) is handler
    code, result = attempts.run()
    assert (code, result["state"], result["step"]) == (0, "succeeded", 2)


def test_the_checksum_of_a_folder_is_that_of_sha256sum(tmp_path: Path):
    not_utf8 = os.fsdecode(b"\xff")
    for name in ("b", "a b/ü", "a/c", "B", "a-c", "new\nline", "back\\slash", "\ufb01", not_utf8):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(os.fsencode(name) * 3)
    (tmp_path / "link").symlink_to("b")
    listed = r"find -L . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    shell = subprocess.run(["sh", "-c", listed], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shell.stdout.split()[0] == path_digest(tmp_path)
    file = subprocess.run(["sha256sum", "b"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert file.stdout.split()[0] == path_digest(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        path_digest(tmp_path / "none")


def test_the_checksum_of_a_folder_is_that_of_no_other_folder(tmp_path: Path):
    (two := tmp_path / "two").mkdir()
    (two / "a").write_text("1")
    (two / "b").write_text("2")
    (one := tmp_path / "one").mkdir()
    (one / f"a\n{path_digest(two / 'b')}  b").write_text("1")
    assert path_digest(one) != path_digest(two)
    # Files behind a link to a folder would not be read.
    (two / "c").symlink_to(one)
    with pytest.raises(OSError, match=re.escape(str(two / "c"))):
        path_digest(two)
