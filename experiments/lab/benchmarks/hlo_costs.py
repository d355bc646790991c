# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Bytes and FLOPs of the instructions of optimized HLO programs, from the texts that `--xla_dump_to` writes."""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SILENT = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast"))
"""Opcodes that move no data."""
VIEWS = frozenset(("bitcast", "convert", "reshape", "transpose"))
"""Opcodes that read an element of their operand for each element of the result, inside a fusion."""
UNKNOWN_COST = frozenset(
    ("while", "conditional", "call", "convolution", "fft", "ragged-dot", "async-start", "async-done")
)
COLLECTIVES = ("all-", "collective-", "ragged-all-", "reduce-scatter")
"""Starts of the opcodes that wait for other devices."""
GEMM = "__cublas$"
"""Start of the targets of custom calls that are matrix products."""
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^()]*)\)(.*)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)')


class Instruction(NamedTuple):
    """An instruction of an optimized HLO program."""

    name: str
    """Name, unique in the program."""
    type: str
    """Type of the result."""
    opcode: str
    """Operation."""
    operands: tuple[str, ...]
    """Names of the operands; `name#1` is the second element of a tuple."""
    rest: str
    """Attributes, and the position of a parameter."""


class Cost(NamedTuple):
    """Work of one call of an operation; None if unknown."""

    bytes: int | None = None
    """Bytes read and written."""
    flops: int | None = None
    """FLOPs of its matrix products."""


