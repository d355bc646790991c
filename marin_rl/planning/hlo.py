# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Collectives and loops of a compiled program, read from its optimized form as XLA prints it."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from marin_rl.chips import Number

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
"""Collective operations of XLA."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)
_COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\(")
LOOP = re.compile(r" while\(.*(?:condition|body)=%?([\w.\-]+), (?:condition|body)=%?([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|condition|body|called_computations|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)


class Collectives(NamedTuple):
    """Number of collective operations by kind."""

    inside_loops: dict[str, int]
    """In a loop's body or condition, or in a computation that these call."""
    outside_loops: dict[str, int]
    """All others."""


def count_collectives(text: str) -> Collectives:
    """Count the collective operations of an optimized program.

    Args:
        text: the program in XLA's text form, as from `jax.stages.Compiled.as_text`.
    """
    computations = split_computations(text)
    looped = [name for body in computations.values() for loop in LOOP.findall(body) for name in loop]
    reached: set[str] = set()
    while looped:
        name = looped.pop()
        if name not in reached and name in computations:
            reached.add(name)
            looped += called_computations(computations[name])
    inside, outside = Counter[str](), Counter[str]()
    for name, body in computations.items():
        (inside if name in reached else outside).update(_COLLECTIVE.findall(body))
    return Collectives(dict(sorted(inside.items())), dict(sorted(outside.items())))


