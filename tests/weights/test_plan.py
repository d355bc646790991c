# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from marin_rl.weights.errors import MismatchedWeightsError
from marin_rl.weights.plan import PieceKey, make_plan
from tests.weights.cut_array import Hosts, box


def test_a_gap_is_told_with_array_and_place():
    with pytest.raises(MismatchedWeightsError, match=r"no training host holds \['2:3', '0:4'\] of \['w'\]"):
        Hosts([box((0, 2), (0, 4))], [box((3, 6), (0, 4))]).plan()


def test_hosts_that_hold_the_same_piece_must_agree():
    hosts = Hosts([box((0, 6), (0, 4))], [box((0, 6), (0, 4))])
    hosts.parts[1][0][5, 3] += 1
    with pytest.raises(MismatchedWeightsError, match=r"training hosts 0 and 1 differ on piece \['0:6', '0:4'\]"):
        hosts.plan()


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


def test_many_differences_are_told_briefly():
    like = {name: jax.ShapeDtypeStruct((1,), jnp.float32) for name in "abcde"}
    with pytest.raises(MismatchedWeightsError, match=r"lack \['a'\], \['b'\], \['c'\] and 2 more; the model lacks"):
        Hosts([box((0, 6), (0, 4))]).plan(like=like)