class Hlo:
    """An optimized program: the text that XLA dumps after all optimizations."""

    def __init__(self, text: str):
        self.module = text.split(None, 2)[1].rstrip(",")
        self._bodies: dict[str, list[Instruction]] = defaultdict(list)
        """Instructions by computation."""
        self._roots: dict[str, Instruction] = {}
        self._instructions: dict[str, Instruction] = {}
        body = ""
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if match := _COMPUTATION.match(line):
                body = match[1]
            elif match := _INSTRUCTION.match(line):
                operands = tuple(part.split()[-1].lstrip("%") for part in match[5].split(",") if part.strip())
                rest = match[5] if match[4] == "parameter" else match[6]
                instruction = Instruction(match[2], match[3], match[4], operands, rest)
                self._bodies[body].append(instruction)
                if match[1]:
                    self._roots[body] = instruction
        for instruction in (one for body in self._bodies.values() for one in body):
            self._instructions[instruction.name] = instruction
            # Names of kernels.
            self._instructions.setdefault(re.sub(r"\W", "_", instruction.name), instruction)

    def __contains__(self, name: str) -> bool:
        return name in self._instructions

    def cost(self, name: str) -> Cost:
        """Return the cost of the instruction with this name, or of the kernel that computes it.

        Slices, gathers, updates of slices and scatters read and write the slices, as in XLA's analysis. FLOPs are those
        of matrix products. The cost of loops, calls, collectives and custom calls is unknown, except for products by
        cuBLAS.
        """
        instruction = self._instructions[name]
        is_custom = instruction.opcode == "custom-call" and not _is_product(instruction)
        if is_custom or instruction.opcode in SILENT | UNKNOWN_COST or instruction.opcode.startswith(COLLECTIVES):
            return Cost()
        read = sum(self._read(instruction, position) for position in range(len(instruction.operands)))
        return Cost(read + self._written(instruction), self._flops(instruction))

    def _sizes(self, operand: str) -> list[int]:
        """Bytes of the arrays of an operand."""
        name, _, element = operand.partition("#")
        sizes = array_bytes(self._instructions[name].type)
        return [sizes[int(element)]] if element else sizes

    def _called(self, instruction: Instruction) -> str | None:
        """Name of the computation of a fusion."""
        match = re.search(r"calls=%?([\w.\-]+)", instruction.rest)
        return match[1] if match and instruction.opcode == "fusion" else None

    def _read(self, instruction: Instruction, position: int) -> int:
        """Bytes that an instruction reads of one operand."""
        size, opcode = sum(self._sizes(instruction.operands[position])), instruction.opcode
        if opcode in ("dynamic-slice", "slice", "gather") and position == 0:
            return min(size, sum(array_bytes(instruction.type)))
        if opcode == "dynamic-update-slice" and position == 0:
            return 0
        if opcode == "scatter" and position < len(instruction.operands) // 2:
            return sum(self._sizes(instruction.operands[position + len(instruction.operands) // 2 + 1]))
        if called := self._called(instruction):
            body = self._bodies[called]
            parameter = next(one.name for one in body if one.opcode == "parameter" and one.rest == str(position))
            return min(size, self._read_in(called, parameter))
        return size

    def _read_in(self, called: str, name: str) -> int:
        """Bytes that a fusion reads of one of its values, at most all for each use."""
        total = 0
        for user in self._bodies[called]:
            for position in (place for place, operand in enumerate(user.operands) if operand == name):
                if user.opcode in VIEWS and user != self._roots[called]:
                    # In the element type of the value, not in that of the view.
                    size, viewed = sum(self._sizes(name)), sum(self._sizes(user.name))
                    total += self._read_in(called, user.name) * size // max(viewed, 1)
                else:
                    total += self._read(user, position)
        return total

    def _written(self, instruction: Instruction) -> int:
        """Bytes that an instruction writes."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "bitcast" and operands[0] in self._instructions:
            return self._written(self._instructions[operands[0]])
        if opcode == "tuple":
            return sum(self._written(self._instructions[operand.partition("#")[0]]) for operand in operands)
        if opcode == "dynamic-update-slice":
            return sum(self._sizes(operands[1]))
        if opcode == "scatter":
            return sum(sum(self._sizes(operand)) for operand in operands[len(operands) // 2 + 1 :])
        if called := self._called(instruction):
            return self._written(self._roots[called])
        sizes = array_bytes(instruction.type)
        # The second output of cuBLAS is its workspace.
        return sizes[0] if opcode == "custom-call" else sum(sizes)

    def _flops(self, instruction: Instruction) -> int:
        if not _is_product(instruction):
            called = self._called(instruction)
            return sum(self._flops(one) for one in self._bodies[called]) if called else 0
        match = _CONTRACTED.search(instruction.rest)
        name, _, element = instruction.operands[0].partition("#")
        left = dimensions(self._instructions[name].type)[int(element or 0)]
        contracted = [left[int(axis)] for axis in re.findall(r"\d+", match[1])] if match else []
        return 2 * math.prod(dimensions(instruction.type)[0]) * math.prod(contracted)


def _is_product(instruction: Instruction) -> bool:
    """Whether an instruction is a matrix product, with dimensions in its attributes."""
    is_custom = instruction.opcode == "custom-call" and f'custom_call_target="{GEMM}' in instruction.rest
    return instruction.opcode == "dot" or is_custom


def dimensions(type_: str) -> list[tuple[int, ...]]:
    """Return the dimensions of the arrays of an HLO type.

    >>> dimensions("(f32[2,3]{1,0}, s32[])")
    [(2, 3), ()]
    """
    return [tuple(int(size) for size in shape.split(",") if size) for _, shape in _ARRAY.findall(type_)]


def array_bytes(type_: str) -> list[int]:
    """Return the bytes of the arrays of an HLO type.

    >>> array_bytes("(bf16[2,3]{1,0:T(8,128)}, pred[4], s4[3], token[])")
    [12, 4, 2, 0]
    """
    bits = [8 if name == "pred" else int((re.findall(r"\d+", name) or [0])[0]) for name, _ in _ARRAY.findall(type_)]
    return [-(-each * math.prod(shape) // 8) for each, shape in zip(bits, dimensions(type_), strict=True)]


def read_hlo(folder: Path) -> dict[int, Hlo]:
    """Read the optimized programs of a folder of `--xla_dump_to`, by number.

    Raises:
        SystemExit: if there is none.
    """
    files = {
        int(path.name.split("_")[1].split(".")[0]): path for path in folder.glob("module_*after_optimizations.txt")
    }
    if not files:
        raise SystemExit(f"--hlo {folder} has no module_*after_optimizations.txt; give a folder of --xla_dump_to")
    return {number: Hlo(path.read_text()) for number, path in files.items()}
