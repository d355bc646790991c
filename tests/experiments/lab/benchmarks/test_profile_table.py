# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tables of traces: a traced product on the CPU, a written trace of a GPU, HLO texts, and unions of intervals."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from experiments.lab.benchmarks import profile_table
from experiments.lab.benchmarks.hlo_costs import Cost, Hlo
from experiments.lab.benchmarks.profile_table import (
    Operation,
    Program,
    Trace,
    complement,
    intersection,
    phase_rows,
    program_rows,
    read_trace,
    union,
)
from marin_rl.pods.chips import CHIPS
from marin_rl.utils.errors import UserError

# Parts of the programs of a decode step and an update, compiled for an H100, and a product by cuBLAS.
DECODE = """\
HloModule jit_run, is_scheduled=true, entry_computation_layout={(bf16[64,1024]{1,0})->bf16[64,8,640,128]{3,2,1,0}}

%gemm_fusion_dot.12_computation (parameter_0: bf16[64,4,256], parameter_1: bf16[2048,1024], parameter_2: bf16[1024,1024], parameter_3: bf16[1024,1024]) -> f32[4,64,4096] {
  %parameter_1 = bf16[2048,1024]{1,0} parameter(1), metadata={scheduling_name="parameter_1"}
  %parameter_2 = bf16[1024,1024]{1,0} parameter(2)
  %parameter_3 = bf16[1024,1024]{1,0} parameter(3)
  %concatenate.17 = bf16[4096,1024]{1,0} concatenate(%parameter_1, %parameter_2, %parameter_3), dimensions={0}
  %bitcast.213 = bf16[4,256,4096]{1,0,2} bitcast(%concatenate.17)
  %parameter_0 = bf16[64,4,256]{2,1,0} parameter(0)
  %dot.28 = f32[4,4096,64]{1,2,0} dot(%bitcast.213, %parameter_0), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={1}, rhs_contracting_dims={2}, metadata={op_name="jit(run)/while/body/contract embed -> position, kv_head/0 1 , 2 3 4 1 -> 0 2 3 4/dot_general"}
  ROOT %bitcast.240 = f32[4,64,4096]{2,1,0} bitcast(%dot.28)
}

%fused_gather (param_0.155: f32[151936,1024], param_1.670: s32[64]) -> bf16[64,1,1024] {
  %param_0.155 = f32[151936,1024]{1,0} parameter(0)
  %convert.1 = bf16[151936,1024]{1,0} convert(%param_0.155)
  %param_1.670 = s32[64]{0} parameter(1)
  %bitcast.3.1 = s32[64,1]{1,0} bitcast(%param_1.670)
  ROOT %gather.1 = bf16[64,1,1024]{2,1,0} gather(%convert.1, %bitcast.3.1), offset_dims={1,2}, collapsed_slice_dims={}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,1024}
}

%fused_scatter (param_0.121: bf16[64,8,640,128], param_1.1235: bf16[64,1,8,1,128], param_2.1131: s32[64,2]) -> bf16[64,8,640,128] {
  %param_0.121 = bf16[64,8,640,128]{3,2,1,0} parameter(0)
  %param_2.1131 = s32[64,2]{1,0} parameter(2)
  %param_1.1235 = bf16[64,1,8,1,128]{4,3,2,1,0} parameter(1)
  ROOT %scatter.5 = bf16[64,8,640,128]{3,2,1,0} scatter(%param_0.121, %param_2.1131, %param_1.1235), update_window_dims={1,2,3,4}, inserted_window_dims={}, scatter_dims_to_operand_dims={0,2}, index_vector_dim=1, to_apply=%region_1
}

%fused_updates (param_0: f32[16,64], param_1: s32[], param_2: f32[64]) -> (f32[16,64], f32[64]) {
  %param_0 = f32[16,64]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %param_2 = f32[64]{0} parameter(2)
  %exponential = f32[64]{0} exponential(%param_2)
  %bitcast.9 = f32[1,64]{1,0} bitcast(%exponential)
  %constant = s32[] constant(0)
  %dynamic_update_slice.1 = f32[16,64]{1,0} dynamic-update-slice(%param_0, %bitcast.9, %param_1, %constant)
  ROOT %tuple = (f32[16,64]{1,0}, f32[64]{0}) tuple(%dynamic_update_slice.1, %exponential)
}

%wrapped_convert_computation (param_0.1: f32[151936,1024]) -> bf16[151936,1024] {
  %param_0.1 = f32[151936,1024]{1,0} parameter(0)
  ROOT %convert.2 = bf16[151936,1024]{1,0} convert(%param_0.1)
}

%body (arg_tuple.1: (s32[], bf16[64,8,640,128], f32[151936,1024], /*index=3*/s32[64])) -> (s32[], bf16[64,8,640,128]) {
  %arg_tuple.1 = (s32[], bf16[64,8,640,128]{3,2,1,0}, f32[151936,1024]{1,0}, /*index=3*/s32[64]{0}) parameter(0)
  %get-tuple-element.1 = s32[64]{0} get-tuple-element(%arg_tuple.1), index=3
  %loop_gather_fusion = bf16[64,1,1024]{2,1,0} fusion(%arg_tuple.1#2, %get-tuple-element.1), kind=kLoop, calls=%fused_gather
  %wrapped_convert = bf16[151936,1024]{1,0} fusion(%arg_tuple.1#2), kind=kLoop, calls=%wrapped_convert_computation
  %bitcast.225.0 = bf16[64,4,256]{2,1,0} bitcast(%loop_gather_fusion)
  %w.1 = bf16[2048,1024]{1,0} constant({...})
  %w.2 = bf16[1024,1024]{1,0} constant({...})
  %gemm_fusion_dot.12 = f32[4,64,4096]{2,1,0} fusion(%bitcast.225.0, %w.1, %w.2, /*index=3*/%w.2), kind=kCustom, calls=%gemm_fusion_dot.12_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %indices = s32[64,2]{1,0} constant({...})
  %updates = bf16[64,1,8,1,128]{4,3,2,1,0} slice(%gemm_fusion_dot.12), slice={[0:1], [0:64], [0:1024]}
  %input_scatter_fusion.2 = bf16[64,8,640,128]{3,2,1,0} fusion(%arg_tuple.1#1, %updates, %indices), kind=kInput, calls=%fused_scatter
  %pallas_call.8 = (bf16[64,8,5,2,128]{4,3,2,1,0}, f32[64,8,5,2]{3,2,1,0}) custom-call(%bitcast.225.0, %input_scatter_fusion.2), custom_call_target="__gpu$xla.gpu.triton", backend_config={"name":"mha_forward"}
  ROOT %tuple.2 = (s32[], bf16[64,8,640,128]{3,2,1,0}) tuple(%arg_tuple.1#0, %input_scatter_fusion.2)
}

ENTRY %main (x: f32[64,128], w: f32[128,256], t: f32[16,64]) -> f32[64,256] {
  %x = f32[64,128]{1,0} parameter(0)
  %w = f32[128,256]{1,0} parameter(1)
  %t = f32[16,64]{1,0} parameter(2)
  %cublas-gemm.1.0 = (f32[64,256]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %reduce-scatter.1 = f32[64,64]{1,0} reduce-scatter(%x), channel_id=1, dimensions={1}, to_apply=%region_1
  %step = s32[] constant(3)
  %row = f32[64]{0} slice(%t), slice={[0:1], [0:64]}
  %updates_fusion = (f32[16,64]{1,0}, f32[64]{0}) fusion(%t, %step, %row), kind=kLoop, calls=%fused_updates
  %while.23 = (s32[], bf16[64,8,640,128]{3,2,1,0}) while(%updates_fusion), condition=%condition, body=%body
  ROOT %copy.1 = f32[64,256]{0,1} copy(%cublas-gemm.1.0#0)
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemm_fusion_dot.12", Cost(64 * 1024 * 2 + 4096 * 1024 * 2 + 4 * 64 * 4096 * 4, 2 * 64 * 4096 * 1024)),
        ("gemm_fusion_dot_12", Cost(64 * 1024 * 2 + 4096 * 1024 * 2 + 4 * 64 * 4096 * 4, 2 * 64 * 4096 * 1024)),
        # 64 rows of the table in float32, their indices, and the rows in bfloat16.
        ("loop_gather_fusion", Cost(64 * 1024 * 4 + 64 * 4 + 64 * 1024 * 2, 0)),
        ("wrapped_convert", Cost(151936 * 1024 * (4 + 2), 0)),
        # The rows of the cache are read, and written, and the new ones read, with their indices.
        ("input_scatter_fusion.2", Cost(3 * 64 * 8 * 128 * 2 + 64 * 2 * 4, 0)),
        # The row, its index, the row of the array, and the second output.
        ("updates_fusion", Cost(4 + 3 * 64 * 4, 0)),
        # Without the workspace.
        ("cublas-gemm.1.0", Cost((64 * 128 + 128 * 256 + 64 * 256) * 4, 2 * 64 * 128 * 256)),
        ("copy.1", Cost(2 * 64 * 256 * 4, 0)),
        ("row", Cost(2 * 64 * 4, 0)),
        ("pallas_call.8", Cost()),
        ("while.23", Cost()),
        ("reduce-scatter.1", Cost()),
    ],
)
def test_the_costs_of_instructions_of_a_gpu_program(name: str, expected: Cost) -> None:
    hlo = Hlo(DECODE)
    assert hlo.module == "jit_run"
    assert hlo.cost(name) == expected


def test_a_traced_product_has_its_bytes_and_flops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = jnp.ones((64, 128)), jnp.ones((128, 32))

    @jax.jit
    def traced_product(left: jax.Array, right: jax.Array) -> jax.Array:
        return left @ right

    compiled = traced_product.lower(left, right).compile()
    (tmp_path / "module_0.jit_traced_product.cpu_after_optimizations.txt").write_text(compiled.as_text() or "")
    traced_product(left, right).block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path / "profile", profiler_options=options):
        for _ in range(3):
            with jax.profiler.TraceAnnotation("step"):
                traced_product(left, right).block_until_ready()

    arguments = [str(tmp_path / "profile"), "--hlo", str(tmp_path), "--chip", "h100"]
    outputs = ["--json", str(tmp_path / "table.json"), "--plot", str(tmp_path / "step.png")]
    profile_table.main([*arguments, *outputs])
    report = json.loads((tmp_path / "table.json").read_text())
    [program] = (row for name, row in report["programs"].items() if name.startswith("jit_traced_product"))
    [product] = (row for row in program["operations"].values() if row["flops"])
    assert product["calls"] == 3
    assert product["flops"] == 2 * 64 * 128 * 32
    assert product["bytes"] == (64 * 128 + 128 * 32 + 64 * 32) * 4
    shortest = max(product["bytes"] / 3350e9, product["flops"] / 989e12)
    assert product["share_of_bound"] == pytest.approx(3 * shortest / product["seconds"])
    assert sum(row["share"] for row in program["operations"].values()) == pytest.approx(1)
    assert 0 < report["phases"]["step"]["idle_share"] < 1
    assert capsys.readouterr().out.startswith("| phase | seconds | share idle |")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    # The command may write its own files again.
    profile_table.main([*arguments, *outputs])


GPU = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 400000
             stats { metadata_id: 1 ref_value: 5 } stats { metadata_id: 2 ref_value: 6 }
             stats { metadata_id: 3 int64_value: 7 } }
    events { metadata_id: 2 offset_ps: 390000 duration_ps: 210000 }
    events { metadata_id: 2 offset_ps: 800000 duration_ps: 100000 }
  }
  lines {
    name: "Stream #14(MemcpyD2D)" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 500000 duration_ps: 200000 }
  }
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 4 offset_ps: 0 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_12" } }
  event_metadata { key: 2 value { id: 2 name: "input_scatter_fusion_2" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2D" } }
  event_metadata { key: 4 value { id: 4 name: "jit_run" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "program_id" } }
  stat_metadata { key: 5 value { id: 5 name: "gemm_fusion_dot.12" } }
  stat_metadata { key: 6 value { id: 6 name: "jit_run" } }
}
planes {
  name: "/host:CPU"
  lines {
    name: "python" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 900000 duration_ps: 1200000 }
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 200000 }
    events { metadata_id: 3 offset_ps: 1500000 duration_ps: 500000 }
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 100000 }
  }
  event_metadata { key: 1 value { id: 1 name: "steps" } }
  event_metadata { key: 2 value { id: 2 name: "step" } }
  event_metadata { key: 3 value { id: 3 name: "store" } }
}
"""


