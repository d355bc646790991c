# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.config.workers_config import parse_worker_slice
from marin_rl.pods.chips import CHIPS, GIB, TopologyError, parse_topology


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "accelerator"),
    [
        ("v5e:2x2", 4, 1, "v5litepod-4"),
        ("v5e:2x4", 8, 1, "v5litepod-8"),
        ("2xv6e-8", 16, 2, "v6e-8"),
        ("v5e-1", 1, 1, "v5litepod-1"),
        ("V5litepod-16", 16, 4, "v5litepod-16"),
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
    kind = parse_worker_slice(f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}")
    assert (kind.num_hosts, kind.chips_per_host) == (topology.num_hosts // topology.slices, topology.chips_per_host)


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


def test_name_is_the_topology():
    names = ["v5p-32", " V5P:2x2x4 ", "2xv5e-16", "H100:8", "cpu-4"]
    assert [parse_topology(name).name for name in names] == ["v5p:2x2x4"] * 2 + ["2xv5e:4x4", "h100:8", "cpu:4"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", r"'v5p': it is not a slice of TPUs, .*; other devices are h100:8 and cpu:8"),
        ("v4-8", r"'v4-8': it is v4:2x2x1, but there is no data of v4 for a plan; there is of v5e, v5p, v6e, h100"),
        ("v5e:4,4", r"'v5e:4,4': it is not a slice of TPUs, such as v5e-8"),
        ("a100:8", r"'a100:8': it is not a slice.* other devices are h100:8"),
        ("h100:16", r"'h100:16': write h100:N with a number of GPUs of one host, at most 8; nearest: h100:8"),
        ("2xh100:2", "at most 8; nearest: h100:2"),
        ("8xh100", "at most 8; nearest: h100:1"),
        ("cpu", "'cpu': write cpu:N with a number of devices; nearest: cpu:1"),
        ("cpu:0", "nearest: cpu:1"),
        ("cpu:2x2", "nearest: cpu:2"),
        ("cpus:2", "not a slice of TPUs"),
    ],
)
def test_wrong_topology_names_the_nearest(name: str, message: str):
    with pytest.raises(TopologyError, match=message):
        parse_topology(name)


def test_memory_is_below_the_published_size():
    for name, size in {"v5e": 16, "v5p": 95, "v6e": 32, "h100": 80}.items():
        assert 0.7 * size < CHIPS[name].memory / GIB < 1.01 * size
