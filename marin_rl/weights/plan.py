# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Choice of the pieces that a receiver fetches, from the manifests of all training hosts."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.weights.manifest import Bounds, Manifest, Piece, bounds_of, find_gap, overlap, whole
from marin_rl.weights.protocol import MismatchedWeightsError
from marin_rl.weights.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class TargetArray:
    """An array of the receiver's model."""

    shape: tuple[int, ...]
    """Shape of the array."""
    dtype: np.dtype
    """Dtype of the array."""
    sharding: jax.sharding.Sharding | None
    """Sharding of the array; None keeps it on the host as a numpy array."""

    def boxes(self) -> set[Bounds]:
        """Return the boxes of the shards of this process."""
        if self.sharding is None:
            return {whole(self.shape)}
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {bounds_of(index, self.shape) for index in indices if index is not None}


def target_arrays(like: object) -> dict[str, TargetArray]:
    """Return the target arrays of a tree of arrays or `jax.ShapeDtypeStruct`s, by name."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: TargetArray(
            tuple(leaf.shape),
            np.dtype(leaf.dtype),
            None if isinstance(leaf, np.ndarray) else leaf.sharding or default,
        )
        for name, leaf in named_leaves(like).items()
    }


class PieceKey(NamedTuple):
    """Identifies a piece among several manifests."""

    manifest: int
    """Index of the manifest."""
    piece: int
    """Index into `Manifest.pieces`."""


def choose_pieces(
    targets: Mapping[str, TargetArray], manifests: Sequence[Manifest], *, cast: bool
) -> dict[str, dict[PieceKey, Piece]]:
    """Choose the pieces that the receiver's devices need.

    Args:
        targets: arrays of the receiver, by name.
        manifests: one manifest per training host, all of one version.
        cast: whether floating-point arrays may be sent in another floating-point dtype than the receiver's.

    Returns:
        The pieces to fetch, by array name. The bytes are balanced over the hosts.

    Raises:
        MismatchedWeightsError: if names, shapes or dtypes differ, or pieces are missing or inconsistent; the message
            names array and piece.
    """
    held: dict[str, dict[PieceKey, Piece]] = {}
    for number, manifest in enumerate(manifests):
        for index, piece in enumerate(manifest.pieces):
            held.setdefault(piece.name, {})[PieceKey(number, index)] = piece
    _check_names(targets.keys(), held.keys())
    loads = [0] * len(manifests)
    chosen = {}
    for name, target in targets.items():
        for piece in held[name].values():
            _check_compatible(piece, target, cast=cast)
        boxes = target.boxes()
        _check_cover(name, boxes, held[name].values())
        chosen[name] = _choose(held[name], boxes, loads)
    return chosen


def _check_names(targets: Set[str], held: Set[str]) -> None:
    missing, extra = sorted(targets - held), sorted(held - targets)
    if missing or extra:
        raise MismatchedWeightsError(
            "the published weights do not match the receiver's model: "
            + "; ".join(
                f"{verb} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for verb, names in (("they lack", missing), ("the model lacks", extra))
                if names
            )
        )


def _check_compatible(piece: Piece, target: TargetArray, *, cast: bool) -> None:
    if piece.shape != target.shape:
        raise MismatchedWeightsError(
            f"{piece.name} was published with shape {piece.shape}; the receiver needs {target.shape}"
        )
    sent = jnp.dtype(piece.dtype)
    floats = jnp.issubdtype(sent, jnp.floating) and jnp.issubdtype(target.dtype, jnp.floating)
    if sent != target.dtype and not (cast and floats):
        raise MismatchedWeightsError(
            f"{piece.name} was published as {sent.name}; the receiver needs {target.dtype.name}. Set weights.dtype to "
            "cast between floating-point dtypes"
        )


def _check_cover(name: str, boxes: set[Bounds], pieces: Collection[Piece]) -> None:
    for box in boxes:
        gap = find_gap(box, [piece.bounds for piece in pieces])
        if gap is not None:
            indices = [f"{start}:{stop}" for start, stop in gap]
            raise MismatchedWeightsError(
                f"no training host holds {indices} of {name}; a sender is missing or incomplete"
            )


def _choose(held: Mapping[PieceKey, Piece], boxes: set[Bounds], loads: list[int]) -> dict[PieceKey, Piece]:
    """Choose the pieces that overlap the boxes; of replicas, the one on the least loaded host."""
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
