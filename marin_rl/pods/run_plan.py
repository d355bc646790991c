# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The plan of a run: its programs compiled for a topology, their memory, and the least time of a step."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import jax

from marin_rl.batching.packing import Prompt, choose_layout, count_microbatches
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.models.hf_config import read_hf_config
from marin_rl.pods.absent_devices import absent_devices
from marin_rl.pods.chips import GIB, Chip, Number, Topology
from marin_rl.pods.compiling import Failure, ProgramMemory, chip_bytes, compile_program, memory_remedy
from marin_rl.pods.least_time import StepSize, sampler_seconds, trainer_seconds
from marin_rl.pods.programs import LOWER, UNROLLED, RunShapes, open_shapes, programs_of
from marin_rl.tokenization.load import TokenizerLoadError
from marin_rl.training.starting_weights import hf_folder, resolve_model
from marin_rl.utils.devices.sharding import check_sharding

ON_ONE_HOST = ("prefill", "short prefill", "decode")
"""Programs of the sampler that run on the chips of each host alone."""


class Lengths(NamedTuple):
    """Tokens of every rollout of a planned step."""

    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Sampled tokens of a rollout."""


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
    problem: Failure | None
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
    layers: int
    """Number of layers."""
    per_device_parallelism: int
    """`trainer.per_device_parallelism`, or its default: rows of `rollouts.max_length` of a microbatch on a device."""
    rows: int
    """Rows of a microbatch on each data-parallel device, which may share prompts and be longer."""
    row_length: int
    """Positions of a row."""
    step: StepSize
    """Size of a step."""
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
        return self.fit(*LOWER)

    def fit(self, *names: str) -> bool:
        """Return whether the programs with these names compile and fit, if the run has them."""
        return all(program.problem is None for program in self.programs if program.name in names)

    @property
    def workers(self) -> int | None:
        """Workers whose sampling takes no longer than the trainer's step; None if there are none, or no rates."""
        if not self.worker_seconds or not self.trainer_seconds:
            return None
        return math.ceil(sum(self.worker_seconds.values()) / sum(self.trainer_seconds.values()))


def make_plan(
    config: TrainConfig,
    topology: Topology,
    *,
    vocab_size: int,
    worker_topology: Topology | None = None,
    lengths: Lengths | None = None,
    only: Collection[str] | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Plan:
    """Compile the programs of a run for a topology.

    Args:
        config: training config; `model` is set.
        topology: chips of the trainer.
        vocab_size: number of tokens of the model.
        worker_topology: chips of a rollout worker, in `mode: async` only; None for one host of the trainer's kind.
        lengths: tokens of every rollout; None for the maximum.
        only: names of the programs to compile, if the run has them; None for all.
        report: called with the name of each program before it is compiled.

    Raises:
        TopologyError: if the devices are not available.
        ValueError: if the mesh or the rows do not fit the devices or the model, or the workers' chips not the run.
    """
    is_async = config.mode is Mode.ASYNC
    if worker_topology is not None:
        _check_workers(is_async, topology, worker_topology)
    worker_topology = (worker_topology or topology.local()) if is_async else None
    jax.config.update("jax_enable_compilation_cache", topology.chip.platform == "cpu")
    names = [name for name in programs_of(config, topology.num_hosts) if only is None or name in only]
    on_host = [name for name in names if name in (UNROLLED if is_async else ON_ONE_HOST)]

    def plan_programs(
        names: Collection[str], place: str, run: RunShapes, held: Mapping[str, Number], chip: Chip
    ) -> list[PlannedProgram]:
        programs = []
        for name in names:
            report(name)
            programs.append(_plan_program(name, place, run, held, chip))
        return programs

    with absent_devices(topology):
        run, step = _chosen_layout(_open(config, vocab_size), lengths or default_lengths(config))
        held = _held(run)
        programs = plan_programs([name for name in names if name not in on_host], "trainer", run, held, topology.chip)
        plan = Plan(
            topology,
            worker_topology,
            mesh=dict(run.trainer.device_mesh.shape),
            parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.policy)),
            layers=run.num_layers,
            per_device_parallelism=run.trainer.per_device_parallelism,
            rows=run.layout.rows_per_microbatch // run.trainer.data_axis_size,
            row_length=run.layout.row_length,
            step=step,
            held=held,
            programs=tuple(programs),
            trainer_seconds=trainer_seconds(run, step, topology.chip),
            worker_seconds={},
        )
    if not on_host:
        return plan
    if worker_topology is None:
        # XLA compiles a program with collectives for all devices of a topology only.
        with absent_devices(topology.local()):
            host = _open(of_one_host(config, topology), vocab_size)
            programs = plan_programs(on_host, "trainer", host, held, topology.chip)
            seconds = sampler_seconds(host, step, topology.chip, topology.num_hosts)
        return dataclasses.replace(
            plan, programs=(*plan.programs, *programs), trainer_seconds={**plan.trainer_seconds, **seconds}
        )
    with absent_devices(worker_topology):
        try:
            worker = _open(_of_worker(config), vocab_size)
        except ValueError as error:
            raise ValueError(f"rollout workers: {_for_workers(str(error))}") from error
        weights = {"weights": chip_bytes(worker.parameters)}
        programs = plan_programs(on_host, "worker", worker, weights, worker_topology.chip)
        seconds = sampler_seconds(worker, step, worker_topology.chip, hosts=1)
    return dataclasses.replace(plan, programs=(*plan.programs, *programs), worker_seconds=seconds)


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


