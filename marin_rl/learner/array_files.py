# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sharded arrays in files: every process writes the boxes of its devices, and any mesh can read them.

A file holds boxes of arrays in row-major order, one after another. A box is described in pieces of at most
`PIECE_BYTES`, each with a checksum that is computed as it is written and verified as it is read. While reading, every
piece that a mesh needs is read by exactly one process, which sends it to the others that need it.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from haliax import NamedArray
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh, Sharding

from marin_rl import multihost
from marin_rl.remote_path import RemotePath, StorageError
from marin_rl.storage import StoragePath, read_range, write_parts
from marin_rl.weights.manifest import Bounds, bounds_of, find_gap, overlap, shape_of, slices_within, volume, whole

T = TypeVar("T")

PIECE_BYTES = 64 * 2**20
"""Maximum size of a piece, and the size from which a file gets no further piece."""
_STREAMS = 8
"""Files that a process reads or writes at the same time."""


class DamagedArraysError(ValueError):
    """A file of arrays is missing or altered; the message names it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A contiguous byte range of a box, and its place in a file."""

    file: str
    """Name of the file."""
    offset: int
    """Position in the file, in bytes."""
    num_bytes: int
    """Size in bytes."""
    sha256: str
    """Checksum, in hexadecimal digits."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A box of an array, in pieces of row-major bytes."""

    bounds: Bounds
    """Start and stop along each dimension."""
    pieces: tuple[Piece, ...]
    """The pieces in order; none if the box has no elements."""


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """A saved array."""

    dtype: str
    """Name of the dtype."""
    shape: tuple[int, ...]
    """Shape of the complete array."""
    boxes: tuple[Box, ...]
    """The boxes, which do not overlap."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def is_complete(self) -> bool:
        """Whether the boxes cover the array, and the pieces every box."""
        size = jnp.dtype(self.dtype).itemsize
        return find_gap(whole(self.shape), [box.bounds for box in self.boxes]) is None and all(
            sum(piece.num_bytes for piece in box.pieces) == volume(box.bounds) * size for box in self.boxes
        )


@dataclasses.dataclass(frozen=True)
class HostArray:
    """The boxes of an array that this process writes, in host memory."""

    dtype: str
    """Name of the dtype."""
    shape: tuple[int, ...]
    """Shape of the complete array."""
    boxes: tuple[tuple[Bounds, np.ndarray], ...]
    """The boxes with their elements."""


_JSON = pydantic.TypeAdapter(dict[str, SavedArray])


def to_jsonable(arrays: Mapping[str, SavedArray]) -> dict[str, Any]:
    """Convert descriptions to values that JSON supports."""
    return _JSON.dump_python(dict(arrays), mode="json")


def from_jsonable(value: Any) -> dict[str, SavedArray]:
    """Invert `to_jsonable`; raises ValueError if the value is not a description of arrays."""
    return _JSON.validate_python(value)


def named_arrays(tree: object) -> dict[str, Any]:
    """Return the arrays of a tree, or their shapes, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_named)
    return {jax.tree_util.keystr(path): leaf.array if _is_named(leaf) else leaf for path, leaf in leaves}


def _is_named(leaf: object) -> bool:
    return isinstance(leaf, NamedArray)


def copy_to_host(tree: object) -> dict[str, HostArray]:
    """Copy the boxes that this process writes to the host; the arrays may be donated afterwards.

    Of equal shards on several devices, one is written.

    Args:
        tree: arrays, sharded over all processes.

    Returns:
        The boxes of every array by path; an array without a box of this process has none.
    """
    own = {
        name: [shard for shard in array.addressable_shards if shard.replica_id == 0]
        for name, array in named_arrays(tree).items()
    }
    for shard in (shard for shards in own.values() for shard in shards):
        shard.data.copy_to_host_async()
    return {
        name: HostArray(
            array.dtype.name,
            array.shape,
            tuple((bounds_of(shard.index, array.shape), _on_host(shard.data)) for shard in own[name]),
        )
        for name, array in named_arrays(tree).items()
    }


def _on_host(array: jax.Array) -> np.ndarray:
    (device,) = array.devices()
    # On the CPU numpy would view the device's memory, which a donation reuses.
    return np.array(array, copy=True) if device.platform == "cpu" else np.asarray(array)


