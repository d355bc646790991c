# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.chips import CHIPS, GIB, TopologyError, accelerator_type, parse_topology
from marin_rl.config.workers_config import TpuSlice


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "accelerator"),
    [
        ("v5e:2x2", 4, 1, "v5litepod-4"),
        ("v5e:2x4", 8, 1, "v5litepod-8"),
        ("2xv6e:2x4", 16, 2, "v6e-8"),
        ("v6e:4x4", 16, 4, "v6e-16"),
        ("v5e:16x16", 256, 64, "v5litepod-256"),
        ("v5p:2x2x4", 16, 4, "v5p-32"),
        ("2xv5p:2x2x4", 32, 8, "v5p-32"),
        ("v6e:8x8", 64, 16, "v6e-64"),
    ],
)
def test_topologies_have_googles_names(name: str, chips: int, hosts: int, accelerator: str):
    topology = parse_topology(name)
    assert (topology.num_chips, topology.num_hosts, topology.accelerator) == (chips, hosts, accelerator)
    assert topology.chip is CHIPS[topology.chip.name]
    # Ray's description of a slice.
    kind = TpuSlice.parse(f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}")
    assert (kind.num_hosts, kind.chips_per_host) == (topology.num_hosts // topology.slices, topology.chips_per_host)


@pytest.mark.parametrize(
    ("slice_type", "shape"),
    [
        *(("v5e-4", "v5e:2x2"), ("v5e-8", "v5e:2x4"), ("v5litepod-8", "v5e:2x4"), ("v5lite-16", "v5e:4x4")),
        *(("V5E-32", "v5e:4x8"), ("v5litepod-256", "v5e:16x16"), ("v6e-64", "v6e:8x8"), ("v6e-128", "v6e:8x16")),
        *(("v5p-8", "v5p:2x2x1"), ("v5p-16", "v5p:2x2x2"), ("v5p-32", "v5p:2x2x4"), ("v5p-64", "v5p:2x4x4")),
        *(("v5p-128", "v5p:4x4x4"), ("v5p-1024", "v5p:8x8x8"), ("2xv5e-16", "2xv5e:4x4"), ("2xv5p-32", "2xv5p:2x2x4")),
    ],
)
def test_type_of_a_slice_names_its_default_shape(slice_type: str, shape: str):
    named, shaped = parse_topology(slice_type), parse_topology(shape)
    assert (named.chip, named.shape, named.slices) == (shaped.chip, shaped.shape, shaped.slices)
    assert accelerator_type(slice_type.partition("x")[2] if slice_type[0] == "2" else slice_type) == named.accelerator


def test_devices_of_a_cpu_share_its_memory():
    one, eight = parse_topology("cpu:1"), parse_topology("cpu:8")
    assert (eight.num_chips, eight.num_hosts) == (8, 1)
    assert one.chip.memory == pytest.approx(8 * eight.chip.memory)
    assert eight.local() is eight


def test_gpus_are_those_of_one_host():
    one = parse_topology("h100:1")
    assert (one.num_chips, one.num_hosts, one.chip.platform) == (1, 1, "gpu")
    assert one.local() is one


def test_local_topology_is_one_host():
    local = parse_topology("2xv5p:2x2x4").local()
    assert (local.name, local.num_chips, local.num_hosts, local.slices) == ("v5p:2x2x1", 4, 1, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", r"'v5p' is not a topology.*nearest: v5p:2x2"),
        ("v5e:4,4", r"'v5e:4,4' is not a topology.*nearest: v5e:"),
        ("v5p-24", r"'v5p-24': a slice of 24 has no default shape; give the shape.* nearest: .*v5p-16, v5p-32"),
        ("v5p-17", "a slice of 17 has no default shape; .*nearest: .*v5p-16"),
        ("v5e-512", "nearest: v5litepod-64, v5litepod-128, v5litepod-256"),
        ("v5e-0", "nearest: v5litepod-4, "),
        ("v5e8", r"'v5e8' is not a topology.*nearest: .*v5e"),
        ("", r"'' is not a topology.*nearest: v5e:4x4"),
        ("v5:2x2", r"'v5:2x2': there is no data of chip 'v5'; nearest: v5p, v5e|nearest: v5e, v5p"),
        ("a100:8", r"no data of chip 'a100'; nearest: h100"),
        ("h100:16", r"'h100:16': a plan for h100 has the GPUs of one host, at most 8; nearest: h100:8"),
        ("2xh100:2", "the GPUs of one host, at most 8; nearest: h100:4"),
        ("v5p:4x4", r"has 2 dimensions, but slices of v5p have 3; nearest: v5p:4x4x1"),
        ("v5e:2x2x4", r"has 3 dimensions, but slices of v5e have 2; nearest: v5e:2x8"),
        ("v5p:3x2x1", r"not made of whole hosts, which have 2x2x1 chips; nearest: v5p:4x2x1"),
        ("v6e:1x1", r"not made of whole hosts, which have 2x2 chips; nearest: v6e:2x2"),
        ("v5e:32x16", r"has 128 hosts, but a slice of v5e has at most 64; use several slices"),
        ("0xv5e:4x4", "has a size of 0"),
        ("cpu:0", "has a size of 0"),
        ("2xcpu:4", "a CPU has one slice of one dimension; write cpu:8"),
        ("cpu:2x2", "a CPU has one slice of one dimension; write cpu:4"),
    ],
)
def test_wrong_topology_names_the_nearest(name: str, message: str):
    with pytest.raises(TopologyError, match=message):
        parse_topology(name)


def test_table_agrees_with_the_published_ratios():
    """Chapter 2 of How to Scale Your Model: one-way link rates of 45, 90 and 90 GB/s over 4, 6 and 4 links."""
    links = {"v5e": 4 * 45e9, "v5p": 6 * 90e9, "v6e": 4 * 90e9}
    memory = {"v5e": 16e9, "v5p": 95e9, "v6e": 32e9}
    for name in links:
        chip = CHIPS[name]
        assert chip.interconnect == pytest.approx(links[name], rel=0.12)
        assert chip.memory == pytest.approx(memory[name], rel=0.1)
        assert chip.memory < 1.01 * memory[name] / 1e9 * GIB
        assert chip.network < chip.interconnect < chip.memory_bandwidth
