# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compiles the programs of one cell of `compile_tpu` for TPUs that are absent; run by it in a separate process."""

import argparse
import dataclasses
import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jmp
from levanter.models.llama import LlamaConfig
from levanter.models.qwen import Qwen3Config

from experiments.lab.benchmarks.measurement import program_bytes
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import ArithmeticConfig
from marin_rl.pods.absent_devices import absent_devices
from marin_rl.pods.chips import parse_topology
from marin_rl.pods.programs import LOWER, RunShapes, open_shapes
from marin_rl.pods.run_plan import of_one_host
from marin_rl.sampling.config import SamplingConfig
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len

MODELS: dict[str, tuple[LlamaConfig, int, int]] = {
    "0.6B": (
        Qwen3Config(
            hidden_dim=1024,
            intermediate_dim=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        151936,
        1,
    ),
    "1B": (
        LlamaConfig(
            hidden_dim=2048,
            intermediate_dim=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            tie_word_embeddings=True,
        ),
        128256,
        1,
    ),
    "8B": (
        Qwen3Config(hidden_dim=4096, intermediate_dim=12288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128),
        151936,
        4,
    ),
}
"""Architecture, vocabulary size and `model_axis_size` by name: Qwen3-0.6B, Llama-3.2-1B and Qwen3-8B."""

TOPOLOGIES = {"v5e": "v5e:4x4", "v5p": "v5p:2x2x4", "v6e": "v6e:4x4"}
"""Topology of 16 chips by kind of chip."""
CHIPS = 16
ROW_TOKENS = 8192
"""Tokens of a microbatch on each data shard, at least one row."""
CACHED_TOKENS = 65536
"""Tokens in the cache of each data shard, at least two slots."""
LAYERS = (1, 2)
"""Numbers of layers that are compiled; all others follow from the difference."""
PROGRAMS = {"learner": "update", "reference": "score", "prefill": "prefill", "decode": "decode"}
"""Name of each program in `marin_rl.pods.programs`."""


def make_config(name: str, length: int) -> TrainConfig:
    """Return the config of a run with a model and sequences of this length."""
    model, _, model_axis = MODELS[name]
    trainer = dataclasses.replace(
        TrainerConfig(),
        model_axis_size=model_axis,
        tensor_parallel_axes=["mlp", "heads", "kv_head"] if model_axis > 1 else None,
        mp=jmp.get_policy("p=f32,c=bfloat16"),
        per_device_parallelism=max(1, ROW_TOKENS // length),
    )
    slots = max(2, CACHED_TOKENS // length) * (CHIPS // model_axis)
    return TrainConfig(
        environment=ArithmeticConfig(),
        run_dir=f"runs/compile-{name}",
        model=dataclasses.replace(model, **seq_len(length)),
        rollouts=RolloutConfig(
            prompts_per_step=trainer.per_device_parallelism, group_size=8, max_length=length, packing=True
        ),
        sampling=SamplingConfig(max_new_tokens=length // 2, max_seqs=slots, kv_cache_dtype="bfloat16"),
        trainer=trainer,
    )


def measure(program: str, run: RunShapes, file: Path | None) -> dict[str, Any]:
    """Compile a program; return its bytes on each chip.

    Args:
        program: one of `PROGRAMS`.
        run: the run.
        file: where to write the optimized program, compressed; None discards it.
    """
    start = time.perf_counter()
    compiled = LOWER[PROGRAMS[program]](run).compile()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress((compiled.as_text() or "").encode(), 3))
    return {**program_bytes(compiled), "seconds": round(time.perf_counter() - start, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line of JSON for each program."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("chip", choices=TOPOLOGIES)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("length", type=int)
    parser.add_argument("programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--keep", type=Path, help="folder for the optimized programs, in XLA's text form")
    chosen = parser.parse_args(arguments)
    jax.config.update("jax_enable_compilation_cache", False)
    topology, config = parse_topology(TOPOLOGIES[chosen.chip]), make_config(chosen.model, chosen.length)
    host = topology.local(), of_one_host(config, topology)
    for program in chosen.programs:
        devices, compiled = host if program in ("prefill", "decode") else (topology, config)
        layers: dict[str, Any] = {}
        error = None
        with absent_devices(devices):
            run = open_shapes(compiled, MODELS[chosen.model][1])
            for count in LAYERS:
                name = f"{program}-{chosen.model}-{chosen.length}-{count}.hlo.gz"
                file = None if chosen.keep is None else chosen.keep / name
                try:
                    layers[str(count)] = measure(program, run.with_layers(count), file)
                except (ValueError, RuntimeError, NotImplementedError) as raised:
                    error = f"{type(raised).__name__}: {str(raised)[:2000]}"
                    break
        cell = {"chip": chosen.chip, "model": chosen.model, "length": chosen.length, "program": program}
        print(json.dumps({**cell, "layers": layers, "error": error}), flush=True)


if __name__ == "__main__":
    main()
