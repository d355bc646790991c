# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from marin_rl.weights.plan import PieceKey, choose_pieces, target_arrays
from marin_rl.weights.protocol import MismatchedWeightsError
from tests.weights.partitioned_array import LIKE, NAME, Hosts, box


def test_error_names_array_and_indices_of_a_gap():
    with pytest.raises(MismatchedWeightsError, match=r"no training host holds \['2:3', '0:4'\] of \['w'\]"):
        Hosts([box((0, 2), (0, 4))], [box((3, 6), (0, 4))]).plan()


def test_replicas_must_have_equal_checksums():
    hosts = Hosts([box((0, 6), (0, 4))], [box((0, 6), (0, 4))])
    hosts.parts[1][0][5, 3] += 1
    with pytest.raises(MismatchedWeightsError, match=r"training hosts 0 and 1 differ on piece \['0:6', '0:4'\]"):
        hosts.plan()


def test_replicated_piece_is_fetched_once_and_load_is_balanced():
    rows = [box((row, row + 1), (0, 4)) for row in range(6)]
    keys = Hosts(rows, rows, rows).plan()[NAME]
    assert len(keys) == 6
    assert [sum(key.manifest == host for key in keys) for host in range(3)] == [2, 2, 2]


def test_only_overlapping_pieces_are_fetched():
    wanted = {name: dataclasses.replace(want, sharding=_TopHalf()) for name, want in target_arrays(LIKE).items()}
    manifests = Hosts([box((0, 3), (0, 4))], [box((3, 6), (0, 4))]).manifests
    assert choose_pieces(wanted, manifests, cast=False)[NAME].keys() == {PieceKey(0, 0)}
    # A host without any required piece may be absent.
    assert choose_pieces(wanted, [manifests[0]], cast=False)[NAME].keys() == {PieceKey(0, 0)}


class _TopHalf(jax.sharding.Sharding):
    """Target of a process with devices for the first three rows."""

    def addressable_devices_indices_map(self, global_shape):
        return {jax.devices()[0]: (slice(0, 3), slice(None))}


def test_long_list_of_differences_is_shortened():
    like = {name: jax.ShapeDtypeStruct((1,), jnp.float32) for name in "abcde"}
    with pytest.raises(MismatchedWeightsError, match=r"lack \['a'\], \['b'\], \['c'\] and 2 more; the model lacks"):
        Hosts([box((0, 6), (0, 4))]).plan(like=like)
