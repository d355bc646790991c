# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Launches on slices of a stand-in for Cloud TPU: start, preemption, restart, resume, stop, errors and secrets."""

import json
import os
import re
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marin_rl import launch as command_line
from marin_rl.pods.gcloud import Slices
from tests.pods.conftest import Project, in_background, wait_until
from tests.pods.stand_in_gcloud import DROPPED, Cloud

ROLLOUT = ["--rollout_slices.tpu_type", "v5litepod-8"]
ROLLOUTS = [*ROLLOUT, "--rollout_slices.num_slices", "2", "--rollout_slices.capacity_type", "spot"]
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, and leave out the check of the training config, which takes seconds; `test_preflight.py` tests it."""
    monkeypatch.setattr("marin_rl.pods.tpu.POLL_SECONDS", 0.05)
    monkeypatch.setattr("marin_rl.pods.launch.check_training", lambda *_: "gs://bucket/runs/a")


def launch(action: str, project: Project, *options: str) -> int:
    passed = ["--", "--config", "run.yaml"] if action == "start" else []
    return command_line.main(["tpu", action, *project.options, *options, *passed])


def background(project: Project, *options: str) -> Callable[[], int]:
    return in_background(lambda arguments: launch("start", project, *arguments), options)


def finish(project: Project) -> None:
    (project.control / "finish").write_text("")


def interrupt_when(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], object]) -> None:
    """Interrupt launches between two polls if a condition holds, as Ctrl-C does."""

    def sleep(seconds: float) -> None:
        if condition():
            raise KeyboardInterrupt

    monkeypatch.setattr("marin_rl.pods.tpu.time", types.SimpleNamespace(sleep=sleep, monotonic=float))


def start_and_leave(project: Project, *options: str) -> None:
    """Start a run, and interrupt the launch that follows it."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_when(patch, lambda: len(project.starts()) >= 2)
        assert launch("start", project, *options) == 130


def pids(cloud: Cloud) -> list[str]:
    return sorted(file.read_text() for file in cloud.folder.glob("hosts/*/*/marin_rl_launch/*/jobs/*/pids"))


