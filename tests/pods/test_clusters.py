# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Clusters that cannot be used, and logs that cannot be read."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if sys.version_info < (3, 12):
    pytest.skip("Iris needs Python 3.12", allow_module_level=True)

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from finelog.errors import StatsError
from iris.resources.state import JobState

from marin_rl.pods import iris_jobs
from marin_rl.pods.config import LaunchConfig
from marin_rl.pods.iris_jobs import ClusterError, open_cluster, run_launch

pytestmark = pytest.mark.medium


@pytest.mark.parametrize("text", ["", "a: [1,", "- 1", "platform: 3", "\0", None])
def test_damaged_cluster_files(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "pods.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ClusterError, match=r"cannot connect to the cluster '.*pods\.yaml': "), open_cluster(str(file)):
        pass


class Job:
    """Fake job, whose log has errors."""

    job_id = "/root/job"

    def __init__(self, *parts: list[str | Exception]) -> None:
        self._parts = list(parts)
        self.state = JobState.RUNNING

    def status(self) -> Any:
        return SimpleNamespace(state=self.state, submitted_at=None, error_message="")

    def state_only(self) -> JobState:
        return self.state

    def wait(self, **_: Any) -> Any:
        return self.status()

    def follow_logs(self, **_: Any) -> Iterator[Any]:
        for line in self._parts.pop(0):
            if isinstance(line, Exception):
                raise line
            yield SimpleNamespace(task_id=SimpleNamespace(task_index=0), data=line)
        self.state = JobState.SUCCEEDED


def follow(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    client = SimpleNamespace(submit=lambda *_, **__: job)
    monkeypatch.setattr(iris_jobs, "open_cluster", lambda cluster: contextlib.nullcontext(client))
    monkeypatch.setattr(iris_jobs, "RETRY_SECONDS", 0.0)
    lines: list[str] = []
    config = LaunchConfig(cluster="marin")
    return run_launch(config, ["train"], "job", preemptible=False, report=lines.append), lines


def test_a_log_is_read_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = StatsError("connection refused")
    status, lines = follow(Job(["a", lost], [lost], ["a", "b", lost], ["a", "b", "c"]), monkeypatch)
    assert status == 0
    assert [line for line in lines if line.startswith("[0]")] == ["[0] a", "[0] b", "[0] c"]
    assert lines[-1] == "job /root/job succeeded"


def test_a_lost_controller_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(["a", ConnectError(Code.UNAVAILABLE, "connection refused")])
    with pytest.raises(ClusterError, match="the job goes on, but cannot be followed: connection refused"):
        follow(job, monkeypatch)
