# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weights in Hugging Face format, written one tensor after another.

The tensors of one layer, or those outside all layers, are converted at a time. They stay sharded on the devices; the
main process copies one of them after another to its host, in slices, and writes it. So an export needs room for one
layer, or for embeddings and head, and not for the model. A checkpoint is read in the same parts, with up to 512 MiB of
chunks that hold several layers.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq
from jax.sharding import NamedSharding, PartitionSpec
from levanter.compat.hf_checkpoints import _shard_hf_checkpoint
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmHeadModel

from marin_rl.models.hf_tensors import to_tensors
from marin_rl.models.lora import has_adapter, merge_adapter
from marin_rl.runs.array_files import bytes_of
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.utils import multihost
from marin_rl.utils.devices.arrays import is_named
from marin_rl.utils.devices.trainer_config import TrainerConfig

T = TypeVar("T")

SHARD_BYTES = 10**10
"""Size above which the tensors are written to several files with an index."""
SLICE_BYTES = 64 * 2**20
"""Bytes of an array that every device holds at a time while the array is sent to the main host."""
INDEX = "model.safetensors.index.json"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
"""Names of dtypes in safetensors files."""


@runtime_checkable
class WeightParts(Protocol):
    """Weights of a policy, from which an export takes one part after another."""

    shape: LmHeadModel
    """Shapes of the policy."""
    dtype: jnp.dtype | None
    """Type of the tensors; None for that of the parameters."""

    def layer(self, index: int) -> dict[str, jax.Array]:
        """Return the tensors of a layer by their names after the layer's number; collective over all processes."""
        ...

    def rest(self) -> dict[str, jax.Array]:
        """Return the tensors outside all layers, by name; collective over all processes."""
        ...


