# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of a GPU in its CPU form: parts at tiny sizes, and the rows of parts that fail."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.lab.benchmarks import gpu, gpu_kernels, gpu_parts
from experiments.lab.benchmarks.gpu import PARTS, Part, Settings, run_parts
from experiments.lab.benchmarks.gpu_parts import qwen3_arguments
from experiments.lab.benchmarks.measurement import load_config
from marin_rl.learner.flash_attention import block_attention
from tests import fork_server
from tests.serving.serving_cases import has_ended, until

FAULTS = """
import json, os, signal, subprocess, sys
function, arguments, settings, result = sys.argv[1:]
if function == "exit":
    sys.exit("Fatal: no memory")
if function == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if function == "hang":
    child = subprocess.Popen(["sleep", "600"])
    with open(json.loads(settings)[0] + "/child", "w") as file:
        file.write(str(child.pid))
    print("compiling", flush=True)
    child.wait()
with open(result, "w") as file:
    json.dump({"status": "ok", "figures": {"called": json.loads(arguments)}}, file)
"""
"""A module whose parts crash, exit or hang."""
KERNEL_PARTS = [Part(f"{name}, float32", 60, "kernel", (name, "float32")) for name in gpu.KERNELS]
KERNEL_PARTS.append(Part("decode, bfloat16", 60, "kernel", ("decode", "bfloat16")))


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_parts.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "MODULE", "faulty_parts")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "work", tiny=True)


def named(name: str) -> Part:
    (part,) = [part for part in PARTS if part.name == name]
    return part


def run_here(part: Part, settings: Settings) -> dict[str, Any]:
    settings.work.mkdir(exist_ok=True)
    row = gpu_parts.run(part.function, settings, part.arguments)
    return json.loads(json.dumps(row, allow_nan=False))


@pytest.mark.medium
@pytest.mark.parametrize("part", KERNEL_PARTS, ids=lambda part: part.name)
def test_kernels_equal_plain_attention(part: Part, settings: Settings):
    row = run_here(part, settings)
    assert row["status"] == "ok", row
    errors = [
        figure for name, figure in row["figures"].items() if name.startswith(("output", "query", "keys", "values"))
    ]
    assert len(errors) == (1 if part.arguments[0] in ("prefill", "decode") else 4)
    assert 0 < min(errors) <= max(errors) < {"float32": 1e-6, "bfloat16": 1e-2}[part.arguments[1]]


@pytest.mark.parametrize("name", ["log-probs llama, float32", "log-probs qwen3, bfloat16"])
@pytest.mark.medium
def test_logprobs_equal_float64(name: str, settings: Settings):
    row = run_here(named(name), settings)
    assert row["status"] == "ok", row
    assert row["figures"]["tokens"] > 16
    if "bfloat16" in name:
        # The model was computed in bfloat16.
        assert row["figures"]["learner - float64, most"] > 1e-4


@pytest.mark.parametrize("name", ["gradient llama, bfloat16", "gradient qwen3, float32"])
@pytest.mark.medium
def test_gradients_equal_float64(name: str, settings: Settings):
    row = run_here(named(name), settings)
    assert row["status"] == "ok", row
    assert row["figures"]["tensors"] == {"llama": 21, "qwen3": 25}[name.split()[1].strip(",")]


@pytest.mark.slow
def test_throughput_is_compared_with_the_plan(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_parts, "subprocess", fork_server)
    rows = {name: run_here(named(name), settings) for name in ("plan update 4k", "update 4k", "decode 64")}
    assert [row["status"] for row in rows.values()] == ["ok"] * 3, rows
    assert rows["update 4k"]["figures"]["planned_gib"] > 0
    assert rows["update 4k"]["figures"]["update_tokens_per_second"] > 0
    # No plan was made for it.
    assert rows["decode 64"]["figures"]["planned_gib"] is None
    assert rows["decode 64"]["figures"]["tokens_per_call"] == 8 * 16


@pytest.mark.slow
def test_a_step_is_traced_and_a_start_timed(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_parts, "subprocess", fork_server)
    rows = {name: run_here(named(name), settings) for name in ("step", "start", "attention 4k")}
    assert [row["status"] for row in rows.values()] == ["ok"] * 3, rows
    step, start = rows["step"]["figures"], rows["start"]["figures"]
    assert step["range"][0] <= step["tokens_per_second"] <= step["range"][1]
    assert 0 <= step["idle_share"] < 1
    assert start["warm_cache_seconds"] < start["cold_cache_seconds"]
    assert rows["attention 4k"]["figures"]["wgmma True"] > 0


def test_the_first_figures_of_an_h100_are_two_fifths_of_the_memory_rate(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    """A decode step read 4.0 GB in 3.04 ms: 1.19 GB of weights, and 64 x 384 tokens of 114,688 bytes."""
    settings.work.mkdir()
    config = load_config(qwen3_arguments(settings._replace(tiny=False), "decode 64")[:-1])
    h100 = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [h100])
    assert gpu_parts._memory_share(config, 21_037) == pytest.approx(4.01e9 / 3.042e-3 / 3.35e12, rel=5e-3)


@pytest.mark.medium
def test_a_wrong_kernel_is_a_failed_row(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    def without_segments(query: jax.Array, keys: jax.Array, values: jax.Array, segments: jax.Array, **rest: Any):
        return block_attention(query, keys, values, jnp.ones_like(segments), **rest)

    monkeypatch.setattr(gpu_kernels, "block_attention", without_segments)
    row = run_here(named("capped scores, float32"), settings)
    assert row["status"] == "failed"
    assert "too far from float64 (limit 1e-05): output_64 " in row["reason"]
    assert row["figures"]["output_64"] > 0.1


@pytest.mark.usefixtures("faults")
def test_a_part_that_fails_costs_one_row(settings: Settings, tmp_path: Path):
    parts = [Part(name, 60, name, (name,)) for name in ("exit", "crash")] + [
        Part("hang", 1, "hang"),
        Part("a", 60, "a"),
    ]
    output = tmp_path / "report.json"
    report = run_parts(parts, settings, None, output, 600)
    rows = report["rows"]
    assert json.loads(output.read_text()) == report
    assert {name: row["status"] for name, row in rows.items()} == {
        "exit": "failed",
        "crash": "failed",
        "hang": "timed out",
        "a": "ok",
    }
    assert rows["exit"]["reason"] == "the process ended with status 1; its last output: Fatal: no memory"
    assert rows["crash"]["reason"] == "the process ended with signal SIGSEGV; it printed nothing"
    assert rows["hang"]["reason"] == "took longer than 1 s; its last output: compiling"
    # A process that the part started has ended, too.
    until(lambda: has_ended(int((settings.work / "child").read_text())))


@pytest.mark.usefixtures("faults")
def test_good_rows_are_kept_and_no_row_is_missing(settings: Settings, tmp_path: Path):
    output, part = tmp_path / "report.json", Part("a", 60, "a", (1,))
    run_parts([part], settings, None, output, 600)
    report = run_parts([part._replace(arguments=(2,)), Part("b", 60, "b")], settings, None, output, 0)
    assert report["rows"]["a"]["figures"] == {"called": [1]}
    assert report["rows"]["b"] == {"status": "not run", "reason": "the 0 s of --seconds are over"}


def test_the_parent_needs_no_package():
    """It installs the wheels, so it must start without them."""
    code = "import sys; import experiments.lab.benchmarks.gpu; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "numpy", "haliax", "levanter", "marin_rl"} & set(done.stdout.split())
