# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Launches on slices of a stand-in for Cloud TPU: start, preemption, restart, resume, stop, errors and secrets."""

import json
import os
import re
import signal
import types
from pathlib import Path
from typing import Any

import pytest

from marin_rl import launch as command_line
from marin_rl.pods.slices import Slices
from tests.pods.conftest import Project, in_background, wait_until
from tests.pods.stand_in_gcloud import Cloud

RUN_DIR = "gs://bucket/runs/a"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, and leave out the check of the training config, which takes seconds; `test_preflight.py` tests it."""
    monkeypatch.setattr("marin_rl.pods.tpu.POLL_SECONDS", 0.05)
    monkeypatch.setattr(command_line, "check_training", lambda config, arguments, report: RUN_DIR)


def launch(action: str, project: Project, *options: str) -> int:
    passed = ["--", "--config", "run.yaml"] if action == "start" else []
    return command_line.main(["tpu", action, *project.options, *options, *passed])


def finish(project: Project) -> None:
    (project.control / "finish").write_text("")


def pids(cloud: Cloud) -> list[str]:
    return sorted(file.read_text() for file in cloud.folder.glob("hosts/*/*/marin_rl_launch/*/jobs/*/pids"))


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
    assert output.count(": running\n") == 2

    assert launch("stop", project) == 0
    assert (project.control / "stopped").exists()
    assert launch("status", project) == 0
    assert capsys.readouterr().out.count(": ended with status 0\n") == 2

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


def start_arguments(project: Project, *options: str) -> list[str]:
    return ["tpu", "start", *project.options, *options, "--", "--config", "run.yaml"]


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
    assert launch("start", project) == 1
    captured = capsys.readouterr()
    assert "poll 9 of 10 failed" in captured.out
    assert "cannot reach a host" in captured.err
    assert "pod still exists, and its slices are billed; delete with" in captured.out


@pytest.mark.medium
def test_failed_run_is_restarted(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    running = in_background(command_line.main, start_arguments(project, "--max_restarts", "1000"))
    wait_until(lambda: len(project.starts()) == 2)
    (project.control / "fail").write_text("")
    wait_until(lambda: len(project.starts()) > 2)
    (project.control / "fail").unlink()
    finish(project)
    assert running.join() == 0
    output = capsys.readouterr().out
    assert re.search(r"pod: train failed on host \S+ with exit status 3; restart 1 of 1000\n", output)
    # The code is not replaced, and the slices are those of the start.
    assert output.count("installing the code") == 1
    assert len(cloud.called("create")) == 1


@pytest.mark.medium
def test_run_that_fails_too_often_shows_its_log(
    cloud: Cloud, project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    (project.control / "fail").write_text("")
    assert launch("start", project) == 1
    captured = capfd.readouterr()
    assert "training with --config run.yaml" in captured.out
    assert re.search(r"error: train failed on host \S+ with exit status 3 on pod, after 1 restart; ", captured.err)
    assert captured.err.endswith(" the log is above. Correct the cause and rerun the same command\n")

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
    assert "error: pod runs training with other arguments, " in capsys.readouterr().err


@pytest.mark.medium
def test_logs(cloud: Cloud, project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("start", project, "--detach") == 0
    wait_until(lambda: len(project.starts()) == 2)
    capfd.readouterr()
    assert launch("logs", project) == 0
    assert capfd.readouterr().out.count(": training with --config run.yaml") == 2
    assert launch("logs", project, "--worker", "1") == 0
    assert capfd.readouterr().out.count("training with") == 1


@pytest.mark.medium
def test_a_failure_to_show_a_log_is_the_exit_status(
    cloud: Cloud, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch("start", project, "--slices.num_slices", "2", "--detach") == 0
    # A command that was ended by a signal.
    statuses = [0, -9]
    monkeypatch.setattr("marin_rl.pods.gcloud.Gcloud.stream_tpus", lambda *_: statuses.pop())
    assert launch("logs", project, "--slices.num_slices", "2") == -9


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


def test_dry_run_prints_the_requests_and_does_nothing(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("start", project, *ROLLOUTS, "--slices.num_slices", "2", "--dry_run") == 0
    trainer, *rollouts = capsys.readouterr().out.splitlines()
    assert " queued-resources create pod --accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5" in trainer
    assert " --node-count=2 --node-prefix=pod --zone=us-east5-a`" in trainer
    assert [" --node-id=pod-rollouts-1 " in line for line in rollouts] == [False, True]
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
    running = in_background(command_line.main, start_arguments(project, *ROLLOUTS, *SPOT))
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
    assert launch("status", project, *ROLLOUTS) == 0
    assert launch("delete", project, *ROLLOUTS) == 0
    assert cloud.resources == {}


@pytest.mark.medium
def test_code_is_replaced_after_a_failure(cloud: Cloud, project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    """Also on the hosts of rollout slices, where Ray still runs; a run that is followed keeps code and workers."""
    one = ["--rollout_slices.tpu_type", "v5litepod-8"]
    copies = [cloud.host(node, 0) / "marin_rl_launch" / node / "code" for node in ("pod", "pod-rollouts-0")]
    (project.control / "fail").write_text("")
    assert launch("start", project, *one) == 1
    (project.folder / "new.py").write_text("")
    (project.control / "fail").unlink()
    assert launch("start", project, *one, "--detach") == 0
    assert all((copy / "new.py").exists() for copy in copies)

    before = pids(cloud)
    (project.folder / "newer.py").write_text("")
    capfd.readouterr()
    assert launch("start", project, *one, "--detach") == 0
    output = capfd.readouterr().out
    assert "pod: ray_head, train is running already\npod-rollouts-0: ray_worker is running already\n" in output
    assert (pids(cloud), any((copy / "newer.py").exists() for copy in copies)) == (before, False)


@pytest.mark.medium
def test_ray_that_fails_is_restarted(cloud: Cloud, project: Project) -> None:
    running = in_background(command_line.main, start_arguments(project, "--rollout_slices.tpu_type", "v5litepod-8"))
    wait_until(lambda: len(ray_starts(project)) == 3 and len(project.starts()) == 2)
    job = cloud.host("pod-rollouts-0", 1) / "marin_rl_launch" / "pod-rollouts-0" / "jobs" / "ray_worker"
    os.kill(int((job / "pids").read_text().split()[1]), signal.SIGKILL)
    wait_until(lambda: len(ray_starts(project)) == 5)
    finish(project)
    assert running.join() == 0
    assert len(project.starts()) == 2


def test_requests_that_exist_after_a_rejected_one_are_named(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.fail("create pod-rollouts-1", "ERROR: RESOURCE_EXHAUSTED: Quota limit has been exceeded")
    assert launch("start", project, *ROLLOUTS) == 1
    captured = capsys.readouterr()
    assert "the project has no quota for this request" in captured.err
    assert "pod, pod-rollouts-0 still exists, and its slices are billed; delete with `" in captured.out
    assert launch("delete", project, *ROLLOUTS) == 0
    assert cloud.resources == {}


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


def test_bucket_that_does_not_exist(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "check_training", lambda config, arguments, report: "gs://other/run")
    error = failed(project, capsys)
    assert "cannot list the bucket of run_dir 'gs://other/run'; create it with `gcloud storage buckets create" in error
    assert "your account lacks a permission" in error
    assert cloud.resources == {}


@pytest.mark.medium
def test_mounted_run_dir_is_not_checked(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "check_training", lambda config, arguments, report: "/mnt/runs/a")
    finish(project)
    assert launch("start", project) == 0
    output = capsys.readouterr().out
    assert output.startswith("run_dir /mnt/runs/a is not in Cloud Storage, and is not checked before the request\n")
    assert not cloud.called("storage")


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
def test_suspended_request_of_an_earlier_launch_is_replaced(cloud: Cloud, project: Project) -> None:
    finish(project)
    with cloud.change() as state:
        state["resources"]["pod"] = {"flags": {}, "nodes": ["pod"], "waits": 0, "state": "SUSPENDED"}
        state["resources"]["pod"]["flags"]["accelerator-type"] = "v5p-16"
    assert launch("start", project, "--autodelete") == 0
    assert len(project.starts()) == 2


@pytest.mark.parametrize("state_name", ["ACTIVE", "SUSPENDED", "FAILED"])
def test_other_slices_of_the_same_name_are_refused(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], state_name: str
) -> None:
    with cloud.change() as state:
        flags = {"accelerator-type": "v5p-8"}
        state["resources"]["pod"] = {"flags": flags, "nodes": ["pod"], "waits": 0, "state": state_name}
    error = failed(project, capsys)
    assert "pod exists with 1 x v5p-8 instead of 1 x v5p-16; delete it first, or choose another tpu_name" in error
    assert set(cloud.resources) == {"pod"}


@pytest.mark.medium
def test_deleted_by_someone_else(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: len(project.starts()) == 2)
    assert launch("delete", project) == 0
    assert running.join() == 1
    assert "pod was deleted, but not by this command" in capsys.readouterr().err
    assert len(cloud.called("create")) == 1


def test_delete_ends_a_request_that_another_launch_waits_for(cloud: Cloud, project: Project) -> None:
    with cloud.change() as state:
        state["waits"] = 10**6
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: cloud.resources)
    assert launch("delete", project) == 0
    assert running.join() == 1
    assert (cloud.resources, len(cloud.called("create"))) == ({}, 1)


@pytest.mark.medium
def test_deleted_during_a_poll(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slices still exist at the start of the poll, but not for its commands."""
    running = in_background(command_line.main, start_arguments(project))
    wait_until(lambda: len(project.starts()) == 2)
    addresses = Slices.addresses

    def delete_first(slices: Slices) -> Any:
        if cloud.resources:
            assert launch("delete", project) == 0
        return addresses(slices)

    monkeypatch.setattr(Slices, "addresses", delete_first)
    cloud.fail("ssh pod", "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].")
    assert running.join() == 1
    assert "pod was deleted, but not by this command" in capsys.readouterr().err
    assert len(cloud.called("create")) == 1