class DeviceWeights:
    """Weights on the devices of all processes."""

    def __init__(self, model: LmHeadModel, trainer: TrainerConfig, dtype: jnp.dtype | None = None) -> None:
        """Convert nothing yet. Adapters are merged, with their base in the precision of parameters.

        `dtype` is the type of the tensors; None for that of the parameters.
        """
        model, adapted = eqx.filter(model, eqx.is_array), has_adapter(model)

        def merge(tree: T) -> T:
            return merge_adapter(trainer.mp.cast_to_param(tree)) if adapted else tree

        self.shape = shape = eqx.filter_eval_shape(merge, model)
        self.dtype = dtype
        self._trainer = trainer
        self._layers, self._others = _split(model)
        # JAX keeps these functions, so they do not refer to the weights.
        self._take = eqx.filter_jit(lambda layers, row: _convert_layer(shape, dtype, merge(_take_layer(layers, row))))
        self._convert = eqx.filter_jit(lambda others: _convert_rest(shape, dtype, merge(others)))

    def layer(self, index: int) -> dict[str, jax.Array]:
        """See `WeightParts`."""
        layers, row = _part(self._layers, index)
        return self._run(self._take, layers, jnp.int32(row or 0))

    def rest(self) -> dict[str, jax.Array]:
        """See `WeightParts`."""
        return self._run(self._convert, self._others)

    def _run(self, function: Callable[..., dict[str, jax.Array]], *arguments: Any) -> dict[str, jax.Array]:
        with self._trainer.use_device_mesh(), hax.axis_mapping(self._trainer.parameter_axis_mapping):
            return function(*arguments)


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A leaf of a saved policy."""

    array: ts.TensorStore
    like: Any


class SavedWeights:
    """Weights in the files of a checkpoint, for one process."""

    def __init__(self, shape: LmHeadModel, saved: Checkpoint, dtype: jnp.dtype | None = None) -> None:
        """Compare the checksums of the files.

        `shape` has the shapes of the saved policy, and `saved` only the arrays of the policy, from `Checkpoint.part`.
        `dtype` is the type of the tensors; None for that of the parameters.

        Raises:
            DamagedCheckpointError: if a file is missing or altered.
        """
        self.shape, self.dtype = shape, dtype
        saved.verify_arrays()
        arrays = saved.open_arrays()
        self._layers, self._others = _split(
            jax.tree_util.tree_map_with_path(
                lambda path, leaf: _Saved(arrays[jax.tree_util.keystr(path)], leaf), shape, is_leaf=is_named
            )
        )
        self._convert_layer = eqx.filter_jit(lambda layer: _convert_layer(shape, dtype, layer))
        self._convert_rest = eqx.filter_jit(lambda others: _convert_rest(shape, dtype, others))

    def layer(self, index: int) -> dict[str, jax.Array]:
        """See `WeightParts`."""
        layers, row = _part(self._layers, index)
        rows = slice(None) if row is None else slice(row, row + 1)
        return self._convert_layer(self._read(layers, rows))

    def rest(self) -> dict[str, jax.Array]:
        """See `WeightParts`."""
        return self._convert_rest(self._read(self._others, slice(None)))

    def _read(self, tree: Any, rows: slice) -> Any:
        """Read rows of all arrays of a tree."""
        leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: isinstance(leaf, _Saved))
        reads = [leaf.array[rows].read() for leaf in leaves]
        found = [_with_rows(leaf.like, read.result()) for leaf, read in zip(leaves, reads, strict=True)]
        return jax.tree.unflatten(structure, found)


def _with_rows(like: Any, rows: Any) -> Any:
    """Give an array the axes of another one, of which it has some rows."""
    if not isinstance(like, NamedArray):
        return rows
    return NamedArray(rows, (Axis(like.axes[0].name, rows.shape[0]), *like.axes[1:]))


def _layers(model: Any) -> Any:
    """Return the layers of a model: `Stacked`, or `BlockSeq` if they are of different kinds."""
    transformer = model.transformer
    return transformer.blocks if isinstance(model.config, Gpt2Config) else transformer.layers


def _split(model: Any) -> tuple[Any, Any]:
    """Split a model into its layers and the rest."""
    return _layers(model), eqx.tree_at(_layers, model, None)


def _join(layers: Any, others: Any) -> LmHeadModel:
    """Invert `_split`."""
    return eqx.tree_at(_layers, others, layers, is_leaf=lambda node: node is None)


def _part(layers: Any, index: int) -> tuple[Any, int | None]:
    """Return the part of the layers that holds one of them, and its row there; None if it is alone."""
    if isinstance(layers, BlockSeq):
        block = Axis(layers.Block.name, 1)
        return dataclasses.replace(layers, blocks=[layers.blocks[index]], Block=block), None
    return layers, index


def _take_layer(layers: Any, row: jax.Array) -> Any:
    """Take one layer of a part of the layers."""
    if isinstance(layers, BlockSeq):
        return layers

    def take(leaf: Any) -> Any:
        array = leaf.array if is_named(leaf) else leaf
        return _with_rows(leaf, jax.lax.dynamic_slice_in_dim(array, row, 1))

    return jax.tree.map(take, layers, is_leaf=is_named)


def _zeros(shape: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)


def _tensors(model: LmHeadModel, dtype: jnp.dtype | None) -> dict[str, jax.Array]:
    """Convert a policy to the tensors of its Hugging Face form."""
    if dtype is not None:
        model = jax.tree.map(lambda array: array.astype(dtype), model)
    return to_tensors(model)


def _convert_layer(shape: LmHeadModel, dtype: jnp.dtype | None, layers: Any) -> dict[str, jax.Array]:
    """Convert one layer; the keys are the names after the layer's number."""
    _, others = _split(shape)
    one = dataclasses.replace(layers, Block=Axis(layers.Block.name, 1))
    # XLA removes what does not reach the result.
    named = _tensors(_join(one, _zeros(others)), dtype)
    return {suffix: named[f"{prefix}0.{suffix}"] for prefix, suffix in map(_layer_name, named) if prefix}


