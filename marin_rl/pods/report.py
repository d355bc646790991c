# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A plan as text, in at most 120 columns, or as JSON values."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from marin_rl.pods.chips import GIB, Number
from marin_rl.pods.run_plan import Plan, PlannedProgram

WIDTH = 120


def describe(plan: Plan) -> str:
    """Return a plan as text."""
    return "\n\n".join(part for part in (_head(plan), _memory(plan), _time(plan), _verdict(plan)) if part)


def _head(plan: Plan) -> str:
    topology, step = plan.topology, plan.step
    unit, unit_name = _unit(plan)
    where = f"{_count(topology.num_chips, 'chip')} of {topology.chip.memory / GIB:.2f} GiB on "
    where += _count(topology.num_hosts, "host") + (f", {topology.slices} slices" if topology.slices > 1 else "")
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    lines = {"topology": f"{topology.name}: {where}; mesh {mesh}"}
    if plan.worker_topology is not None:
        lines["worker"] = f"{plan.worker_topology.name}: {_count(plan.worker_topology.num_chips, 'chip')}"
    lines["model"] = f"{_parameters(plan.parameters)} parameters, {_count(plan.layers, 'layer')}"
    if plan.adapter is not None:
        share = f"{plan.adapter / plan.parameters:.2%}"
        lines["trained"] = f"an adapter of {_parameters(plan.adapter)} parameters, {share} of the model's"
        lines["targets"] = ", ".join(plan.targets)
    lines["step"] = plan.description
    lines["microbatches"] = (
        f"{step.microbatches:,} in {_count(step.updates, 'update')}, of {_count(plan.rows, 'row')} x "
        f"{plan.row_length:,} positions on each data-parallel chip"
    )
    held = " + ".join(f"{_number(size / unit)} {name}" for name, size in plan.held.items())
    lines["held"] = f"{held} {unit_name} on each chip"
    return "\n".join(f"{name:<14}{value}" for name, value in lines.items())


def _memory(plan: Plan) -> str:
    unit, unit_name = _unit(plan)
    rows = []
    for program in plan.programs:
        if program.compiled is None:
            sizes = ["", "", "", "does not compile"]
        else:
            temporaries = program.compiled.temporaries
            numbers = (program.memory - temporaries, temporaries, program.memory)
            share = f"{program.memory / program.chip.memory:.0%}"
            sizes = [*(f"{number / unit:.2f}" for number in numbers), share + (" !" if program.problem else "")]
        rows.append((_name(plan, program), *sizes))
    return table((f"memory, {unit_name} on each chip", "resident", "temporaries", "total", "of the chip"), rows)


def _time(plan: Plan) -> str:
    if not plan.trainer_seconds:
        return ""
    lines = ["least time of a step, computed from the peak rates of the chip and not measured on one:"]
    lines.append(_seconds("trainer: " if plan.worker_seconds else "", plan.trainer_seconds))
    if plan.worker_topology is not None and plan.workers is not None:
        lines.append(_seconds("one worker: ", plan.worker_seconds))
        lines.append(f"{_count(plan.workers, 'worker')} of {plan.worker_topology.name} for the trainer")
    return "\n".join(lines)


def _seconds(place: str, seconds: Mapping[str, float]) -> str:
    parts = " + ".join(f"{name} {_number(part)}" for name, part in seconds.items())
    return f"{place}{parts} = {_number(sum(seconds.values()))} s"


def _verdict(plan: Plan) -> str:
    lines = []
    for program in plan.programs:
        if program.problem is not None:
            text = f"{_name(plan, program)}: {program.problem.problem}; {program.problem.remedy}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    return "\n".join(["the run does not fit:", *lines]) if lines else "every program compiles and fits"


def _name(plan: Plan, program: PlannedProgram) -> str:
    return program.name if plan.worker_topology is None else f"{program.name} ({program.place})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, in columns; the first is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others])

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def _unit(plan: Plan) -> tuple[float, str]:
    """Return the unit of memory: GiB, or MiB if all programs are small."""
    largest = max(program.memory for program in plan.programs)
    return (GIB, "GiB") if largest >= GIB else (2.0**20, "MiB")


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _number(value: Number) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, in bytes of one chip and seconds."""
    return {
        "topology": plan.topology.name,
        "worker_topology": None if plan.worker_topology is None else plan.worker_topology.name,
        "chips": plan.topology.num_chips,
        "mesh": dict(plan.mesh),
        "parameters": plan.parameters,
        "adapter": {"parameters": plan.adapter, "targets": list(plan.targets)} if plan.adapter is not None else None,
        "layers": plan.layers,
        "microbatch": {"rows_per_device": plan.rows, "row_length": plan.row_length},
        "step": plan.step._asdict(),
        "held": dict(plan.held),
        "programs": [
            {
                "name": program.name,
                "place": program.place,
                "compiled": None if program.compiled is None else dataclasses.asdict(program.compiled),
                "memory": program.memory,
                "chip_memory": program.chip.memory,
                "problem": None if program.problem is None else dataclasses.asdict(program.problem),
            }
            for program in plan.programs
        ],
        "fits": plan.fits,
        "computed_seconds": {"trainer": dict(plan.trainer_seconds), "worker": dict(plan.worker_seconds)},
        "workers": plan.workers,
    }
