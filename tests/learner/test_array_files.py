# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from marin_rl.learner import array_files
from marin_rl.learner.array_files import (
    DamagedArraysError,
    HostArray,
    copy_to_host,
    from_jsonable,
    load_arrays,
    merge,
    to_jsonable,
    write_boxes,
)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def tree() -> dict[str, jax.Array]:
    bits = np.random.default_rng(0).integers(0, 2**16, size=(5, 7), dtype=np.uint16)
    return {
        "bfloat16": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "negative zero": jnp.asarray([-0.0, 0.0, jnp.nan, -jnp.inf]),
        "scalar": jnp.asarray(7, jnp.int32),
        "large": jnp.arange(1000, dtype=jnp.float32).reshape(10, 100),
    }


def assert_same_bits(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes(), name


@pytest.mark.parametrize("piece_bytes", [64, 1000, 2**26])
def test_arrays_are_restored_bit_for_bit(
    tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(array_files, "PIECE_BYTES", piece_bytes)
    arrays = tree()
    saved = from_jsonable(to_jsonable(write_boxes(tmp_path, "a", copy_to_host(arrays))))
    assert all(array.is_complete for array in saved.values())
    pieces = [piece for array in saved.values() for box in array.boxes for piece in box.pieces]
    assert max(piece.num_bytes for piece in pieces) <= piece_bytes
    assert sum(piece.num_bytes for piece in pieces) == sum(array.nbytes for array in arrays.values())
    assert {path.name for path in tmp_path.iterdir()} == {piece.file for piece in pieces}
    assert_same_bits(load_arrays(tmp_path, saved, arrays, {}, mesh), arrays)


def test_copy_on_the_host_survives_a_donation() -> None:
    array = jnp.arange(1000.0)
    expected = np.array(array)
    copies = copy_to_host({"a": array})
    jax.jit(lambda old: old * 0, donate_argnums=0)(array).block_until_ready()
    [(_, values)] = copies["['a']"].boxes
    np.testing.assert_array_equal(values, expected)


def test_boxes_of_several_processes_are_assembled(tmp_path: Path, mesh: Mesh) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    parts = []
    for process, columns in enumerate([(0, 2), (2, 6)]):
        boxes = [(((row, row + 2), columns), array[row : row + 2, slice(*columns)]) for row in (0, 2)]
        parts.append(write_boxes(tmp_path, f"p{process}", {"['a']": HostArray("float32", (4, 6), tuple(boxes))}))
    assert not parts[0]["['a']"].is_complete
    like = {"a": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    restored = load_arrays(tmp_path, merge(parts), like, {}, mesh)
    np.testing.assert_array_equal(restored["a"], array)


def test_a_part_of_the_arrays_reads_only_its_bytes(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = tree()
    saved = write_boxes(tmp_path, "a", copy_to_host(arrays))
    sizes, read_range = [], array_files.read_range

    def read(path: Path, start: int, stop: int) -> bytes:
        sizes.append(stop - start)
        return read_range(path, start, stop)

    monkeypatch.setattr(array_files, "read_range", read)
    part = {"large": arrays["large"]}
    assert_same_bits(load_arrays(tmp_path, {"['large']": saved["['large']"]}, part, {}, mesh), part)
    assert sizes == [4000]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""])
def test_altered_file_is_named(tmp_path: Path, mesh: Mesh, damage) -> None:
    arrays = tree()
    saved = write_boxes(tmp_path, "a", copy_to_host(arrays))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DamagedArraysError, match=rf"{tmp_path.name}/a-0000\.bin differs from what was written"):
        load_arrays(tmp_path, saved, arrays, {}, mesh)


def test_array_with_a_gap_or_a_short_box_is_incomplete(tmp_path: Path) -> None:
    saved = write_boxes(tmp_path, "a", copy_to_host(tree()))["['large']"]
    box = saved.boxes[0]
    assert saved.is_complete
    assert not dataclasses.replace(saved, boxes=()).is_complete
    assert not dataclasses.replace(saved, boxes=(dataclasses.replace(box, pieces=()),)).is_complete
    assert not dataclasses.replace(saved, shape=(11, 100)).is_complete