def written(text: str, folder: Path) -> Path:
    path = folder / "host.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    trace = read_trace(written(GPU, tmp_path))
    phases = phase_rows(trace)
    # The device works from 1000 to 1700 and from 1800 to 1900 ns, and the product until 1400.
    assert list(phases) == ["step", "store", "wait", "steps"]
    assert {name: row["seconds"] for name, row in phases.items()} == pytest.approx(
        {"step": 300e-9, "store": 500e-9, "wait": 400e-9, "steps": 1200e-9}
    )
    assert {name: row["idle_share"] for name, row in phases.items()} == pytest.approx(
        {"step": 1 / 3, "store": 2 / 5, "wait": 1 / 4, "steps": 1 / 3}
    )
    assert phases["wait"]["programs"] == pytest.approx({"jit_run 7": 200e-9, "unknown": 110e-9})

    programs = program_rows(trace, {5: Hlo(DECODE)}, CHIPS["h100"])
    assert list(programs) == ["unknown", "jit_run 7"]
    scatter, copy = programs["unknown"]["operations"].values()
    assert scatter["calls"] == 2
    # A kernel that starts before the one before it has ended is not a part of it.
    assert scatter["seconds"] == pytest.approx(310e-9)
    assert scatter["bytes"] == Hlo(DECODE).cost("input_scatter_fusion.2").bytes
    assert copy == {"calls": 1, "seconds": pytest.approx(200e-9), "share": pytest.approx(200 / 510)} | dict.fromkeys(
        ("bytes", "flops", "share_of_bound")
    )
    assert programs["jit_run 7"]["operations"]["gemm_fusion_dot.12"]["flops"] == 2 * 64 * 4096 * 1024


