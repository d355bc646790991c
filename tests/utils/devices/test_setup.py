# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from marin_rl.utils.devices.setup import (
    COLLECTION_THRESHOLD,
    collect_garbage,
    collect_rarely,
    exempt_from_collection,
    join_processes,
    start_devices,
)
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests import fork_server
from tests.cpu_host import cpu_host


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Results of each case on eight devices, computed in a subprocess because JAX fixes its number of devices."""
    command = [sys.executable, "-m", "tests.utils.devices.device_cases"]
    completed = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout)


@pytest.mark.medium
def test_rows_per_data_parallel_device(outcomes: dict[str, str]):
    assert outcomes == {
        "data axis": "24 rows, 3 a device",
        # Pairs of devices share the same rows.
        "model axis": "12 rows, 3 a device",
        "replicas": "24 rows, 3 a device",
        "configured rows": "40 rows, 5 a device",
        # The model axis has the largest size that divides both numbers.
        "pod": "6 rows, 3 a device",
        "fitting": "12 rows, 3 a device",
        "model axis too large": "8 devices cannot be split into trainer.model_axis_size 3 x "
        "trainer.replica_ici_axis_size 1: their product must divide a slice's devices",
        "replicas over slices": "trainer.replica_dcn_axis_size is 2, but the number of slices is 1; set a number that "
        "divides it",
        "accelerator": "trainer.require_accelerator is true, but jax found only a CPU; set it to false to use that",
    }


def test_input_config_is_not_modified():
    section = TrainerConfig()
    started = start_devices(section, rows_per_device=4)
    assert section == TrainerConfig()
    assert section.per_device_parallelism == -1
    assert (started.per_device_parallelism, started.rows_per_microbatch) == (4, 4 * jax.device_count())


def test_cache_that_cannot_be_written_is_disabled_with_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    former = jax.config.values["jax_compilation_cache_dir"]
    try:
        for folder in (tmp_path / "file" / "jax", tmp_path / "file", Path("/proc/jax"), tmp_path / "new" / "jax"):
            caplog.clear()
            join_processes(dataclasses.replace(TrainerConfig(), jax_compilation_cache_dir=str(folder)))
            is_used = folder.parent.name == "new"
            assert jax.config.values["jax_compilation_cache_dir"] == (str(folder) if is_used else None)
            assert len(caplog.messages) == (0 if is_used else 1)
            assert is_used or f"{folder} cannot be written" in caplog.text
    finally:
        jax.config.update("jax_compilation_cache_dir", former)


@pytest.fixture
def no_exempt_objects() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def cycle_class() -> type:
    """A class whose objects only garbage collection frees."""

    class Cycle:
        alive = 0

        def __init__(self):
            Cycle.alive += 1
            self.itself = self

        def __del__(self):
            Cycle.alive -= 1

    return Cycle


@pytest.mark.medium
def test_garbage_is_collected_explicitly_or_when_there_is_much():
    Cycle, thresholds = cycle_class(), gc.get_threshold()
    with collect_rarely():
        assert gc.get_threshold()[0] == COLLECTION_THRESHOLD
        kept = [Cycle(), Cycle()]
        collect_garbage(1)
        assert Cycle.alive == 2
        del kept
        Cycle()
        # The objects that have survived a call are older.
        collect_garbage(2)
        assert Cycle.alive == 2
        collect_garbage(10)
        assert Cycle.alive == 0
        Cycle()
        # Objects that are freed meanwhile, also in other threads, are subtracted.
        much = [[] for _ in range(2 * COLLECTION_THRESHOLD)]
        assert (len(much), Cycle.alive) == (2 * COLLECTION_THRESHOLD, 0)
    assert gc.get_threshold() == thresholds


@pytest.mark.medium
@pytest.mark.usefixtures("no_exempt_objects")
def test_only_objects_of_the_context_are_collected():
    Cycle = cycle_class()
    before = Cycle()
    gc.collect()
    with exempt_from_collection(), exempt_from_collection():
        del before
        Cycle()
        gc.collect()
        assert Cycle.alive == 1  # the object of before the context
    # Before the next collection, in which Python 3.12 exempts immortal objects.
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert Cycle.alive == 0