@pytest.mark.medium
def test_start_runs_on_all_hosts_until_the_end(
    cloud: Cloud, project: Project, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marin_rl.pods.launch.check_training", lambda *_: "/mnt/runs/a")
    finish(project)
    assert launch("start", project) == 0
    assert project.starts() == ["None --config run.yaml --trainer.distributed.initialize_jax_distributed true"] * 2
    output = capsys.readouterr().out
    assert output.startswith("run_dir /mnt/runs/a is not in Cloud Storage, and is not checked before the request\n")
    assert not cloud.called("storage")
    assert "pod: requesting 1 x v5p-16, 8 chips\n" in output
    assert "pod: WAITING_FOR_RESOURCES\npod: ACTIVE\npod: installing the code on 2 hosts\n" in output
    assert "the run is complete, or was stopped\n" in output
    assert "pod still exists, and its slices are billed; delete with `python -m marin_rl.launch tpu delete " in output
    (create,) = cloud.called("create")
    assert {"--node-id=pod", "--runtime-version=v2-alpha-tpuv5"} <= set(create)
    code = cloud.host("pod", 1) / "marin_rl_launch" / "pod" / "code"
    assert sorted(path.name for path in code.iterdir()) == [".gitignore", "run.yaml", "train.py"]


@pytest.mark.medium
def test_rerun_follows_a_running_launch_and_resumes_an_ended_one(
    cloud: Cloud, project: Project, capsys: Output
) -> None:
    start_and_leave(project)
    before = pids(cloud)
    start_and_leave(project)
    assert "pod: train is running already" in capsys.readouterr().out
    assert (pids(cloud), len(cloud.called("create")), len(project.starts())) == (before, 1, 2)
    assert launch("start", project, "--", "--num_steps", "7") == 1
    assert "error: pod runs training with other arguments, " in capsys.readouterr().err

    assert launch("status", project) == 0
    output = capsys.readouterr().out
    assert output.startswith("pod: ACTIVE\n")
    assert output.count(": running\n") == 2
    assert launch("logs", project) == 0
    assert capsys.readouterr().out.count(": training with --config run.yaml") == 2

    assert launch("stop", project) == 0
    assert (project.control / "stopped").exists()
    assert launch("status", project) == 0
    assert capsys.readouterr().out.count(": ended with status 0\n") == 2

    join = background(project, "--autodelete")
    wait_until(lambda: len(project.starts()) == 4)
    assert launch("stop", project) == 0
    assert (join(), len(cloud.called("create")), cloud.resources) == (0, 1, {})


@pytest.mark.medium
@pytest.mark.parametrize("loss", ["preempted", "vanished"])
def test_lost_slices_are_requested_again(cloud: Cloud, project: Project, loss: str) -> None:
    join = background(project, "--slices.capacity_type", "spot")
    wait_until(lambda: len(project.starts()) == 2)
    if loss == "preempted":
        cloud.preempt("pod")
    else:
        cloud.fail("ssh pod", DROPPED)
        cloud.fail("tpu-vm describe pod", "ERROR: (gcloud) NOT_FOUND: Resource was not found")
    wait_until(lambda: len(project.starts()) == 4)
    finish(project)
    assert join() == 0
    assert (len(cloud.called("create", "--spot")), len(cloud.called("delete", "--force"))) == (2, 1)


@pytest.mark.medium
def test_several_slices_of_which_one_is_ready_later(
    cloud: Cloud, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.without_addresses["pod-1"] = 1
    finish(project)
    several = ["--slices.num_slices", "2"]
    assert launch("start", project, *several) == 0
    (create,) = cloud.called("create")
    assert {"--node-count=2", "--node-prefix=pod"} <= set(create)
    assert len(project.starts()) == 4
    assert {"pod-0", "pod-1"} <= {word for call in cloud.called("ssh") for word in call}
    # A command that was ended by a signal is the exit status.
    statuses = [0, -9]
    monkeypatch.setattr("marin_rl.pods.gcloud.stream_gcloud", lambda *_, **__: statuses.pop())
    assert launch("logs", project, *several) == -9


@pytest.mark.medium
def test_dropped_connections_are_survived_ten_times(cloud: Cloud, project: Project, capsys: Output) -> None:
    cloud.fail("ssh", DROPPED)
    cloud.fail("scp", "Connection reset by 10.0.0.1 port 22")
    join = background(project)
    wait_until(lambda: len(project.starts()) == 2)
    cloud.fail("ssh", DROPPED, times=2)
    finish(project)
    assert join() == 0

    cloud.fail("ssh", DROPPED, times=99)
    assert launch("start", project) == 1
    captured = capsys.readouterr()
    assert "poll 9 of 10 failed" in captured.out
    assert "a host or Google Cloud cannot be reached" in captured.err
    assert "pod still exists, and its slices are billed; delete with" in captured.out


@pytest.mark.medium
def test_failed_run_is_restarted(cloud: Cloud, project: Project, capsys: Output) -> None:
    join = background(project, "--max_restarts", "1000")
    wait_until(lambda: len(project.starts()) == 2)
    (project.control / "fail").write_text("")
    wait_until(lambda: len(project.starts()) > 2)
    (project.control / "fail").unlink()
    finish(project)
    assert join() == 0
    output = capsys.readouterr().out
    assert re.search(r"pod: train failed on host \S+ with exit status 3; restart 1 of 1000\n", output)
    # The code is not replaced, and the slices are those of the start.
    assert (output.count("installing the code"), len(cloud.called("create"))) == (1, 1)


@pytest.mark.medium
def test_run_that_fails_too_often_shows_its_log(cloud: Cloud, project: Project, capsys: Output) -> None:
    (project.control / "fail").write_text("")
    assert launch("start", project) == 1
    captured = capsys.readouterr()
    assert "training with --config run.yaml" in captured.out
    assert re.search(r"error: train failed on host \S+ with exit status 3 on pod, after 1 restart; ", captured.err)
    assert captured.err.endswith(" the log is above. Correct the cause and rerun the same command\n")


@pytest.mark.medium
def test_secrets_are_in_no_command_and_readable_by_their_user_only(
    cloud: Cloud, project: Project, capfd: Output, monkeypatch: pytest.MonkeyPatch
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
    assert "hush" not in captured.out + captured.err + json.dumps(cloud.calls)
    folder = cloud.host("pod", 0) / "marin_rl_launch" / "pod"
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "upload" / "environment.sh").stat().st_mode & 0o077 == 0
    assert [path for path in folder.rglob("*") if path.is_file() and b"hush" in path.read_bytes()] == [
        folder / "upload" / "environment.sh"
    ]


def test_dry_run_prints_the_requests_and_does_nothing(cloud: Cloud, project: Project, capsys: Output) -> None:
    assert launch("start", project, *ROLLOUTS, "--slices.num_slices", "2", "--dry_run") == 0
    trainer, *rollouts = capsys.readouterr().out.splitlines()
    assert " create pod --zone=us-east5-a --accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5" in trainer
    assert " --node-count=2 --node-prefix=pod`" in trainer
    assert [" --node-id=pod-rollouts-1 " in line for line in rollouts] == [False, True]
    assert cloud.calls == []


# Rollout slices under Ray.


def ray_starts(project: Project) -> list[str]:
    """Arguments of each start of Ray."""
    path = project.control / "ray"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def worker(address: str) -> str:
    return f"start --block --disable-usage-stats --address={address}:6379"


@pytest.mark.medium
def test_rollout_slices_join_the_trainer(cloud: Cloud, project: Project) -> None:
    join = background(project, *ROLLOUTS)
    wait_until(lambda: len(ray_starts(project)) == 5 and len(project.starts()) == 2)
    head = 'start --block --disable-usage-stats --head --port=6379 --num-cpus=0 --resources={"TPU": 0}'
    assert ray_starts(project) == sorted([head, *[worker("10.0.0.0")] * 4])
    assert project.starts()[0].endswith("initialize_jax_distributed true --ray_address 10.0.0.0:6379")
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

    # A worker that fails is restarted; the trainer is not.
    job = cloud.host("pod-rollouts-0", 1) / "marin_rl_launch" / "pod-rollouts-0" / "jobs" / "ray_worker"
    os.kill(int((job / "pids").read_text().split()[1]), signal.SIGKILL)
    wait_until(lambda: len(ray_starts(project)) == 14)
    assert len(project.starts()) == 4

    finish(project)
    assert join() == 0
    assert launch("delete", project, *ROLLOUTS) == 0
    assert cloud.resources == {}


@pytest.mark.medium
def test_code_is_replaced_after_a_failure(cloud: Cloud, project: Project, capsys: Output) -> None:
    """Also on the hosts of rollout slices, where Ray still runs; a run that is followed keeps code and workers."""
    copies = [cloud.host(node, 0) / "marin_rl_launch" / node / "code" for node in ("pod", "pod-rollouts-0")]
    (project.control / "fail").write_text("")
    assert launch("start", project, *ROLLOUT) == 1
    (project.folder / "new.py").write_text("")
    (project.control / "fail").unlink()
    start_and_leave(project, *ROLLOUT)
    assert all((copy / "new.py").exists() for copy in copies)

    before = pids(cloud)
    (project.folder / "newer.py").write_text("")
    capsys.readouterr()
    start_and_leave(project, *ROLLOUT)
    output = capsys.readouterr().out
    assert "pod: ray_head, train is running already\npod-rollouts-0: ray_worker is running already\n" in output
    assert (pids(cloud), any((copy / "newer.py").exists() for copy in copies)) == (before, False)


# Errors before and during the request.


@pytest.mark.medium
def test_failures_of_a_start(
    cloud: Cloud, project: Project, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is one line, and names the slices that exist."""

    def failed(*options: str) -> str:
        assert launch("start", project, *options) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert "gcloud is not on PATH; install the Google Cloud CLI" in failed()
    with monkeypatch.context() as patch:
        patch.setattr("marin_rl.pods.launch.check_training", lambda *_: "gs://other/run")
        assert "the zone or bucket does not exist; correct the name, " in (error := failed())
        assert "`gcloud storage ls gs://other --quiet`" in error
    cloud.fail("create", "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit has been exceeded. Limit: 0 in zone")
    assert "the project has no quota for this request; request more quota" in (error := failed())
    assert "has been exceeded. Limit: 0 in zone" in error
    assert cloud.resources == {}
    assert "no such package" in failed("--code.install", "echo no such package; exit 7")
    assert project.starts() == []


def test_requests_that_exist_after_a_rejected_one_are_named(cloud: Cloud, project: Project, capsys: Output) -> None:
    cloud.fail("create pod-rollouts-1", "ERROR: RESOURCE_EXHAUSTED: Quota limit has been exceeded")
    assert launch("start", project, *ROLLOUTS, "--slices", "{tpu_type: v5p-16}", "--autodelete") == 1
    captured = capsys.readouterr()
    assert "the project has no quota for this request" in captured.err
    assert "pod, pod-rollouts-0 still exists, and its slices are billed; delete with `python -m" in captured.out
    # The command has the options of the launch.
    assert "tpu delete --tpu_name pod " in captured.out
    assert captured.out.endswith(" --slices '{tpu_type: v5p-16}'`\n")


def test_failed_request_is_deleted(cloud: Cloud, project: Project, capsys: Output) -> None:
    cloud.add("pod", "v5p-16", state="FAILED")
    cloud.resources["pod"]["error"] = "no capacity"
    assert launch("start", project) == 1
    captured = capsys.readouterr()
    assert "the request for pod failed and was deleted: no capacity" in captured.err
    assert "still exists" not in captured.out
    assert cloud.resources == {}


@pytest.mark.parametrize("state", ["ACTIVE", "SUSPENDED", "FAILED"])
def test_other_slices_of_the_same_name_are_refused(cloud: Cloud, project: Project, capsys: Output, state: str) -> None:
    cloud.add("pod", "v5p-8", state=state)
    assert launch("start", project) == 1
    error = capsys.readouterr().err
    assert "pod exists with 1 x v5p-8 instead of 1 x v5p-16; delete it first, or choose another tpu_name" in error
    assert set(cloud.resources) == {"pod"}


@pytest.mark.medium
@pytest.mark.parametrize("when", ["waiting", "running", "polling"])
def test_slices_that_somebody_deletes_are_not_requested_again(
    cloud: Cloud, project: Project, capsys: Output, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    cloud.waits = 10**6 if when == "waiting" else 1
    join = background(project)
    wait_until(lambda: cloud.resources if when == "waiting" else len(project.starts()) == 2)
    if when == "polling":
        # The slices still exist at the start of the poll, but not for its commands.
        addresses = Slices.addresses

        def delete_first(slices: Slices) -> Any:
            if cloud.resources:
                assert launch("delete", project) == 0
            return addresses(slices)

        monkeypatch.setattr(Slices, "addresses", delete_first)
        cloud.fail("ssh pod", DROPPED)
    else:
        assert launch("delete", project) == 0
    assert join() == 1
    assert "pod was deleted, but not by this command" in capsys.readouterr().err
    assert (cloud.resources, len(cloud.called("create"))) == ({}, 1)


def test_actions_without_slices(cloud: Cloud, project: Project, capsys: Output) -> None:
    assert [launch(action, project) for action in ("delete", "status", "stop")] == [0, 0, 0]
    assert capsys.readouterr().out.splitlines() == [
        "pod: nothing of this name exists in zone us-east5-a of the default project",
        "pod: ABSENT",
        "pod: ABSENT, no job runs",
    ]


@pytest.mark.medium
@pytest.mark.parametrize("started", [False, True])
def test_interrupt_names_what_is_left(
    cloud: Cloud, project: Project, capsys: Output, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    interrupt_when(monkeypatch, lambda: project.starts() or not started)
    assert launch("start", project) == 130
    output = capsys.readouterr().out
    state = "the run continues without it" if started else "the run has not started"
    assert f"interrupted; {state}; the same command continues\n" in output
    assert "pod still exists, and its slices are billed; delete with `" in output
