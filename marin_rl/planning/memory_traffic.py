# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Bytes that a compiled program moves from and to main memory, read from its optimized form as XLA prints it."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from marin_rl.chips import Number
from marin_rl.planning.hlo import CALL, LOOP, SHAPE, array_bytes, called_computations, executions, split_computations

_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:, (.*)|$)", re.MULTILINE)
_WITHOUT_TRAFFIC = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while")


class _Instruction(NamedTuple):
    """An instruction of a computation."""

    name: str
    shape: str
    """Type of the result, with the layout of each array."""
    operation: str
    operands: list[str]
    """Names of the operands; the number of a parameter."""
    attributes: str


_Computation = dict[str, _Instruction]
"""The instructions of a computation by name; the last one is its result."""


def loop_bytes(text: str) -> int:
    """Return the bytes that one iteration of a program's largest loop moves from and to the main memory of a TPU.

    Every instruction reads its operands and writes its result, unless the layout places them in on-chip memory, such as
    `S(1)`. A slice or a gather reads the size of its result, and an update in place (a scatter, an update of a slice)
    writes the updated part only. The same holds within fusions.

    Args:
        text: the optimized program in XLA's text form.
    """
    bodies = split_computations(text)
    loops = [name for body in bodies.values() for loop in LOOP.findall(body) for name in loop]
    if not loops:
        return 0
    return _traffic(max(loops, key=lambda name: len(bodies[name])), _parse(bodies))


def memory_traffic(text: str, unknown_trips: Sequence[Number]) -> Number:
    """Return the bytes that a program moves from and to main memory, counted as by `loop_bytes` in all of its loops.

    The arguments are those of `collective_bytes`.
    """
    bodies, counts = split_computations(text), executions(text, unknown_trips)
    computations, scheduled = _parse(bodies), {list(bodies)[-1]}
    for body in bodies.values():
        for pattern in (LOOP, CALL):
            scheduled.update(name for names in pattern.findall(body) for name in names if name)
    return sum(counts[name] * _traffic(name, computations) for name in scheduled if name in counts)


def _parse(bodies: Mapping[str, str]) -> dict[str, _Computation]:
    return {
        name: {
            result: _Instruction(result, shape, operation, [_name(operand) for operand in operands.split(", ")], rest)
            for result, shape, operation, operands, rest in _INSTRUCTION.findall(body)
        }
        for name, body in bodies.items()
    }


def _name(operand: str) -> str:
    return operand.strip().split("%")[-1]


def _traffic(name: str, computations: Mapping[str, _Computation]) -> int:
    """Return the bytes that one execution of a computation moves, without those of its loops and calls."""
    computation = computations[name]
    return sum(_moved(instruction, computation, computations) for instruction in computation.values())


def _moved(instruction: _Instruction, computation: _Computation, computations: Mapping[str, _Computation]) -> int:
    operation, arrays = instruction.operation, SHAPE.findall(instruction.shape)
    if operation in _WITHOUT_TRAFFIC or operation.endswith("-done"):
        return 0
    if operation.endswith("-start"):
        # A copy or a slice, with source and destination first in its type. It reads as much as it writes.
        return min(map(array_bytes, arrays[:2])) * sum("S(" not in end[-1] for end in arrays[:2])
    if operation in ("send", "recv"):
        return array_bytes(arrays[0])  # Then a context and a token.
    read = sum(
        _read(instruction, position, _bytes(computation[operand].shape), computation, computations)
        for position, operand in enumerate(instruction.operands)
        if operand in computation
    )
    return read + _written(instruction, computation, computations)


def _read(
    instruction: _Instruction,
    position: int,
    size: int,
    computation: _Computation,
    computations: Mapping[str, _Computation],
) -> int:
    """Return the bytes that an instruction reads of an operand of `size` bytes."""
    match instruction.operation:
        case "fusion":
            fused = _fused(instruction, computations)
            wanted = ("parameter", [str(position)])
            parameters = [name for name, part in fused.items() if (part.operation, part.operands) == wanted]
            return _read_by_users(parameters[0], size, fused, computations) if parameters else size
        case "bitcast":
            return _read_by_users(instruction.name, size, computation, computations)
        case "slice" | "dynamic-slice" | "gather" if position == 0:
            return min(size, _all_bytes(instruction.shape))
        case "dynamic-update-slice" if position == 0:
            return 0
        case "scatter" if position == 0:
            return min(size, _all_bytes(computation[instruction.operands[-1]].shape))
        case _:
            return size


def _read_by_users(name: str, size: int, computation: _Computation, computations: Mapping[str, _Computation]) -> int:
    """Return the bytes that the instructions of a fusion read of an array of `size` bytes, each at most once."""
    if name == _root(computation).name:
        return size  # Other instructions read the result of a nested fusion.
    return min(
        size,
        sum(
            _read(user, position, size, computation, computations)
            for user in computation.values()
            for position, operand in enumerate(user.operands)
            if operand == name
        ),
    )


def _written(instruction: _Instruction, computation: _Computation, computations: Mapping[str, _Computation]) -> int:
    """Return the bytes that an instruction writes to main memory."""
    arrays, outputs = SHAPE.findall(instruction.shape), [instruction]
    if instruction.operation == "fusion":
        computation = _fused(instruction, computations)
        root = _root(computation)
        outputs = [computation[name] for name in root.operands] if root.operation == "tuple" else [root]
    if len(arrays) != len(outputs):
        return _bytes(instruction.shape)
    updates = [_updated(output, computation, computations) for output in outputs]
    return sum(
        array_bytes(array) if update is None else update
        for array, update in zip(arrays, updates, strict=True)
        if "S(" not in array[-1]
    )


def _updated(
    instruction: _Instruction, computation: _Computation, computations: Mapping[str, _Computation]
) -> int | None:
    """Return the bytes of the updated part if an instruction updates an array in place, or None."""
    match instruction.operation:
        case "bitcast" if instruction.operands[0] in computation:
            return _updated(computation[instruction.operands[0]], computation, computations)
        case "dynamic-update-slice":
            return _all_bytes(computation[instruction.operands[1]].shape)
        case "scatter":
            return _all_bytes(computation[instruction.operands[-1]].shape)
        case "fusion":
            fused = _fused(instruction, computations)
            return _updated(_root(fused), fused, computations)
        case _:
            return None


def _fused(instruction: _Instruction, computations: Mapping[str, _Computation]) -> _Computation:
    return computations[called_computations(instruction.attributes)[0]]


def _root(computation: _Computation) -> _Instruction:
    *_, last = computation.values()
    return last


def _bytes(shape: str) -> int:
    """Return the bytes of the arrays of a type that are in main memory."""
    return sum(array_bytes(array) for array in SHAPE.findall(shape) if "S(" not in array[-1])


def _all_bytes(shape: str) -> int:
    return sum(map(array_bytes, SHAPE.findall(shape)))