def test_programs_of_one_name_are_told_apart_by_number_or_else_unknown() -> None:
    other = DECODE.replace("4096", "2048")
    operation = Operation("gpu", Program("jit_run", 5), "gemm_fusion_dot.12", 0, 1, 1)
    hlo = {5: Hlo(DECODE), 6: Hlo(other)}

    def bytes_of(number: int) -> int | None:
        [row] = program_rows(Trace([operation._replace(program=Program("jit_run", number))], {}), hlo, None).values()
        return row["operations"]["gemm_fusion_dot.12"]["bytes"]

    assert bytes_of(5) == hlo[5].cost("gemm_fusion_dot.12").bytes
    assert bytes_of(6) == hlo[6].cost("gemm_fusion_dot.12").bytes != bytes_of(5)
    assert bytes_of(7) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a plane /device:GPU:N with streams, nor HLO instructions in /host:CPU"),
        (GPU.replace("/device:GPU:0", "/device:CUSTOM:0"), "neither a plane /device:GPU:N with streams"),
    ],
)
def test_a_trace_without_a_device(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        profile_table.main([str(written(text, tmp_path))])


def test_the_trace_must_be_the_only_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no trace"):
        profile_table.main([str(tmp_path)])
    for name in ("process-0", "process-1"):
        (tmp_path / name).mkdir()
        written(GPU, tmp_path / name)
    with pytest.raises(SystemExit, match=r"several traces; name one:\n.*process-0"):
        profile_table.main([str(tmp_path)])
    profile_table.main([str(tmp_path / "process-1")])


def test_arguments_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(written(GPU, tmp_path))
    with pytest.raises(SystemExit):
        profile_table.main([trace, "--chip", "h100"])
    assert "needs --hlo" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="give a folder of --xla_dump_to"):
        profile_table.main([trace, "--hlo", str(tmp_path)])
    with pytest.raises(UserError, match="--json"):
        profile_table.main([trace, "--json", trace])


