# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.weights.assemble import assemble
from marin_rl.weights.bounds import Bounds
from marin_rl.weights.errors import MismatchedWeightsError
from marin_rl.weights.receive_buffers import ReceiveBuffers
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
def test_any_cut_gives_the_array(boxes: list[list[Bounds]]):
    np.testing.assert_array_equal(Hosts(*boxes).assemble()["w"], FULL)


@pytest.mark.parametrize("boxes", [[[box((0, 6), (0, 4))]], [[box((0, 6), (0, 1))], [box((0, 6), (1, 4))]]])
def test_what_is_written_in_place_is_not_copied_on_its_way_to_the_device(boxes: list[list[Bounds]]):
    hosts = Hosts(*boxes)
    plan = hosts.plan()
    landing = ReceiveBuffers(plan)
    place = landing.box(NAME, box((0, 6), (0, 4)))
    assert place is not None
    array = assemble(LIKE, plan, landing)["w"]
    assert array.unsafe_buffer_pointer() == place.ctypes.data


def test_pieces_that_contradict_each_other_are_told():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    hosts.parts[1][0][0, 1] += 1
    with pytest.raises(MismatchedWeightsError, match=r"two pieces of .* hold different values at \['2:4', '0:4'\]"):
        hosts.assemble()


def test_pieces_that_agree_on_a_nan_do_not_contradict():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    for part, row in ((hosts.parts[0][0], 3), (hosts.parts[1][0], 1)):
        part[row, 0] = np.nan
    assert np.isnan(hosts.assemble()["w"][3, 0])


def test_casting_is_from_floating_point_to_floating_point():
    narrow = {"w": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16)}
    received = Hosts([box((0, 6), (0, 4))]).assemble(narrow, cast=True)["w"]
    assert received.dtype == jnp.bfloat16
    np.testing.assert_array_equal(received, jnp.asarray(FULL).astype(jnp.bfloat16))
    with pytest.raises(MismatchedWeightsError, match="the receiver needs int32"):
        Hosts([box((0, 6), (0, 4))]).plan(like={"w": jax.ShapeDtypeStruct((6, 4), jnp.int32)}, cast=True)
