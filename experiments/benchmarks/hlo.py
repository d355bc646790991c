# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Collectives of a compiled program, inside and outside its loops."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
"""Collective operations of XLA."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)
_COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\(")
_LOOP = re.compile(r" while\(.*(?:condition|body)=%?([\w.\-]+), (?:condition|body)=%?([\w.\-]+)")
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
    computations = _split(text)
    looped = [name for body in computations.values() for loop in _LOOP.findall(body) for name in loop]
    reached: set[str] = set()
    while looped:
        name = looped.pop()
        if name not in reached and name in computations:
            reached.add(name)
            looped += _called(computations[name])
    inside, outside = Counter[str](), Counter[str]()
    for name, body in computations.items():
        (inside if name in reached else outside).update(_COLLECTIVE.findall(body))
    return Collectives(dict(sorted(inside.items())), dict(sorted(outside.items())))


def _split(text: str) -> dict[str, str]:
    """Return the text of each computation by its name."""
    headers = list(_COMPUTATION.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    return {header[1]: text[header.end() : end] for header, end in zip(headers, ends, strict=True)}


def _called(body: str) -> list[str]:
    groups = [several or one for several, one in _CALLED.findall(body)]
    return [name.strip().lstrip("%") for group in groups for name in group.split(",")]


_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:, |$)", re.MULTILINE)
_SHAPE = re.compile(r"(pred|[a-z]+(?=\d))(\d*)[a-z0-9]*\[([\d,]*)\](\{[^}]*\})?")
_WITHOUT_TRAFFIC = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while")


def loop_bytes(text: str) -> int:
    """Return the bytes that one iteration of a program's largest loop moves from and to the main memory of a TPU.

    Every instruction reads its operands and writes its result, unless the layout places them in on-chip memory, such as
    `S(1)`. An update in place (a scatter, or an update of a slice) reads and writes its other operands only. A gather
    counts its whole table.

    Args:
        text: the optimized program in XLA's text form.
    """
    computations = _split(text)
    loops = [name for body in computations.values() for loop in _LOOP.findall(body) for name in loop]
    if not loops:
        return 0
    body = max((computations[name] for name in loops), key=len)
    instructions = _INSTRUCTION.findall(body)
    shapes = {name: shape for name, shape, _, _ in instructions}
    return sum(_traffic(shape, operation, names, shapes) for _, shape, operation, names in instructions)


def _traffic(shape: str, operation: str, arguments: str, shapes: dict[str, str]) -> int:
    if operation in _WITHOUT_TRAFFIC or operation.endswith("-done"):
        return 0
    if operation.endswith("-start"):
        # A copy or a slice, with source and destination first in its type. It reads as much as it writes.
        ends = _SHAPE.findall(shape)[:2]
        return min(map(_size, ends)) * sum("S(" not in end[-1] for end in ends)
    operands = [shapes.get(name.strip().split("%")[-1], "") for name in arguments.split(", ")]
    if operation != "custom-call" and shape in operands and _bytes(shape):
        operands.remove(shape)
        return 2 * sum(map(_bytes, operands))
    return _bytes(shape) + sum(map(_bytes, operands))


def _bytes(shape: str) -> int:
    """Return the bytes of the arrays of a type that are in main memory."""
    return sum(_size(array) for array in _SHAPE.findall(shape) if "S(" not in array[-1])


def _size(array: tuple[str, str, str, str]) -> int:
    kind, bits, dimensions, _ = array
    width = 1 if kind == "pred" else -(-int(bits) // 8)
    return width * math.prod(int(size) for size in dimensions.split(",") if size)
