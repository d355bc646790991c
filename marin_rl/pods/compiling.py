# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compiles one program of a run, and returns its memory. A failure is a result."""

import dataclasses
import math
import time
from typing import Any, cast

import jax
import numpy as np

from marin_rl.pods.chips import Number
from marin_rl.pods.programs import LOWER, UNROLLED, RunShapes


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of a compiled program on each chip."""

    arguments: Number
    """All inputs."""
    outputs: Number
    """All outputs."""
    aliased: Number
    """Outputs that replace an input."""
    temporaries: Number
    """Everything else that is allocated when the program uses most memory."""
    seconds: float = 0.0
    """Time to lower and compile."""

    @property
    def total(self) -> Number:
        """Bytes on each chip while the program runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class CompileFailure:
    """A program that cannot be compiled, or that needs too much memory."""

    problem: str
    """The failure, in one line."""
    remedy: str
    """The settings to change, in one sentence."""


def compile_program(name: str, run: RunShapes) -> ProgramMemory | CompileFailure:
    """Compile a program of a run on the current devices.

    Programs with one copy of the code per layer are compiled with one and two layers. The difference is the cost of a
    layer; temporaries are those of two layers, because layers run one after another. Layers of different kinds are all
    compiled. `name` is one of `programs.LOWER`.
    """
    start = time.perf_counter()
    try:
        if name not in UNROLLED or run.num_layers <= 2 or run.has_dense_layers:
            memory = compiled_memory(name, run)
        else:
            one, two = (compiled_memory(name, run.with_layers(count)) for count in (1, 2))
            memory = extrapolate(one, two, run.num_layers)
    # Any error of lowering and compiling is a result.
    except Exception as error:
        return explain(name, error, run)
    return dataclasses.replace(memory, seconds=time.perf_counter() - start)


def extrapolate(one: ProgramMemory, two: ProgramMemory, layers: int) -> ProgramMemory:
    """Return the memory of a program of several layers, from that of one and two.

    >>> extrapolate(ProgramMemory(5, 0, 0, 3), ProgramMemory(7, 0, 0, 3), 10)
    ProgramMemory(arguments=23, outputs=0, aliased=0, temporaries=3, seconds=0.0)
    """

    def line(name: str) -> Number:
        return getattr(one, name) + (layers - 1) * (getattr(two, name) - getattr(one, name))

    return ProgramMemory(line("arguments"), line("outputs"), line("aliased"), two.temporaries)


def compiled_memory(name: str, run: RunShapes) -> ProgramMemory:
    """Compile a program with all layers of a run, and return its memory."""
    memory = cast(Any, LOWER[name](run).compile().memory_analysis())
    return ProgramMemory(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        temporaries_at_peak(memory, run.trainer.device_mesh.devices.flat[0].platform),
    )


def temporaries_at_peak(memory: Any, platform: str) -> int:
    """Return the temporaries of a program when it uses most memory.

    XLA for TPUs refuses a program by its peak. Its `temp_size_in_bytes` counts more than is allocated at a time: a
    program with 5.6 GiB of arguments and 13.4 GiB of that size compiles for a chip of 15.75 GiB, with a peak of 14.2.
    The peak on a CPU does not contain temporaries.
    """
    if platform != "tpu":
        return memory.temp_size_in_bytes
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return max(memory.peak_memory_in_bytes - kept, 0)


def chip_bytes(tree: Any) -> int:
    """Return the bytes of arrays or shapes with shardings on each chip."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "sharding", None) is not None]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def explain(name: str, error: Exception, run: RunShapes) -> CompileFailure:
    """Return the problem of an error of lowering or compiling, and its remedy."""
    text = " ".join(str(error).split()) or type(error).__name__
    lowered = text.lower()
    if "vmem" in lowered:
        return CompileFailure(_used(text, "vmem"), _VMEM_REMEDIES["sampler" if name in UNROLLED else "learner"])
    if "resource_exhausted" in lowered or "hbm" in lowered:
        return CompileFailure(_used(text, "hbm"), memory_remedy(name, run))
    if isinstance(error, ValueError) and "; " in text and len(text) < 600:
        # marin_rl's own errors name the remedy.
        problem, _, remedy = text.partition("; ")
        return CompileFailure(problem, remedy)
    kind = type(run.config.model).__name__
    return CompileFailure(
        f"{type(error).__name__}: {text[:200]}",
        f"check that levanter's {kind} supports this mesh and precision, starting with trainer.model_axis_size: 1",
    )


_MODEL_AXIS = "trainer.model_axis_size with trainer.tensor_parallel_axes: [mlp, heads, kv_head]"
_VMEM_REMEDIES = {
    "learner": "set model.flash_attention_block_size to 256 or 128, for a smaller block of attention in vector memory",
    "sampler": f"raise {_MODEL_AXIS}, so that each chip has fewer KV heads, or lower rollouts.max_length",
}


def memory_remedy(name: str, run: RunShapes) -> str:
    """Return the settings to change, so that a program needs less main memory."""
    config, rows = run.config, run.trainer.per_device_parallelism
    if name in ("resharding", "sampler weights"):
        return f"raise {_MODEL_AXIS} up to the chips of a host, or use a chip with more memory"
    if name in UNROLLED:
        halved = max(run.rl.sampling.max_seqs // 2, 1)
        dtype = "" if run.rl.sampling.kv_cache_dtype != "float32" else ", or sampling.kv_cache_dtype to bfloat16"
        return f"set sampling.max_seqs to {halved}{dtype}, or raise {_MODEL_AXIS}"
    if name == "update" and getattr(config.model, "gradient_checkpointing", True) is False:
        return "set model.gradient_checkpointing to true"
    if name in ("update", "score") and rows > 1:
        return f"set trainer.per_device_parallelism to {rows // 2} (now {rows} rows on each device)"
    if name in ("update", "score"):
        return f"use more chips, raise {_MODEL_AXIS}, or lower {config.rows.section}.max_length and logprob_block_size"
    return "use more chips, so that each holds a smaller part of weights and optimizer state"


def _used(text: str, space: str) -> str:
    """Return the sizes that XLA names, or the first part of its message."""
    at = text.lower().find("used ")
    sizes = text[at : at + 60].split(space)[0] if at >= 0 else ""
    kind = "vector memory (VMEM)" if space == "vmem" else "main memory (HBM)"
    return f"out of {kind}: {sizes.strip().lower()}".rstrip(": ") if sizes else f"out of {kind}: {text[:160]}"
