# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from marin_rl.runs import array_files
from marin_rl.runs.array_files import STATE, SavedArray, copy_to_host, load_arrays, write_arrays
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.utils.remote_path import StorageError
from marin_rl.utils.storage import FileDigest, StoragePath, file_sizes, storage_path


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("data",))


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    folder = tmp_path if request.param == "local" else storage_path(f"memory://arrays{tmp_path}")
    (folder / STATE).mkdir(parents=True, exist_ok=True)
    return folder


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, size=(6, 8), dtype=np.uint16)
    return {
        "bfloat16": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16),
        "bool": jnp.asarray([True, False]),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key_data(jax.random.key(7)),
        "negative zero": jnp.asarray([-0.0, 0.0, jnp.nan, -jnp.inf]),
        "scalar": jnp.asarray(7, jnp.int32),
        "nested": [jnp.zeros(3), {"a/b": jnp.ones(3)}],
        "large": jnp.arange(1000, dtype=jnp.float32).reshape(10, 100),
    }


def save(folder: StoragePath, arrays: object) -> Checkpoint:
    copied = copy_to_host(arrays)
    return saved({name: array for name, (array, _) in copied.items()}, write_arrays(folder, copied), folder)


def saved(arrays: dict[str, SavedArray], files: dict[str, FileDigest], folder: StoragePath) -> Checkpoint:
    return Checkpoint(folder, 0, {}, "", arrays, files)


def assert_same_bits(found: object, expected: object) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 2**26])
def test_arrays_are_restored_bit_for_bit(
    folder: StoragePath, mesh: Mesh, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(array_files, "CHUNK_BYTES", chunk_bytes)
    arrays = tree()
    checkpoint = save(folder, arrays)
    assert checkpoint.missing_files() == []
    assert file_sizes(folder) == {name: digest.size for name, digest in checkpoint.files.items()}
    assert max(file_sizes(folder).values()) <= chunk_bytes
    assert sum(file_sizes(folder).values()) == sum(array.nbytes for array in jax.tree.leaves(arrays))
    assert_same_bits(load_arrays(checkpoint.open_arrays(), arrays, {}, mesh), arrays)
    # A part of them reads only its files.
    kept = {name: array for name, array in checkpoint.arrays.items() if name == "['large']"}
    for file in checkpoint.files.keys() - set(kept["['large']"].files()):
        (folder / file).unlink()
    part = {"large": arrays["large"]}
    assert_same_bits(load_arrays(saved(kept, dict(checkpoint.files), folder).open_arrays(), part, {}, mesh), part)


def test_a_file_is_a_chunk_in_row_major_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_files, "CHUNK_BYTES", 1000)
    (tmp_path / STATE).mkdir()
    save(tmp_path, {"layers": [jnp.arange(1000, dtype=jnp.float32).reshape(10, 100)]})
    names = sorted(path.name for path in (tmp_path / STATE).iterdir())
    assert names == [f"%5B%27layers%27%5D%5B0%5D-{number}.0.bin" for number in range(10)]
    second = np.fromfile(tmp_path / STATE / names[1], np.float32)
    np.testing.assert_array_equal(second, np.arange(100, 200))


@given(
    st.lists(st.sampled_from([1, 2, 3, 36, 61, 67, 128, 1733, 4096, 65537]), max_size=4),
    st.sampled_from([1, 2, 4]),
)
def test_chunks_divide_a_shard_and_are_no_larger_than_necessary(shape: list[int], itemsize: int) -> None:
    chunk = array_files._chunk_shape(shape, itemsize)
    assert all(size % part == 0 for size, part in zip(shape, chunk, strict=True))
    if math.prod(shape) * itemsize <= array_files.CHUNK_BYTES:
        assert chunk == tuple(shape)
    if math.prod(chunk) * itemsize > array_files.CHUNK_BYTES:
        # Only a large prime dimension, which would give many small files, is left whole.
        assert set(chunk) <= {1, 67, 1733, 65537}
    assert math.prod(shape) // math.prod(chunk) <= 64 * max(math.prod(shape) * itemsize // array_files.CHUNK_BYTES, 1)


def test_copy_on_the_host_survives_a_donation() -> None:
    array = jnp.arange(1000.0)
    expected = np.array(array)
    copies = copy_to_host({"a": array})
    jax.jit(lambda old: old * 0, donate_argnums=0)(array).block_until_ready()
    _, [(_, values)] = copies["['a']"]
    np.testing.assert_array_equal(values, expected)


def test_shards_of_several_processes_are_assembled(folder: StoragePath, mesh: Mesh) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    described = SavedArray("float32", (4, 6), (2, 2), f"{STATE}/a")
    written: dict[str, FileDigest] = {}
    for columns in ((0, 2), (2, 6)):
        assert len(saved({"['a']": described}, written, folder).missing_files()) == 6 - len(written)
        shards = [((rows, columns), array[slice(*rows), slice(*columns)]) for rows in ((0, 2), (2, 4))]
        written |= write_arrays(folder, {"['a']": (described, shards)})
    arrays = saved({"['a']": described}, written, folder).open_arrays()
    like = {"a": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    np.testing.assert_array_equal(load_arrays(arrays, like, {}, mesh)["a"], array)
    for start, stop in itertools.combinations(range(5), 2):
        np.testing.assert_array_equal(arrays["['a']"][start:stop, 1:5].read().result(), array[start:stop, 1:5])


def test_errors_of_files_keep_their_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore pickles the exceptions of its callbacks."""
    for error in (StorageError("refused", "gs://bucket/x", "try again"), OSError(28, "No space left on device", "x")):

        def fail(path: Path, data: bytes, error: OSError = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", fail)
            with pytest.raises(type(error)) as caught:
                write_arrays(tmp_path, copy_to_host(tree()))
        assert str(caught.value) == str(error)
