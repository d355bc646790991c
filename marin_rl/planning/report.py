# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A plan as text, in at most 120 columns, or as JSON values."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from marin_rl.chips import Number
from marin_rl.planning.compiling import Failure
from marin_rl.planning.run_plan import Phase, Plan

WIDTH = 120


def describe(plan: Plan) -> str:
    """Return a plan as text."""
    parts = [_head(plan), _memory_table(plan), _time_table(plan), _summary(plan), _problems(plan)]
    return "\n\n".join(part for part in parts if part)


def _head(plan: Plan) -> str:
    topology, step = plan.topology, plan.step
    unit, unit_name = _unit(plan)
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    slices = f", {topology.slices} slices" if topology.slices > 1 else ""
    chips, hosts = _count(topology.num_chips, "chip"), _count(topology.num_hosts, "host")
    where = f"{chips} of {plan.chip.memory / 2**30:.2f} GiB on {hosts}{slices}"
    held = " + ".join(f"{_number(size / unit)} {name}" for name, size in plan.held.items())
    lines = [
        ("topology", f"{topology.name}: {where}; mesh {mesh}"),
        ("model", f"{_parameters(plan.parameters)} parameters, {_count(plan.layers, 'layer')}"),
        (
            "step",
            f"{step.groups:,} prompts x {step.rollouts // step.groups} = {step.rollouts:,} rollouts of "
            f"{step.prompt_tokens:,} + {step.answer_tokens:,} tokens",
        ),
        (
            "microbatches",
            f"{step.microbatches:,} in {_count(step.updates, 'update')}, of {_count(plan.rows, 'row')} x "
            f"{plan.row_length:,} positions on each data-parallel chip",
        ),
        ("held", f"{held} {unit_name} on each chip"),
    ]
    if topology.slices > 1:
        lines.insert(1, ("network", f"{plan.chip.network / 1e9:.4g} GB/s from each chip to other slices"))
    if plan.worker_topology is not None:
        lines.insert(1, ("worker", f"{plan.worker_topology.name}: {plan.worker_topology.num_chips} chips"))
    return "\n".join(f"{name:<14}{value}" for name, value in lines)


def _memory_table(plan: Plan) -> str:
    header = (f"memory, {_unit(plan)[1]} on each chip", "resident", "temporaries", "total", "of memory", "compiled")
    return table(header, [_memory_row(plan, phase) for phase in plan.phases])


def _memory_row(plan: Plan, phase: Phase) -> Sequence[str]:
    name = _name(plan, phase)
    if isinstance(phase.result, Failure):
        return name, "", "", "", "", "no"
    used, unit = phase.result, _unit(plan)[0]
    layers = "1 and 2 layers" if used.extrapolated else _count(plan.layers, "layer")
    share = f"{phase.memory / phase.chip.memory:.0%}" + (" !" if phase.memory > phase.chip.memory else "")
    resident = phase.memory - used.temporaries
    sizes = [f"{size / unit:.2f}" for size in (resident, used.temporaries, phase.memory)]
    return name, *sizes, share, f"{layers}, {used.seconds:.0f} s"


def _time_table(plan: Plan) -> str:
    scale = 1e9 if max(phase.work.flops for phase in plan.phases) < 1e12 else 1e12
    several = plan.topology.slices > 1
    header = (
        "least time, of a step on each chip",
        "Gflop" if scale == 1e9 else "Tflop",
        "memory, GB",
        *(["sent in slice, GB", "between slices, GB"] if several else ["sent, GB"]),
        "seconds",
        "limit",
    )
    rows = []
    for phase in plan.phases:
        # One of the two shapes of prefill may have no work.
        if phase.every_step and phase.bound.seconds and not isinstance(phase.result, Failure):
            work = phase.work
            sent = [work.interconnect / 1e9, *([work.network / 1e9] if several else [])]
            numbers = [work.flops / scale, work.traffic / 1e9, *sent, phase.bound.seconds]
            rows.append((_name(plan, phase), *map(_number, numbers), phase.bound.limit))
    return table(header, rows)


def _summary(plan: Plan) -> str:
    failed = {phase.place for phase in plan.phases if isinstance(phase.result, Failure)}
    if failed:
        return f"no time of a step, because programs of the {' and the '.join(sorted(failed))} do not compile"
    phases = [phase for phase in plan.phases if phase.every_step]
    slowest = max(phases, key=lambda phase: (phase.place == "trainer", phase.bound.seconds))
    lines = [
        f"a step takes at least {_number(plan.step_seconds)} s; {slowest.name} takes "
        f"{slowest.bound.seconds / plan.step_seconds:.0%} of it, limited by {slowest.bound.limit}",
        f"at most {plan.tokens_per_second:,.0f} sampled tokens per second, "
        f"{plan.tokens_per_second / plan.topology.num_chips:,.0f} per chip of the trainer; "
        f"update at most at {plan.mfu:.0%} of peak flops (MFU)",
    ]
    if plan.worker_topology is not None:
        lines.append(
            f"{_count(plan.workers, 'worker')} of {plan.worker_topology.name} for the trainer: one samples a step in "
            f"{_number(plan.seconds('worker'))} s"
        )
    return "\n".join(lines)


def _problems(plan: Plan) -> str:
    lines = []
    for phase in plan.phases:
        problem = phase.problem
        if problem is not None:
            text = f"{_name(plan, phase)}: {problem.problem}; {problem.remedy}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    if not lines:
        return "every program compiles and fits"
    return "\n".join(["the run does not work:", *lines])


def _name(plan: Plan, phase: Phase) -> str:
    return phase.name if plan.worker_topology is None else f"{phase.name} ({phase.place})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, in columns; the first and the last are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        last = len(header) - 2
        numbers = [
            f"{cell:<{width}}" if index == last else f"{cell:>{width}}" for index, (cell, width) in enumerate(others)
        ]
        return "  ".join([f"{first[0]:<{first[1]}}", *numbers]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def _unit(plan: Plan) -> tuple[float, str]:
    """Return the unit of memory: GiB, or MiB if all phases are small."""
    largest = max(phase.memory for phase in plan.phases)
    return (2.0**30, "GiB") if largest >= 2**30 else (2.0**20, "MiB")


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _number(value: Number) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, in bytes, seconds and flops of one chip."""
    return {
        "topology": plan.topology.name,
        "worker_topology": None if plan.worker_topology is None else plan.worker_topology.name,
        "chips": plan.topology.num_chips,
        "chip": dataclasses.asdict(plan.chip),
        "mesh": plan.mesh,
        "parameters": plan.parameters,
        "layers": plan.layers,
        "microbatch": {"rows_per_device": plan.rows, "row_length": plan.row_length},
        "step": plan.step._asdict(),
        "held": plan.held,
        "phases": [_phase_json(phase) for phase in plan.phases],
        "fits": plan.fits,
        "step_seconds": plan.step_seconds,
        "workers": plan.workers,
        "tokens_per_second": plan.tokens_per_second if plan.step_seconds else None,
        "mfu": plan.mfu if plan.step_seconds else None,
    }


def _phase_json(phase: Phase) -> dict[str, Any]:
    problem = phase.problem
    program: dict[str, Any] = {}
    if not isinstance(phase.result, Failure):
        program = dataclasses.asdict(phase.result) | {"collectives": phase.result.collectives._asdict()}
    return {
        "name": phase.name,
        "place": phase.place,
        "program": program,
        "others": phase.others,
        "memory": phase.memory,
        "work": dataclasses.asdict(phase.work),
        "seconds": phase.bound.seconds,
        "limit": phase.bound.limit,
        "problem": None if problem is None else dataclasses.asdict(problem),
    }
