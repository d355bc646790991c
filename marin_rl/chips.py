# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Chips, and topologies of them: `v5p:2x2x4`, slices `2xv5p:2x2x4`, GPUs `h100:8`, or devices of a CPU `cpu:8`.

A slice of a TPU may also be named by its type: `v5p-32` is `v5p:2x2x4`, and `v5e-16` and `v5litepod-16` are `v5e:4x4`.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import re
from pathlib import Path

from marin_rl.errors import UserError

GIB = 2**30
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, of cgroups version 2 and 1."""
Number = int | float
"""A quantity that may be extrapolated or averaged."""


class TopologyError(UserError):
    """A topology does not exist, or does not fit the config."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates and sizes of one chip. All rates are peaks."""

    name: str
    """Name in a topology."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    memory: float
    """Bytes of main memory that programs can use."""
    vmem: int
    """Bytes of on-chip vector memory; 0 without one."""
    flops: float
    """Floating-point operations per second of a matrix product in bfloat16, on a CPU in float32."""
    memory_bandwidth: float
    """Bytes per second from and to main memory, both directions together."""
    interconnect: float
    """Bytes per second that a chip sends to chips of its slice, over all links."""
    network: float
    """Bytes per second that a chip sends to other slices: the host's rate over its chips."""
    host_link: float
    """Bytes per second between a chip and its host."""
    dimensions: int = 1
    """Dimensions of a slice."""
    host_bounds: tuple[int, ...] = (1,)
    """Chips of one host of a slice of several hosts, along each dimension."""
    single_host: int = 0
    """Slices of at most this number of chips have one host."""
    hosts_per_slice: int = 1
    """Largest number of hosts in a slice."""
    accelerator: str = ""
    """Prefix of Google's name for a slice, which ends with the number of chips, or of cores."""
    cores_in_name: int = 1
    """Number that the name counts for a chip."""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            platform="tpu",
            memory=15.75 * GIB,
            vmem=128 * 2**20,
            flops=197e12,
            memory_bandwidth=819e9,
            interconnect=200e9,
            network=3.125e9,
            host_link=16e9,
            dimensions=2,
            host_bounds=(2, 2),
            single_host=8,
            hosts_per_slice=64,
            accelerator="v5litepod",
        ),
        Chip(
            name="v5p",
            platform="tpu",
            memory=95.74 * GIB,
            vmem=128 * 2**20,
            flops=459e12,
            memory_bandwidth=2765e9,
            interconnect=600e9,
            network=6.25e9,
            host_link=16e9,
            dimensions=3,
            host_bounds=(2, 2, 1),
            hosts_per_slice=1536,
            accelerator="v5p",
            cores_in_name=2,
        ),
        Chip(
            name="v6e",
            platform="tpu",
            memory=31.25 * GIB,
            vmem=128 * 2**20,
            flops=918e12,
            memory_bandwidth=1638e9,
            interconnect=400e9,
            network=12.5e9,
            host_link=32e9,
            dimensions=2,
            host_bounds=(2, 2),
            single_host=8,
            hosts_per_slice=64,
            accelerator="v6e",
        ),
        Chip(
            name="h100",
            platform="gpu",
            memory=0.75 * 79.11 * GIB,
            vmem=0,
            flops=989e12,
            memory_bandwidth=3350e9,
            interconnect=450e9,
            network=50e9,
            host_link=64e9,
            host_bounds=(8,),
        ),
    )
}
"""Chips by name.

Peak flops, memory bandwidth and interconnect: Google's pages of each chip (docs.cloud.google.com/tpu/docs/v5e, v5p,
v6e); their interconnect is the sum of both directions, here it is one. Network: the pages' rate of a pod (v5e 6.4, v6e
25.6 Tbit/s over 256 chips) and 200 Gbit/s for the four chips of a v5p host. Memory: the limit in XLA's messages
("of 15.75G hbm"), which is below the chip's 16, 95 and 32 GB because the system reserves a part. Vector memory: jax's
`jax/_src/pallas/mosaic/tpu_info.py`, over the cores of a chip. Host link: PCIe of generation 3 with 16 lanes, and 5
with 8 lanes for v6e, of which Google does not publish the rate. Hosts: Google's pages of each chip (eight chips of v5e
and v6e are one host, in larger slices hosts have four).

H100: NVIDIA's data sheet of the SXM module (bfloat16 without sparsity, NVLink in one direction, PCIe of generation 5).
Memory: the part that jax reserves unless `XLA_PYTHON_CLIENT_MEM_FRACTION` is set.
"""

