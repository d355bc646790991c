# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tables of a trace of jax's profiler: the most expensive operations of each program, and the idle time of the device.

    python -m experiments.lab.benchmarks.profile_table RUN_DIR/profile
    python -m experiments.lab.benchmarks.profile_table RUN_DIR/profile --hlo dump --chip h100 --plot step.png

A trace has no shapes. Bytes and FLOPs come from the optimized programs. XLA writes them with
`XLA_FLAGS=--xla_dump_to=dump` when it compiles a program, not when it reads one from the compilation cache, which
`--trainer.jax_compilation_cache_dir null` disables. On GPUs, operations are the events of the streams; on CPUs those of
HLO instructions, in all threads. The time of an operation that contains others in its thread, such as a loop, is the
time outside them.
"""

import argparse
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.profiler import ProfileData
from numpy.typing import ArrayLike

from experiments.lab.benchmarks.hlo_costs import Cost, Hlo, read_hlo
from experiments.lab.benchmarks.measurement import shown
from experiments.lab.report import MARK, markdown_table
from marin_rl.pods.chips import CHIPS, Chip
from marin_rl.runs.metrics_file import COLORS
from marin_rl.runs.run_directory import check_output
from marin_rl.training.loop import PHASES

STEP = "steps"
"""Annotation of a whole step."""
ANNOTATIONS = (*PHASES, STEP, "evaluation")
MOST_EXPENSIVE = 10
"""Largest number of operations of a program in the table."""
UNKNOWN = "unknown"
"""Program of events without `hlo_module`, such as kernels of CUDA graphs and copies."""


class Program(NamedTuple):
    """A compiled program."""

    module: str
    """Name of its HLO module."""
    number: int | None = None
    """The compiler's number of it, which is also in the names of XLA's dumps."""

    def __str__(self) -> str:
        return self.module if self.number is None else f"{self.module} {self.number}"


class Operation(NamedTuple):
    """One call of an operation; times in nanoseconds on the clock of the trace."""

    device: str
    """Device."""
    program: Program
    """Program."""
    name: str
    """Name of the HLO instruction, otherwise of the kernel."""
    start: float
    """When it began."""
    end: float
    """When it ended."""
    alone: float
    """Duration without the operations that it contains."""


class Trace(NamedTuple):
    """The events of a trace that the tables are about."""

    operations: list[Operation]
    """Operations of the devices."""
    phases: dict[str, np.ndarray]
    """Times at which each phase ran on the host, as returned by `union`."""


def find_trace(path: Path) -> Path:
    """Return the only trace in a folder.

    Raises:
        SystemExit: if there is none or several.
    """
    found = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"))
    if len(found) != 1:
        which = "\n".join(["several traces; name one:", *map(str, found)]) if found else "no trace (*.xplane.pb)"
        raise SystemExit(f"{path} has {which}")
    return found[0]


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        SystemExit: if no device has an operation in it.
    """
    operations: list[Operation] = []
    hosts: list[Operation] = []
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with warnings.catch_warnings():
        # Python 3.12 reports this of jaxlib's types.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        for plane in ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                if re.match(r"/device:GPU:\d+", plane.name) and str(line.name).startswith("Stream"):
                    operations += _operations(plane.name, line.events, only_hlo=False)
                elif plane.name == "/host:CPU":
                    events = list(line.events)
                    hosts += _operations(plane.name, events, only_hlo=True)
                    for event in events:
                        if event.name in ANNOTATIONS:
                            spans[event.name].append((event.start_ns, event.end_ns))
    if not operations and not hosts:
        raise SystemExit(
            f"{path} has no operations: neither a plane /device:GPU:N with streams, nor HLO instructions in /host:CPU"
        )
    phases = {name: union(spans[name]) for name in ANNOTATIONS if name in spans}
    if STEP in phases:
        inner = union([span for name in PHASES for span in spans[name]])
        between = complement(inner, phases[STEP][0, 0], phases[STEP][-1, 1])
        phases["wait"] = intersection(between, phases[STEP])
    ordered = {name: phases[name] for name in ANNOTATIONS if name in phases}
    return Trace(operations or hosts, ordered)


def _operations(plane: str, events: Iterable[Any], *, only_hlo: bool) -> Iterator[Operation]:
    """The operations of one stream or thread.

    Kernels of a stream can overlap, because one may start before the one before it has ended.
    """
    found: list[Operation] = []
    alone: list[float] = []
    containing: list[int] = []
    for event in sorted(events, key=lambda event: (event.start_ns, -event.duration_ns)):
        stats = dict(event.stats)
        if only_hlo and "hlo_op" not in stats:
            continue
        while containing and found[containing[-1]].end < event.end_ns:
            containing.pop()
        if containing:
            alone[containing[-1]] -= event.duration_ns
        containing.append(len(found))
        alone.append(event.duration_ns)
        # The devices of a CPU share a plane.
        device = f"{plane}:{stats.get('device_ordinal', 0)}" if only_hlo else plane
        program = Program(str(stats.get("hlo_module", UNKNOWN)), stats.get("program_id"))
        name = str(stats.get("hlo_op", event.name))
        found.append(Operation(device, program, name, event.start_ns, event.end_ns, 0.0))
    yield from (each._replace(alone=duration) for each, duration in zip(found, alone, strict=True))


