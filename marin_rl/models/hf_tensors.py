# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Names and shapes of the tensors in Hugging Face checkpoints, and their comparison with those of a model."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax.state_dict import flatten_modules_for_export, to_state_dict
from levanter.models.lm_model import LmConfig, LmHeadModel
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from marin_rl.models.hf_config import PolicyModelError
from marin_rl.utils.hub import LFS_PROBLEM, is_lfs_pointer
from marin_rl.utils.storage import read_small

BASE_PREFIX = "transformer"
"""Prefix of tensor names in GPT-2 checkpoints that were saved with their head; other architectures have none."""

_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Suffixes of constants that older versions of transformers saved with the weights."""
WEIGHT_TYPES = ("BF16", "F16", "F32", "F64")
"""Supported types of weights, by their names in safetensors files."""
_MOST_NAMED = 5
_FUSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Suffixes of tensors that contain all experts of a layer."""
_ROUTER = ".mlp.gate.weight"
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Names of a layer's mixture and of the weights of an expert: gate, up and down; by architecture."""
MAX_EXPERTS = 4096
"""Maximum number of experts in a fused tensor; the time to split it grows with it."""


def check_tensors(checkpoint: str, model: LmHeadModel) -> None:
    """Raise an error unless a checkpoint's tensors match a model's exactly; reads only file headers.

    A tensor that the model does not use (a bias, a normalization, an adapter) changes the checkpoint's function, and
    would be dropped without an error. With tied embeddings `lm_head.weight` is optional and unused, as in transformers.
    `checkpoint` is a folder with safetensors files, or a hub name; `model` may be shapes.

    Raises:
        PolicyModelError: if tensors are missing, unused, of another shape, or both fused and separate, or a file is
            missing or damaged; the message names them.
    """
    shapes = _with_split_experts(read_tensor_shapes(checkpoint), model, checkpoint)
    expected = tensor_shapes(model)
    tied = {"lm_head.weight"} - expected.keys()
    unused = [name for name in shapes if name not in expected | dict.fromkeys(tied) and not name.endswith(_BUFFERS)]
    misshapen = [
        f"{name} {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = [
        f"{problem} {listing(names)}"
        for problem, names in {
            "the files lack": [name for name in expected if name not in shapes],
            "the model does not use": unused,
            "of another shape than in the model are": misshapen,
        }.items()
        if names
    ]
    if problems:
        raise PolicyModelError(
            f"the weights in {checkpoint!r} are not those that its config.json describes: {'; '.join(problems)}; use "
            "config.json and weights of the same checkpoint"
        )


def _with_split_experts(
    shapes: dict[str, tuple[int, ...]], model: LmHeadModel, checkpoint: str
) -> dict[str, tuple[int, ...]]:
    """Split the fused experts of a model in the shapes of a checkpoint's tensors."""
    separate = dict(shapes)
    mixtures = [name for name in shapes if name.endswith((*_FUSED, _ROUTER))]
    split = jax.eval_shape(
        functools.partial(split_experts, model_type=_model_type(model)),
        {name: jax.ShapeDtypeStruct(separate.pop(name), jnp.float32) for name in mixtures},
    )
    if twice := [name for name in split if name in separate]:
        raise PolicyModelError(
            f"the weights in {checkpoint!r} contain some tensors twice, in the names of transformers 4 and in those of "
            f"fused experts: {listing(twice)}; remove one of the two"
        )
    return separate | {name: tuple(leaf.shape) for name, leaf in split.items()}


def _model_type(model: LmHeadModel) -> str:
    return LmConfig.get_choice_name(type(cast(Any, model.config)))


