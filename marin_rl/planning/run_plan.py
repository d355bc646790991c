# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The plan of a run: its programs compiled for a topology, the memory of each phase, and the time of a step."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from marin_rl.batching.packing import Prompt, choose_layout, count_microbatches
from marin_rl.chips import GIB, Chip, Number, Topology
from marin_rl.config.device_settings import logprob_block
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.sharding import check_sharding
from marin_rl.models.hf_config import read_hf_config
from marin_rl.planning import time_model
from marin_rl.planning.absent_devices import absent_devices
from marin_rl.planning.compiling import Failure, Measured, chip_bytes, compile_program, memory_remedy
from marin_rl.planning.programs import UNROLLED, RunShapes, open_shapes, programs_of
from marin_rl.planning.time_model import Bound, StepSize, Work
from marin_rl.tokenization.load import TokenizerLoadError
from marin_rl.training.open_run import make_learner
from marin_rl.training.starting_weights import hf_folder, resolve_model


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of every rollout in the time model."""

    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Sampled tokens of a rollout."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step, on one chip."""

    name: str
    """Name of the program."""
    place: str
    """`trainer` or `worker`."""
    result: Measured | Failure
    """The compiled program."""
    others: Number
    """Bytes that stay allocated and are not among the program's arguments."""
    work: Work
    """Work of a step."""
    bound: Bound
    """Least time of a step's work."""
    every_step: bool
    """Whether the phase is a part of each step."""
    chip: Chip
    """The chip that it runs on."""
    remedy: str
    """The settings to change, so that it needs less memory, in one sentence."""

    @property
    def memory(self) -> Number:
        """Bytes on each chip during the phase; 0 if the program does not compile."""
        return 0.0 if isinstance(self.result, Failure) else self.others + self.result.total

    @property
    def problem(self) -> Failure | None:
        """The reason, if the phase cannot run; None if it can."""
        if isinstance(self.result, Failure):
            return self.result
        if self.memory > self.chip.memory:
            return Failure(f"needs {self.memory / GIB:.2f} of {self.chip.memory / GIB:.2f} GiB", self.remedy)
        return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    topology: Topology
    """Chips of the trainer."""
    worker_topology: Topology | None
    """Chips of a rollout worker; None in `mode: sync`."""
    chip: Chip
    """The chip, with measured rates if it is a CPU."""
    mesh: dict[str, int]
    """Sizes of the trainer's mesh."""
    parameters: int
    """Number of parameters of the policy."""
    layers: int
    """Number of layers."""
    rows: int
    """Rows of a microbatch on each data-parallel device."""
    row_length: int
    """Positions of a row."""
    step: StepSize
    """Size of a step."""
    phases: tuple[Phase, ...]
    """All phases."""
    held: dict[str, Number]
    """Bytes on each chip of the trainer that stay allocated, by name."""
    model_flops: Number
    """Flops that the updates of a step need, of all chips."""

    @property
    def fits(self) -> bool:
        """Whether every program compiles, and every phase fits the memory."""
        return all(phase.problem is None for phase in self.phases)

    def seconds(self, place: str) -> float:
        """Return the least seconds of a step on the trainer or on a worker."""
        return math.fsum(phase.bound.seconds for phase in self.phases if phase.place == place and phase.every_step)

    @property
    def step_seconds(self) -> float:
        """Least seconds of a step: of all phases, or with workers of the trainer's."""
        return self.seconds("trainer")

    @property
    def workers(self) -> int:
        """Workers whose sampling takes no longer than the trainer's step; 0 in `mode: sync`."""
        if self.worker_topology is None:
            return 0
        return max(math.ceil(self.seconds("worker") / self.seconds("trainer")), 1)

    @property
    def tokens_per_second(self) -> float:
        """Upper bound of sampled tokens per second, with enough workers."""
        return self.step.rollouts * self.step.answer_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Upper bound of the share of peak flops that the updates reach."""
        update = next(phase for phase in self.phases if phase.name == "update")
        return self.model_flops / (update.bound.seconds * self.chip.flops * self.topology.num_chips)


def make_plan(
    config: TrainConfig,
    topology: Topology,
    *,
    vocab_size: int,
    worker_topology: Topology | None = None,
    lengths: Lengths | None = None,
    known: Mapping[str, Measured | Failure] | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Plan:
    """Compile the programs of a run for a topology.

    Args:
        config: training config; `model` is set.
        topology: chips of the trainer.
        vocab_size: number of tokens of the model.
        worker_topology: chips of a rollout worker, in `mode: async` only; None for one host of the trainer's kind.
        lengths: tokens of every rollout in the time model; None for the maximum.
        known: results of programs that need not be compiled again, by name; None for none.
        report: called with the name of each program before it is compiled.

    Raises:
        TopologyError: if the devices are not available.
        ValueError: if the mesh or the rows do not fit the devices or the model, or the workers' chips not the run.
    """
    is_async = config.mode is Mode.ASYNC
    if worker_topology is not None:
        _check_workers(is_async, topology, worker_topology)
    worker_topology = (worker_topology or topology.local()) if is_async else None
    lengths = lengths or default_lengths(config)
    names = programs_of(config, topology.num_hosts)
    own = [name for name in names if not is_async or name not in UNROLLED]
    compiler = _Compiler(known or {}, report)
    jax.config.update("jax_enable_compilation_cache", topology.chip.platform == "cpu")
    if not is_async and topology.num_hosts > 1:
        compiler = _compile_for_one_host(config, topology, vocab_size, compiler)
    with absent_devices(topology):
        run = _open(config, vocab_size)
        chip = topology.chip
        if chip.platform == "cpu":
            chip = time_model.measure_cpu(chip, topology.num_chips)
        run, step = _chosen_layout(run, lengths)
        held = _held(run)
        phases = [_phase(name, "trainer", run, step, chip, held, compiler) for name in own]
        if is_async:
            phases = _with_published_weights(phases)
        plan = Plan(
            topology,
            worker_topology,
            chip,
            dict(run.trainer.device_mesh.shape),
            sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.policy)),
            run.num_layers,
            run.layout.rows_per_microbatch // run.trainer.data_axis_size,
            run.layout.row_length,
            step,
            tuple(phases),
            held,
            time_model.model_flops(run, step),
        )
    if worker_topology is None:
        return plan
    with absent_devices(worker_topology):
        try:
            worker = _open(_of_worker(config), vocab_size)
        except ValueError as error:
            raise ValueError(f"rollout workers: {_for_workers(str(error))}") from error
        held: dict[str, Number] = {"weights": chip_bytes(worker.parameters)}
        sampling = [name for name in names if name in UNROLLED]
        chip = chip if chip.platform == "cpu" else worker_topology.chip
        found = [_phase(name, "worker", worker, step, chip, held, compiler) for name in sampling]
        phases += [
            dataclasses.replace(phase, result=_with_worker_keys(phase.result), remedy=_for_workers(phase.remedy))
            for phase in found
        ]
    return dataclasses.replace(plan, phases=tuple(phases))


def _compile_for_one_host(
    config: TrainConfig, topology: Topology, vocab_size: int, compiler: "_Compiler"
) -> "_Compiler":
    """Compile the programs that run on one host for its devices alone, and return them with those already known.

    XLA compiles a program with collectives only for all devices of a topology.
    """
    one_host = ("prefill", "short prefill", "decode")
    names = [name for name in programs_of(config, topology.num_hosts) if name in one_host]
    with absent_devices(topology.local()):
        host = _open(of_one_host(config, topology), vocab_size)
        results = {name: compiler.compile(name, host, (1.0,)) for name in names}
    return compiler._replace(known={**compiler.known, **results})


def of_one_host(config: TrainConfig, topology: Topology) -> TrainConfig:
    """Return the config of a run with the sampler that each host of a topology has."""
    trainer = dataclasses.replace(
        config.trainer,
        model_axis_size=math.gcd(config.trainer.model_axis_size, topology.chips_per_host),
        replica_ici_axis_size=1,
        replica_dcn_axis_size=1,
    )
    sampling = dataclasses.replace(config.sampling, max_seqs=-(-config.sampling.max_seqs // topology.num_hosts))
    return dataclasses.replace(config, trainer=trainer, sampling=sampling)


def _check_workers(is_async: bool, topology: Topology, worker_topology: Topology) -> None:
    """Raise ValueError if the run has no workers, or their chips cannot be compared with the trainer's."""
    if not is_async:
        raise ValueError(
            f"--worker_topology is {worker_topology.name}, but a run with mode: sync has no workers; leave it out, or "
            "plan with --mode async"
        )
    platforms = {topology.chip.platform, worker_topology.chip.platform}
    if "cpu" in platforms and len(platforms) > 1:
        raise ValueError(
            f"--topology is {topology.name} and --worker_topology {worker_topology.name}, but times of a CPU are those "
            "of this machine; give accelerators or CPUs for both"
        )
    if "cpu" in platforms and topology.num_chips != worker_topology.num_chips:
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
    """Return a remedy with the keys of the workers' mesh instead of the trainer's."""
    for key in ("model_axis_size", "tensor_parallel_axes"):
        text = text.replace(f"trainer.{key}", f"workers.mesh.{key}")
    return text


