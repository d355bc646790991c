# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compiles the programs of one cell of `compile_tpu` for TPUs that are absent; run by it in a separate process."""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import Axis
from jax._src.core import trace_state_clean
from jax.experimental import mesh_utils
from jax.experimental.topologies import get_topology_desc
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel
from levanter.models.qwen import Qwen3Config
from levanter.optim import AdamConfig
from levanter.trainer import TrainerConfig

from experiments.benchmarks.hlo import count_collectives, loop_bytes
from experiments.benchmarks.measurement import program_bytes
from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample
from marin_rl.config.train_config import LOGPROB_BLOCK_SIZE
from marin_rl.learner.attention_kernel import attention_kernel
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_model import model_shape
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Learner, placed_shape
from marin_rl.objectives.kl import NoKlConfig
from marin_rl.objectives.policy_loss import ReinforceLossConfig
from marin_rl.sampling.attention import Tokens, attention_form
from marin_rl.sampling.decoding import Programs, Slots, compile_programs
from marin_rl.sampling.group_sampler import DECODE_STEPS
from marin_rl.sampling.prefill import prefill_shape

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

TOPOLOGIES = {"v5e": ("v5e:4x4", "v5litepod-16"), "v5p": ("v5p:2x2x4", "v5p-32"), "v6e": ("v6e:4x4", "v6e-16")}
"""Topology and accelerator type of 16 chips by kind of chip."""
BLOCK_SIZE = LOGPROB_BLOCK_SIZE["tpu"]
ROW_TOKENS = 8192
"""Tokens of a microbatch on each data shard, at least one row."""
CACHED_TOKENS = 65536
"""Tokens in the cache of each data shard, at least two slots."""
LAYERS = (1, 2)
"""Numbers of layers that are compiled; all others follow from the difference."""


def _is_tracing() -> bool:
    return not trace_state_clean()


@contextlib.contextmanager
def absent_devices(chip: str) -> Iterator[None]:
    """Let jax and levanter find the chips of a topology instead of this machine's devices."""
    topology, accelerator = TOPOLOGIES[chip]
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        # Otherwise a second compiling process on this machine fails.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    devices = list(get_topology_desc(platform="tpu", topology_name=topology).devices)

    def make_mesh(replicas: int, data: int, model: int, *_: int) -> jax.sharding.Mesh:
        shape = (replicas, data, model)
        grid = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(grid, ("replica", "data", "model"))

    with (
        mock.patch("jax.devices", return_value=devices),
        mock.patch("jax.device_count", return_value=len(devices)),
        mock.patch("jax.default_backend", return_value="tpu"),
        mock.patch("levanter.trainer.create_fsdp_mesh", make_mesh),
        # Both execute operations eagerly, which is impossible on an absent device.
        mock.patch("jax.ensure_compile_time_eval", contextlib.nullcontext),
        mock.patch("haliax.partitioning.is_in_jit", _is_tracing),
    ):
        yield


class Parts(NamedTuple):
    """What all programs of a model on a topology have in common; only shapes, no arrays."""

    trainer: TrainerConfig
    """The mesh, with parameters and optimizer sharded over all chips."""
    config: LlamaConfig
    """The architecture."""
    model: LmHeadModel
    """Shapes of the parameters."""
    parameters: LmHeadModel
    """The same with their shardings."""


@functools.cache
def make_parts(name: str, length: int, layers: int) -> Parts:
    """Return the common parts of a model with this number of layers."""
    config, vocab, model_axis = MODELS[name]
    trainer = TrainerConfig(
        model_axis_size=model_axis,
        tensor_parallel_axes=["mlp", "heads", "kv_head"] if model_axis > 1 else None,
        fsdp_axis="embed",
        mp=jmp.get_policy("p=f32,c=bfloat16"),
    )
    config = dataclasses.replace(config, num_layers=layers, seq_len=length)
    config = cast(LlamaConfig, attention_kernel(config, "tpu").configure(config, length))
    model = model_shape(config, Axis("vocab", vocab), trainer)
    return Parts(trainer, config, model, placed_shape(model, trainer.device_mesh, trainer.parameter_axis_mapping))


