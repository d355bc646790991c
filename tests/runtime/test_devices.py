# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from marin_rl.runtime.config import default_trainer
from marin_rl.runtime.devices import start_devices


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What eight devices make of each case; jax counts its devices once, so that takes a process of its own."""
    script = Path(__file__).with_name("device_cases.py")
    finished = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    return json.loads(finished.stdout)


@pytest.mark.parametrize(("case", "rows"), [("fits", 2), ("model axis", 1), ("microbatches", 2)])
def test_rows_are_shared_by_the_data_parallel_devices(outcomes: dict[str, str], case: str, rows: int):
    assert outcomes[case] == f"{rows} rows a device"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "rows",
            "a batch of 12 rows (rollouts.prompts_per_step x rollouts.group_size) cannot be split over 8 "
            "data-parallel devices; make it a multiple of 8, or raise trainer.model_axis_size",
        ),
        (
            "rows with model axis",
            "a batch of 6 rows (rollouts.prompts_per_step x rollouts.group_size) cannot be split over 4 "
            "data-parallel devices; make it a multiple of 4, or raise trainer.model_axis_size",
        ),
        (
            "model axis too large",
            "8 devices cannot be split into trainer.model_axis_size 3 x trainer.replica_ici_axis_size 1: their "
            "product must divide a slice's devices",
        ),
        (
            "microbatches do not fit",
            "a batch of 24 rows cannot be split into microbatches of trainer.per_device_parallelism 2 x 8 "
            "data-parallel devices; choose one that divides 3",
        ),
        (
            "accelerator",
            "trainer.require_accelerator is true, but jax found only a CPU; set it to false to use that",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_numbers(outcomes: dict[str, str], case: str, message: str):
    assert outcomes[case] == message


def test_the_section_that_was_given_is_left_alone():
    section = default_trainer()
    started = start_devices(section, rows=jax.device_count() * 4)
    assert section == default_trainer()
    assert section.per_device_parallelism == -1
    assert started.per_device_parallelism != -1