def _check_workers(is_async: bool, topology: Topology, worker_topology: Topology) -> None:
    """Raise ValueError if the run has no workers, or they cannot have these chips."""
    if not is_async:
        raise ValueError(
            f"--worker_topology is {worker_topology.name}, but a run with mode: sync has no workers; leave it out, or "
            "plan with --mode async"
        )
    if "cpu" in (topology.chip.platform, worker_topology.chip.platform) and topology != worker_topology:
        raise ValueError(
            f"--topology is {topology.name} and --worker_topology {worker_topology.name}, but a process can have only "
            "one number of CPU devices; give the same one, or leave --worker_topology out"
        )
    if worker_topology.num_hosts > 1:
        raise ValueError(
            f"--worker_topology is {worker_topology.name}, which has {worker_topology.num_hosts} hosts, but a rollout "
            f"worker has one; give {worker_topology.local().name}"
        )


def _for_workers(text: str) -> str:
    """Return a message with the keys of the workers' mesh instead of the trainer's."""
    for key in ("model_axis_size", "tensor_parallel_axes"):
        text = text.replace(f"trainer.{key}", f"workers.mesh.{key}")
    return text


def _of_worker(config: TrainConfig) -> TrainConfig:
    """Return the config with the mesh and the precision of a rollout worker."""
    return dataclasses.replace(config, trainer=config.workers.trainer_config(config.trainer))


def _open(config: TrainConfig, vocab_size: int) -> RunShapes:
    run = open_shapes(config, vocab_size)
    mappings = [run.trainer.parameter_axis_mapping, run.trainer.compute_axis_mapping]
    check_sharding(run.policy, run.trainer.device_mesh.shape, mappings)
    return run


_ALLOCATED_LATER = {
    "initial state": ("optimizer", "reference", "copy for workers"),
    "weight copy": ("copy for workers",),
}
"""Held arrays that do not exist yet when a program runs, or that it creates."""


def _plan_program(name: str, place: str, run: RunShapes, held: Mapping[str, Number], chip: Chip) -> PlannedProgram:
    """Compile a program, and compare its memory and that of the arrays that stay allocated with the chip's."""
    result = compile_program(name, run)
    if isinstance(result, Failure):
        planned = PlannedProgram(name, place, None, 0, chip, result)
    else:
        resident = sum(size for part, size in held.items() if part not in _ALLOCATED_LATER.get(name, ()))
        arguments = sum(held[part] for part in _held_arguments(name, held))
        # Held arrays that are arguments of the program count once; a program may take a part of them.
        others = resident - min(arguments, result.arguments)
        planned = PlannedProgram(name, place, result, others, chip, None)
        if planned.memory > chip.memory:
            problem = f"needs {planned.memory / GIB:.2f} of {chip.memory / GIB:.2f} GiB"
            planned = dataclasses.replace(planned, problem=Failure(problem, memory_remedy(name, run)))
    if planned.problem is not None and place == "worker":
        problem = Failure(planned.problem.problem, _for_workers(planned.problem.remedy))
        planned = dataclasses.replace(planned, problem=problem)
    return planned