def _with_worker_keys(result: Measured | Failure) -> Measured | Failure:
    if isinstance(result, Failure):
        return dataclasses.replace(result, remedy=_for_workers(result.remedy))
    return result


def _of_worker(config: TrainConfig) -> TrainConfig:
    """Return the config with the mesh and the precision of a rollout worker."""
    return dataclasses.replace(config, trainer=config.workers.trainer_config(config.trainer))


def _open(config: TrainConfig, vocab_size: int) -> RunShapes:
    run = open_shapes(config, vocab_size)
    mappings = [run.trainer.parameter_axis_mapping, run.trainer.compute_axis_mapping]
    check_sharding(run.policy, run.trainer.device_mesh.shape, mappings)
    return run


def with_model(config: TrainConfig) -> TrainConfig:
    """Return a config with `model` set, from a local `initialize_from` if it is not; the weights are not read.

    Raises:
        ValueError: if `initialize_from` is needed and cannot be read.
    """
    if config.model is not None:
        return config
    _refuse_remote_weights(config)
    return resolve_model(config)


def _refuse_remote_weights(config: TrainConfig) -> None:
    if config.initialize_from is not None and "://" in config.initialize_from:
        raise ValueError(
            f"initialize_from is {config.initialize_from!r}, but a plan copies no weights from an object store; give a "
            "local folder with their config.json"
        )


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


