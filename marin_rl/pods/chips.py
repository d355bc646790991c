# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Chips, and topologies of them: slices of TPUs `v5p:2x2x4` or `v5p-32`, GPUs `h100:8`, devices of a CPU `cpu:8`."""

import contextlib
import dataclasses
import math
import os
import re
from pathlib import Path

from marin_rl.utils.devices.slice_names import GENERATIONS, SliceName, TopologyError, parse_slice

GIB = 2**30
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, of cgroups version 2 and 1."""
Number = int | float
"""A quantity that may be extrapolated or averaged."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Memory and peak rates of one chip."""

    name: str
    """Name in a topology."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    memory: float
    """Bytes of main memory that programs can use."""
    flops: float | None
    """Floating-point operations per second of a matrix product in bfloat16; None if unknown."""
    memory_bandwidth: float | None
    """Bytes per second from and to main memory, both directions together; None if unknown."""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", memory=15.75 * GIB, flops=197e12, memory_bandwidth=819e9),
        Chip("v5p", "tpu", memory=95.74 * GIB, flops=459e12, memory_bandwidth=2765e9),
        Chip("v6e", "tpu", memory=31.25 * GIB, flops=918e12, memory_bandwidth=1638e9),
        Chip("h100", "gpu", memory=0.75 * 79.11 * GIB, flops=989e12, memory_bandwidth=3350e9),
    )
}
"""Chips by name.

TPUs: peak FLOPS and memory bandwidth from Google's pages of each chip (docs.cloud.google.com/tpu/docs/v5e, v5p, v6e);
memory from the limit in XLA's messages ("of 15.75G hbm"), which is below the chip's 16, 95 and 32 GB because the system
reserves a part. H100: NVIDIA's data sheet of the SXM module (bfloat16 without sparsity); the memory is the part that
jax reserves unless `XLA_PYTHON_CLIENT_MEM_FRACTION` is set.
"""

GPUS_PER_HOST = 8
"""Largest number of GPUs in a topology, which are those of one host."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips of one or several slices."""

    name: str
    """Its name with the shape, such as `2xv5p:2x2x4`."""
    chip: Chip
    """Kind of chip."""
    shape: tuple[int, ...]
    """Chips of a slice along each dimension."""
    slices: int = 1
    """Number of slices."""

    @property
    def num_chips(self) -> int:
        """Number of chips of all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Chips of one host along each dimension."""
        return self._slices.host_shape if self.chip.platform == "tpu" else self.shape

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
        """Google's type for a slice of this kind.

        >>> [parse_topology(name).accelerator for name in ("v5e:4x4", "v5p:2x2x4", "v6e:8x8")]
        ['v5litepod-16', 'v5p-32', 'v6e-64']
        """
        return self._slices.type

    @property
    def _slices(self) -> SliceName:
        return SliceName(GENERATIONS[self.chip.name], self.shape, self.slices)

    def local(self) -> "Topology":
        """Return the topology of one host."""
        if self.chip.platform != "tpu":
            return self
        shape = self.host_shape
        return Topology(str(SliceName(GENERATIONS[self.chip.name], shape)), self.chip, shape)


_OTHERS = ["cpu", *(chip.name for chip in CHIPS.values() if chip.platform == "gpu")]
_DEVICES = re.compile(rf"(.*?)({'|'.join(_OTHERS)})\b(?:[:-]([0-9]{{1,6}}))?")


def parse_topology(text: str) -> Topology:
    """Parse the name of a topology.

    Args:
        text: type or topology of a slice of TPUs, such as `v5p-32` or `v5p:2x2x4`, before it `Nx` for N slices;
            `h100:N` or `cpu:N`.

    Raises:
        TopologyError: if the form, the chip or the shape is invalid; names the nearest valid ones.

    >>> topology = parse_topology("2xv5p-32")
    >>> topology.name, topology.num_chips, topology.num_hosts
    ('2xv5p:2x2x4', 32, 8)
    """
    devices = _DEVICES.match(text.strip().lower())
    if devices is not None:
        return _parse_devices(text, devices)
    named = parse_slice(text, others=f"; other devices are {' and '.join(f'{name}:8' for name in reversed(_OTHERS))}")
    if named.generation.name not in CHIPS:
        raise TopologyError(
            f"{text!r}: it is {named}, but there is no data of {named.generation.name} for a plan; there is of "
            f"{', '.join([*CHIPS, 'cpu'])}"
        )
    return Topology(str(named), CHIPS[named.generation.name], named.shape, named.slices)


def _parse_devices(text: str, match: re.Match[str]) -> Topology:
    """The devices of a CPU or the GPUs of one host."""
    name, number = match[2], int(match[3] or 1)
    most = math.inf if name == "cpu" else GPUS_PER_HOST
    if match[0] != text.strip().lower() or match[1] or match[3] is None or not 1 <= number <= most:
        numbers = "a number of devices" if name == "cpu" else f"a number of GPUs of one host, at most {GPUS_PER_HOST}"
        nearest = f"{name}:{int(min(max(number, 1), most))}"
        raise TopologyError(f"{text!r}: write {name}:N with {numbers}; nearest: {nearest}")
    return Topology(f"{name}:{number}", _cpu(number) if name == "cpu" else CHIPS[name], (number,))


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or the limit of this process's container if it is lower."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        # A missing file, or the text `max`, is no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(path.read_text(encoding="utf-8")))
    return min(limits)


def _cpu(devices: int) -> Chip:
    """Return one of several equal devices of this machine's CPU."""
    return Chip("cpu", "cpu", memory=machine_memory() / devices, flops=None, memory_bandwidth=None)