def split_computations(text: str) -> dict[str, str]:
    """Return the text of each computation by its name."""
    headers = list(_COMPUTATION.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    return {header[1]: text[header.end() : end] for header, end in zip(headers, ends, strict=True)}


def called_computations(body: str) -> list[str]:
    """Return the names of the computations that instructions call, loops included."""
    groups = [several or one for several, one in _CALLED.findall(body)]
    return [name.strip().lstrip("%") for group in groups for name in group.split(",")]


SHAPE = re.compile(r"(pred|[a-z]+(?=\d))(\d*)[a-z0-9]*\[([\d,]*)\](\{[^}]*\})?")


def array_bytes(array: tuple[str, str, str, str]) -> int:
    """Return the bytes of an array, which is a match of `SHAPE`, without padding."""
    kind, bits, dimensions, _ = array
    width = 1 if kind == "pred" else -(-int(bits) // 8)
    return width * math.prod(int(size) for size in dimensions.split(",") if size)


class CollectiveBytes(NamedTuple):
    """Bytes that a chip sends in one execution of a program."""

    interconnect: Number
    """Over the links within a slice."""
    network: Number
    """Between slices."""
    operations: Number
    """Number of executed collective operations."""


CALL = re.compile(r" call\(.*to_apply=%?([\w.\-]+)()")
_WHILE = re.compile(r"^.* while\(%?([\w.\-]+)\), condition=%?([\w.\-]+), body=%?([\w.\-]+).*$", re.MULTILINE)
_TRIPS = re.compile(r'known_trip_count[^\d}]*"?n"?:"?(\d+)')
_COMPARED = re.compile(r"ROOT .* compare\((.*?)\), direction=LT")
_ELEMENT = re.compile(r"get-tuple-element\([^)]*\), index=(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_OPERATION = re.compile(rf"^.* = (.*?) ({'|'.join(KINDS)})(-start)?\(.*$", re.MULTILINE)
_RECEIVED = re.compile(
    r'^.* = (.*?) recv\(.*_xla_megascale_target="?\{+([\d,]+).*_xla_megascale_transfer_type="(\w+)"', re.MULTILINE
)


def collective_bytes(text: str, unknown_trips: Sequence[Number]) -> CollectiveBytes:
    """Return the bytes that a chip sends in a program, with the iterations of its loops.

    A group of n chips sends `(n-1)/n` of the result of an all-gather or all-to-all, twice that in an all-reduce, and
    `n-1` times the result of a reduce-scatter (ring algorithms, as in chapter 3 of "How to Scale Your Model").

    In a program of several TPU slices, XLA replaces the part of a collective that crosses slices by a `send` to the
    host and a `recv` from it, with the type of the collective and its chips as attributes. The same rules apply.

    Args:
        text: the optimized program in XLA's text form.
        unknown_trips: iterations of a loop whose number of iterations is not a constant, by the number of such loops
            around it; the last counts for deeper ones.
    """
    counts = executions(text, unknown_trips)
    partitions = re.search(r"num_partitions=(\d+)", text)
    chips = int(partitions[1]) if partitions else 1
    sent: dict[str, tuple[float, float]] = {}
    network = received = 0.0
    for name, body in split_computations(text).items():
        count = counts.get(name, 0.0)
        for match in _OPERATION.finditer(body):
            line = match[0]
            channel = _CHANNEL.search(line)
            # The parts of an asynchronous operation repeat it under the same channel.
            key = line if channel is None else f"{match[2]} {channel[1]}"
            if count > sent.get(key, (0.0, 0.0))[0]:
                sent[key] = (count, _sent_bytes(match[1], match[2], bool(match[3]), line, chips))
        for shape, group, transfer in _RECEIVED.findall(body):
            result = float(array_bytes(SHAPE.findall(shape)[0]))  # Then a context and a token.
            network += count * _group_bytes(transfer.lower().replace("_", "-"), result, group.count(",") + 1)
            received += count
    interconnect = sum(count * size for count, size in sent.values())
    return CollectiveBytes(interconnect, network, received + sum(count for count, _ in sent.values()))


def executions(text: str, unknown_trips: Sequence[Number]) -> dict[str, Number]:
    """Return how often each computation of a program runs; see `collective_bytes`."""
    computations = split_computations(text)
    counts: dict[str, Number] = dict.fromkeys(computations, 0.0)
    depths = dict.fromkeys(computations, 0)
    counts[list(computations)[-1]] = 1.0  # The entry is the last one, and callers follow what they call.
    for name in reversed(computations):
        body, count, depth = computations[name], counts[name], depths[name]
        loops = {
            part: _trips(loop, body, computations) for loop in _WHILE.finditer(body) for part in (loop[2], loop[3])
        }
        for called in called_computations(body):
            if called not in counts:
                continue
            trips = loops.get(called, 1.0)
            depths[called] = max(depths[called], depth + (trips is None))
            if trips is None:
                trips = unknown_trips[min(depth, len(unknown_trips) - 1)]
            counts[called] += count * trips
    return counts


def _trips(loop: re.Match[str], body: str, computations: dict[str, str]) -> float | None:
    """Return the iterations of a loop that counts from 0 to a constant; None if they are not constant."""
    if known := _TRIPS.search(loop[0]):
        return float(known[1])
    condition = computations.get(loop[2], "")
    compared = _COMPARED.search(condition)
    if compared is None:
        return None
    counter, limit = (name.strip().split("%")[-1] for name in compared[1].split(",")[-2:])
    bound = _constant(condition, limit)
    if bound is None and (element := _element(condition, limit)) is not None:
        bound = _constant(body, _operand(body, loop[1], element))
    if bound is None:
        return None
    index = _element(condition, counter)
    return float(-(-bound // (1 if index is None else _stride(computations[loop[3]], index))))


def _line(body: str, name: str) -> str:
    found = re.search(rf"^ *(?:ROOT )?%?{re.escape(name)} = .*$", body, re.MULTILINE)
    return found[0] if found else ""


def _constant(body: str, name: str) -> int | None:
    found = re.search(r" constant\((\d+)\)", _line(body, name))
    return int(found[1]) if found else None


def _element(body: str, name: str) -> int | None:
    found = _ELEMENT.search(_line(body, name))
    return int(found[1]) if found else None


def _operand(body: str, name: str, index: int) -> str:
    arguments = re.search(r" tuple\((.*?)\)(?:,|$)", _line(body, name))
    names = arguments[1].split(", ") if arguments else []
    return names[index].split("%")[-1] if index < len(names) else ""


def _stride(body: str, index: int) -> int:
    """Return the step of a loop's counter, which is an element of the loop's state."""
    root = re.search(r"^ *ROOT %?([\w.\-]+) = ", body, re.MULTILINE)
    added = re.search(r" add\((.*?)\)", _line(body, _operand(body, root[1], index))) if root else None
    names = added[1].split(", ") if added else []
    steps = [value for name in names if (value := _constant(body, name.split("%")[-1])) is not None]
    return max(steps[0], 1) if steps else 1


def _sent_bytes(shape: str, kind: str, starts: bool, line: str, chips: int) -> float:
    arrays = [array_bytes(array) for array in SHAPE.findall(shape)]
    if kind == "collective-permute":
        return float(arrays[0])
    group = _group_size(line) or chips
    total = float(sum(arrays))
    if starts and kind == "all-gather":
        total *= group / (group + 1)  # Source and result are both in the type.
    return _group_bytes(kind, total, group)


def _group_bytes(kind: str, result: float, group: int) -> float:
    """Return the bytes that a chip of a group sends in a collective operation with a result of this size."""
    match kind:
        case "one-to-one":
            return result
        case "all-reduce":
            return 2 * result * (group - 1) / group
        case "reduce-scatter":
            return result * (group - 1)
        case _:
            return result * (group - 1) / group


def _group_size(line: str) -> int | None:
    """Return the number of devices of a group of a collective operation, in any of XLA's notations; None for all."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        # A part of an axis has its size after a colon.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    return None
