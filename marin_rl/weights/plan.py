# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a receiver fetches from which training host.

Everything that can be judged from the manifests is judged before a byte travels.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.weights.bounds import Bounds, bounds_of, find_gap, overlap, whole
from marin_rl.weights.errors import MismatchedWeightsError
from marin_rl.weights.manifest import Manifest, Piece
from marin_rl.weights.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One array that the receiver's model needs."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: np.dtype
    """Its dtype."""
    sharding: jax.sharding.Sharding | None
    """Where it is put; None keeps it on the host, as numpy."""

    def boxes(self) -> set[Bounds]:
        """The parts that this process holds."""
        if self.sharding is None:
            return {whole(self.shape)}
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {bounds_of(index, self.shape) for index in indices if index is not None}


@dataclasses.dataclass(frozen=True, order=True)
class PieceKey:
    """Names a piece among several manifests."""

    manifest: int
    """Index of the manifest."""
    piece: int
    """Index into `Manifest.pieces`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to fetch, and what becomes of it."""

    wanted: Mapping[str, Wanted]
    """The receiver's arrays by name."""
    pieces: Mapping[str, Mapping[PieceKey, Piece]]
    """By array, the pieces to fetch."""

    def fetched(self) -> list[PieceKey]:
        """All pieces to fetch, in the order in which their hosts hold them."""
        return sorted(key for pieces in self.pieces.values() for key in pieces)


def wanted_arrays(like: object) -> dict[str, Wanted]:
    """What a tree with arrays or `jax.ShapeDtypeStruct`s asks for, by name."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: Wanted(
            tuple(leaf.shape),
            np.dtype(leaf.dtype),
            None if isinstance(leaf, np.ndarray) else leaf.sharding or default,
        )
        for name, leaf in named_leaves(like).items()
    }


def make_plan(wanted: Mapping[str, Wanted], manifests: Sequence[Manifest], *, cast: bool) -> Plan:
    """Choose the pieces that the receiver's devices need.

    Args:
        wanted: the receiver's arrays.
        manifests: one of every training host, all of one version.
        cast: whether floating-point arrays may arrive in another floating-point dtype than is wanted.

    Raises:
        MismatchedWeightsError: if names, shapes or dtypes differ, or pieces are missing or contradict each other; names
            array and piece.
    """
    held: dict[str, dict[PieceKey, Piece]] = {}
    for number, manifest in enumerate(manifests):
        for index, piece in enumerate(manifest.pieces):
            held.setdefault(piece.name, {})[PieceKey(number, index)] = piece
    check_names(wanted.keys(), held.keys())
    loads = [0] * len(manifests)
    chosen = {}
    for name, want in wanted.items():
        for piece in held[name].values():
            check_fit(name, want, piece.shape, jnp.dtype(piece.dtype), cast=cast)
        boxes = want.boxes()
        _check_cover(name, boxes, held[name].values())
        chosen[name] = _choose(held[name], boxes, loads)
    return Plan(wanted, chosen)


def check_names(wanted: Set[str], held: Set[str]) -> None:
    """Refuse weights of another model.

    Raises:
        MismatchedWeightsError: if a name is on one side alone.
    """
    missing, extra = sorted(wanted - held), sorted(held - wanted)
    if missing or extra:
        raise MismatchedWeightsError(
            "the published weights are not those of the receiver's model: "
            + "; ".join(
                f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for what, names in (("they lack", missing), ("the model lacks", extra))
                if names
            )
        )


def check_fit(name: str, want: Wanted, shape: tuple[int, ...], sent: np.dtype, *, cast: bool) -> None:
    """Refuse an array that was published with another shape or dtype than is wanted.

    Args:
        name: the array.
        want: what the receiver needs.
        shape: what was published.
        sent: the dtype that travels.
        cast: whether floating-point arrays may arrive in another floating-point dtype than is wanted.

    Raises:
        MismatchedWeightsError: if they differ.
    """
    if shape != want.shape:
        raise MismatchedWeightsError(f"{name} was published with shape {shape}; the receiver needs {want.shape}")
    floats = jnp.issubdtype(sent, jnp.floating) and jnp.issubdtype(want.dtype, jnp.floating)
    if sent != want.dtype and not (cast and floats):
        raise MismatchedWeightsError(
            f"{name} was published as {sent.name}; the receiver needs {want.dtype.name}, and only a transfer whose "
            "dtype is configured casts, between floating-point dtypes"
        )


def _check_cover(name: str, boxes: set[Bounds], pieces: Collection[Piece]) -> None:
    for box in boxes:
        gap = find_gap(box, [piece.bounds for piece in pieces])
        if gap is not None:
            where = [f"{start}:{stop}" for start, stop in gap]
            raise MismatchedWeightsError(f"no training host holds {where} of {name}; a sender is missing or incomplete")


def _choose(held: Mapping[PieceKey, Piece], boxes: set[Bounds], loads: list[int]) -> dict[PieceKey, Piece]:
    """The pieces that overlap with the boxes; of those that several hosts hold, one from the least loaded."""
    copies: dict[Bounds, list[PieceKey]] = {}
    for key, piece in held.items():
        if any(overlap(piece.bounds, box) is not None for box in boxes):
            copies.setdefault(piece.bounds, []).append(key)
    chosen = {}
    for keys in copies.values():
        first = held[keys[0]]
        for key in keys[1:]:
            if held[key].checksums != first.checksums:
                raise MismatchedWeightsError(f"training hosts {keys[0].manifest} and {key.manifest} differ on {first}")
        key = min(keys, key=lambda key: loads[key.manifest])
        loads[key.manifest] += first.num_bytes
        chosen[key] = held[key]
    return chosen