def tensor_shapes(model: LmHeadModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by their Hugging Face names."""
    named = eqx.filter_eval_shape(lambda model: to_tensors(eqx.filter(model, eqx.is_array)), model)
    return {name: tuple(leaf.shape) for name, leaf in named.items()}


def to_tensors(model: LmHeadModel) -> dict[str, jax.Array]:
    """Convert a model to the tensors of its Hugging Face form, by name."""
    return split_experts(to_state_dict(flatten_modules_for_export(model)), _model_type(model))


def split_experts(tensors: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Split fused tensors of a mixture's experts into those of each expert; returns the same dictionary.

    The parameters of transformers 5 are `mlp.experts.gate_up_proj`, `[experts, 2 mlp, embed]`, and
    `mlp.experts.down_proj`, `[experts, embed, mlp]`; levanter's new line writes those of `mixtral`. The files of both
    transformers and the servers that read them have gate, up and down of each expert, which levanter reads. Each fused
    tensor is removed before the next one is split. `model_type` is the architecture; others than mixtures are returned
    as they are.
    """
    if model_type not in _EXPERTS:
        return tensors
    mixture, (gate, up, down) = _EXPERTS[model_type]
    fused = [name for name in tensors if name.endswith(_FUSED) and _is_stack(tensors[name].shape)]
    for name in fused:
        layer, _, kind = name.partition(".mlp.experts.")
        stack = tensors.pop(name)
        half = stack.shape[1] // 2
        rows = {gate: slice(half), up: slice(half, None)} if kind == "gate_up_proj" else {down: slice(None)}
        for expert in range(stack.shape[0]):
            for weight, part in rows.items():
                tensors[f"{layer}.{mixture}.experts.{expert}.{weight}.weight"] = stack[expert, part]
        if (router := tensors.pop(layer + _ROUTER, None)) is not None:
            tensors[f"{layer}.{mixture}.gate.weight"] = router
    return tensors


def _is_stack(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] <= MAX_EXPERTS and max(shape) < 2**31


def read_tensor_shapes(checkpoint: str) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors in a checkpoint's safetensors files; names are without the prefix of GPT-2.

    Raises:
        PolicyModelError: if a file is missing, damaged or in PyTorch's pickle format, or holds no floats.
    """
    _refuse_pickled(checkpoint)
    shapes: dict[str, tuple[int, ...]] = {}
    not_weights: list[str] = []
    name = "model.safetensors"
    try:
        for name in _file_names(checkpoint):
            folder = Path(checkpoint)
            headers = read_headers(folder / name if folder.is_dir() else Path(cast(str, cached_file(checkpoint, name))))
            for tensor, (dtype, shapes[tensor]) in headers.items():
                if dtype not in WEIGHT_TYPES and not tensor.endswith(_BUFFERS):
                    not_weights.append(f"{tensor} ({dtype})")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise PolicyModelError(
            f"the weights in {checkpoint!r} are missing or damaged: {name}: {str(error).splitlines()[0]}"
        ) from error
    if not_weights:
        raise PolicyModelError(
            f"the weights in {checkpoint!r} are not in bfloat16, float16, float32 or float64, as in quantized "
            f"checkpoints: {listing(not_weights)}; use the checkpoint that they were made from"
        )
    return {name.removeprefix(f"{BASE_PREFIX}."): shape for name, shape in shapes.items()}


def read_headers(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the type and the shape of the tensors of a safetensors file, by name.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is a pointer of Git LFS.
        SafetensorError: if it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError("the file does not exist")
    if is_lfs_pointer(path):
        raise ValueError(LFS_PROBLEM)
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def _file_names(checkpoint: str) -> list[str]:
    index = cached_file(checkpoint, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        return ["model.safetensors"]
    weight_map: Mapping[str, str] = json.loads(read_small(Path(index)).decode())["weight_map"]
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"model.safetensors.index.json names {outside[0]!r}, which is not a file of the folder")
    return names


def _refuse_pickled(checkpoint: str) -> None:
    folder = Path(checkpoint)
    if any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (folder / name).exists():
            raise PolicyModelError(
                f"the weights in {checkpoint!r} are in {name}, PyTorch's pickle format, which is not read; convert "
                "them to safetensors on a machine with torch: "
                f"AutoModelForCausalLM.from_pretrained({checkpoint!r}).save_pretrained(NEW_FOLDER)"
            )


def listing(names: list[str]) -> str:
    """Return the first names of a list as a text."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
