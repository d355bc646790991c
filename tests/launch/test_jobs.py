# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Launches on slices of a stand-in for Cloud TPU: start, preemption, resume, stop, errors and secrets."""

import fcntl
import json
import re
import shutil
import subprocess
import types
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from marin_rl.launch import __main__ as command_line
from marin_rl.launch import queued_resource
from tests.launch.conftest import Project, in_background, wait_until
from tests.launch.stand_in_gcloud import Cloud

RUN_DIR = "gs://bucket/runs/a"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once, and leave out the check of the training config, which takes seconds; `test_tpu.py` tests it."""
    monkeypatch.setattr("marin_rl.launch.hosts.RETRY_DELAY", 0.0)
    monkeypatch.setattr(command_line, "training_run", lambda config, arguments, report: RUN_DIR)


def launch(action: str, project: Project, *options: str, command: str = "tpu") -> int:
    passed = ["--", "--config", "run.yaml"] if action == "start" else []
    return command_line.main([command, action, *project.options, *options, *passed])


def finish(project: Project) -> None:
    (project.control / "finish").write_text("")


def pids(cloud: Cloud) -> list[str]:
    return sorted(file.read_text() for file in cloud.folder.glob("hosts/*/*/marin_rl_launch/*/jobs/*/supervisor.pid"))


@pytest.mark.medium
def test_start_runs_on_all_hosts_until_the_end(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(project)
    assert launch("start", project) == 0
    assert project.starts() == ["None --config run.yaml --trainer.distributed.initialize_jax_distributed true"] * 2
    output = capsys.readouterr().out
    assert "pod: requesting 1 x v5p-16, 8 chips\n" in output
    assert "pod: WAITING_FOR_RESOURCES\npod: ACTIVE\npod: installing the code on 2 hosts\n" in output
    assert "the run is complete, or was stopped\n" in output
    assert re.search(
        r"pod still exists, and its slices are billed; delete with `python -m marin_rl.launch tpu delete ",
        output,
    )
    (create,) = cloud.called("create")
    assert "--node-id=pod" in create
    assert "--runtime-version=v2-alpha-tpuv5" in create
    code = cloud.host("pod", 1) / "marin_rl_launch" / "pod" / "code"
    assert sorted(path.name for path in code.iterdir()) == [".gitignore", "run.yaml", "train.py"]


@pytest.mark.medium
def test_rerun_follows_a_running_launch_and_resumes_an_ended_one(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("start", project, "--detach") == 0
    wait_until(lambda: len(project.starts()) == 2)
    before = pids(cloud)
    assert launch("start", project, "--detach") == 0
    assert "pod: train is running already" in capsys.readouterr().out
    assert (pids(cloud), len(cloud.called("create")), len(project.starts())) == (before, 1, 2)

    assert launch("status", project) == 0
    output = capsys.readouterr().out
    assert output.startswith("pod: ACTIVE\n")
    assert output.count(": running, 0 restarts\n") == 2

    assert launch("stop", project) == 0
    assert (project.control / "stopped").exists()
    assert launch("status", project) == 0
    assert capsys.readouterr().out.count(": exited, 0 restarts, last exit status 0\n") == 2

    finish(project)
    assert launch("start", project, "--autodelete") == 0
    assert len(project.starts()) == 4
    assert cloud.resources == {}
    assert len(cloud.called("create")) == 1


@pytest.mark.medium
def test_autodelete_also_after_a_stop(cloud: Cloud, project: Project) -> None:
    running = in_background(command_line.main, start_arguments(project, "--autodelete"))
    wait_until(lambda: len(project.starts()) == 2)
    assert launch("stop", project) == 0
    assert running.join() == 0
    assert cloud.resources == {}


@pytest.mark.medium
def test_preempted_slices_are_requested_again(cloud: Cloud, project: Project) -> None:
    running = in_background(command_line.main, start_arguments(project, "--slices.capacity_type", "spot"))
    wait_until(lambda: len(project.starts()) == 2)
    cloud.preempt("pod")
    wait_until(lambda: len(project.starts()) == 4)
    finish(project)
    assert running.join() == 0
    assert len(cloud.called("create", "--spot")) == 2
    assert len(cloud.called("delete", "--force")) == 1


def start_arguments(project: Project, *options: str, command: str = "tpu") -> list[str]:
    return [command, "start", *project.options, *options, "--", "--config", "run.yaml"]


@pytest.mark.medium
def test_hosts_that_vanish_without_a_state_are_detected(cloud: Cloud, project: Project) -> None:
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: len(project.starts()) == 2)
    cloud.fail("ssh pod", "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].")
    cloud.fail("tpu-vm describe pod", "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource was not found")
    wait_until(lambda: len(project.starts()) == 4)
    finish(project)
    assert running.join() == 0


@pytest.mark.medium
def test_several_slices(cloud: Cloud, project: Project) -> None:
    finish(project)
    assert launch("start", project, "--slices.num_slices", "2") == 0
    (create,) = cloud.called("create")
    assert {"--node-count=2", "--node-prefix=pod"} <= set(create)
    assert len(project.starts()) == 4
    assert {call[4] for call in cloud.called("ssh")} == {"pod-0", "pod-1"}


@pytest.mark.medium
def test_a_slice_that_gets_its_addresses_later(cloud: Cloud, project: Project) -> None:
    finish(project)
    with cloud.change() as state:
        state["without_addresses"] = {"pod-1": 1}
    assert launch("start", project, "--slices.num_slices", "2") == 0
    assert len(project.starts()) == 4


@pytest.mark.medium
def test_ssh_drops_are_survived(cloud: Cloud, project: Project) -> None:
    drop = "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."
    cloud.fail("ssh", drop)
    cloud.fail("scp", "Connection reset by 10.0.0.1 port 22")
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: len(project.starts()) == 2)
    cloud.fail("ssh", drop, times=2)
    finish(project)
    assert running.join() == 0


def test_gives_up_if_hosts_stay_unreachable(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.fail("ssh", "[/usr/bin/ssh] exited with return code [255].", times=99)
    assert launch("start", project, "--jobs.max_failed_polls", "2") == 1
    captured = capsys.readouterr()
    assert "poll 1 of 2 failed" in captured.out
    assert "cannot reach a host" in captured.err
    assert "pod still exists, and its slices are billed; delete with" in captured.out


@pytest.mark.medium
def test_failed_run_shows_its_log(cloud: Cloud, project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    (project.control / "fail").write_text("")
    assert launch("start", project) == 1
    captured = capfd.readouterr()
    assert "training with --config run.yaml" in captured.out
    assert re.search(r"error: train failed on host \S+ of pod with exit status 3 after 1 restarts", captured.err)
    assert captured.err.endswith(" and rerun the same command\n")
    assert len(project.starts()) == 4

    (project.control / "fail").unlink()
    finish(project)
    assert launch("start", project) == 0


@pytest.mark.medium
def test_failed_installation_shows_its_output(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("start", project, "--code.install", "echo no such package; exit 7") == 1
    assert "installing the code failed on" in (error := capsys.readouterr().err)
    assert "no such package" in error
    assert project.starts() == []


@pytest.mark.medium
def test_another_command_on_the_slices_is_refused(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("start", project, "--detach") == 0
    other = ["tpu", "start", *project.options, "--", "--config", "run.yaml", "--num_steps", "7"]
    assert command_line.main(other) == 1
    assert "error: pod runs another command: " in capsys.readouterr().err


@pytest.mark.medium
def test_logs(cloud: Cloud, project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("start", project, "--detach") == 0
    wait_until(lambda: len(project.starts()) == 2)
    capfd.readouterr()
    assert launch("logs", project) == 0
    assert capfd.readouterr().out.count(": training with --config run.yaml") == 2
    assert launch("logs", project, "--worker", "1", "--log_lines", "1") == 0
    assert capfd.readouterr().out.count("training with") == 1


@pytest.mark.medium
def test_a_failure_to_show_a_log_is_the_exit_status(
    cloud: Cloud, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch("start", project, "--slices.num_slices", "2", "--detach") == 0
    # A command that was ended by a signal.
    statuses = [0, -9]
    monkeypatch.setattr("marin_rl.launch.gcloud.Gcloud.stream_tpus", lambda *_: statuses.pop())
    assert launch("logs", project, "--slices.num_slices", "2") == -9


def test_concurrent_checks_of_a_job_do_not_see_each_other(tmp_path: Path) -> None:
    (tmp_path / "upload").mkdir()
    (tmp_path / "jobs" / "train").mkdir(parents=True)
    script = shutil.copy(resources.files("marin_rl.launch") / "host.sh", tmp_path / "upload")
    with (tmp_path / "jobs" / "train" / "supervisor.lock").open("w") as lock:
        for kind, state in ((fcntl.LOCK_SH, "ended"), (fcntl.LOCK_EX, "running")):
            fcntl.flock(lock, kind)
            assert subprocess.check_output(["bash", script, "status"], text=True) == f"status train {state} {{}}\n"
    assert "no job has started" in subprocess.check_output(["bash", script, "logs", "5"], text=True)


@pytest.mark.medium
def test_secrets_are_in_no_command_and_readable_by_their_user_only(
    cloud: Cloud, project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hush 'quoted' $HOME"
    monkeypatch.setenv("TOKEN", secret)
    finish(project)
    assert launch("start", project, "--code.secrets", "[TOKEN]") == 0
    assert launch("status", project) == 0
    assert launch("logs", project) == 0
    captured = capfd.readouterr()
    assert project.starts()[0].startswith(f"{secret} --config")
    assert (project.control / "installed").read_text() == f"installed with {secret}\n" * 2
    assert "hush" not in captured.out + captured.err
    assert "hush" not in json.dumps(cloud.calls)
    folder = cloud.host("pod", 0) / "marin_rl_launch" / "pod"
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "upload" / "environment.sh").stat().st_mode & 0o077 == 0
    assert [path for path in folder.rglob("*") if path.is_file() and b"hush" in path.read_bytes()] == [
        folder / "upload" / "environment.sh"
    ]


def test_dry_run_prints_everything_and_does_nothing(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hush")
    assert launch("start", project, "--code.secrets", "[TOKEN]", "--dry_run") == 0
    output = capsys.readouterr().out
    assert not (cloud.folder / "calls.jsonl").exists()
    assert "hush" not in output
    assert "TOKEN='<hidden>'\n" in output
    commands = [line.split()[2:6] for line in output.splitlines() if line.startswith("$ ")]
    expected: Sequence[Sequence[str]] = [
        ["auth", "list", "--filter=status:ACTIVE"],
        ["compute", "tpus", "locations", "list"],
        ["compute", "tpus", "tpu-vm", "accelerator-types"],
        ["storage", "cp", "-", f"{RUN_DIR}/.launch_write_check"],
        ["storage", "rm", f"{RUN_DIR}/.launch_write_check"],
        ["compute", "tpus", "queued-resources", "describe"],
        ["compute", "tpus", "queued-resources", "create"],
        ["compute", "tpus", "tpu-vm", "describe"],
        ["compute", "tpus", "tpu-vm", "ssh"],
        ["compute", "tpus", "tpu-vm", "scp"],
        ["compute", "tpus", "tpu-vm", "ssh"],
        ["compute", "tpus", "tpu-vm", "ssh"],
    ]
    assert [words[: len(known)] for words, known in zip(commands, expected, strict=True)] == expected
    assert "# upload/code.tar.gz: 3 files of" in output
    for action in ("status", "logs", "stop", "delete"):
        assert launch(action, project, "--dry_run") == 0
    capsys.readouterr()
    assert launch("start", project, *ROLLOUTS, "--dry_run", command="ray") == 0
    output = capsys.readouterr().out
    assert output.count("# upload/host.sh:") == 2
    assert "# upload: as for pod-rollouts-0\n" in output
    assert not (cloud.folder / "calls.jsonl").exists()


# Rollout slices under Ray.

ROLLOUTS = ["--rollout_slices.tpu_type", "v5litepod-8", "--rollout_slices.num_slices", "2"]
SPOT = ["--rollout_slices.capacity_type", "spot"]


def ray_starts(project: Project) -> list[str]:
    """Arguments of each start of Ray."""
    path = project.control / "ray"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def worker(address: str) -> str:
    return f"start --block --disable-usage-stats --address={address}:6379"


@pytest.mark.medium
def test_rollout_slices_join_the_trainer(cloud: Cloud, project: Project) -> None:
    running = in_background(command_line.main, start_arguments(project, *ROLLOUTS, *SPOT, command="ray"))
    wait_until(lambda: len(ray_starts(project)) == 5 and len(project.starts()) == 2)
    head = 'start --block --disable-usage-stats --head --port=6379 --num-cpus=0 --resources={"TPU": 0}'
    assert ray_starts(project) == sorted([head, *[worker("10.0.0.0")] * 4])
    assert project.starts()[0].endswith(
        "--trainer.distributed.initialize_jax_distributed true --ray_address 10.0.0.0:6379"
    )
    assert [call[4] for call in cloud.called("create", "--spot")] == ["pod-rollouts-0", "pod-rollouts-1"]

    # A lost rollout slice is replaced while the trainer continues.
    cloud.preempt("pod-rollouts-1")
    wait_until(lambda: len(ray_starts(project)) == 7)
    assert (len(project.starts()), len(cloud.called("create"))) == (2, 4)

    # A trainer with another address: the workers join it.
    cloud.preempt("pod")
    wait_until(lambda: len(project.starts()) == 4 and len(ray_starts(project)) == 12)
    address = project.starts()[-1].split()[-1].removesuffix(":6379")
    assert address != "10.0.0.0"
    assert ray_starts(project).count(worker(address)) == 4
    # On 2 hosts of each group, on the second rollout slice, and on all hosts again.
    assert len((project.control / "installed").read_text().splitlines()) == 6 + 2 + 6

    finish(project)
    assert running.join() == 0
    assert launch("status", project, *ROLLOUTS, command="ray") == 0
    assert launch("delete", project, *ROLLOUTS, command="ray") == 0
    assert cloud.resources == {}


@pytest.mark.medium
def test_code_is_replaced_after_a_failure_and_a_stop(
    cloud: Cloud, project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    one = ["--rollout_slices.tpu_type", "v5litepod-8"]
    copies = [cloud.host(node, 0) / "marin_rl_launch" / node / "code" for node in ("pod", "pod-rollouts-0")]
    (project.control / "fail").write_text("")
    assert launch("start", project, *one, command="ray") == 1
    captured = capfd.readouterr()
    assert "pod: installing the code on 2 hosts\n" in captured.out
    assert (
        "Correct the cause, run `python -m marin_rl.launch ray stop` with the same options, because jobs still run, "
        "and rerun the same command\n"
    ) in captured.err

    # Ray still runs.
    (project.folder / "new.py").write_text("")
    assert launch("start", project, *one, command="ray") == 1
    output = capfd.readouterr().out
    assert "pod: the code on its hosts is not replaced, because ray_head runs there\n" in output
    assert "installing the code" not in output
    assert not any((copy / "new.py").exists() for copy in copies)

    assert launch("stop", project, *one, command="ray") == 0
    (project.control / "fail").unlink()
    running = in_background(command_line.main, start_arguments(project, *one, command="ray"))
    wait_until(lambda: all((copy / "new.py").exists() for copy in copies))
    finish(project)
    assert running.join() == 0


def test_requests_are_deleted_if_one_of_them_is_rejected(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.fail("create pod-rollouts-1", "ERROR: RESOURCE_EXHAUSTED: Quota limit has been exceeded")
    assert launch("start", project, *ROLLOUTS, command="ray") == 1
    captured = capsys.readouterr()
    assert "the project has no quota for this request" in captured.err
    assert "pod: deleting the request, which was not granted yet\n" in captured.out
    assert "still exists" not in captured.out
    assert cloud.resources == {}


def test_rollout_slices_are_for_ray_only(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("start", project, command="ray") == 1
    assert launch("start", project, *ROLLOUTS) == 1
    missing, given = capsys.readouterr().err.splitlines()
    assert missing.startswith("error: rollout_slices is missing")
    assert given.startswith("error: rollout_slices is set, but `launch tpu` has none")


# Errors before and during the request.


def failed(project: Project, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Error of a launch that fails, in one line."""
    assert launch("start", project, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_no_gcloud(
    cloud: Cloud,
    project: Project,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcloud is not on PATH; install the Google Cloud CLI" in failed(project, capsys)


def test_not_logged_in(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    with cloud.change() as state:
        state["login"] = False
    assert failed(project, capsys) == "error: you are not logged in to Google Cloud; run gcloud auth login\n"
    assert launch("status", project) == 1
    assert capsys.readouterr().err.startswith("error: you are not logged in to Google Cloud; run gcloud auth login (")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--zone", "us-east5-z", "zone 'us-east5-z' has no TPUs or does not exist; did you mean 'us-east5-"),
        ("--slices.tpu_type", "v5p-17", "tpu_type 'v5p-17' does not exist in zone us-east5-a; did you mean 'v5p-16'"),
        (
            "--slices.tpu_type",
            "v5e-17",
            "tpu_type 'v5litepod-17' does not exist in zone us-east5-a; did you mean 'v5lite",
        ),
        ("--slices.tpu_type", "v9-16", "slices: tpu_type is 'v9-16': it is not a slice of TPUs; "),
        ("--slices.tpu_type", "v5p-4", "(types of v5p count cores, 2 for each chip)"),
    ],
)
def test_unknown_zone_and_type(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert message in failed(project, capsys, option, value)
    assert not (cloud.folder / "calls.jsonl").exists() or not cloud.called("create")


def test_run_dir_that_cannot_be_written(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "training_run", lambda config, arguments, report: "gs://other/run")
    error = failed(project, capsys)
    assert "cannot write to run_dir 'gs://other/run'; create its bucket" in error
    assert "your account lacks a permission" in error
    assert cloud.resources == {}


def test_mounted_run_dir_is_not_checked(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "training_run", lambda config, arguments, report: "/mnt/runs/a")
    assert launch("start", project, "--dry_run") == 0
    output = capsys.readouterr().out
    assert output.startswith("$ ")
    assert "run_dir /mnt/runs/a is not in Cloud Storage, and is not checked before the request\n" in output
    assert " storage cp " not in output


def test_write_check_leaves_nothing(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.fail("create", "ERROR: quota")
    failed(project, capsys)
    with cloud.change() as state:
        assert state["objects"] == []


def test_no_quota_at_the_request(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    message = "Quota limit 'TPUV5PPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-east5-a."
    cloud.fail("create", f"ERROR: (gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED: {message}")
    error = failed(project, capsys)
    assert "the project has no quota for this request; request more quota, or choose another zone" in error
    assert message in error
    assert cloud.resources == {}


def test_failed_request_is_deleted(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    with cloud.change() as state:
        state["waits"] = 10**6
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: cloud.resources)
    with cloud.change() as state:
        state["resources"]["pod"] |= {"state": "FAILED", "error": "no capacity"}
    assert running.join() == 1
    assert "the request for pod failed and was deleted: no capacity" in capsys.readouterr().err
    assert cloud.resources == {}


@pytest.mark.medium
def test_failed_and_suspended_requests_of_earlier_launches_are_replaced(cloud: Cloud, project: Project) -> None:
    finish(project)
    for state_name in ("FAILED", "SUSPENDED"):
        with cloud.change() as state:
            state["resources"]["pod"] = {"flags": {}, "nodes": ["pod"], "waits": 0, "state": state_name}
            state["resources"]["pod"]["flags"]["accelerator-type"] = "v5p-16"
        assert launch("start", project, "--autodelete") == 0
    assert len(project.starts()) == 4


@pytest.mark.parametrize("state_name", ["ACTIVE", "SUSPENDED", "FAILED"])
def test_other_slices_of_the_same_name_are_refused(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], state_name: str
) -> None:
    with cloud.change() as state:
        flags = {"accelerator-type": "v5p-8"}
        state["resources"]["pod"] = {"flags": flags, "nodes": ["pod"], "waits": 0, "state": state_name}
    error = failed(project, capsys)
    assert "pod exists with tpu_type v5p-8 instead of v5p-16; delete it first, or choose another tpu_name" in error
    assert set(cloud.resources) == {"pod"}


@pytest.mark.medium
def test_deleted_by_someone_else(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: len(project.starts()) == 2)
    assert launch("delete", project) == 0
    assert running.join() == 1
    assert "pod was deleted, but not by this command" in capsys.readouterr().err
    assert len(cloud.called("create")) == 1


@pytest.mark.medium
def test_deleted_during_a_poll(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slices still exist at the start of the poll, but not for its commands."""
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: len(project.starts()) == 2)
    describe_node = queued_resource.describe_node

    def delete_first(*arguments: Any) -> queued_resource.Node:
        if cloud.resources:
            assert launch("delete", project) == 0
        return describe_node(*arguments)

    monkeypatch.setattr(queued_resource, "describe_node", delete_first)
    cloud.fail("ssh pod", "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].")
    assert running.join() == 1
    assert "pod was deleted, but not by this command" in capsys.readouterr().err
    assert len(cloud.called("create")) == 1


def test_delete_of_nothing(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("delete", project) == 0
    assert launch("status", project) == 0
    assert launch("stop", project) == 0
    lines = capsys.readouterr().out.splitlines()
    absent = "pod: there are no slices of this name in zone us-east5-a of gcloud's default project, so nothing was "
    assert lines[0].startswith(f"{absent}deleted; ")
    assert lines[1] == "pod: ABSENT"
    assert lines[2].startswith(f"{absent}stopped; ")


def test_commands_for_what_is_left_keep_a_name_like_a_flag(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.fail("ssh", "ERROR: no such host")
    assert launch("start", project, "--tpu_name", "detach", "--detach") == 1
    assert " --tpu_name detach`" in capsys.readouterr().out


def test_commands_for_what_is_left_keep_mappings(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.fail("ssh", "ERROR: no such host")
    assert launch("start", project, "--slices", "{tpu_type: v5p-16}") == 1
    captured = capsys.readouterr()
    assert "python -m marin_rl.launch tpu delete --tpu_name pod " in captured.out
    assert " --slices '{tpu_type: v5p-16}'`" in captured.out
    assert "no such host" in captured.err


@pytest.mark.medium
@pytest.mark.parametrize("started", [False, True])
def test_interrupt_names_what_is_left(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    def interrupt(seconds: float) -> None:
        if not started or project.starts():
            raise KeyboardInterrupt

    monkeypatch.setattr("marin_rl.launch.jobs.time", types.SimpleNamespace(sleep=interrupt))
    assert launch("start", project) == 130
    output = capsys.readouterr().out
    running = "interrupted; the run continues without it. Logs: `python -m marin_rl.launch tpu logs --tpu_name"
    assert (running in output) is started
    assert ("interrupted before it has started the run; run the same command again" in output) is not started
    assert (
        "pod still exists, and its slices are billed; delete with `python -m marin_rl.launch tpu delete --tpu_name"
        in output
    )