def _held(run: RunShapes) -> dict[str, Number]:
    """Return the bytes on each chip of the trainer that stay allocated."""
    state = run.parts.make_learner(run.layout).state_shape(run.spec.trained)
    weights = chip_bytes(run.trained)
    held: dict[str, Number] = {"weights": weights, "optimizer": chip_bytes(run.place(state)) - weights}
    if run.config.kl.needs_reference:
        held["reference"] = chip_bytes(run.parameters)
    if run.config.mode is Mode.ASYNC:
        dtype, leaves = run.config.weights.sent_dtype, cast(Any, jax.tree.leaves(run.parameters))
        sent = [jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=leaf.sharding) for leaf in leaves]
        held["copy for workers"] = chip_bytes(sent)
    return held


def _held_arguments(name: str, held: Mapping[str, Number]) -> tuple[str, ...]:
    """Return the held arrays that are arguments of a program."""
    match name:
        case "update":
            return "weights", "optimizer"
        case "score":
            return ("reference",) if "reference" in held else ("weights",)
        case "resharding" | "prefill" | "short prefill" | "decode":
            return ()
        case _:
            return ("weights",)


def _chosen_layout(run: RunShapes, lengths: Lengths) -> tuple[RunShapes, StepSize]:
    """Choose the layout of a step's batch, as the run does."""
    rollouts, updates = run.config.rollouts, run.config.updates
    count = rollouts.rollouts_per_step
    per_update = -(-count // updates.minibatches)
    sequences = [[min(sum(lengths), rollouts.max_length)]] * per_update
    prompts = [[Prompt(str(i // rollouts.group_size).encode(), lengths.prompt - 1)] for i in range(per_update)]
    layout, slots = choose_layout(sequences, run.layout, prompts=prompts)
    microbatches = count_microbatches(slots) * updates.per_step
    step = StepSize(rollouts.prompts_per_step, count, *lengths, microbatches, updates.per_step)
    return dataclasses.replace(run, layout=layout), step


def default_lengths(config: TrainConfig) -> Lengths:
    """Return the longest rollouts of a config: a full answer in every turn, after the longest prompt."""
    answer = min(config.sampling.max_new_tokens * config.rollouts.max_turns, config.rollouts.max_length - 1)
    if config.rollouts.max_tokens is not None:
        answer = min(answer, config.rollouts.max_tokens)
    longest = config.rollouts.max_length - answer
    return Lengths(min(config.rollouts.max_prompt_length or longest, longest), answer)


def with_model(config: TrainConfig) -> TrainConfig:
    """Return a config with `model` set, from a local `initialize_from` if it is not; the weights are not read.

    Raises:
        ValueError: if `initialize_from` is needed and cannot be read.
    """
    if config.model is not None:
        return config
    _refuse_remote_weights(config)
    return resolve_model(config)


def vocab_size_of(config: TrainConfig) -> int:
    """Return the vocabulary of the checkpoint in `initialize_from`, which may be padded, or else of the tokenizer.

    Raises:
        ValueError: if it cannot be read. Weights in an object store are not copied for a plan.
    """
    try:
        if config.initialize_from is None:
            return config.tokenizer.build().vocab_size
        _refuse_remote_weights(config)
        return read_hf_config(hf_folder(config.initialize_from)).vocab_size
    except (TokenizerLoadError, ValueError) as error:
        raise ValueError(f"{error}; or give the number of tokens with --vocab_size") from error


def _refuse_remote_weights(config: TrainConfig) -> None:
    if config.initialize_from is not None and "://" in config.initialize_from:
        raise ValueError(
            f"initialize_from is {config.initialize_from!r}, but a plan copies no weights from an object store; give a "
            "local folder with their config.json"
        )
