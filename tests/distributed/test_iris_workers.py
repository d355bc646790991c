# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout workers with fake jobs of Iris; tests/pods/test_iris_jobs.py tests them with a cluster."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

if sys.version_info < (3, 12):
    pytest.skip("Iris needs Python 3.12", allow_module_level=True)

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from iris.resources.state import JobState

from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed import iris_workers
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml

pytestmark = pytest.mark.medium


class Job:
    """Fake job."""

    def __init__(self, name: str, resources: Any) -> None:
        self.job_id = SimpleNamespace(name=name)
        self.resources = resources
        self.state, self.error, self.cancelled = JobState.RUNNING, "", False
        self.at_end: Exception | None = None

    def state_only(self) -> JobState:
        return self.state

    def status(self) -> Any:
        return SimpleNamespace(error_message=self.error)

    def wait(self, *_: Any, **__: Any) -> None:
        if self.at_end is not None:
            raise self.at_end

    def cancel(self) -> None:
        self.cancelled = True
        raise ConnectError(Code.UNAVAILABLE, "the controller is down")


class Iris:
    """Fake of Iris."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.refusal: ConnectError | None = None

    def submit(self, entrypoint: Any, name: str, resources: Any, **_: Any) -> Job:
        if self.refusal is not None:
            raise self.refusal
        self.jobs.append(Job(name, resources))
        return self.jobs[-1]


@pytest.fixture
def iris(monkeypatch: pytest.MonkeyPatch) -> Iris:
    fake = Iris()
    context = SimpleNamespace(client=fake, registry=SimpleNamespace(registered=lambda *_: nullcontext()))
    monkeypatch.setattr(iris_workers, "iris_ctx", lambda: context)
    monkeypatch.setattr(iris_workers, "get_job_info", lambda: SimpleNamespace(advertise_host="127.0.0.1"))
    monkeypatch.setattr(iris_workers, "POLL_SECONDS", -1.0)
    return fake


def opened(**workers: Any) -> Any:
    text = (
        f"run_dir: /mnt/a\nmode: async\nenvironment: {{type: arithmetic}}\nmodel: {{type: llama}}\nworkers: {workers}\n"
    )
    config = from_yaml(TrainConfig, text.replace("'", ""), "a test")
    return iris_workers.iris_workers(print, config, {}, 8, "", "secret")


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.WORKER_FAILED, JobState.KILLED])
def test_an_ended_job_is_a_failure(iris: Iris, state: JobState) -> None:
    with opened(engine="iris", num_workers=2) as client:
        assert client.find_failure() is None
        iris.jobs[1].state, iris.jobs[1].error = state, "the reason"
        assert client.find_failure() == f"worker-1 {state.value}: the reason"


@pytest.mark.parametrize("at_end", [TimeoutError(), ConnectError(Code.UNAVAILABLE, "down")])
def test_workers_that_cannot_be_stopped_do_not_fail_the_run(iris: Iris, at_end: Exception) -> None:
    with opened(engine="iris", num_workers=2):
        iris.jobs[0].at_end = at_end
    assert iris.jobs[0].cancelled == isinstance(at_end, TimeoutError)


def test_a_refused_job_is_a_mistake(iris: Iris) -> None:
    iris.refusal = ConnectError(Code.FAILED_PRECONDITION, "no scaling group provides device tpu:v5p-8")
    with pytest.raises(ConfigError, match=r"no scaling group .* change workers\.tpu_slice or"), opened(engine="iris"):
        pass
    iris.refusal = ConnectError(Code.UNAVAILABLE, "the controller is down")
    with pytest.raises(ConnectError, match="down"), opened(engine="iris"):
        pass


@pytest.mark.parametrize(
    ("workers", "cpu"),
    [
        ({}, 1.0),
        ({"resources": {"CPU": 2}}, 2.0),
        ({"resources": {"CPU": 0}}, 4),
        ({"tpu_slice": "v5p-8"}, 32),
        ({"tpu_slice": "v5p-8", "resources": {"CPU": 2}}, 2.0),
    ],
)
def test_cpus_of_workers(iris: Iris, workers: dict[str, Any], cpu: float) -> None:
    with opened(engine="iris", **workers):
        pass
    assert iris.jobs[0].resources.cpu == cpu