def write_boxes(folder: StoragePath, prefix: str, arrays: Mapping[str, HostArray]) -> dict[str, SavedArray]:
    """Write boxes to new files, several at a time.

    Args:
        folder: an existing folder.
        prefix: start of the file names, unique among all processes and attempts.
        arrays: the boxes by name of the array.

    Returns:
        The description of every array, with the boxes of this process.

    Raises:
        OSError: if a file cannot be written.
    """
    files: list[list[memoryview]] = []
    room = 0
    pieces: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, array in arrays.items():
        for index, (_, data) in enumerate(array.boxes):
            content = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
            places = pieces.setdefault((name, index), [])
            for start in range(0, len(content), PIECE_BYTES):
                if room <= 0:
                    files.append([])
                    room = PIECE_BYTES
                places.append((len(files) - 1, len(files[-1])))
                files[-1].append(content[start : start + PIECE_BYTES])
                room -= len(files[-1][-1])

    def write(number: int) -> list[Piece]:
        return _write_file(folder / f"{prefix}-{number:04d}.bin", files[number])

    with ThreadPoolExecutor(_STREAMS, thread_name_prefix="write") as threads:
        written = list(threads.map(write, range(len(files))))
    return {
        name: SavedArray(
            array.dtype,
            array.shape,
            tuple(
                Box(bounds, tuple(written[file][at] for file, at in pieces[name, index]))
                for index, (bounds, _) in enumerate(array.boxes)
            ),
        )
        for name, array in arrays.items()
    }


def _write_file(path: StoragePath, contents: list[memoryview]) -> list[Piece]:
    described, offset = [], 0
    for content in contents:
        described.append(Piece(path.name, offset, len(content), hashlib.sha256(content).hexdigest()))
        offset += len(content)
    if isinstance(path, RemotePath):
        # In one request, or a few large ones.
        path.write_bytes(b"".join(contents))
    else:
        write_parts(path, contents)
    return described


def merge(parts: Iterable[Mapping[str, SavedArray]]) -> dict[str, SavedArray]:
    """Merge the descriptions of several processes."""
    merged: dict[str, SavedArray] = {}
    for part in parts:
        for name, array in part.items():
            before = merged[name].boxes if name in merged else ()
            merged[name] = dataclasses.replace(array, boxes=(*before, *array.boxes))
    return merged


