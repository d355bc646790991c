# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json

from marin_rl.pods.chips import GIB, parse_topology
from marin_rl.pods.compiling import CompileFailure
from marin_rl.pods.report import describe, to_json
from tests.pods.plan_cases import make_plan, planned

WORKERS = {
    "worker_topology": parse_topology("v5p:2x2x1"),
    "trainer_seconds": {"update": 2.0},
    "worker_seconds": {"prefill": 1.0, "decode": 4.0},
}


def test_report_of_a_run_that_fits():
    assert "least time" not in describe(make_plan(planned("update"), trainer_seconds={}))
    plan = make_plan(planned("initial state"), planned("update"), planned("decode"))
    text = describe(plan)
    assert max(map(len, text.splitlines())) <= 120
    assert "v5p:2x2x4: 16 chips of 95.74 GiB on 4 hosts; mesh replica 1 x data 16 x model 1" in text
    assert "8.03B parameters, 32 layers" in text
    assert "2 prompts x 8 = 16 rollouts of 1,024 + 7,168 tokens" in text
    assert "2 weights + 4 optimizer GiB on each chip" in text
    assert [line.split() for line in text.splitlines() if line.startswith("update  ")] == [
        ["update", "12.00", "1.00", "13.00", "14%"]
    ]
    assert "computed from the peak rates of the chip and not measured on one:\nupdate 3 + decode 1 = 4 s" in text
    assert text.endswith("every program compiles and fits")
    assert plan.fits


def test_an_adapter_is_described_with_its_share_and_targets():
    assert "trained" not in describe(make_plan(planned("update")))
    assert to_json(make_plan(planned("update")))["adapter"] is None
    plan = make_plan(planned("update"), adapter=42_000_000, targets=("q_proj", "v_proj"))
    text = describe(plan)
    assert "\ntrained       an adapter of 42M parameters, 0.52% of the model's\ntargets       q_proj, v_proj\n" in text
    assert to_json(plan)["adapter"] == {"parameters": 42_000_000, "targets": ["q_proj", "v_proj"]}


def test_workers_keep_up_with_the_trainer():
    plan = make_plan(planned("update"), planned("decode", "worker"), **WORKERS)
    assert plan.workers == 3
    text = describe(plan)
    assert "trainer: update 2 = 2 s\none worker: prefill 1 + decode 4 = 5 s\n3 workers of v5p:2x2x1" in text
    assert "\ndecode (worker) " in text
    assert make_plan(planned("update"), planned("decode")).workers is None
    values = json.loads(json.dumps(to_json(plan), allow_nan=False))
    assert (values["topology"], values["worker_topology"], values["chips"]) == ("v5p:2x2x4", "v5p:2x2x1", 16)
    assert values["programs"][0]["memory"] == 13 * GIB
    assert values["computed_seconds"] == {"trainer": WORKERS["trainer_seconds"], "worker": WORKERS["worker_seconds"]}
    assert (values["fits"], values["workers"]) == (True, 3)


def test_problems_are_shown_with_their_remedies():
    large = dataclasses.replace(
        planned("update", gib=100), problem=CompileFailure("needs 103.00 of 95.74 GiB", "use fewer rows")
    )
    failed = dataclasses.replace(
        planned("decode"), compiled=None, problem=CompileFailure("out of VMEM", "use fewer heads")
    )
    plan = make_plan(large, failed)
    text = describe(plan)
    assert not plan.fits
    assert "108% !" in text
    assert "does not compile" in text
    assert text.endswith(
        "the run does not fit:\nupdate: needs 103.00 of 95.74 GiB; use fewer rows\ndecode: out of VMEM; use fewer heads"
    )
    row = to_json(plan)["programs"][1]
    assert row["problem"] == {"problem": "out of VMEM", "remedy": "use fewer heads"}
    assert row["compiled"] is None
