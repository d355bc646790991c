# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The plan of a run: its programs compiled for a topology, their memory, and the least time of a step."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax

from marin_rl.batching.packing import choose_layout, count_microbatches
from marin_rl.config.reference_config import CheckpointReferenceConfig
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.starting_weights import stored_vocab_size
from marin_rl.parts.model import Lengths
from marin_rl.parts.rl import RunParts
from marin_rl.parts.teacher import teacher_spec
from marin_rl.pods.absent_devices import absent_devices
from marin_rl.pods.chips import GIB, Chip, Number, Topology
from marin_rl.pods.compiling import CompileFailure, ProgramMemory, chip_bytes, compile_program, memory_remedy
from marin_rl.pods.least_time import StepSize, sampler_seconds, trainer_seconds
from marin_rl.pods.programs import UNROLLED, RunShapes, open_shapes, programs_of
from marin_rl.sessions.earlier_run import resolve_model
from marin_rl.sessions.recipes import recipe_of
from marin_rl.utils.devices.sharding import check_sharding

ConfigT = TypeVar("ConfigT", bound=AbstractRunConfig)

ON_ONE_HOST = ("prefill", "short prefill", "decode")
"""Programs of the sampler that run on the chips of each host alone."""


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """A program of a run on one chip."""

    name: str
    """One of `programs.LOWER`."""
    place: str
    """`trainer` or `worker`."""
    compiled: ProgramMemory | None
    """Memory of the program; None if it does not compile."""
    others: Number
    """Bytes that stay allocated and are not among the program's arguments."""
    chip: Chip
    """The chip that it runs on."""
    problem: CompileFailure | None
    """The reason, if it does not compile or needs too much memory."""

    @property
    def memory(self) -> Number:
        """Bytes on each chip while the program runs; 0 if it does not compile."""
        return 0 if self.compiled is None else self.others + self.compiled.total


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    topology: Topology
    """Chips of the trainer."""
    worker_topology: Topology | None
    """Chips of a rollout worker; None in `mode: sync`."""
    mesh: Mapping[str, int]
    """Sizes of the trainer's mesh."""
    parameters: int
    """Number of parameters of the policy."""
    adapter: int | None
    """Number of parameters of the adapter that is trained; None if the policy is."""
    targets: tuple[str, ...]
    """Modules that the adapter changes."""
    layers: int
    """Number of layers."""
    rows: int
    """Rows of a microbatch on each data-parallel device, which may share prompts and be longer."""
    row_length: int
    """Positions of a row."""
    step: StepSize
    """Size of a step."""
    description: str
    """The step in words."""
    held: Mapping[str, Number]
    """Bytes on each chip of the trainer that stay allocated, by name."""
    programs: tuple[PlannedProgram, ...]
    """All programs."""
    trainer_seconds: Mapping[str, float]
    """Least seconds of each phase of a step on the trainer; empty if the rates of its chip are unknown."""
    worker_seconds: Mapping[str, float]
    """The same on one rollout worker; empty in `mode: sync`."""

    @property
    def fits(self) -> bool:
        """Whether every program compiles and fits the memory."""
        return all(program.problem is None for program in self.programs)

    @property
    def workers(self) -> int | None:
        """Workers whose sampling takes no longer than the trainer's step; None if there are none, or no rates."""
        if not self.worker_seconds or not self.trainer_seconds:
            return None
        return math.ceil(sum(self.worker_seconds.values()) / sum(self.trainer_seconds.values()))