def _convert_rest(shape: LmHeadModel, dtype: jnp.dtype | None, others: Any) -> dict[str, jax.Array]:
    """Convert the arrays outside all layers."""
    layers, _ = _split(shape)
    named = _tensors(_join(_zeros(layers), others), dtype)
    return {name: array for name, array in named.items() if not _layer_name(name)[0]}


def _layer_name(name: str) -> tuple[str, str]:
    """Split the name of a tensor at its layer's number; the first part is empty outside all layers.

    >>> _layer_name("model.layers.12.mlp.up_proj.weight"), _layer_name("lm_head.weight")
    (('model.layers.', 'mlp.up_proj.weight'), ('', 'lm_head.weight'))
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        return "", name
    return ".".join([*parts[:number], ""]), ".".join(parts[number + 1 :])


def write_weights(parts: WeightParts, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write weights to safetensors files, with an index if there are several; collective over all processes.

    Only the main process writes, to an existing folder. Above `shard_bytes`, another file is begun.

    Raises:
        OSError: in the main process, if a file cannot be written.
    """
    shapes = eqx.filter_eval_shape(lambda: _tensors(_zeros(parts.shape), parts.dtype))
    files, index = _shard_hf_checkpoint(shapes, shard_bytes)
    taken = _Taken(parts)
    for name, described in files.items():
        ordered = sorted(described)
        arrays = ((key, _copy_to_main(taken.take(key))) for key in ordered)
        if multihost.is_main():
            _write_file(folder / name, {key: described[key] for key in ordered}, cast(Any, arrays))
        else:
            for _ in arrays:
                pass
    if index is not None and multihost.is_main():
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


class _Taken:
    """Tensors that are converted when the first of their part is taken, and released when they are taken."""

    def __init__(self, parts: WeightParts) -> None:
        self._parts = parts
        self._layer: int | None = None
        self._of_layer: dict[str, jax.Array] = {}
        self._of_rest: dict[str, jax.Array] | None = None

    def take(self, name: str) -> jax.Array:
        prefix, suffix = _layer_name(name)
        if not prefix:
            if self._of_rest is None:
                self._of_rest = self._parts.rest()
            return self._of_rest.pop(name)
        index = int(name[len(prefix) :].partition(".")[0])
        if index != self._layer:
            self._layer, self._of_layer = index, self._parts.layer(index)
        return self._of_layer.pop(suffix)


def _copy_to_main(array: jax.Array) -> np.ndarray | None:
    """Copy an array to the host of the main process; None in the others. No device holds more than a slice of it."""
    if array.is_fully_addressable:
        return np.asarray(array)
    length = array.shape[0]
    rows = min(max(SLICE_BYTES * length // max(array.nbytes, 1), 1), length)
    copy = np.empty(array.shape, array.dtype) if multihost.is_main() else None
    replicated = NamedSharding(cast(NamedSharding, array.sharding).mesh, PartitionSpec())
    for start in range(0, length, rows):
        first = min(start, length - rows)
        part = jax.block_until_ready(take_rows(array, first, rows, replicated))
        if copy is not None:
            copy[first : first + rows] = np.asarray(part.addressable_data(0))
    return copy


@functools.partial(jax.jit, static_argnums=(2, 3))
def take_rows(array: jax.Array, start: int, rows: int, sharding: NamedSharding) -> jax.Array:
    """Take consecutive rows of an array.

    A gather, because XLA lets each device gather its own rows. For a dynamic slice of a sharded dimension, XLA first
    copies the whole array to every device.
    """
    taken = jnp.take(array, start + jnp.arange(rows), axis=0, mode="clip")
    return jax.lax.with_sharding_constraint(taken, sharding)


def _write_file(path: Path, shapes: Mapping[str, Any], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a safetensors file, with the bytes that `safetensors` writes for tensors of one type.

    `tensors` are in the order of `shapes`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = shape.size * shape.dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[shape.dtype.name],
            "shape": list(shape.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            file.write(bytes_of(tensor))
