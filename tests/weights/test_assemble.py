# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.weights.fetch import ReceiveBuffers, assemble
from marin_rl.weights.manifest import Bounds
from marin_rl.weights.protocol import MismatchedWeightsError
from tests.weights.cut_array import FULL, LIKE, NAME, Hosts, box


@pytest.mark.parametrize(
    "boxes",
    [
        [[box((0, 6), (0, 4))]],
        [[box((0, 3), (0, 4))], [box((3, 6), (0, 4))]],
        [[box((0, 6), (0, 1)), box((0, 2), (1, 4))], [box((2, 6), (1, 4))]],
        [[box((0, 4), (0, 4))], [box((2, 6), (0, 4))]],
        [[box((0, 6), (0, 4))], [box((0, 6), (0, 4))]],
    ],
)
def test_array_is_assembled_from_any_partition(boxes: list[list[Bounds]]):
    np.testing.assert_array_equal(Hosts(*boxes).assemble()["w"], FULL)


@pytest.mark.parametrize("boxes", [[[box((0, 6), (0, 4))]], [[box((0, 6), (0, 1))], [box((0, 6), (1, 4))]]])
def test_in_place_buffers_are_not_copied_to_the_device(boxes: list[list[Bounds]]):
    hosts = Hosts(*boxes)
    plan = hosts.plan()
    buffers = ReceiveBuffers(plan)
    place = buffers.box(NAME, box((0, 6), (0, 4)))
    assert place is not None
    array = assemble(LIKE, plan, buffers)["w"]
    assert array.unsafe_buffer_pointer() == place.ctypes.data


def test_inconsistent_pieces_are_rejected():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    hosts.parts[1][0][0, 1] += 1
    with pytest.raises(MismatchedWeightsError, match=r"two pieces of .* hold different values at \['2:4', '0:4'\]"):
        hosts.assemble()


def test_pieces_with_equal_nans_are_consistent():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    for part, row in ((hosts.parts[0][0], 3), (hosts.parts[1][0], 1)):
        part[row, 0] = np.nan
    assert np.isnan(hosts.assemble()["w"][3, 0])


def test_only_floating_point_is_cast_on_receipt():
    narrow = {"w": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16)}
    received = Hosts([box((0, 6), (0, 4))]).assemble(narrow, cast=True)["w"]
    assert received.dtype == jnp.bfloat16
    np.testing.assert_array_equal(received, jnp.asarray(FULL).astype(jnp.bfloat16))
    with pytest.raises(MismatchedWeightsError, match="the receiver needs int32"):
        Hosts([box((0, 6), (0, 4))]).plan(like={"w": jax.ShapeDtypeStruct((6, 4), jnp.int32)}, cast=True)
