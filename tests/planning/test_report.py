# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest

from marin_rl.chips import CHIPS, GIB, parse_topology
from marin_rl.planning.compiling import Failure, Measured
from marin_rl.planning.hlo import CollectiveBytes
from marin_rl.planning.report import describe, to_json
from marin_rl.planning.run_plan import Phase, Plan
from marin_rl.planning.time_model import Bound, StepSize, Work

NOTHING_SENT = CollectiveBytes(0, 0, 0)


def phase(
    name: str,
    place: str = "trainer",
    *,
    seconds: float = 1.0,
    gib: float = 10,
    others: float = 2 * GIB,
    chip: str = "v5p",
    network: float = 0.0,
) -> Phase:
    program = Measured(gib * GIB, 0, 0, GIB, 0, NOTHING_SENT, seconds=3.2)
    work = Work(flops=seconds * 459e12, traffic=5e9, interconnect=1e9, network=network)
    return Phase(
        name,
        place,
        program,
        others,
        work,
        Bound(seconds, "compute"),
        name != "initial state",
        CHIPS[chip],
        "use fewer rows",
    )


def make_plan(*phases: Phase, asynchronous: bool = False, topology: str = "v5p:2x2x4") -> Plan:
    return Plan(
        topology=parse_topology(topology),
        worker_topology=parse_topology("v5p:2x2x1") if asynchronous else None,
        chip=CHIPS["v5p"],
        mesh={"replica": 1, "data": 16, "model": 1},
        parameters=8_030_000_000,
        layers=32,
        rows=1,
        row_length=8192,
        step=StepSize(64, 512, 1024, 7168, 32, 1),
        phases=phases,
        held={"weights": 2 * GIB, "optimizer": 4 * GIB},
        model_flops=16 * 0.5 * 459e12,
    )


def test_report_of_a_run_that_fits():
    plan = make_plan(phase("initial state", seconds=9.0), phase("update", seconds=3.0), phase("decode", seconds=1.0))
    text = describe(plan)
    assert max(map(len, text.splitlines())) <= 120
    assert "v5p:2x2x4: 16 chips of 95.74 GiB on 4 hosts; mesh replica 1 x data 16 x model 1" in text
    assert "8.03B parameters, 32 layers" in text
    assert "64 prompts x 8 = 512 rollouts of 1,024 + 7,168 tokens" in text
    assert "2 weights + 4 optimizer GiB on each chip" in text
    assert "update                       12.00         1.00  13.00        14%  32 layers, 3 s" in text
    # The creation of the state is not a part of a step.
    assert "a step takes at least 4 s; update takes 75% of it, limited by compute" in text
    assert f"at most {512 * 7168 // 4:,} sampled tokens per second" in text
    assert "update at most at 17% of peak flops" in text
    assert text.endswith("every program compiles and fits")
    assert plan.fits


def test_phases_without_work_have_memory_but_no_time():
    text = describe(make_plan(phase("update"), phase("prefill", seconds=0.0), phase("short prefill")))
    assert [line.split("  ")[0] for line in text.splitlines() if "prefill" in line] == [
        "prefill",
        "short prefill",
        "short prefill",
    ]


def test_bytes_between_slices_have_a_column():
    text = describe(make_plan(phase("update", network=2.5e9), topology="2xv5p:2x2x2"))
    assert "network       6.25 GB/s from each chip to other slices" in text
    header, _, row = text.split("\n\n")[2].splitlines()
    assert header.endswith("Tflop  memory, GB  sent in slice, GB  between slices, GB  seconds  limit")
    assert row.split() == ["update", "459", "5", "1", "2.5", "1", "compute"]
    assert "between slices" not in describe(make_plan(phase("update", network=2.5e9)))


def test_workers_keep_up_with_the_trainer():
    plan = make_plan(phase("update", seconds=2.0), phase("decode", "worker", seconds=5.0), asynchronous=True)
    assert (plan.workers, plan.step_seconds) == (3, 2.0)
    assert "3 workers of v5p:2x2x1 for the trainer: one samples a step in 5 s" in describe(plan)
    assert make_plan(phase("update"), phase("decode")).workers == 0


def test_phase_above_the_memory_is_a_problem():
    plan = make_plan(phase("update", gib=100))
    text = describe(plan)
    assert not plan.fits
    assert "108% !" in text
    assert "the run does not work:\nupdate: needs 103.00 of 95.74 GiB; use fewer rows" in text


def test_worker_has_the_memory_of_its_chip():
    plan = make_plan(phase("update"), phase("decode", "worker", gib=14, chip="v5e"), asynchronous=True)
    assert not plan.fits
    assert "decode (worker): needs 17.00 of 15.75 GiB; use fewer rows" in describe(plan)


def test_failure_is_shown_with_its_remedy_and_without_times():
    failed = dataclasses.replace(phase("decode"), result=Failure("out of vector memory (VMEM)", "use fewer heads"))
    plan = make_plan(phase("update"), failed)
    text = describe(plan)
    assert "decode: out of vector memory (VMEM); use fewer heads" in text
    assert "no time of a step, because programs of the trainer do not compile" in text
    assert "sampled tokens per second" not in text
    assert not plan.fits
    row = to_json(plan)["phases"][1]
    assert row["problem"] == {"problem": "out of vector memory (VMEM)", "remedy": "use fewer heads"}
    assert row["program"] == {}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_json_has_the_figures_of_the_report(asynchronous: bool):
    plan = make_plan(
        phase("update"), phase("decode", "worker" if asynchronous else "trainer"), asynchronous=asynchronous
    )
    values = to_json(plan)
    assert (values["topology"], values["chips"], values["fits"]) == ("v5p:2x2x4", 16, True)
    assert values["phases"][0]["memory"] == 13 * GIB
    assert values["phases"][0]["program"]["collectives"] == {"interconnect": 0, "network": 0, "operations": 0}
    assert values["step_seconds"] == plan.step_seconds
    assert values["worker_topology"] == ("v5p:2x2x1" if asynchronous else None)