def test_delete_of_nothing(cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("delete", project) == 0
    assert launch("status", project) == 0
    assert launch("stop", project) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pod: nothing of this name exists in zone us-east5-a of the default project",
        "pod: ABSENT",
        "pod: ABSENT, no job runs",
    ]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--tpu_name", "detach", "--detach"], " --tpu_name detach`"),
        (["--slices", "{tpu_type: v5p-16}"], " --slices '{tpu_type: v5p-16}'`"),
    ],
)
def test_the_command_that_deletes_has_the_options_of_the_launch(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], options: list[str], shown: str
) -> None:
    cloud.fail("ssh", "ERROR: no such host")
    assert launch("start", project, *options) == 1
    captured = capsys.readouterr()
    assert "python -m marin_rl.launch tpu delete --tpu_name pod " in captured.out
    assert shown in captured.out
    assert "no such host" in captured.err


@pytest.mark.medium
@pytest.mark.parametrize("started", [False, True])
def test_interrupt_names_what_is_left(
    cloud: Cloud, project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    def interrupt(seconds: float) -> None:
        if not started or project.starts():
            raise KeyboardInterrupt

    monkeypatch.setattr("marin_rl.pods.tpu.time", types.SimpleNamespace(sleep=interrupt, monotonic=float))
    assert launch("start", project) == 130
    output = capsys.readouterr().out
    assert ("interrupted; the run continues without it; the same command continues\n" in output) is started
    assert ("interrupted; the run has not started; the same command continues\n" in output) is not started
    assert (
        "pod still exists, and its slices are billed; delete with `python -m marin_rl.launch tpu delete --tpu_name"
        in output
    )
