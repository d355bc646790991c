# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sharded arrays in files: every process writes the shards of its devices, and any mesh can read them.

An array is stored as a regular grid of chunks, so fine that each shard of the mesh that saves it consists of whole
chunks. A file holds one chunk in row-major order; the manifest of the checkpoint has its size and checksum.
TensorStore splits shards into chunks when they are written, and assembles chunks when any part of an array is read. The
files themselves go through `utils.storage`, because TensorStore's own clients of object stores know neither the
settings nor the stores of fsspec.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh, Sharding

from marin_rl.utils.devices.arrays import is_named, named_arrays, replace_arrays
from marin_rl.utils.devices.boxes import (
    Array,
    Bounds,
    grid_cells,
    local_boxes,
    own_shards,
    place_boxes,
    slices_within,
    start_copies,
    whole,
)
from marin_rl.utils.storage import FileDigest, StoragePath, digest_of

T = TypeVar("T")

STATE = "state"
"""Folder of the files."""

CHUNK_BYTES = 32 * 2**20
"""Maximum size of a chunk, if the shape of the shard can be divided."""
_MAX_FACTOR = 64
"""Largest prime factor of a dimension into which a shard is divided: a larger one would give many small files."""
STREAMS = 8
"""Files that a process reads or writes at the same time."""
_CACHE_BYTES = 512 * 2**20
"""Memory for chunks of which several parts are read, one after another."""


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """A saved array."""

    dtype: str
    """Name of the dtype."""
    shape: tuple[int, ...]
    """Shape of the array."""
    chunk: tuple[int, ...]
    """Shape of every chunk; it divides that of the array."""
    prefix: str
    """Start of the names of its files."""

    def file(self, start: Sequence[int]) -> str:
        """Return the name of the file of the chunk that starts at this element."""
        numbers = [str(first // part) for first, part in zip(start, self.chunk, strict=True)]
        return f"{self.prefix}-{'.'.join(numbers) or '0'}.bin"

    def files(self) -> Iterator[str]:
        """Yield the names of the files of all chunks."""
        for box in grid_cells(whole(self.shape), self.chunk):
            yield self.file([start for start, _ in box])

    def open(
        self,
        context: ts.Context,
        read: Callable[[str], bytes] | None = None,
        write: Callable[[str, memoryview], None] | None = None,
    ) -> ts.TensorStore:
        """Return the array, of which any part can be read and whole chunks can be written.

        TensorStore calls both functions in threads; content passed to `write` may change afterwards.
        """
        layout = ts.ChunkLayout(chunk_shape=self.chunk)
        options: dict[str, Any] = {"dtype": jnp.dtype(self.dtype), "shape": self.shape, "chunk_layout": layout}
        if read is not None:
            options["read_function"] = lambda domain, chunk, _: np.copyto(
                chunk, np.frombuffer(read(self.file(domain.inclusive_min)), chunk.dtype).reshape(chunk.shape)
            )
        if write is not None:
            options["write_function"] = lambda domain, chunk, _: write(self.file(domain.inclusive_min), bytes_of(chunk))
        return ts.virtual_chunked(context=context, **options)


HostArray = tuple[SavedArray, list[tuple[Bounds, np.ndarray]]]
"""An array and the shards of it that this process writes, with their boxes, in host memory."""


def make_context(cache_bytes: int = _CACHE_BYTES) -> ts.Context:
    """Return a context in which `STREAMS` files are transferred at a time, and chunks are cached."""
    return ts.Context({"data_copy_concurrency": {"limit": STREAMS}, "cache_pool": {"total_bytes_limit": cache_bytes}})


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of an array in row-major order: its own memory if it has this order, otherwise a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def copy_to_host(tree: object, *, donated: bool = True) -> dict[str, HostArray]:
    """Copy the shards that this process writes to the host.

    Of equal shards on several devices, one is written. With `donated`, the arrays may be donated before the shards are
    written; otherwise those in the memory of the host are not copied. The result has every array by path; one without a
    shard of this process has none.
    """
    arrays = named_arrays(tree)
    start_copies(arrays.values())
    return {
        name: (_describe(name, array), [(box, _on_host(shard, donated)) for box, shard in own_shards(array)])
        for name, array in arrays.items()
    }


def _on_host(array: Array, donated: bool) -> np.ndarray:
    # On the CPU numpy would view the device's memory, which a donation reuses.
    is_view = not isinstance(array, jax.Array) or all(device.platform == "cpu" for device in array.devices())
    return np.array(array, copy=True) if donated and is_view else np.asarray(array)


def _describe(name: str, array: jax.Array) -> SavedArray:
    chunk = _chunk_shape(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    # A path starts with a dot; it would hide the file.
    return SavedArray(array.dtype.name, array.shape, chunk, f"{STATE}/{quote(name.lstrip('.'), safe='')}")


def _chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Divide the shape of a shard, its first dimensions first, until a chunk has at most `CHUNK_BYTES`."""
    chunk = [max(size, 1) for size in shard]
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        factors = itertools.product(range(len(chunk)), range(2, _MAX_FACTOR + 1))
        dimension, factor = next((pair for pair in factors if chunk[pair[0]] % pair[1] == 0), (0, 0))
        if not factor:
            break
        chunk[dimension] //= factor
    return tuple(chunk)


def write_arrays(folder: StoragePath, arrays: Mapping[str, HostArray]) -> dict[str, FileDigest]:
    """Write the shards of this process, several files at a time; return sizes and checksums of its files.

    `folder` contains the folder `STATE`. The shards, from `copy_to_host`, are by path of the array.

    Raises:
        OSError: if a file cannot be written.
    """
    written: dict[str, FileDigest] = {}

    def write(file: str, content: memoryview) -> None:
        (folder / file).write_bytes(content)
        written[file] = digest_of(content)

    context, pending = make_context(cache_bytes=0), []
    for array, shards in arrays.values():
        chunks = array.open(context, write=write)
        # A reference, because a copy of all shards would double the memory.
        pending += [
            chunks[slices_within(box, whole(array.shape))].write(shard, can_reference_source_data_indefinitely=True)
            for box, shard in shards
        ]
    _wait(pending)
    return written


def load_arrays(arrays: Mapping[str, ts.TensorStore], like: T, mapping: ResourceMapping, mesh: Mesh) -> T:
    """Load arrays onto a mesh; every process reads the chunks that its devices need.

    Args:
        arrays: the arrays by path.
        like: a tree of arrays or shapes; a named array is sharded by `mapping`, another by its own sharding or not.
        mapping: mesh axes by axis name.
        mesh: the mesh.

    Returns:
        The tree with the saved values.

    Raises:
        Exception: that of the function that reads the files, after all reads have ended.
    """
    leaves = jax.tree_util.tree_leaves_with_path(like, is_leaf=is_named)
    shardings = {jax.tree_util.keystr(path): _sharding(leaf, mapping, mesh) for path, leaf in leaves}
    reads = {name: _read_boxes(arrays[name], sharding) for name, sharding in shardings.items()}
    _wait(read for boxes in reads.values() for read in boxes.values())
    loaded = {}
    for name, sharding in shardings.items():
        boxes = {box: read.result() for box, read in reads.pop(name).items()}
        loaded[name] = place_boxes(arrays[name].shape, sharding, boxes)
    return replace_arrays(like, loaded)


def _read_boxes(array: ts.TensorStore, sharding: Sharding) -> dict[Bounds, ts.Future]:
    """Start to read the boxes of an array on the devices of this process."""
    boxes = local_boxes(array.shape, sharding)
    return {box: array[slices_within(box, whole(array.shape))].read() for box in boxes}


def _wait(pending: Iterable[ts.Future | ts.WriteFutures]) -> None:
    """Wait for all requests, so that none is running afterwards; raise the first error."""
    errors = [request.exception() for request in pending]
    for error in filter(None, errors):
        raise error


def _sharding(leaf: Any, mapping: ResourceMapping, mesh: Mesh) -> Sharding:
    if is_named(leaf):
        return hax.partitioning.sharding_for_axis(leaf.axes, mapping, mesh)
    return getattr(leaf, "sharding", None) or hax.partitioning.sharding_for_axis((), {}, mesh)
