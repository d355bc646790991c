# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.weights.assemble import assemble
from marin_rl.weights.bounds import Bounds
from marin_rl.weights.errors import MismatchedWeightsError
from marin_rl.weights.landing import Landing
from marin_rl.weights.manifest import Manifest, Piece, checksum
from marin_rl.weights.plan import PieceKey, make_plan, wanted_arrays

FULL = np.arange(24, dtype=np.float32).reshape(6, 4)
LIKE = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
NAME = "['w']"


def box(*edges: tuple[int, int]) -> Bounds:
    return edges


class Hosts:
    """Training hosts that each hold some boxes of one array."""

    def __init__(self, *boxes: list[Bounds]) -> None:
        self.parts = [[FULL[tuple(slice(*edge) for edge in bounds)].copy() for bounds in held] for held in boxes]
        self.boxes = boxes

    @property
    def manifests(self) -> list[Manifest]:
        return [
            Manifest(
                1,
                host,
                len(self.boxes),
                2**20,
                tuple(
                    Piece(NAME, (6, 4), "float32", bounds, (checksum(part.reshape(-1).view(np.uint8)),))
                    for bounds, part in zip(held, parts, strict=True)
                ),
            )
            for host, (held, parts) in enumerate(zip(self.boxes, self.parts, strict=True))
        ]

    def plan(self, *, cast: bool = False, like=LIKE):
        return make_plan(wanted_arrays(like), self.manifests, cast=cast)

    def assemble(self, like=LIKE, *, cast: bool = False):
        plan = self.plan(like=like, cast=cast)
        landing = Landing(plan)
        for key in plan.fetched():
            landing.write(key, 0, self.parts[key.manifest][key.piece].reshape(-1).view(np.uint8))
        return assemble(like, plan, landing)


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
    landing = Landing(plan)
    place = landing.box(NAME, box((0, 6), (0, 4)))
    assert place is not None
    array = assemble(LIKE, plan, landing)["w"]
    assert array.unsafe_buffer_pointer() == place.ctypes.data


def test_a_gap_is_told_with_array_and_place():
    with pytest.raises(MismatchedWeightsError, match=r"no training host holds \['2:3', '0:4'\] of \['w'\]"):
        Hosts([box((0, 2), (0, 4))], [box((3, 6), (0, 4))]).plan()


def test_pieces_that_contradict_each_other_are_told():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    hosts.parts[1][0][0, 1] += 1
    with pytest.raises(MismatchedWeightsError, match=r"two pieces of .* hold different values at \['2:4', '0:4'\]"):
        hosts.assemble()


def test_hosts_that_hold_the_same_piece_must_agree():
    hosts = Hosts([box((0, 6), (0, 4))], [box((0, 6), (0, 4))])
    hosts.parts[1][0][5, 3] += 1
    with pytest.raises(MismatchedWeightsError, match=r"training hosts 0 and 1 differ on piece \['0:6', '0:4'\]"):
        hosts.plan()


def test_pieces_that_agree_on_a_nan_do_not_contradict():
    hosts = Hosts([box((0, 4), (0, 4))], [box((2, 6), (0, 4))])
    for part, row in ((hosts.parts[0][0], 3), (hosts.parts[1][0], 1)):
        part[row, 0] = np.nan
    assert np.isnan(hosts.assemble()["w"][3, 0])


def test_a_piece_that_several_hosts_hold_is_fetched_once_and_the_load_is_shared():
    rows = [box((row, row + 1), (0, 4)) for row in range(6)]
    keys = Hosts(rows, rows, rows).plan().fetched()
    assert len(keys) == 6
    assert [sum(key.manifest == host for key in keys) for host in range(3)] == [2, 2, 2]


def test_only_what_overlaps_is_fetched():
    plan = Hosts([box((0, 3), (0, 4))], [box((3, 6), (0, 4))]).plan()
    wanted = {name: dataclasses.replace(want, sharding=_TopHalf()) for name, want in plan.wanted.items()}
    manifests = Hosts([box((0, 3), (0, 4))], [box((3, 6), (0, 4))]).manifests
    assert make_plan(wanted, manifests, cast=False).fetched() == [PieceKey(0, 0)]
    # A host that has not what nobody here needs is not missed.
    assert make_plan(wanted, [manifests[0]], cast=False).fetched() == [PieceKey(0, 0)]


class _TopHalf(jax.sharding.Sharding):
    """As on a process whose devices hold the first three rows."""

    def addressable_devices_indices_map(self, global_shape):
        return {jax.devices()[0]: (slice(0, 3), slice(None))}


def test_casting_is_from_floating_point_to_floating_point():
    narrow = {"w": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16)}
    received = Hosts([box((0, 6), (0, 4))]).assemble(narrow, cast=True)["w"]
    assert received.dtype == jnp.bfloat16
    np.testing.assert_array_equal(received, jnp.asarray(FULL).astype(jnp.bfloat16))
    with pytest.raises(MismatchedWeightsError, match="the receiver needs int32"):
        Hosts([box((0, 6), (0, 4))]).plan(like={"w": jax.ShapeDtypeStruct((6, 4), jnp.int32)}, cast=True)


def test_many_differences_are_told_briefly():
    like = {name: jax.ShapeDtypeStruct((1,), jnp.float32) for name in "abcde"}
    with pytest.raises(MismatchedWeightsError, match=r"lack \['a'\], \['b'\], \['c'\] and 2 more; the model lacks"):
        Hosts([box((0, 6), (0, 4))]).plan(like=like)
