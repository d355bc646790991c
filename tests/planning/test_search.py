# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest

from marin_rl.chips import CHIPS, parse_topology
from marin_rl.config.train_config import TrainConfig
from marin_rl.planning.compiling import Failure, Measured
from marin_rl.planning.hlo import CollectiveBytes
from marin_rl.planning.run_plan import Phase, Plan
from marin_rl.planning.search import describe_search, search, with_settings
from marin_rl.planning.time_model import Bound, StepSize, Work
from tests.planning.plan_cases import tiny_config


def make_plan(config: TrainConfig, seconds: float, *, bytes_used: int = 10) -> Plan:
    program = Measured(bytes_used, 0, 0, 0, 0, CollectiveBytes(0, 0, 0))
    phase = Phase("update", "trainer", program, 0, Work(flops=1.0), Bound(seconds, "compute"), True, CHIPS["v5e"], "")
    return Plan(
        topology=parse_topology("v5e:2x2"),
        worker_topology=None,
        chip=CHIPS["v5e"],
        mesh={"data": 4},
        parameters=1,
        layers=2,
        rows=config.trainer.per_device_parallelism,
        row_length=32,
        step=StepSize(4, 16, 24, 8, 4, 1),
        phases=(phase,),
        held={},
        model_flops=1.0,
    )


def test_search_keeps_the_best_of_each_setting():
    """A step takes 8 s, less with 8 rows and half of that without recomputation, but 16 rows do not fit."""
    seen: list[tuple[TrainConfig, frozenset[str]]] = []

    def make(config: TrainConfig, like: Plan, programs: frozenset[str]) -> Plan:
        seen.append((config, programs))
        rows = config.trainer.per_device_parallelism
        recomputing = config.model.gradient_checkpointing
        return make_plan(config, 32.0 / rows / (1 if recomputing else 2), bytes_used=2**40 if rows > 8 else 10)

    config = tiny_config("--model.gradient_checkpointing", "true")
    candidates = search(config, make_plan(config, 8.0), make, most=20)
    best = candidates[0]
    assert dict(best.changes) == {"trainer.per_device_parallelism": 8, "model.gradient_checkpointing": False}
    assert best.plan.step_seconds == 2.0
    assert [candidate.plan.fits for candidate in candidates].index(False) > 2
    ranks = [candidate.rank for candidate in candidates]
    assert ranks == sorted(ranks)
    rows = [programs for changed, programs in seen if changed.trainer.per_device_parallelism != 4]
    assert rows[0] == {"update", "score"}
    text = describe_search(candidates, parse_topology("v5e:2x2"))
    first = text.splitlines()[3]
    assert first.split() == ["0%", "2", "yes", "per_device_parallelism", "8,", "gradient_checkpointing", "false"]
    assert max(map(len, text.splitlines())) <= 120


def test_search_is_bounded():
    config = tiny_config()
    made: list[TrainConfig] = []

    def make(config: TrainConfig, like: Plan, programs: frozenset[str]) -> Plan:
        made.append(config)
        return make_plan(config, 1.0)

    candidates = search(config, make_plan(config, 1.0), make, most=3)
    assert (len(made), len(candidates)) == (3, 4)
    # The config itself wins ties.
    assert candidates[0].changes == ()


def test_plan_that_does_not_compile_is_last():
    config = tiny_config()

    def make(config: TrainConfig, like: Plan, programs: frozenset[str]) -> Plan:
        plan = make_plan(config, 0.1)
        failed = dataclasses.replace(plan.phases[0], result=Failure("no", "nothing"), bound=Bound(0.0, "compute"))
        return dataclasses.replace(plan, phases=(failed,))

    candidates = search(config, make_plan(config, 1.0), make, most=2)
    assert candidates[0].changes == ()


def test_settings_that_contradict_the_config_are_left_out():
    config = tiny_config()

    def make(config: TrainConfig, like: Plan, programs: frozenset[str]) -> Plan:
        raise ValueError("does not fit")

    assert len(search(config, make_plan(config, 1.0), make, most=9)) == 1


def test_settings_change_nested_sections():
    config = with_settings(tiny_config(), [("model.gradient_checkpointing", True), ("logprob_block_size", 64)])
    assert (config.model.gradient_checkpointing, config.logprob_block_size) == (True, 64)
    assert config.model.hidden_dim == 32
    with pytest.raises(ValueError, match="logprob_block_size is 0"):
        with_settings(tiny_config(), [("logprob_block_size", 0)])