GENERATIONS = {"v5lite": "v5e"} | {
    name: chip.name for chip in CHIPS.values() if chip.platform == "tpu" for name in (chip.accelerator, chip.name)
}
"""Chip by the names of a TPU generation in the type of a slice; Google's own name is `Chip.accelerator`."""


def accelerator_type(text: str) -> str:
    """Return Google's name for the type of a slice, which may have a common name; other texts are not changed.

    >>> accelerator_type("v5e-8"), accelerator_type("v5p-32"), accelerator_type("v4-8")
    ('v5litepod-8', 'v5p-32', 'v4-8')
    """
    generation, dash, size = text.strip().lower().partition("-")
    chip = GENERATIONS.get(generation)
    return text if chip is None else f"{CHIPS[chip].accelerator}{dash}{size}"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips of one or several slices."""

    name: str
    """The name that was parsed."""
    chip: Chip
    """Kind of chip."""
    shape: tuple[int, ...]
    """Chips of a slice along each dimension."""
    slices: int = 1
    """Number of slices."""

    @property
    def chips_per_slice(self) -> int:
        """Number of chips of a slice."""
        return math.prod(self.shape)

    @property
    def num_chips(self) -> int:
        """Number of chips of all slices."""
        return self.slices * self.chips_per_slice

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Chips of one host along each dimension."""
        is_one_host = self.chip.platform != "tpu" or self.chips_per_slice <= self.chip.single_host
        return self.shape if is_one_host else self.chip.host_bounds

    @property
    def chips_per_host(self) -> int:
        """Number of chips of one host."""
        return math.prod(self.host_shape)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all slices."""
        return self.num_chips // self.chips_per_host

    @property
    def accelerator(self) -> str:
        """Google's name for a slice of this kind.

        >>> [parse_topology(name).accelerator for name in ("v5e:4x4", "v5p:2x2x4", "v6e:8x8")]
        ['v5litepod-16', 'v5p-32', 'v6e-64']
        """
        return f"{self.chip.accelerator}-{self.chips_per_slice * self.chip.cores_in_name}"

    def local(self) -> "Topology":
        """Return the topology of one host."""
        if self.chip.platform != "tpu":
            return self
        shape = self.host_shape
        return Topology(f"{self.chip.name}:{'x'.join(map(str, shape))}", self.chip, shape)


_NAME = re.compile(r"(?:(?P<slices>\d+)x)?(?P<chip>[a-z]\w*):(?P<shape>\d+(?:x\d+)*)")
_TYPE = re.compile(r"(?P<slices>\d+x)?(?P<generation>[a-z]\w*)-(?P<size>\d+)")
_EXAMPLES = ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v6e:2x2", "v6e:4x4", "v6e:8x8")


def parse_topology(text: str) -> Topology:
    """Parse the name of a topology.

    Args:
        text: `CHIP:AxB`, `CHIP:AxBxC`, the type of a slice such as `v5e-16`, `h100:N` or `cpu:N`; before it `Nx` for N
            slices of a TPU.

    Raises:
        TopologyError: if the form, the chip or the shape is invalid; names the nearest valid ones.

    >>> topology = parse_topology("2xv5p:2x2x4")
    >>> topology.num_chips, topology.num_hosts, topology.chip.name
    (32, 8, 'v5p')
    """
    match = _NAME.fullmatch(with_shape(text))
    known = ["cpu", *CHIPS]
    if match is None:
        near = difflib.get_close_matches(text, _EXAMPLES, n=3, cutoff=0.5) or [*_EXAMPLES[2:6:3], "cpu:8"]
        raise TopologyError(f"{text!r} is not a topology, which is a chip and a shape; nearest: {', '.join(near)}")
    name, slices = match["chip"], int(match["slices"] or 1)
    shape = tuple(map(int, match["shape"].split("x")))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.3) or known
        raise TopologyError(f"{text!r}: there is no data of chip {name!r}; nearest: {', '.join(near)}")
    if slices < 1 or min(shape) < 1:
        raise TopologyError(f"{text!r} has a size of 0; every size is at least 1")
    if name == "cpu":
        if len(shape) > 1 or slices > 1:
            raise TopologyError(
                f"{text!r}: a CPU has one slice of one dimension; write cpu:{slices * math.prod(shape)}"
            )
        return Topology(text, _cpu(shape[0]), shape)
    chip = CHIPS[name]
    if chip.platform == "gpu":
        _check_gpus(text, chip, shape, slices)
    else:
        _check_shape(text, chip, shape)
    return Topology(text, chip, shape, slices)


def with_shape(text: str) -> str:
    """Replace the type of a slice by its chip and the shape that Google gives it by default.

    Other texts are not changed.

    Raises:
        TopologyError: if slices of this size have no default shape; names those that have one.

    >>> with_shape("v5p-32"), with_shape("2xv5e-16"), with_shape("v4:2x2x1")
    ('v5p:2x2x4', '2xv5e:4x4', 'v4:2x2x1')
    """
    match = _TYPE.fullmatch(text.strip().lower())
    if match is None or match["generation"] not in GENERATIONS:
        return text
    chip, size = CHIPS[GENERATIONS[match["generation"]]], int(match["size"])
    smallest, largest = (hosts * math.prod(chip.host_bounds) for hosts in (1, chip.hosts_per_slice))
    # Other numbers have no shape of their own: v5p-24 may be 2x2x3 or 12x1x1.
    sizes = [2**power for power in range(smallest.bit_length() - 1, largest.bit_length())]
    chips = size // chip.cores_in_name
    if chips not in sizes or size % chip.cores_in_name:
        near = sorted(sizes, key=lambda valid: abs(valid - chips))[:3]
        names = (f"{chip.accelerator}-{valid * chip.cores_in_name}" for valid in sorted(near))
        raise TopologyError(
            f"{text!r}: a slice of {size} has no default shape; give the shape, such as "
            f"{_fit_dimensions(chip, (chips,))}; nearest: {', '.join(names)}"
        )
    power = chips.bit_length() - 1
    shape = [2 ** ((power + index) // chip.dimensions) for index in range(chip.dimensions)]
    if any(length % host for length, host in zip(shape, chip.host_bounds, strict=True)):
        shape.reverse()
    return f"{match['slices'] or ''}{chip.name}:{'x'.join(map(str, shape))}"


def _check_gpus(text: str, chip: Chip, shape: tuple[int, ...], slices: int) -> None:
    count, most = slices * math.prod(shape), math.prod(chip.host_bounds)
    if len(shape) > 1 or slices > 1 or count > most:
        raise TopologyError(
            f"{text!r}: a plan for {chip.name} has the GPUs of one host, at most {most}; "
            f"nearest: {chip.name}:{min(count, most)}"
        )


def _check_shape(text: str, chip: Chip, shape: tuple[int, ...]) -> None:
    if len(shape) != chip.dimensions:
        raise TopologyError(
            f"{text!r} has {len(shape)} dimensions, but slices of {chip.name} have {chip.dimensions}; "
            f"nearest: {_fit_dimensions(chip, shape)}"
        )
    whole = tuple(-(-size // host) * host for size, host in zip(shape, chip.host_bounds, strict=True))
    if whole != shape:
        raise TopologyError(
            f"{text!r} is not made of whole hosts, which have {'x'.join(map(str, chip.host_bounds))} chips; "
            f"nearest: {chip.name}:{'x'.join(map(str, whole))}"
        )
    hosts = math.prod(shape) // math.prod(chip.host_bounds)
    if hosts > chip.hosts_per_slice:
        raise TopologyError(
            f"{text!r} has {hosts} hosts, but a slice of {chip.name} has at most {chip.hosts_per_slice}; use several "
            f"slices, such as 2x{chip.name}:SHAPE"
        )


def _fit_dimensions(chip: Chip, shape: tuple[int, ...]) -> str:
    """Return a shape of the right number of dimensions, with as many chips if possible."""
    if len(shape) > chip.dimensions:
        shape = (*shape[: chip.dimensions - 1], math.prod(shape[chip.dimensions - 1 :]))
    padded = (*shape, *[1] * (chip.dimensions - len(shape)))
    whole = (-(-size // host) * host for size, host in zip(padded, chip.host_bounds, strict=True))
    return f"{chip.name}:{'x'.join(map(str, whole))}"


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or the limit of this process's container if it is lower."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        # A missing file, or the text `max`, is no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(path.read_text(encoding="utf-8")))
    return min(limits)


def _cpu(devices: int) -> Chip:
    """Return one of several equal devices of this machine's CPU, without its rates, which `measure_cpu` measures."""
    memory = machine_memory() / devices
    unknown = math.inf
    return Chip(
        name="cpu",
        platform="cpu",
        memory=memory,
        vmem=0,
        flops=unknown,
        memory_bandwidth=unknown,
        interconnect=unknown,
        network=unknown,
        host_link=unknown,
    )
