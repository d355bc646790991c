# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from types import SimpleNamespace

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import Mesh

from marin_rl.utils.levanter_line import peak_flops, shard

ROWS, WIDTH = Axis("rows", 4), Axis("width", 2)


@pytest.mark.parametrize("mapping", [{"rows": "data"}, {}], ids=["sharded", "replicated"])
@pytest.mark.parametrize("is_current", [True, False])
def test_shard_constrains_every_array(mapping: dict[str, str], is_current: bool):
    def program(array: hax.NamedArray) -> hax.NamedArray:
        with hax.axis_mapping(mapping):
            return shard(array) if is_current else shard(array, mapping)

    with set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        lowered = jax.jit(program).lower(hax.zeros((ROWS, WIDTH))).as_text()
    wanted = '[{"data"}, {}]' if mapping else "[{}, {}]"
    assert [
        line.partition("<@mesh, ")[2].partition(">")[0] for line in lowered.splitlines() if "constraint" in line
    ] == [wanted]


def test_shard_without_a_mesh_or_mapping_changes_nothing():
    array = hax.arange(ROWS)
    assert shard(array) is array
    lowered = jax.jit(lambda array: shard(array, {})).lower(array).as_text()
    assert "constraint" not in lowered


def test_peak_flops_of_known_and_unknown_devices(caplog: pytest.LogCaptureFixture):
    kinds = ("NVIDIA H100 80GB HBM3", "TPU v5 lite", "cpu", "NVIDIA of next year", "")
    assert [peak_flops(SimpleNamespace(device_kind=kind)) for kind in kinds] == [989.5e12, 197e12, None, None, None]
    # It is called at every step.
    assert caplog.messages == []