def make_plan(
    config: AbstractRunConfig,
    topology: Topology,
    *,
    vocab_size: int,
    worker_topology: Topology | None = None,
    lengths: Lengths | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Plan:
    """Compile the programs of a run for a topology.

    Args:
        config: config of the run; `model` is set.
        topology: chips of the trainer.
        vocab_size: number of tokens of the model.
        worker_topology: chips of a rollout worker, in `mode: async` only; None for one host of the trainer's kind.
        lengths: tokens of every rollout of an RL run; None for the maximum.
        report: called with the name of each program before it is compiled.

    Raises:
        TopologyError: if the devices are not available.
        ValueError: if the mesh or the rows do not fit the devices or the model, or the workers' chips not the run.
    """
    is_async = config.is_async
    if worker_topology is not None:
        _check_workers(is_async, worker_topology)
    worker_topology = (worker_topology or topology.local()) if is_async else None
    jax.config.update("jax_enable_compilation_cache", topology.chip.platform == "cpu")
    names = programs_of(recipe_of(config).parts(config, config.trainer), topology.num_hosts)
    on_host = [name for name in names if name in (UNROLLED if is_async else ON_ONE_HOST)]
    of_worker: dict[str, float] = {}
    with absent_devices(topology):
        run, step, description = _chosen_layout(_open(config, vocab_size), lengths)
        held, mesh, rows = _held(run), dict(run.trainer.device_mesh.shape), run.layout.rows_per_microbatch
        of_mesh = [name for name in names if name not in on_host]
        programs = [_plan_program(name, "trainer", run, held, topology.chip, report) for name in of_mesh]
        of_trainer = trainer_seconds(run, step, topology.chip)
        rows //= run.trainer.data_axis_size
    if on_host and worker_topology is None:
        # XLA compiles a program with collectives for all devices of a topology only.
        with absent_devices(topology.local()):
            host = _open(of_one_host(run.rl, topology), vocab_size)
            programs += [_plan_program(name, "trainer", host, held, topology.chip, report) for name in on_host]
            of_trainer |= sampler_seconds(host, step, topology.chip, topology.num_hosts)
    elif on_host and worker_topology is not None:
        with absent_devices(worker_topology):
            try:
                section = run.rl.workers.trainer_config(config.trainer)
                worker = _open(dataclasses.replace(config, trainer=section), vocab_size)
            except ValueError as error:
                raise ValueError(f"rollout workers: {_for_workers(str(error))}") from error
            weights, chip = _weights(worker, worker.sent), worker_topology.chip
            programs += [_plan_program(name, "worker", worker, weights, chip, report) for name in on_host]
            of_worker = sampler_seconds(worker, step, chip, hosts=1)
    parameters = run.spec.num_parameters
    return Plan(
        topology=topology,
        worker_topology=worker_topology,
        mesh=mesh,
        parameters=parameters,
        adapter=None if config.lora is None else run.spec.num_trained,
        targets=() if config.lora is None else tuple(config.lora.targets),
        layers=run.num_layers,
        rows=rows,
        row_length=run.layout.row_length,
        step=step,
        description=description,
        held=held,
        programs=tuple(programs),
        trainer_seconds=of_trainer,
        worker_seconds=of_worker,
    )


def of_one_host(config: TrainConfig, topology: Topology) -> TrainConfig:
    """Return the config of a run with the sampler that each host of a topology has."""
    if topology.num_hosts == 1:
        return config
    trainer = dataclasses.replace(
        config.trainer,
        model_axis_size=math.gcd(config.trainer.model_axis_size, topology.chips_per_host),
        replica_ici_axis_size=1,
        replica_dcn_axis_size=1,
    )
    sampling = dataclasses.replace(config.sampling, max_seqs=-(-config.sampling.max_seqs // topology.num_hosts))
    return dataclasses.replace(config, trainer=trainer, sampling=sampling)


def _check_workers(is_async: bool, topology: Topology) -> None:
    """Raise ValueError if the run has no workers, or they cannot have these chips."""
    if not is_async:
        raise ValueError(
            f"--worker_topology is {topology.name}, but a run with mode: sync has no workers; leave it out, or plan "
            "with --mode async"
        )
    if topology.num_hosts > 1:
        raise ValueError(
            f"--worker_topology is {topology.name}, which has {topology.num_hosts} hosts, but a rollout worker has "
            f"one; give {topology.local().name}"
        )


def _for_workers(text: str) -> str:
    """Return a message with the keys of the workers' mesh instead of the trainer's."""
    for key in ("model_axis_size", "tensor_parallel_axes"):
        text = text.replace(f"trainer.{key}", f"workers.mesh.{key}")
    return text


def _open(config: AbstractRunConfig, vocab_size: int) -> RunShapes:
    run = open_shapes(config, vocab_size)
    mappings = [run.trainer.parameter_axis_mapping, run.trainer.compute_axis_mapping]
    check_sharding(run.policy, run.trainer.device_mesh.shape, mappings)
    return run


_ALLOCATED_LATER = {
    "initial state": ("optimizer", "reference", "copy for workers"),
    "weight copy": ("copy for workers",),
}
"""Held arrays that do not exist yet when a program runs, or that it creates."""


def _plan_program(
    name: str, place: str, run: RunShapes, held: Mapping[str, Number], chip: Chip, report: Callable[[str], None]
) -> PlannedProgram:
    """Compile a program, and compare its memory and that of the arrays that stay allocated with the chip's."""
    report(name)
    result = compile_program(name, run)
    if isinstance(result, CompileFailure):
        planned = PlannedProgram(name, place, None, 0, chip, result)
    else:
        resident = sum(size for part, size in held.items() if part not in _ALLOCATED_LATER.get(name, ()))
        arguments = sum(held[part] for part in _held_arguments(name, held, run))
        # Held arrays that are arguments of the program count once; a program may take a part of them.
        others = resident - min(arguments, result.arguments)
        planned = PlannedProgram(name, place, result, others, chip, None)
        if planned.memory > chip.memory:
            problem = f"needs {planned.memory / GIB:.2f} of {chip.memory / GIB:.2f} GiB"
            planned = dataclasses.replace(planned, problem=CompileFailure(problem, memory_remedy(name, run)))
    if planned.problem is not None and place == "worker":
        problem = CompileFailure(planned.problem.problem, _for_workers(planned.problem.remedy))
        planned = dataclasses.replace(planned, problem=problem)
    return planned


def _held(run: RunShapes) -> dict[str, Number]:
    """Return the bytes on each chip of the trainer that stay allocated."""
    state = run.parts.make_learner(run.layout, run.base).state_shape(run.spec.trained)
    held = _weights(run, run.trained)
    held["optimizer"] = chip_bytes(run.place(state)) - held["weights"]
    # The log-probabilities of the reference of pairs are computed with the first weights, and kept on the host.
    config = run.config
    if config.needs_reference:
        teachers = {part.path for part in run.rl.reference.parts if isinstance(part, CheckpointReferenceConfig)}
        shapes = [teacher_spec(cast(RunParts, run.parts), path).policy for path in teachers]
        shapes += [run.sent] if config.needs_initial_policy else []
        held["reference"] = sum(chip_bytes(run.place(shape)) for shape in shapes)
    # A checkpoint that also scores is loaded once.
    is_loaded = "reference" in held and isinstance(run.rl.reference, CheckpointReferenceConfig)
    if run.teacher is not None and not is_loaded:
        held["teacher"] = chip_bytes(run.teacher)
    if config.is_async:
        dtype, leaves = run.rl.weights.sent_dtype, cast(Any, jax.tree.leaves(run.sent))
        sent = [jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=leaf.sharding) for leaf in leaves]
        held["copy for workers"] = chip_bytes(sent)
    return held


def _weights(run: RunShapes, trained: Any) -> dict[str, Number]:
    """Return the bytes of weights on each chip: those of the base of an adapter, and trained ones."""
    base: dict[str, Number] = {} if run.base is None else {"base": chip_bytes(run.base)}
    return {**base, "weights": chip_bytes(trained)}


def _held_arguments(name: str, held: Mapping[str, Number], run: RunShapes) -> tuple[str, ...]:
    """Return the held arrays that are arguments of a program."""
    base = ("base",) if "base" in held else ()
    match name:
        case "update":
            teacher = () if run.teacher is None else ("teacher" if "teacher" in held else "reference",)
            return *base, "weights", "optimizer", *teacher
        case "score":
            return *base, "reference" if "reference" in held else "weights"
        case "resharding" | "prefill" | "short prefill" | "decode":
            return ()
        case "sampler weights":
            return *base, "weights"
        case _:
            return ("weights",)


def _chosen_layout(run: RunShapes, lengths: Lengths | None) -> tuple[RunShapes, StepSize, str]:
    """Choose the layout of a step's batch, as the run does; return it with the size of the step, and this in words."""
    step = run.parts.equal_step(lengths)
    layout, slots = choose_layout(step.of_update, run.layout, prompts=step.prompts)
    microbatches = count_microbatches(slots) * step.updates
    size = StepSize(step.groups, step.sequences, *step.lengths, microbatches, step.updates)
    return dataclasses.replace(run, layout=layout), size, step.description


def complete_model(config: ConfigT, vocab_size: int | None) -> tuple[ConfigT, int]:
    """Return a config with `model` set, and the number of tokens of the model. The weights are not read.

    Args:
        config: config of the run; without `model`, it is that of a local `initialize_from`.
        vocab_size: number of tokens; None for that of the checkpoint in `initialize_from`, which may be padded, or else
            of the tokenizer.

    Raises:
        ValueError: if they cannot be read. Weights in an object store are not copied for a plan.
    """
    start = config.initialize_from
    if start is not None and "://" in start and (config.model is None or vocab_size is None):
        missing = "a model in the config" if config.model is None else "the number of tokens with --vocab_size"
        raise ValueError(
            f"initialize_from is {start!r}, but a plan copies no weights from an object store; give {missing}, or a "
            "local folder with their config.json"
        )
    if config.model is None:
        config = resolve_model(config)
    if vocab_size is not None:
        return config, vocab_size
    try:
        return config, config.tokenizer.build().vocab_size if start is None else stored_vocab_size(start)
    except ValueError as error:
        raise ValueError(f"{error}; or give the number of tokens with --vocab_size") from error
