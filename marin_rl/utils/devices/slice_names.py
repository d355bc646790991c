# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Names of TPU slices: types, `v5p-32`, which count chips or cores, and topologies in chips, `v5p:2x2x4`.

Every setting that names a slice takes both, in any case, and the common names `v5e-16` and `v5lite-16` of Google's
`v5litepod-16`.
"""

import dataclasses
import math
import re

from marin_rl.utils.errors import UserError


class TopologyError(UserError):
    """A topology does not exist, or does not fit the config."""


@dataclasses.dataclass(frozen=True)
class ChipGeneration:
    """A generation of TPUs, and the sizes of its slices."""

    name: str
    """Name in a topology."""
    host_bounds: tuple[int, ...]
    """Chips of one host of a slice of several hosts, along each dimension."""
    max_hosts: int
    """Largest number of hosts in a slice."""
    single_host: int = 0
    """Slices of at most this number of chips have one host."""
    cores_in_name: int = 1
    """Number that the type counts for a chip."""
    accelerator: str = ""
    """Prefix of Google's type, if it is not the name."""
    aliases: tuple[str, ...] = ()
    """Other names that people use."""

    @property
    def sizes(self) -> list[int]:
        """Chips of the slices that have a shape by default."""
        smallest, largest = (hosts * math.prod(self.host_bounds) for hosts in (1, self.max_hosts))
        # Other numbers have no shape of their own: v5p-24 may be 2x2x3 or 6x2x1.
        powers = [2**power for power in range(smallest.bit_length() - 1, largest.bit_length())]
        return [1, *powers] if self.single_host else powers

    def default_shape(self, chips: int) -> tuple[int, ...]:
        """Return the shape that Google gives a slice of one of the `sizes`."""
        dimensions, power = len(self.host_bounds), chips.bit_length() - 1
        shape = [2 ** ((power + index) // dimensions) for index in range(dimensions)]
        if any(length % host for length, host in zip(shape, self.host_bounds, strict=True)):
            shape.reverse()
        return tuple(shape)

    def type_of(self, chips: int) -> str:
        """Return Google's type of a slice with this number of chips."""
        return f"{self.accelerator or self.name}-{chips * self.cores_in_name}"

    @property
    def example(self) -> str:
        """A topology of several hosts, for messages."""
        return f"{self.name}:{'x'.join(map(str, self.default_shape(16)))}"


_CUBES = (2, 2, 1)
GENERATIONS = {
    generation.name: generation
    for generation in (
        ChipGeneration("v2", (2, 2), 64, cores_in_name=2),
        ChipGeneration("v3", (2, 2), 256, cores_in_name=2),
        ChipGeneration("v4", _CUBES, 1024, cores_in_name=2),
        ChipGeneration("v5e", (2, 2), 64, single_host=8, accelerator="v5litepod", aliases=("v5lite",)),
        ChipGeneration("v5p", _CUBES, 1536, cores_in_name=2),
        ChipGeneration("v6e", (2, 2), 64, single_host=8),
        ChipGeneration("v7x", _CUBES, 2304, cores_in_name=2, accelerator="tpu7x"),
    )
}
"""Generations by name. Hosts: Google's pages of each (eight chips of v5e and v6e are one host, in larger slices hosts
have four)."""
_NAMES = {
    name: generation
    for generation in GENERATIONS.values()
    for name in (generation.name, generation.accelerator, *generation.aliases)
    if name
}
_EXAMPLES = ("v5e-8", "v5e:2x4", "v5p-32", "v5p:2x2x4", "v6e-8", "v6e:4x4", "v4-8", "v4:2x2x1")
_FORM = re.compile(r"(?:([0-9]{1,6})x)?([a-z][a-z0-9]*)(?:-([0-9]{1,6})|:([0-9]{1,6}(?:x[0-9]{1,6})*))")


@dataclasses.dataclass(frozen=True)
class SliceName:
    """One or several equal slices."""

    generation: ChipGeneration
    shape: tuple[int, ...]
    """Chips of a slice along each dimension."""
    slices: int = 1
    """Number of slices."""

    @property
    def chips(self) -> int:
        """Number of chips of a slice."""
        return math.prod(self.shape)

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Chips of one host along each dimension."""
        return self.shape if self.chips <= self.generation.single_host else self.generation.host_bounds

    @property
    def chips_per_host(self) -> int:
        """Number of chips of a host."""
        return math.prod(self.host_shape)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of a slice."""
        return self.chips // self.chips_per_host

    @property
    def type(self) -> str:
        """Google's type of a slice; slices of another shape than the default one have the same.

        >>> [parse_slice(name).type for name in ("v5e:4x4", "2xv5p:2x2x4", "v6e-64", "V4-8")]
        ['v5litepod-16', 'v5p-32', 'v6e-64', 'v4-8']
        """
        return self.generation.type_of(self.chips)

    @property
    def shape_text(self) -> str:
        """Shape, such as 2x2x4."""
        return "x".join(map(str, self.shape))

    def __str__(self) -> str:
        """Topology, such as 2xv5p:2x2x4."""
        return f"{'' if self.slices == 1 else f'{self.slices}x'}{self.generation.name}:{self.shape_text}"


def parse_slice(text: str, others: str = "") -> SliceName:
    """Parse the type or the topology of a slice; before it `Nx` for N slices.

    Args:
        text: the name.
        others: names of other devices that the caller takes, for the error message.

    Raises:
        TopologyError: if the form, the generation or the size is invalid; names valid ones.

    >>> str(parse_slice("v5p-32")), str(parse_slice("V5litepod-16")), str(parse_slice("2xv6e:2x4"))
    ('v5p:2x2x4', 'v5e:4x4', '2xv6e:2x4')
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or match[2] not in _NAMES:
        raise TopologyError(f"{text!r}: it is not a slice of TPUs, such as {', '.join(_EXAMPLES)}{others}")
    slices, generation = int(match[1] or 1), _NAMES[match[2]]
    shape = _shape_of_type(text, generation, int(match[3])) if match[3] else tuple(map(int, match[4].split("x")))
    if slices < 1 or 0 in shape:
        raise TopologyError(f"{text!r}: a size is 0; every size is at least 1")
    _check_shape(text, generation, shape)
    return SliceName(generation, shape, slices)


def _shape_of_type(text: str, generation: ChipGeneration, size: int) -> tuple[int, ...]:
    chips, rest = divmod(size, generation.cores_in_name)
    if rest or chips not in generation.sizes:
        counted = "chips" if generation.cores_in_name == 1 else f"cores, {generation.cores_in_name} for each chip"
        raise TopologyError(
            f"{text!r}: a slice of {size} has no default shape. Types of {generation.name} count {counted}: "
            f"{', '.join(map(generation.type_of, generation.sizes))}; other slices are named by their shape in chips, "
            f"such as {generation.example}"
        )
    return generation.default_shape(chips)


def _check_shape(text: str, generation: ChipGeneration, shape: tuple[int, ...]) -> None:
    bounds = generation.host_bounds
    is_whole = len(shape) == len(bounds) and all(size % host == 0 for size, host in zip(shape, bounds, strict=True))
    if not is_whole and not (generation.single_host and shape == (1, 1)):
        raise TopologyError(
            f"{text!r}: slices of {generation.name} have {len(bounds)} dimensions and consist of whole hosts of "
            f"{'x'.join(map(str, bounds))} chips, such as {generation.example}"
        )
    hosts = math.prod(shape) // math.prod(bounds)
    if hosts > generation.max_hosts:
        raise TopologyError(
            f"{text!r}: it has {hosts} hosts, but a slice of {generation.name} has at most {generation.max_hosts}; use "
            f"several slices, such as 2x{generation.example}"
        )
