# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from transformers import LlamaConfig

from marin_rl.batching.rl_example import pack_batch
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.data.dataset import join_examples, join_pairs
from marin_rl.data.rows import make_example
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.pods import compiling
from marin_rl.pods.compiling import (
    CompileFailure,
    ProgramMemory,
    chip_bytes,
    compile_program,
    compiled_memory,
    explain,
)
from marin_rl.pods.programs import LOWER, RunShapes, open_shapes
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.setup import own_rows
from tests.pods.plan_cases import tiny_config, tiny_supervised


@pytest.fixture(scope="module")
def run() -> RunShapes:
    return open_shapes(tiny_config(), vocab_size=128)


def opened(*overrides: str) -> RunShapes:
    return open_shapes(tiny_config(*overrides), vocab_size=128)


def test_bytes_of_a_chip_are_those_of_its_shards(run: RunShapes):
    floats = sum(leaf.size for leaf in jax.tree.leaves(run.policy))
    assert chip_bytes(run.parameters) == 4 * floats


@pytest.mark.medium
@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_unrolled_program_of_three_layers_equals_the_compiled_one(run: RunShapes, program: str):
    three = run.with_layers(3)
    whole, direct = compile_program(program, three), compiled_memory(program, three)
    assert isinstance(whole, ProgramMemory)
    for name in ("arguments", "outputs", "aliased"):
        # Small arrays are padded.
        assert getattr(whole, name) == pytest.approx(getattr(direct, name), rel=0.01)


def test_the_teacher_of_an_update_may_have_another_size(
    run: RunShapes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("marin_rl.parts.teacher.check_tokenizer", lambda policy, path: None)
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    teacher = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256)
    teacher.save_pretrained(tmp_path)
    exact = ("--kl", "{type: exact, beta: 0.1}", "--trainer.mp", "p=f32,c=bf16")
    initial, other = opened(*exact), opened(*exact, "--reference", f"{{type: checkpoint, path: {tmp_path}}}")
    assert run.teacher is None
    assert chip_bytes(initial.teacher) == chip_bytes(run.parameters) / 2
    matrices = 2 * 160 * 32 + 4 * 32 * 32 + 3 * 32 * 48
    assert chip_bytes(other.teacher) == 2 * (matrices + 3 * 32)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "key", "values"),
    [
        ("score", "trainer.per_device_parallelism", (1, 2, 4)),
        ("prefill", "rollouts.max_length", (32, 64, 128)),
    ],
)
def test_larger_sizes_never_need_less_memory(program: str, key: str, values: tuple[int, ...]):
    totals = []
    for value in values:
        memory = compile_program(program, opened(f"--{key}", str(value), "--model.seq_len", "256"))
        assert isinstance(memory, ProgramMemory)
        totals.append(memory.total)
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


@pytest.mark.medium
@pytest.mark.parametrize("kind", [SftConfig, DpoConfig])
def test_programs_of_data_are_those_of_the_run(kind: type[SftConfig | DpoConfig]):
    """Compared with the programs lowered for weights and a packed batch."""
    shapes = open_shapes(tiny_supervised(kind), vocab_size=ChatTokenizer(byte_tokenizer()).vocab_size)
    parts: Any = shapes.parts
    state = parts.first_state(parts.first_policy())
    sequence = np.full(32, 5), np.arange(32) > 0
    pairs = kind is DpoConfig
    rows = [make_example("row", [sequence] * (2 if pairs else 1), chosen=int(pairs))] * 8
    unscored = join_examples(rows)
    scored = pack_batch(
        unscored, TokenMeanConfig(), parts.layout, pad_token_id=0, own_rows=own_rows(parts.trainer)
    ).microbatches
    if pairs:
        rows = [dataclasses.replace(row, reference=np.zeros(62, np.float32)) for row in rows]
        updated = parts.pack(join_pairs(rows, length_normalized=False)).microbatches
    else:
        updated = parts.pack(unscored).microbatches
    assert LOWER["update"](shapes).as_text() == parts.learner.lower(state, updated).as_text()
    assert LOWER["score"](shapes).as_text() == parts.scorer.lower(state.model, scored).as_text()


HBM = "RESOURCE_EXHAUSTED: XLA:TPU compile error. Ran out of memory in memory space hbm. Used 40.10G of 15.75G hbm."
OUT_OF_VMEM = "out of vector memory (VMEM): used 16.20m of 16.00m"
VMEM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 16.20M of 16.00M vmem."


@pytest.mark.parametrize(
    ("program", "overrides", "remedy"),
    [
        ("update", [], "set model.gradient_checkpointing to true"),
        ("update", ["--model.gradient_checkpointing", "true"], "set trainer.per_device_parallelism to 2"),
        ("score", [], "set trainer.per_device_parallelism to 2 (now 4 rows on each device)"),
        ("score", ["--trainer.per_device_parallelism", "1"], "use more chips, raise trainer.model_axis_size"),
        ("decode", [], "set sampling.max_seqs to 4, or raise trainer.model_axis_size"),
        ("decode", ["--sampling.kv_cache_dtype", "float32"], "sampling.kv_cache_dtype to bfloat16"),
        ("initial state", [], "use more chips"),
        (
            "sampler weights",
            [],
            "raise trainer.model_axis_size with trainer.tensor_parallel_axes: [mlp, heads, kv_head] up to the chips",
        ),
    ],
)
def test_remedy_of_too_little_main_memory(run: RunShapes, program: str, overrides: list[str], remedy: str):
    failure = explain(program, jax.errors.JaxRuntimeError(HBM), opened(*overrides) if overrides else run)
    assert failure.problem == "out of main memory (HBM): used 40.10g of 15.75g"
    assert remedy in failure.remedy


@pytest.mark.parametrize(
    ("program", "error", "problem", "remedy"),
    [
        ("update", jax.errors.JaxRuntimeError(VMEM), OUT_OF_VMEM, "model.flash_attention_block_size"),
        ("prefill", jax.errors.JaxRuntimeError(VMEM), OUT_OF_VMEM, "raise trainer.model_axis_size"),
        # An error of marin_rl keeps its remedy.
        ("update", ValueError("rollouts.row_length is 640; set it to 1024"), "rollouts.row_length is 640", "set it to"),
        ("decode", AttributeError("no 'layers'\nmore"), "AttributeError: no 'layers' more", "levanter's LlamaConfig"),
    ],
)
def test_other_problems(run: RunShapes, program: str, error: Exception, problem: str, remedy: str):
    failure = explain(program, error, run)
    assert failure.problem == problem
    assert remedy in failure.remedy


def test_error_of_lowering_is_a_result(run: RunShapes, monkeypatch: pytest.MonkeyPatch):
    def fail(run: RunShapes) -> Any:
        raise NotImplementedError("no such kernel")

    monkeypatch.setitem(cast(Any, compiling.LOWER), "update", fail)
    assert compile_program("update", run) == explain("update", NotImplementedError("no such kernel"), run)


def test_cache_above_its_limit_is_a_result():
    failure = compile_program("decode", opened("--sampling.max_cache_gib", "1e-6"))
    assert isinstance(failure, CompileFailure)
    assert "more than sampling.max_cache_gib 1e-06" in failure.problem
    assert "lower sampling.max_seqs" in failure.remedy
