# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import re

import pytest
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY, infer_tpu_pod_type_from_topology
from ray.util.tpu import get_tpu_worker_resources

from marin_rl.utils.devices.slice_names import GENERATIONS, TopologyError, parse_slice


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        *(("v5e-4", "v5e:2x2"), ("v5e-8", "v5e:2x4"), ("v5litepod-8", "v5e:2x4"), ("v5lite-16", "v5e:4x4")),
        *(("V5E-32", "v5e:4x8"), ("v5litepod-256", "v5e:16x16"), ("v6e-64", "v6e:8x8"), ("v6e-128", "v6e:8x16")),
        *(("v5p-8", "v5p:2x2x1"), ("v5p-16", "v5p:2x2x2"), ("v5p-32", "v5p:2x2x4"), ("v5p-64", "v5p:2x4x4")),
        *(("v5p-128", "v5p:4x4x4"), ("v5p-1024", "v5p:8x8x8"), ("2xv5e-16", "2xv5e:4x4"), ("2xv5p-32", "2xv5p:2x2x4")),
        *(("v5e-1", "v5e:1x1"), ("v6e-1", "v6e:1x1"), ("v4-8", "v4:2x2x1"), ("v4-64", "v4:2x4x4"), ("v3-32", "v3:4x4")),
        *(("v5litepod:2x4", "v5e:2x4"), (" V5P:2x2x4 ", "v5p:2x2x4"), ("v2-8", "v2:2x2"), ("tpu7x-8", "v7x:2x2x1")),
    ],
)
def test_type_of_a_slice_names_its_default_shape(name: str, topology: str):
    named = parse_slice(name)
    assert str(named) == topology
    assert parse_slice(topology) == named


@pytest.mark.parametrize("generation", GENERATIONS)
def test_types_and_hosts_are_those_of_ray(generation: str):
    """An independent table, which lacks some sizes, and Google's name of v7x."""
    version = "v5litepod" if generation == "v5e" else generation
    assert len(VALID_TPU_TOPOLOGY[version]) >= 5
    for shape in VALID_TPU_TOPOLOGY[version]:
        named = parse_slice(f"{generation}:{shape}")
        hosts, resources = get_tpu_worker_resources(shape, version)
        assert (named.num_hosts, named.chips_per_host) == (hosts, resources["TPU"])
        if generation != "v7x":
            assert infer_tpu_pod_type_from_topology(shape, version) == named.type


def test_default_shapes_are_those_of_ray():
    for generation in ("v4", "v5e", "v5p", "v6e"):
        version = "v5litepod" if generation == "v5e" else generation
        shapes = {parse_slice(GENERATIONS[generation].type_of(chips)).shape_text for chips in (4, 8, 16, 64)}
        assert shapes <= VALID_TPU_TOPOLOGY[version]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "it is not a slice of TPUs, such as v5e-8, v5e:2x4") for name in ("v5e_8", "v5-8", "", "ct5lp-8t")),
        *((name, "it is not a slice of TPUs") for name in ("v5e-" + "9" * 30, "v5e-\N{ARABIC-INDIC DIGIT EIGHT}")),
        *((name, "a size is 0; every size is at least 1") for name in ("0xv5e:4x4", "v5p:0x2x1")),
        ("v5p-24", "a slice of 24 has no default shape. Types of v5p count cores, 2 for each chip: v5p-8, v5p-16, v5p"),
        *((name, "named by their shape in chips, such as v5p:2x2x4") for name in ("v5p-4", "v5p-17", "v5p-0")),
        *((name, "Types of v5e count chips: v5litepod-1, v5litepod-4,") for name in ("v5e-2", "v5e-512")),
        *(
            (name, "slices of v5p have 3 dimensions and consist of whole")
            for name in ("v5p:32", "v5p:4x4", "v5p:3x2x1")
        ),
        *((name, "whole hosts of 2x2 chips, such as v5e:4x4") for name in ("v5e:1x2", "v5e:2x2x4")),
        ("v5e:32x16", "it has 128 hosts, but a slice of v5e has at most 64; use several slices, such as 2xv5e:4x4"),
    ],
)
def test_wrong_slice_is_refused_with_valid_ones(name: str, message: str):
    with pytest.raises(TopologyError, match=re.escape(repr(name)) + ": .*" + re.escape(message)):
        parse_slice(name)