def union(intervals: ArrayLike) -> np.ndarray:
    """Return the union of intervals as sorted disjoint intervals, [number, 2].

    >>> union([(4, 5), (0, 2), (1, 3), (3, 3.5)]).tolist()
    [[0.0, 3.5], [4.0, 5.0]]
    """
    array = np.array(intervals, dtype=float).reshape(-1, 2)
    array = array[np.argsort(array[:, 0], kind="stable")]
    ends = np.maximum.accumulate(array[:, 1])
    # Whether a gap precedes, and follows, each interval.
    gaps = np.concatenate([[True], array[1:, 0] > ends[:-1], [True]])
    return np.stack([array[gaps[: len(array)], 0], ends[gaps[1 : len(array) + 1]]], axis=1)


def complement(disjoint: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the intervals between `low` and `high` that a union does not cover."""
    edges = np.concatenate([[low], np.clip(disjoint, low, high).ravel(), [high]]).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def intersection(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the intervals that are in both of two unions."""
    if not len(first) or not len(second):
        return np.zeros((0, 2))
    low, high = min(first[0, 0], second[0, 0]), max(first[-1, 1], second[-1, 1])
    outside = np.concatenate([complement(first, low, high), complement(second, low, high)])
    return complement(union(outside), low, high)


def seconds(disjoint: np.ndarray) -> float:
    """Return the total duration, in seconds, of disjoint intervals in nanoseconds."""
    return float((disjoint[:, 1] - disjoint[:, 0]).sum()) / 1e9


def phase_rows(trace: Trace) -> dict[str, dict[str, Any]]:
    """Return by phase its seconds, the share in which a device is idle, and the seconds in which each program runs.

    A program runs while one of its operations does; with several devices, shares and seconds are means over them.
    """
    devices = sorted({each.device for each in trace.operations})
    groups: dict[tuple[str, Program | None], list[tuple[float, float]]] = defaultdict(list)
    for each in trace.operations:
        groups[each.device, None].append((each.start, each.end))
        groups[each.device, each.program].append((each.start, each.end))
    busy = {key: union(intervals) for key, intervals in groups.items()}
    rows = {}
    for name, phase in trace.phases.items():
        run: dict[Program | None, float] = defaultdict(float)
        for (_, program), intervals in busy.items():
            run[program] += seconds(intersection(phase, intervals)) / len(devices)
        total, any_program = seconds(phase), run.pop(None)
        programs = {str(program): value for program, value in sorted(run.items(), key=lambda item: -item[1]) if value}
        idle = 1 - any_program / total if total else 0.0
        rows[name] = {"seconds": total, "idle_share": idle, "programs": programs}
    return rows


def program_rows(trace: Trace, hlo: Mapping[int, Hlo], chip: Chip | None) -> dict[str, dict[str, Any]]:
    """Return by program its seconds and its most expensive operations, summed over devices.

    Args:
        trace: the trace.
        hlo: optimized programs by number.
        chip: chip whose peak rates bound the operations, or None.
    """
    groups: dict[Program, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in trace.operations:
        groups[each.program][each.name].append(each.alone / 1e9)
    totals = {program: sum(map(sum, names.values())) for program, names in groups.items()}
    rows = {}
    for program in sorted(groups, key=lambda program: -totals[program]):
        names = groups[program]
        candidates = candidates_of(program, names, hlo)
        operations = {}
        for name in sorted(names, key=lambda name: -sum(names[name]))[:MOST_EXPENSIVE]:
            costs = {one.cost(name) for one in candidates if name in one}
            cost = costs.pop() if len(costs) == 1 else Cost()
            time = sum(names[name])
            limit = shortest_time(cost, chip)
            operations[name] = {
                "calls": len(names[name]),
                "seconds": time,
                "share": time / totals[program] if totals[program] else 0.0,
                "bytes": cost.bytes,
                "flops": cost.flops,
                "share_of_bound": None if limit is None or not time else limit * len(names[name]) / time,
            }
        calls = sum(map(len, names.values()))
        rows[str(program)] = {"seconds": totals[program], "calls": calls, "operations": operations}
    return rows


def shortest_time(cost: Cost, chip: Chip | None) -> float | None:
    """Return the seconds that a chip needs at its peak rates, or None if a part is unknown."""
    if chip is None or chip.memory_bandwidth is None or chip.flops is None or cost.bytes is None or cost.flops is None:
        return None
    return max(cost.bytes / chip.memory_bandwidth, cost.flops / chip.flops)


def candidates_of(program: Program, names: Collection[str], hlo: Mapping[int, Hlo]) -> list[Hlo]:
    """Return the dumped programs that a program of a trace may be.

    That is the one with its number and name; otherwise those of its name with the most of its operations.
    """
    if program.number in hlo and hlo[program.number].module == program.module:
        return [hlo[program.number]]
    if program.module == UNKNOWN:
        return list(hlo.values())
    found = {number: sum(name in one for name in names) for number, one in hlo.items() if one.module == program.module}
    return [hlo[number] for number, known in found.items() if known == max(found.values())]


def tables(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = []
    if report["phases"]:
        rows = [
            (
                f"`{name}`",
                shown(row["seconds"]),
                shown(row["idle_share"]),
                ", ".join(f"{program} {shown(value)} s" for program, value in list(row["programs"].items())[:3]),
            )
            for name, row in report["phases"].items()
        ]
        lines += [markdown_table(("phase", "seconds", "share idle", "programs on the device meanwhile"), rows), ""]
    columns = ("operation", "calls", "ms", "share", "MB per call", "GFLOP per call", "share of bound")
    for program, row in report["programs"].items():
        rows = [
            (
                f"`{name}`",
                shown(each["calls"]),
                shown(each["seconds"] * 1e3),
                shown(each["share"]),
                shown(None if each["bytes"] is None else each["bytes"] / 1e6),
                shown(None if each["flops"] is None else each["flops"] / 1e9),
                shown(each["share_of_bound"]),
            )
            for name, each in row["operations"].items()
        ]
        used = 7 if report["chip"] else 6 if report["hlo"] else 4
        lines += [f"## {program}", "", f"{shown(row['seconds'] * 1e3)} ms in {shown(row['calls'])} operations", ""]
        lines += [markdown_table(columns[:used], [cells[:used] for cells in rows]), ""]
    return "\n".join(lines)


def draw(trace: Trace, picture: Path) -> None:
    """Plot phases and programs over time, a lane each, as a PNG file."""
    # The tables do without it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [(name, intervals, COLORS[0]) for name, intervals in trace.phases.items() if name != STEP]
    spans: dict[Program, list[tuple[float, float]]] = defaultdict(list)
    for each in trace.operations:
        spans[each.program].append((each.start, each.end))
    lanes += [
        (str(program), union(spans[program]), COLORS[1]) for program in sorted(spans, key=lambda key: min(spans[key]))
    ]
    lanes.append(("device", union([span for each in spans.values() for span in each]), COLORS[2]))
    steps = trace.phases.get(STEP, union([(lanes[-1][1][0, 0], lanes[-1][1][-1, 1])]))
    low, high = steps[0, 0], steps[-1, 1]
    figure = Figure(figsize=(10, 0.6 + 0.26 * len(lanes)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, (_, intervals, color) in enumerate(lanes):
        # Gaps and intervals below one pixel.
        pixel = (high - low) / 1000
        joined = union([(start, max(end, start + pixel)) for start, end in intervals])
        axes.broken_barh([((a - low) / 1e9, (b - a) / 1e9) for a, b in joined], (row - 0.4, 0.8), color=color)
    axes.set_yticks(range(len(lanes)), [name for name, *_ in lanes])
    axes.set(xlim=(0, (high - low) / 1e9), ylim=(len(lanes) - 0.5, -0.5), xlabel="seconds")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, format="png", metadata={"Software": MARK.decode()})


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of a trace."""
    parser = argparse.ArgumentParser(description="Tables of a trace of jax's profiler", allow_abbrev=False)
    parser.add_argument("trace", type=Path, help="folder with one trace, or its *.xplane.pb")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="folder of --xla_dump_to, for bytes and FLOPs")
    parser.add_argument("--chip", choices=sorted(CHIPS), help="chip whose peak rates bound the operations; needs --hlo")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file of the tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file of phases and programs over time")
    arguments = parser.parse_args(argv)
    if arguments.chip and not arguments.hlo:
        parser.error(f"--chip {arguments.chip} needs --hlo, the folder with the optimized programs")
    if arguments.json:
        check_output(arguments.json, "--json", b'{\n  "trace": "')
    if arguments.plot:
        check_output(arguments.plot, "--plot", MARK)
    path = find_trace(arguments.trace)
    trace = read_trace(path)
    hlo = read_hlo(arguments.hlo) if arguments.hlo else {}
    chip = CHIPS[arguments.chip] if arguments.chip else None
    report = {
        "trace": str(path),
        "hlo": arguments.hlo and str(arguments.hlo),
        "chip": arguments.chip,
        "phases": phase_rows(trace),
        "programs": program_rows(trace, hlo, chip),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    if arguments.plot:
        draw(trace, arguments.plot)
    print(tables(report))


if __name__ == "__main__":
    main()