CELLS = 12
INTERVALS = st.lists(st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(sorted).map(tuple), max_size=6)


def covered(intervals: object) -> np.ndarray:
    """Whether each cell of the grid is in an interval."""
    cells = np.zeros(CELLS, bool)
    for start, end in np.array(intervals, dtype=int).reshape(-1, 2):
        cells[start:end] = True
    return cells


@given(INTERVALS, INTERVALS)
def test_sets_of_intervals_are_those_of_their_cells(first: list, second: list) -> None:
    one, two = union(first), union(second)
    assert (one[1:, 0] > one[:-1, 1]).all()
    np.testing.assert_array_equal(covered(one), covered(first))
    np.testing.assert_array_equal(covered(complement(one, 0, CELLS)), ~covered(first))
    np.testing.assert_array_equal(covered(intersection(one, two)), covered(first) & covered(second))


@given(INTERVALS, INTERVALS, INTERVALS)
def test_the_idle_share_is_that_of_the_cells(first: list, second: list, phase: list) -> None:
    kinds = [("gpu:0", each) for each in (*first, (0, 1))] + [("gpu:1", each) for each in (*second, (3, 4))]
    operations = [Operation(device, Program("f"), "add", *each, 0) for device, each in kinds]
    row = phase_rows(Trace(operations, {"step": union(phase)}))["step"]
    cells = covered(phase)
    assert row["seconds"] == pytest.approx(cells.sum() / 1e9)
    busy = [covered([each for name, each in kinds if name == device])[cells].sum() for device in ("gpu:0", "gpu:1")]
    assert row["idle_share"] == pytest.approx(1 - sum(busy) / 2 / cells.sum() if cells.any() else 0.0)
