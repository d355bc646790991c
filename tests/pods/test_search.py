# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from collections.abc import Collection

import pytest

from marin_rl.config.train_config import TrainConfig
from marin_rl.pods.compiling import Failure
from marin_rl.pods.run_plan import Plan
from marin_rl.pods.search import largest_that_fit
from tests.pods.plan_cases import make_plan, planned, tiny_config

FAILURE = Failure("needs 2.00 of 1.00 GiB", "use fewer")


@pytest.mark.parametrize(
    ("most", "found"),
    [
        # The config has 4 rows in 4 microbatches, and 8 slots for 16 rollouts.
        ({"rows": 9, "slots": 100}, {"trainer.per_device_parallelism": 8, "sampling.max_seqs": 16}),
        ({"rows": 1000, "slots": 8}, {"trainer.per_device_parallelism": 16, "sampling.max_seqs": 8}),
        ({"rows": 1, "slots": 5}, {"trainer.per_device_parallelism": 1, "sampling.max_seqs": 4}),
        ({"rows": 0, "slots": 0}, {"trainer.per_device_parallelism": None, "sampling.max_seqs": None}),
    ],
)
def test_largest_settings_that_fit(most: dict[str, int], found: dict[str, int | None]):
    compiled: list[Collection[str]] = []

    def make(config: TrainConfig, only: Collection[str] = ("update", "decode")) -> Plan:
        compiled.append(only)
        sizes = {"update": config.trainer.per_device_parallelism, "decode": config.sampling.max_seqs}
        limits = {"update": most["rows"], "decode": most["slots"]}
        return make_plan(
            *(
                dataclasses.replace(planned(name), problem=FAILURE if sizes[name] > limits[name] else None)
                for name in sizes
                if name in only
            ),
            per_device_parallelism=sizes["update"],
        )

    config = tiny_config()
    assert largest_that_fit(config, make(config), make) == found
    # A setting compiles only the programs that depend on it.
    assert not [only for only in compiled[1:] if "update" in only and "decode" in only]


def test_run_without_the_sampler_has_no_slots():
    plan = make_plan(planned("update"))
    assert largest_that_fit(tiny_config(), plan, lambda *_: plan) == {"trainer.per_device_parallelism": 16}
