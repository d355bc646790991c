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
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import quote

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from haliax import NamedArray
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh, Sharding

from marin_rl.utils import multihost
from marin_rl.utils.remote_path import StorageError
from marin_rl.utils.storage import FileDigest, StoragePath, digest_of

T = TypeVar("T")

STATE = "state"
"""Folder of the files."""

CHUNK_BYTES = 32 * 2**20
"""Maximum size of a chunk, if the shape of the shard can be divided."""
_MAX_FACTOR = 64
"""Largest prime factor of a dimension into which a shard is divided: a larger one would give many small files."""
_STREAMS = 8
"""Files that a process reads or writes at the same time."""
_CACHE_BYTES = 512 * 2**20
"""Memory for chunks of which several parts are read, one after another."""


class DamagedArraysError(ValueError):
    """A file of arrays is missing or altered; the message names it."""


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """A saved array."""

    dtype: str
    """Name of the dtype."""
    shape: tuple[int, ...]
    """Shape of the array."""
    chunk: tuple[int, ...]
    """Shape of every chunk."""
    prefix: str
    """Start of the names of its files."""

    def __post_init__(self) -> None:
        if len(self.chunk) != len(self.shape) or any(
            part < 1 or size % part for size, part in zip(self.shape, self.chunk, strict=True)
        ):
            raise ValueError(f"{self.prefix}: chunks of shape {self.chunk} do not divide the shape {self.shape}")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def file(self, start: Sequence[int]) -> str:
        """Return the name of the file of the chunk that starts at this element."""
        numbers = [str(first // part) for first, part in zip(start, self.chunk, strict=True)]
        return f"{self.prefix}-{'.'.join(numbers) or '0'}.bin"

    def files(self) -> Iterator[str]:
        """Yield the names of the files of all chunks."""
        grid = [range(0, size, part) for size, part in zip(self.shape, self.chunk, strict=True)]
        return map(self.file, itertools.product(*grid))

    def readable(self, read: Callable[[str], bytes], context: ts.Context) -> ts.TensorStore:
        """Return the array, of which any part can be read; TensorStore calls `read` in threads with names of files."""

        def read_chunk(domain: ts.IndexDomain, chunk: np.ndarray, _: Any) -> None:
            content = read(self.file(domain.inclusive_min))
            chunk[...] = np.frombuffer(content, chunk.dtype).reshape(chunk.shape)

        return ts.virtual_chunked(read_function=read_chunk, context=context, **self._layout)

    def writable(self, write: Callable[[str, bytes], None], context: ts.Context) -> ts.TensorStore:
        """Return the array, of which whole chunks can be written; TensorStore calls `write` in threads."""

        def write_chunk(domain: ts.IndexDomain, chunk: np.ndarray, _: Any) -> None:
            write(self.file(domain.inclusive_min), chunk.tobytes())

        return ts.virtual_chunked(write_function=write_chunk, context=context, **self._layout)

    @property
    def _layout(self) -> dict[str, Any]:
        chunks = ts.ChunkLayout(chunk_shape=self.chunk)
        return {"dtype": jnp.dtype(self.dtype), "shape": self.shape, "chunk_layout": chunks}


HostArray = tuple[SavedArray, list[tuple[tuple[slice, ...], np.ndarray]]]
"""An array and the shards of it that this process writes, with their places, in host memory."""


def named_arrays(tree: object) -> dict[str, Any]:
    """Return the arrays of a tree, or their shapes, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_named)
    return {jax.tree_util.keystr(path): leaf.array if _is_named(leaf) else leaf for path, leaf in leaves}


def _is_named(leaf: object) -> bool:
    return isinstance(leaf, NamedArray)


def copy_to_host(tree: object) -> dict[str, HostArray]:
    """Copy the shards that this process writes to the host; the arrays may be donated afterwards.

    Of equal shards on several devices, one is written.

    Args:
        tree: arrays, sharded over all processes.

    Returns:
        Every array by path; one without a shard of this process has none.
    """
    copied: dict[str, HostArray] = {}
    shards = {
        name: [shard for shard in array.addressable_shards if shard.replica_id == 0]
        for name, array in named_arrays(tree).items()
    }
    for shard in itertools.chain.from_iterable(shards.values()):
        shard.data.copy_to_host_async()
    for name, array in named_arrays(tree).items():
        copied[name] = _describe(name, array), [(shard.index, _on_host(shard.data)) for shard in shards[name]]
    return copied


def _on_host(array: jax.Array) -> np.ndarray:
    (device,) = array.devices()
    # On the CPU numpy would view the device's memory, which a donation reuses.
    return np.array(array, copy=True) if device.platform == "cpu" else np.asarray(array)


def _describe(name: str, array: jax.Array) -> SavedArray:
    chunk = _chunk_shape(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    # A path starts with a dot; it would hide the file.
    return SavedArray(array.dtype.name, array.shape, chunk, f"{STATE}/{quote(name.lstrip('.'), safe='')}")


def _chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Divide the shape of a shard, its first dimensions first, until a chunk has at most `CHUNK_BYTES`."""
    chunk = [max(size, 1) for size in shard]
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        factors = (
            (dimension, factor)
            for dimension, size in enumerate(chunk)
            for factor in range(2, _MAX_FACTOR + 1)
            if size % factor == 0
        )
        dimension, factor = next(factors, (0, 1))
        if factor == 1:
            break
        chunk[dimension] //= factor
    return tuple(chunk)


def write_arrays(folder: StoragePath, arrays: Mapping[str, HostArray]) -> dict[str, FileDigest]:
    """Write the shards of this process, several files at a time.

    Args:
        folder: the folder that contains the folder `STATE`.
        arrays: the shards by path of the array, from `copy_to_host`.

    Returns:
        Size and checksum of the files of this process, by name.

    Raises:
        OSError: if a file cannot be written.
    """
    written: dict[str, FileDigest] = {}

    def write(file: str, content: bytes) -> None:
        (folder / file).write_bytes(content)
        written[file] = digest_of(content)

    context, pending = _context(cache_bytes=0), []
    for array, shards in arrays.values():
        chunks = array.writable(write, context)
        # A reference, because a copy of all shards would double the memory.
        pending += [chunks[index].write(shard, can_reference_source_data_indefinitely=True) for index, shard in shards]
    _wait(pending)
    return written


@dataclasses.dataclass(frozen=True)
class SavedArrays:
    """Arrays in the files of a folder."""

    folder: StoragePath
    """The folder that contains the folder `STATE`."""
    arrays: Mapping[str, SavedArray]
    """The arrays by path."""
    files: Mapping[str, FileDigest]
    """Size and checksum of every file of these arrays, and perhaps of others, by name."""

    def missing_files(self) -> list[str]:
        """Return the names of files of the arrays that are not in `files`."""
        return [file for array in self.arrays.values() for file in array.files() if file not in self.files]

    def read(self, file: str) -> bytes:
        """Read a file.

        Raises:
            DamagedArraysError: if it is missing or altered.
            OSError: if it cannot be read.
        """
        try:
            content = (self.folder / file).read_bytes()
        except FileNotFoundError as error:
            raise DamagedArraysError(f"{file} is missing") from error
        if digest_of(content) != self.files[file]:
            raise DamagedArraysError(f"{file} differs from what was written")
        return content

    def open(self) -> dict[str, ts.TensorStore]:
        """Open the arrays, to read any part of them; several files are read at a time, and chunks are cached.

        Returns:
            The arrays by path. Reading raises `DamagedArraysError` if a file is missing or altered, and another OSError
            if it cannot be read.
        """
        context = _context(_CACHE_BYTES)
        return {name: array.readable(self.read, context) for name, array in self.arrays.items()}

    def verify(self) -> None:
        """Read all files, a few at a time, and compare their checksums; in this process alone.

        Raises:
            DamagedArraysError: if a file is missing or altered.
            StorageError: if the store fails.
        """
        files = [file for array in self.arrays.values() for file in array.files()]
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="verify") as threads:
            # A failure cancels the files that were not begun.
            for _ in threads.map(lambda file: len(self.read(file)), files):
                pass

    def load(self, like: T, mapping: ResourceMapping, mesh: Mesh) -> T:
        """Load the arrays onto a mesh; collective over all processes. Each reads the chunks that its devices need.

        Args:
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
        arrays = self.open()
        reads = {
            name: {str(index): arrays[name][index].read() for index in _own_shards(sharding, arrays[name].shape)}
            for name, sharding in shardings.items()
        }
        _agree(lambda: _wait(read for shards in reads.values() for read in shards.values()))
        loaded: list[Any] = []
        for (name, sharding), (_, leaf) in zip(shardings.items(), leaves, strict=True):
            shards = {index: read.result() for index, read in reads.pop(name).items()}
            array = jax.make_array_from_callback(
                arrays[name].shape, sharding, lambda index, own=shards: own[str(index)]
            )
            loaded.append(NamedArray(array, leaf.axes) if _is_named(leaf) else array)
        return jax.tree.unflatten(structure, loaded)


def _context(cache_bytes: int) -> ts.Context:
    return ts.Context({"data_copy_concurrency": {"limit": _STREAMS}, "cache_pool": {"total_bytes_limit": cache_bytes}})


def _wait(pending: Iterable[ts.Future | ts.WriteFutures]) -> None:
    """Wait for all requests, so that none is running afterwards; raise the first error."""
    errors = [request.exception() for request in pending]
    for error in filter(None, errors):
        raise error


def _sharding(leaf: Any, mapping: ResourceMapping, mesh: Mesh) -> Sharding:
    if _is_named(leaf):
        return hax.partitioning.sharding_for_axis(leaf.axes, mapping, mesh)
    return getattr(leaf, "sharding", None) or hax.partitioning.sharding_for_axis((), {}, mesh)


def _own_shards(sharding: Sharding, shape: tuple[int, ...]) -> Iterable[tuple[slice, ...]]:
    """Return the different shards of the devices of this process."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return {str(index): index for index in indices if index is not None}.values()


def _agree(read: Callable[[], None]) -> None:
    """Call a function in every process; if it fails in one, raise an error of the same type in all."""
    kind, text, own = "", "", None
    try:
        read()
    except StorageError as error:
        kind, text, own = "store", str(error), error
    except DamagedArraysError as error:
        kind, text, own = "damaged", str(error), error
    except OSError as error:
        kind, text, own = "damaged", f"a file cannot be read: {error}", error
    answers = [json.loads(answer) for answer in multihost.gather_texts(json.dumps([kind, text]))]
    failures = {kind: f"training process {process}: {text}" for process, (kind, text) in enumerate(answers) if kind}
    if "store" in failures:
        # Not damage, even if this process has found some: all processes must do the same.
        if isinstance(own, StorageError):
            raise own
        raise StorageError(failures["store"], "checkpoint", "run the same command again when the store is reachable")
    if "damaged" in failures:
        raise DamagedArraysError(text or failures["damaged"]) from own
