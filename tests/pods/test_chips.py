# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import pytest

from marin_rl.config.workers_config import parse_worker_slice
from marin_rl.pods import absent_devices
from marin_rl.pods.chips import CHIPS, TopologyError, parse_topology


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "accelerator"),
    [
        ("v5e:2x4", 8, 1, "v5litepod-8"),
        ("2xv6e-8", 16, 2, "v6e-8"),
        ("V5litepod-16", 16, 4, "v5litepod-16"),
        ("2xv5p:2x2x4", 32, 8, "v5p-32"),
    ],
)
def test_topologies_have_googles_names(name: str, chips: int, hosts: int, accelerator: str):
    topology = parse_topology(name)
    assert (topology.num_chips, topology.num_hosts, topology.accelerator) == (chips, hosts, accelerator)
    assert topology.chip is CHIPS[topology.chip.name]
    kind = parse_worker_slice(f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}")
    assert (kind.num_hosts, kind.chips_per_host) == (topology.num_hosts // topology.slices, topology.chips_per_host)


def test_devices_of_one_machine():
    one, eight, gpu = parse_topology("cpu:1"), parse_topology("cpu:8"), parse_topology("h100:1")
    assert (eight.num_chips, eight.num_hosts) == (8, 1)
    assert one.chip.memory == pytest.approx(8 * eight.chip.memory)
    assert (gpu.num_chips, gpu.num_hosts, gpu.chip.platform) == (1, 1, "gpu")
    assert (eight.local(), gpu.local()) == (eight, gpu)


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
        ("h100:16", r"'h100:16': write h100:N with a number of GPUs of one host, at most 8; nearest: h100:8"),
        ("2xh100:2", "at most 8; nearest: h100:2"),
        ("8xh100", "at most 8; nearest: h100:1"),
        ("cpu", "'cpu': write cpu:N with a number of devices; nearest: cpu:1"),
        ("cpu:0", "nearest: cpu:1"),
        ("cpu:2x2", "nearest: cpu:2"),
    ],
)
def test_wrong_topology_names_the_nearest(name: str, message: str):
    with pytest.raises(TopologyError, match=message):
        parse_topology(name)


def test_cpu_with_another_number_of_devices_needs_a_new_process():
    found = len(jax.devices())
    name = f"cpu:{found + 1}"
    with (
        pytest.raises(TopologyError, match=rf"jax has started with {found} devices of cpu .* so it cannot use {name}"),
        absent_devices.absent_devices(parse_topology(name)),
    ):
        pass


@pytest.mark.parametrize(("name", "extra"), [("v5p:2x2x1", "tpu"), ("h100:1", "gpu")])
def test_missing_compiler_names_the_extra(name: str, extra: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(absent_devices.importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(TopologyError, match=rf"{name} needs .*the extra: pip install -e '\.\[{extra}\]'"),
        absent_devices.absent_devices(parse_topology(name)),
    ):
        pass
