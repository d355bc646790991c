# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Slices are reserved in a local cluster whose node has the resources and labels of a slice, but no TPU."""

import json
import queue
import subprocess
import sys

import pytest

from marin_rl.config.workers_config import WorkersConfig
from marin_rl.distributed import tpu_slices

PROGRAM = """
import json, os, threading
# Ray asks the node for the name of its slice.
os.environ |= {"TPU_NAME": "slice-a"}
import ray
from marin_rl.config.workers_config import WorkersConfig
from marin_rl.distributed import tpu_slices
from marin_rl.distributed.worker_devices import ray_options

LABELS = {"ray.io/tpu-pod-type": "v6e-16", "ray.io/tpu-worker-id": "0", "ray.io/tpu-slice-name": "slice-a"}
tpu_slices.POLL_SECONDS = 0.1
resources = {"TPU": 16, "TPU-v6e-16-head": 1, "spot": 4}
ray.init(address="local", num_cpus=8, resources=resources, labels=LABELS, include_dashboard=False, log_to_driver=False)
before = ray.available_resources()["TPU"]

@ray.remote
class Worker:
    def reserved(self):
        return ray.get_runtime_context().get_assigned_resources()

config = WorkersConfig(num_workers=8, tpu_slice="v6e:4x4", resources={"spot": 1.0})
started, four = {}, threading.Event()

def start(index, place):
    started[index] = Worker.options(scheduling_strategy=place, **ray_options(config.reserved)).remote()
    if len(started) == 4:
        four.set()

slices = tpu_slices.SliceReservations(config, start, print)
assert four.wait(600)
amounts = [ray.get(started[index].reserved.remote()) for index in sorted(started)]
# The second slice has not joined.
slices.stop()
during = ray.available_resources().get("TPU", 0)
slices.release()
print(json.dumps([len(started), amounts, before, during]))
"""


def test_error_that_ends_the_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise ValueError("no such topology")

    monkeypatch.setattr(tpu_slices, "SlicePlacementGroup", refuse)
    reported: queue.Queue[str] = queue.Queue()
    config = WorkersConfig(num_workers=4, tpu_slice="v6e:4x4")
    slices = tpu_slices.SliceReservations(config, lambda index, place: None, reported.put)
    assert reported.get(timeout=600) == "ValueError: no such topology"
    slices.stop()


@pytest.mark.slow
def test_every_host_of_a_reserved_slice_gets_a_worker() -> None:
    """Run in a separate process, because Ray forks."""
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=900)
    assert said.returncode == 0, said.stderr
    started, amounts, before, during = json.loads(said.stdout.splitlines()[-1])
    assert (started, before, during) == (4, 16, 0)
    assert all((amount["CPU"], amount["TPU"], amount["spot"]) == (1, 4, 1) for amount in amounts)
