# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Names of TPU slices: types, `v5p-32`, which count chips or cores, and topologies in chips, `v5p:2x2x4`.

Every setting that names a slice takes both, in any case, and the common names `v5e-16` and `v5lite-16` of Google's
`v5litepod-16`.
"""

import dataclasses
import difflib
import math
import re

from marin_rl.utils.errors import UserError


class TopologyError(UserError):
    """A topology does not exist, or does not fit the config."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of TPUs, and the sizes of its slices."""

    name: str
    """Name in a topology."""
    host_bounds: tuple[int, ...]
    """Chips of one host of a slice of several hosts, along each dimension."""
    max_hosts: int
    """Largest number of hosts in a slice."""
    runtime_version: str
    """Software of the hosts for JAX, see https://cloud.google.com/tpu/docs/runtimes; empty if it is not known."""
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
    def counted(self) -> str:
        """What the number in a type counts, for messages."""
        if self.cores_in_name == 1:
            return f"types of {self.name} count chips"
        return f"types of {self.name} count cores, {self.cores_in_name} for each chip"


_OLD, _CUBES = "tpu-ubuntu2204-base", (2, 2, 1)
GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("v2", (2, 2), 64, _OLD, cores_in_name=2),
        Generation("v3", (2, 2), 256, _OLD, cores_in_name=2),
        Generation("v4", _CUBES, 1024, _OLD, cores_in_name=2),
        Generation(
            "v5e", (2, 2), 64, "v2-alpha-tpuv5-lite", single_host=8, accelerator="v5litepod", aliases=("v5lite",)
        ),
        Generation("v5p", _CUBES, 1536, "v2-alpha-tpuv5", cores_in_name=2),
        Generation("v6e", (2, 2), 64, "v2-alpha-tpuv6e", single_host=8),
        Generation("v7x", _CUBES, 2304, "", cores_in_name=2, accelerator="tpu7x"),
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

    generation: Generation
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
        TopologyError: if the form, the generation or the size is invalid; names the nearest valid ones.

    >>> str(parse_slice("v5p-32")), str(parse_slice("V5litepod-16")), str(parse_slice("2xv6e:2x4"))
    ('v5p:2x2x4', 'v5e:4x4', '2xv6e:2x4')
    """
    slices, generation, size, shape = _parts(text, others)
    if slices < 1 or size == 0 or 0 in shape:
        raise TopologyError(f"{text!r}: a size is 0; every size is at least 1")
    if size is not None:
        shape = generation.default_shape(_chips(text, generation, size))
    _check_shape(text, generation, shape)
    return SliceName(generation, shape, slices)


def _parts(text: str, others: str = "") -> tuple[int, Generation, int | None, tuple[int, ...]]:
    """Number of slices, generation, size of a type and shape of a topology."""
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or match[2] not in _NAMES:
        raise TopologyError(f"{text!r}: it is not a slice of TPUs; {_nearest(text)}{others}")
    shape = tuple(map(int, match[4].split("x"))) if match[4] else ()
    return int(match[1] or 1), _NAMES[match[2]], int(match[3]) if match[3] else None, shape


def _nearest(text: str) -> str:
    """List types and topologies with a name like the text, or examples."""
    names = []
    for name, generation in _NAMES.items():
        for chips in generation.sizes:
            shape = SliceName(generation, generation.default_shape(chips)).shape_text
            names += [f"{name}-{chips * generation.cores_in_name}", f"{name}:{shape}"]
    near = difflib.get_close_matches(text.strip().lower()[:40], names, n=3, cutoff=0.65)
    return f"nearest: {', '.join(near)}" if near else f"examples: {', '.join(_EXAMPLES)}"


def _chips(text: str, generation: Generation, size: int) -> int:
    """Number of chips of a type."""
    chips = size // generation.cores_in_name
    if chips in generation.sizes and size % generation.cores_in_name == 0:
        return chips
    near = sorted(sorted(generation.sizes, key=lambda valid: abs(valid - chips))[:3])
    names = ", ".join(f"{generation.type_of(valid)} ({valid} chip{'s' if valid > 1 else ''})" for valid in near)
    raise TopologyError(
        f"{text!r}: a slice of {size} has no default shape, and {generation.counted}; give a shape in chips, such as "
        f"{_fitting(generation, (chips,))}; nearest: {names}"
    )


def _check_shape(text: str, generation: Generation, shape: tuple[int, ...]) -> None:
    name, bounds = generation.name, generation.host_bounds
    if len(shape) != len(bounds):
        as_type = f", or the type {name}-{shape[0]} ({generation.counted})" if len(shape) == 1 else ""
        raise TopologyError(
            f"{text!r}: it has {len(shape)} dimension{'s' if len(shape) > 1 else ''}, but slices of {name} have "
            f"{len(bounds)}; nearest: {_fitting(generation, shape)}{as_type}"
        )
    if generation.single_host and shape == (1, 1):
        return
    whole = tuple(-(-size // host) * host for size, host in zip(shape, bounds, strict=True))
    if whole != shape:
        raise TopologyError(
            f"{text!r}: it is not made of whole hosts, which have {'x'.join(map(str, bounds))} chips; "
            f"nearest: {name}:{'x'.join(map(str, whole))}"
        )
    hosts = math.prod(shape) // math.prod(bounds)
    if hosts > generation.max_hosts:
        raise TopologyError(
            f"{text!r}: it has {hosts} hosts, but a slice of {name} has at most {generation.max_hosts}; use several "
            f"slices, such as 2x{name}:SHAPE"
        )


def _fitting(generation: Generation, shape: tuple[int, ...]) -> str:
    """Return a topology of the right number of dimensions, with as many chips if possible."""
    bounds = generation.host_bounds
    if len(shape) > len(bounds):
        shape = (*shape[: len(bounds) - 1], math.prod(shape[len(bounds) - 1 :]))
    if math.prod(shape) in generation.sizes:
        whole = generation.default_shape(math.prod(shape))
    else:
        # The last dimension takes the hosts of a single number.
        hosts = -(-math.prod(shape) // math.prod(bounds))
        padded = (*bounds[:-1], hosts * bounds[-1]) if len(shape) == 1 else (*shape, *[1] * (len(bounds) - len(shape)))
        whole = tuple(-(-size // host) * host for size, host in zip(padded, bounds, strict=True))
    return f"{generation.name}:{'x'.join(map(str, whole))}"