def make_layout(parts: Parts, length: int) -> RowLayout:
    """Return the shape of a microbatch."""
    return RowLayout(length, max(1, ROW_TOKENS // length) * parts.trainer.data_axis_size, packed=True)


def make_batch(layout: RowLayout) -> list[RlExample]:
    """Return a batch of one microbatch."""
    axes = (Axis("batch", layout.rows_per_microbatch), Axis("position", layout.row_length))
    shape = [axis.size for axis in axes]
    arrays = {
        name: hax.NamedArray(cast(jax.Array, np.zeros(shape, dtype)), axes) for name, dtype in PER_TOKEN_DTYPES.items()
    }
    return [RlExample(**arrays)]


def lower_learner(name: str, length: int, layers: int) -> jax.stages.Lowered:
    """Lower an update of one microbatch."""
    parts = make_parts(name, length, layers)
    loss = RlLoss(policy_loss=ReinforceLossConfig(), kl=NoKlConfig(), temperature=1.0, block_size=BLOCK_SIZE)
    learner = Learner(parts.trainer, AdamConfig(), loss, num_updates=1000)
    state = learner.state_shape(parts.model)
    placed = placed_shape(state, parts.trainer.device_mesh, parts.trainer.parameter_axis_mapping)
    return learner.lower(placed, make_batch(make_layout(parts, length)))


def lower_reference(name: str, length: int, layers: int) -> jax.stages.Lowered:
    """Lower the forward pass of the reference over one microbatch."""
    parts, layout = make_parts(name, length, layers), make_layout(make_parts(name, length, layers), length)
    scorer = Scorer(parts.trainer, layout, pad_token_id=0, temperature=1.0, block_size=BLOCK_SIZE)
    return scorer.lower(parts.parameters, make_batch(layout))


class SamplerInputs(NamedTuple):
    """Programs of the sampler, and shapes of their arguments."""

    programs: Programs
    model: Any
    cache: Any
    slots: int


@functools.cache
def make_sampler_inputs(name: str, length: int, layers: int) -> SamplerInputs:
    """Compile the programs that make the weights for decoding and the cache, for the shardings of their outputs."""
    parts = make_parts(name, length, layers)
    device = parts.trainer.device_mesh.devices.flat[0]
    slots = max(2, CACHED_TOKENS // length) * parts.trainer.data_axis_size
    programs = compile_programs(
        parts.trainer,
        parts.config,
        attention_form(device.platform, device.device_kind),
        slots=slots,
        context=length,
        dtype=jnp.dtype(jnp.bfloat16),
        steps=DECODE_STEPS,
    )
    with parts.trainer.use_device_mesh():
        model = _output_shapes(cast(Any, programs.prepare), parts.parameters)
        return SamplerInputs(programs, model, _output_shapes(cast(Any, programs.empty)), slots)


def _output_shapes(program: jax.stages.Wrapped, *arguments: Any) -> Any:
    compiled = program.lower(*arguments).compile()
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        compiled.out_info,
        compiled.output_shardings,
    )


def lower_prefill(name: str, length: int, layers: int) -> jax.stages.Lowered:
    """Lower a call of `prefill`."""
    inputs, trainer = make_sampler_inputs(name, length, layers), make_parts(name, length, layers).trainer
    shards = trainer.data_axis_size
    rows, chunk = prefill_shape("tpu", inputs.slots // shards, length, length // 2)
    shape = (rows * shards, chunk)
    tokens = Tokens(_integers(*shape), _integers(rows * shards), _integers(*shape))
    with trainer.use_device_mesh():
        return cast(Any, inputs.programs.prefill).lower(inputs.model, inputs.cache, tokens)


def lower_decode(name: str, length: int, layers: int) -> jax.stages.Lowered:
    """Lower a call of `decode`."""
    inputs, trainer = make_sampler_inputs(name, length, layers), make_parts(name, length, layers).trainer
    slots = inputs.slots
    keys, temperatures = jax.ShapeDtypeStruct((slots, 2), jnp.uint32), jax.ShapeDtypeStruct((slots,), jnp.float32)
    active = jax.ShapeDtypeStruct((slots,), jnp.bool_)
    numbers = _integers(slots)
    state = Slots(*cast(Any, (active, numbers, numbers, _integers(slots, 1), numbers, keys, temperatures)))
    with trainer.use_device_mesh():
        return cast(Any, inputs.programs.decode).lower(inputs.model, inputs.cache, state, _integers(2, 2), _integers())


def _integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


LOWER = {"learner": lower_learner, "reference": lower_reference, "prefill": lower_prefill, "decode": lower_decode}
"""Function that lowers each program."""


def measure(program: str, name: str, length: int, layers: int, keep: Path | None) -> dict[str, Any]:
    """Compile a program; return its bytes on each chip, its cost and its collectives."""
    start = time.perf_counter()
    compiled = LOWER[program](name, length, layers).compile()
    cost, text = cast(dict[str, float], compiled.cost_analysis()), compiled.as_text() or ""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{program}-{name}-{length}-{layers}.hlo.gz").write_bytes(gzip.compress(text.encode(), 3))
    measured = {
        **program_bytes(compiled),
        "bytes_accessed": cost.get("bytes accessed"),
        "collectives": count_collectives(text)._asdict(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if program == "decode":
        inputs = make_sampler_inputs(name, length, layers)
        measured["weight_bytes"], measured["cache_bytes"] = map(_chip_bytes, (inputs.model, inputs.cache))
        measured["step_bytes"] = loop_bytes(text)
    return measured


def _chip_bytes(tree: Any) -> int:
    """Return the bytes of shapes on each chip."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line of JSON for each program."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("chip", choices=TOPOLOGIES)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("length", type=int)
    parser.add_argument("programs", nargs="+", choices=LOWER)
    parser.add_argument("--keep", type=Path, help="folder for the optimized programs, in XLA's text form")
    chosen = parser.parse_args(arguments)
    with absent_devices(chosen.chip):
        for program in chosen.programs:
            layers: dict[str, Any] = {}
            error = None
            for count in LAYERS:
                try:
                    layers[str(count)] = measure(program, chosen.model, chosen.length, count, chosen.keep)
                except (ValueError, RuntimeError, NotImplementedError) as raised:
                    error = f"{type(raised).__name__}: {str(raised)[:2000]}"
                    break
            cell = {"chip": chosen.chip, "model": chosen.model, "length": chosen.length, "program": program}
            print(json.dumps({**cell, "layers": layers, "error": error}), flush=True)


if __name__ == "__main__":
    main()