def default_lengths(config: TrainConfig) -> Lengths:
    """Return the longest rollouts of a config: a full answer in every turn, after the longest prompt."""
    answer = min(config.sampling.max_new_tokens * config.rollouts.max_turns, config.rollouts.max_length - 1)
    if config.rollouts.max_tokens is not None:
        answer = min(answer, config.rollouts.max_tokens)
    longest = config.rollouts.max_length - answer
    return Lengths(min(config.rollouts.max_prompt_length or longest, longest), answer)


def _chosen_layout(run: RunShapes, lengths: Lengths) -> tuple[RunShapes, StepSize]:
    """Choose the layout of a step's batch, as the run does."""
    rollouts, updates = run.config.rollouts, run.config.updates
    count = rollouts.rollouts_per_step
    per_update = -(-count // updates.minibatches)
    sequences = [[min(lengths.prompt + lengths.answer, rollouts.max_length)]] * per_update
    prompts = [[Prompt(str(i // rollouts.group_size).encode(), lengths.prompt - 1)] for i in range(per_update)]
    layout, slots = choose_layout(sequences, run.layout, prompts=prompts)
    step = StepSize(
        rollouts.prompts_per_step,
        count,
        lengths.prompt,
        lengths.answer,
        count_microbatches(slots) * updates.per_step,
        updates.per_step,
    )
    return dataclasses.replace(run, layout=layout), step


def _held(run: RunShapes) -> dict[str, Number]:
    """Return the bytes on each chip of the trainer that stay allocated."""
    state = make_learner(run.config, run.trainer, run.layout).state_shape(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), run.trained)
    )
    weights = chip_bytes(run.trained)
    held: dict[str, Number] = {"weights": weights, "optimizer": chip_bytes(run.place(state)) - weights}
    if run.config.kl.needs_reference:
        held["reference"] = chip_bytes(run.parameters)
    return held


class _Compiler(NamedTuple):
    """Compiles programs whose results are not known."""

    known: Mapping[str, Measured | Failure]
    report: Callable[[str], None]

    def compile(self, name: str, run: RunShapes, unknown_trips: tuple[float, ...]) -> Measured | Failure:
        if name in self.known:
            return self.known[name]
        self.report(name)
        return compile_program(name, run, unknown_trips)


def _phase(
    name: str,
    place: str,
    run: RunShapes,
    step: StepSize,
    chip: Chip,
    held: dict[str, Number],
    compiler: _Compiler,
) -> Phase:
    head_blocks = _head_blocks(run, step)
    per_update = step.microbatches / step.updates
    trips = {"update": (per_update, head_blocks), "score": (per_update * run.config.updates.minibatches, head_blocks)}
    result = compiler.compile(name, run, trips.get(name, (1.0,)))
    measured = None if isinstance(result, Failure) else result
    work = _work(name, run, step, measured)
    absent = ("optimizer", "reference") if name == "initial state" else ()
    resident = math.fsum(size for part, size in held.items() if part not in absent)
    arguments = math.fsum(held[part] for part in _held_arguments(name, run, held))
    # Held arrays that are arguments of the program count once; a program may take a part of them.
    inside = arguments if measured is None else min(arguments, measured.arguments)
    others = resident - inside
    bound = time_model.bound(work, chip)
    return Phase(name, place, result, others, work, bound, name != "initial state", chip, memory_remedy(name, run))


def _held_arguments(name: str, run: RunShapes, held: dict[str, Number]) -> tuple[str, ...]:
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


def _head_blocks(run: RunShapes, step: StepSize) -> float:
    """Return the blocks of the head in a microbatch on each device."""
    answers = step.answer_tokens / (step.prompt_tokens + step.answer_tokens)
    tokens = run.layout.rows_per_microbatch * run.layout.row_length / run.trainer.data_axis_size
    return float(max(math.ceil(answers * tokens / logprob_block(run.config, run.trainer)), 1))


def _work(name: str, run: RunShapes, step: StepSize, measured: Measured | None) -> Work:
    match name:
        case "update":
            return time_model.update_work(run, step, measured)
        case "score":
            return time_model.score_work(run, step, measured)
        case "prefill":
            return time_model.prefill_work(run, step, measured)
        case "short prefill":
            return time_model.short_prefill_work(run, step, measured)
        case "decode":
            return time_model.decode_work(run, step, measured)
        case "weight copy":
            return time_model.once(measured, host=0.0 if measured is None else measured.outputs)
        case _:
            return time_model.once(measured)


def _with_published_weights(phases: list[Phase]) -> list[Phase]:
    """Add the copy of the weights that workers fetch to the memory of the update, which runs at the same time."""
    copies = [phase.result for phase in phases if phase.name == "weight copy" and isinstance(phase.result, Measured)]
    size = math.fsum(copy.outputs for copy in copies)
    return [
        dataclasses.replace(phase, others=phase.others + size) if phase.name in ("update", "score") else phase
        for phase in phases
    ]