def load_arrays(
    folder: StoragePath, saved: Mapping[str, SavedArray], like: T, mapping: ResourceMapping, mesh: Mesh
) -> T:
    """Load arrays onto a mesh; collective over all processes.

    Args:
        folder: folder of the files.
        saved: description of every array of `like`, by path.
        like: a tree of arrays or shapes; a named array is sharded by `mapping`, another by its own sharding or not.
        mapping: mesh axes by axis name.
        mesh: the mesh.

    Returns:
        The tree with the saved values.

    Raises:
        DamagedArraysError: in all processes, if a file is missing or altered.
        StorageError: in all processes, if the store fails.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_named)
    shardings = {jax.tree_util.keystr(path): _sharding(leaf, mapping, mesh) for path, leaf in leaves}
    buffers = _read_boxes(folder, saved, shardings)
    loaded: list[Any] = []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        array = _assemble(
            saved[name],
            shardings[name],
            [
                (box.bounds, buffers.pop((name, index)))
                for index, box in enumerate(saved[name].boxes)
                if (name, index) in buffers
            ],
        )
        loaded.append(NamedArray(array, leaf.axes) if _is_named(leaf) else array)
    return jax.tree.unflatten(structure, loaded)


def verify(folder: StoragePath, saved: Iterable[SavedArray]) -> None:
    """Read all pieces of some arrays, a few at a time, and compare their checksums; in this process alone.

    Raises:
        DamagedArraysError: if a file is missing or altered.
        StorageError: if the store fails.
    """
    pieces = [piece for array in saved for box in array.boxes for piece in box.pieces]

    def check(piece: Piece) -> None:
        content = _read_part(folder, piece, 0, piece.num_bytes)
        if hashlib.sha256(content).hexdigest() != piece.sha256:
            raise DamagedArraysError(f"{folder.name}/{piece.file} differs from what was written")

    with ThreadPoolExecutor(_STREAMS, thread_name_prefix="verify") as threads:
        # A failure cancels the pieces that were not begun.
        for _ in threads.map(check, pieces):
            pass


def read_rows(folder: StoragePath, saved: SavedArray, start: int, stop: int) -> np.ndarray:
    """Read rows of an array, and no other bytes; in this process alone.

    Their checksums are not compared, because a piece may hold other rows too: see `verify`.

    Args:
        folder: folder of the files.
        saved: the array, of at least one dimension.
        start: first row.
        stop: row after the last.

    Raises:
        DamagedArraysError: if a file is missing or too short.
    """
    dtype = jnp.dtype(saved.dtype)
    wanted = ((start, stop), *whole(saved.shape)[1:])
    rows = np.empty(shape_of(wanted), dtype)

    def read(box: Box) -> None:
        shared = overlap(box.bounds, wanted)
        if shared is None:
            return
        row_bytes = volume(box.bounds[1:]) * dtype.itemsize
        first, last = ((row - box.bounds[0][0]) * row_bytes for row in shared[0])
        data = bytearray()
        for place in _places(box, ("", 0)):
            low, high = max(first, place.offset), min(last, place.offset + place.piece.num_bytes)
            if low < high:
                data += _read_part(folder, place.piece, low - place.offset, high - place.offset)
        rows[slices_within(shared, wanted)] = np.frombuffer(data, dtype).reshape(shape_of(shared))

    with ThreadPoolExecutor(_STREAMS, thread_name_prefix="read") as threads:
        list(threads.map(read, saved.boxes))
    return rows


def _read_part(folder: StoragePath, piece: Piece, start: int, stop: int) -> bytes:
    try:
        data = read_range(folder / piece.file, piece.offset + start, piece.offset + stop)
    except FileNotFoundError as error:
        raise DamagedArraysError(f"{folder.name}/{piece.file} is missing") from error
    if len(data) != stop - start:
        raise DamagedArraysError(f"{folder.name}/{piece.file} differs from what was written")
    return data


def _sharding(leaf: Any, mapping: ResourceMapping, mesh: Mesh) -> Sharding:
    if _is_named(leaf):
        return hax.partitioning.sharding_for_axis(leaf.axes, mapping, mesh)
    return getattr(leaf, "sharding", None) or hax.partitioning.sharding_for_axis((), {}, mesh)


def _assemble(saved: SavedArray, sharding: Sharding, boxes: Sequence[tuple[Bounds, np.ndarray]]) -> jax.Array:
    """Make an array of the bytes of the saved boxes that this process needs."""
    dtype = jnp.dtype(saved.dtype)
    assembled: dict[Bounds, np.ndarray] = {}

    def elements(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = bounds_of(index or (), saved.shape)
        if bounds in assembled:
            return assembled[bounds]
        result = np.empty(shape_of(bounds), dtype)
        for box, data in boxes:
            shared = overlap(box, bounds)
            if shared is None:
                continue
            values = data.view(dtype).reshape(shape_of(box))
            if box == bounds:
                result = values
            else:
                result[slices_within(shared, bounds)] = values[slices_within(shared, box)]
        assembled[bounds] = result
        return result

    return jax.make_array_from_callback(saved.shape, sharding, elements)


_Key = tuple[str, int]
"""Name of an array and index of one of its boxes."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """A piece and its place in a box in memory."""

    piece: Piece
    box: _Key
    offset: int


def _read_boxes(
    folder: StoragePath, saved: Mapping[str, SavedArray], shardings: Mapping[str, Sharding]
) -> dict[_Key, np.ndarray]:
    """Read the bytes of all boxes that this process needs; every piece is read by one process."""
    processes, own = jax.process_count(), jax.process_index()
    direct: list[_Place] = []
    shared: list[list[_Place]] = [[] for _ in range(processes)]
    loads = [0] * processes
    buffers: dict[_Key, np.ndarray] = {}
    for name, sharding in shardings.items():
        for index, users in enumerate(_users(saved[name], sharding)):
            places = list(_places(saved[name].boxes[index], (name, index)))
            if own in users:
                buffers[name, index] = np.empty(sum(place.piece.num_bytes for place in places), np.uint8)
            if users == {own}:
                direct += places
            elif len(users) > 1:
                for place in places:
                    reader = loads.index(min(loads))
                    shared[reader].append(place)
                    loads[reader] += place.piece.num_bytes
    stream = np.empty(loads[own], np.uint8)
    starts = np.cumsum([0, *(place.piece.num_bytes for place in shared[own])])
    targets = [buffers[place.box][place.offset : place.offset + place.piece.num_bytes] for place in direct]
    targets += [
        stream[start : start + place.piece.num_bytes] for start, place in zip(starts, shared[own], strict=False)
    ]
    _agree(lambda: _read_pieces(folder, [place.piece for place in (*direct, *shared[own])], targets))
    _exchange(stream, shared, loads, buffers)
    return buffers


def _users(saved: SavedArray, sharding: Sharding) -> Iterator[set[int]]:
    """Yield, for every saved box, the processes whose devices need a part of it."""
    targets: dict[Bounds, set[int]] = {}
    for device, index in sharding.devices_indices_map(saved.shape).items():
        targets.setdefault(bounds_of(index or (), saved.shape), set()).add(device.process_index)
    # The targets are a grid, so that a box need not be compared with each of them.
    cuts = [sorted({bounds[dimension] for bounds in targets}) for dimension in range(len(saved.shape))]
    for box in saved.boxes:
        touched = [
            [(low, high) for low, high in intervals if low < stop and start < high]
            for (start, stop), intervals in zip(box.bounds, cuts, strict=True)
        ]
        yield set().union(*(targets.get(bounds, ()) for bounds in itertools.product(*touched)))


def _places(box: Box, key: _Key) -> Iterator[_Place]:
    offset = 0
    for piece in box.pieces:
        yield _Place(piece, key, offset)
        offset += piece.num_bytes


def _read_pieces(folder: StoragePath, pieces: list[Piece], targets: list[np.ndarray]) -> None:
    """Read and verify pieces, several files at a time; adjacent pieces of a file with one request."""
    order = sorted(range(len(pieces)), key=lambda number: (pieces[number].file, pieces[number].offset))
    runs: list[list[int]] = []
    for number in order:
        piece = pieces[number]
        last = pieces[runs[-1][-1]] if runs else None
        if last is None or (last.file, last.offset + last.num_bytes) != (piece.file, piece.offset):
            runs.append([])
        runs[-1].append(number)

    def read(run: list[int]) -> None:
        first, last = pieces[run[0]], pieces[run[-1]]
        try:
            data = read_range(folder / first.file, first.offset, last.offset + last.num_bytes)
        except FileNotFoundError as error:
            raise DamagedArraysError(f"{folder.name}/{first.file} is missing") from error
        for number in run:
            piece = pieces[number]
            start = piece.offset - first.offset
            content = memoryview(data)[start : start + piece.num_bytes]
            if len(content) != piece.num_bytes or hashlib.sha256(content).hexdigest() != piece.sha256:
                raise DamagedArraysError(f"{folder.name}/{piece.file} differs from what was written")
            targets[number][:] = np.frombuffer(content, np.uint8)

    with ThreadPoolExecutor(_STREAMS, thread_name_prefix="read") as threads:
        list(threads.map(read, runs))


def _agree(read: Callable[[], None]) -> None:
    """Call a function in every process; if it fails in one, raise an error of the same type in all."""
    kind, text, own = "", "", None
    try:
        read()
    except DamagedArraysError as error:
        kind, text, own = "damaged", str(error), error
    except StorageError as error:
        kind, text, own = "store", str(error), error
    except OSError as error:
        kind, text, own = "damaged", f"a file cannot be read: {error}", error
    answers = [json.loads(answer) for answer in multihost.gather_texts(json.dumps([kind, text]))]
    failures = {kind: f"training process {process}: {text}" for process, (kind, text) in enumerate(answers) if kind}
    if "store" in failures:
        # Not damage, even if this process has found some: all processes must do the same.
        if isinstance(own, StorageError):
            raise own
        raise StorageError(failures["store"], "checkpoint", "run the same command again when the store is reachable")
    if own is not None:
        raise DamagedArraysError(text) from own
    if "damaged" in failures:
        raise DamagedArraysError(failures["damaged"])


def _exchange(
    stream: np.ndarray, shared: list[list[_Place]], loads: list[int], buffers: Mapping[_Key, np.ndarray]
) -> None:
    """Send the pieces that several processes need; all of them, since which processes need them is not regular."""
    if not any(loads):
        return
    share = multihost.exchange_room(max(loads), len(loads))
    for start in range(0, max(loads), share):
        block = np.zeros(share, np.uint8)
        part = stream[start : start + share]
        block[: len(part)] = part
        for row, places in zip(multihost.gather_rows(block), shared, strict=True):
            at = 0
            for place in places:
                low, high = max(at, start), min(at + place.piece.num_bytes, start + share)
                if low < high and place.box in buffers:
                    into = place.offset + low - at
                    buffers[place.box][into : into + high - low] = row[low - start : high - start]
                at += place.piece.num_bytes
