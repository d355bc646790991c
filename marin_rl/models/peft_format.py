# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Adapters in the format of PEFT: a folder with `adapter_config.json` and `adapter_model.safetensors`.

A linear layer named `q` in Hugging Face's model has the tensors `base_model.model.q.lora_A.weight`, `[rank, inputs]`,
and `base_model.model.q.lora_B.weight`, `[outputs, rank]`. PEFT adds `lora_alpha / r · B A` to its weight.
"""

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmHeadModel
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from marin_rl.models.hf_config import first_line
from marin_rl.models.hf_tensors import BASE_PREFIX, WEIGHT_TYPES, listing, read_headers, tensor_shapes, to_tensors
from marin_rl.models.lora import ALL_LINEAR, RANK, Adapter, LoraLinear, init_adapter, is_match, with_adapter
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import check_descriptions, local_copy, read_small, storage_path, user_cache

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NOT_ADAPTED = jnp.float8_e4m3fn
"""Type of the tensors outside the adapter, to tell them from those of the adapter."""


class AdapterFormatError(UserError):
    """A folder is not an adapter that can be loaded; the message names the folder, the setting and the remedy."""


def to_peft_tensors(base: LmHeadModel, adapter: Adapter) -> dict[str, jax.Array]:
    """Convert an adapter to the tensors of PEFT, by name.

    Matrices A and B each take the place of weights of the base and are converted as these are. `base` may be shapes.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _NOT_ADAPTED), base)
    model, tensors = with_adapter(zeros, adapter), {}
    for letter in ("A", "B"):
        replaced = jax.tree.map(
            functools.partial(_replace, letter), model, is_leaf=lambda node: isinstance(node, LoraLinear)
        )
        for name, tensor in to_tensors(replaced).items():
            if tensor.dtype != _NOT_ADAPTED:
                tensors[f"{_PREFIX}{_hf_module(base, name)}.lora_{letter}.weight"] = tensor
    return tensors


def _replace(letter: str, node: Any) -> Any:
    """Return A or B of an adapted layer as a layer of its own; other nodes as they are."""
    if not isinstance(node, LoraLinear):
        return node
    a, b = node.low_rank.a, node.low_rank.b
    if letter == "A":
        return dataclasses.replace(node.linear, bias=None, weight=a, Out=a.resolve_axis(RANK))
    return dataclasses.replace(node.linear, bias=None, weight=b, In=b.resolve_axis(RANK))


def save_peft_adapter(
    base: LmHeadModel, adapter: Adapter, folder: Path, base_name: str, dtype: DTypeLike | None = None
) -> None:
    """Write an adapter in the format of PEFT.

    Args:
        base: shapes of the model that it adapts.
        adapter: arrays on the devices of this process.
        folder: an existing folder.
        base_name: folder or hub name of the model that it adapts.
        dtype: type of the tensors; None for that of the adapter.

    Raises:
        OSError: if a file cannot be written.
    """
    tensors = eqx.filter_jit(lambda adapter: to_peft_tensors(base, adapter))(adapter)
    arrays = {name: np.asarray(tensor if dtype is None else tensor.astype(dtype)) for name, tensor in tensors.items()}
    # Without rounding, 5 / 49 · 49 is not 5.
    alpha = float(f"{adapter.scale * _rank(adapter):.12g}")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": _rank(adapter),
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": _targets(base, tensors),
        # GPT-2 has weights of [inputs, outputs].
        "fan_in_fan_out": isinstance(base.config, Gpt2Config),
        "bias": "none",
        "inference_mode": True,
    }
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _rank(adapter: Adapter) -> int:
    return next(iter(adapter.layers.values())).a.axis_size(RANK)


def _targets(base: LmHeadModel, names: Iterable[str]) -> list[str]:
    """Return the shortest names that PEFT matches with the modules of tensors, and with no others of the base."""
    modules = {_module(name) for name in names} - {""}
    others = {_hf_module(base, name) for name in tensor_shapes(base)} - modules
    targets = set()
    for parts in (module.split(".") for module in modules):
        endings = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
        targets.add(next((end for end in endings if not any(is_match(other, end) for other in others)), endings[-1]))
    return sorted(targets)


def _hf_module(base: LmHeadModel, weight: str) -> str:
    """Return the name of the module that has a weight of the base."""
    return (f"{BASE_PREFIX}." if isinstance(base.config, Gpt2Config) else "") + weight.rpartition(".")[0]


def _module(name: str) -> str:
    """Return the module of a tensor's name.

    >>> _module("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    'model.layers.0.self_attn.q_proj'
    """
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


def load_peft_adapter(source: str, base: LmHeadModel, like: Adapter, trainer: TrainerConfig) -> Adapter:
    """Load an adapter.

    Args:
        source: as for `check_peft_adapter`, like `base` and `like`.
        base: shapes of the model that it adapts.
        like: shapes of the adapter, and its scale.
        trainer: mesh and axis mapping of its arrays.

    Raises:
        AdapterFormatError: as `check_peft_adapter`, or if a number is not finite.
    """
    folder = check_peft_adapter(source, base, like)
    dtype = jax.tree.leaves(like)[0].dtype
    tensors: dict[str, np.ndarray] = {}
    with safe_open(folder / WEIGHTS, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensors[name] = file.get_tensor(name).astype(dtype)
            if not np.isfinite(tensors[name].astype(np.float32)).all():
                raise AdapterFormatError(
                    f"the adapter in {str(folder)!r} has numbers that are not finite in {name}; the run that wrote it "
                    "diverged, use an earlier checkpoint of it"
                )
    # The conversion permutes numbers, and the inverse of a permutation is its transpose.
    invert = jax.linear_transpose(functools.partial(to_peft_tensors, base), like)
    with trainer.use_device_mesh():
        return hax.named_jit(lambda tensors: invert(tensors)[0], axis_resources=trainer.parameter_axis_mapping)(tensors)


def check_peft_adapter(source: str, base: LmHeadModel, like: Adapter) -> Path:
    """Check that an adapter can be loaded; reads only its config and the header of its weights.

    Args:
        source: folder in the format of PEFT; one in an object store is copied into the cache folder of the user.
        base: shapes of the model that it adapts.
        like: shapes of the adapter, and its scale.

    Returns:
        The local folder.

    Raises:
        AdapterFormatError: if the folder has no adapter in this format, its files are damaged, or it has settings or
            tensors that `like` does not have.
    """
    path = storage_path(source, "lora.adapter")
    folder = local_copy(path, user_cache("weights")) if isinstance(path, RemotePath) else path
    rank, scale, targets = _read_settings(folder)
    if rank != _rank(like) or not math.isclose(scale, like.scale):
        raise AdapterFormatError(
            f"the adapter in {str(folder)!r} has rank {rank} and factor {scale:g}, but lora.rank is {_rank(like)} and "
            f"lora.alpha / lora.rank is {like.scale:g}; set lora.rank: {rank} and lora.alpha: {scale * rank}"
        )
    found = _read_shapes(folder)
    expected = {name: tensor.shape for name, tensor in eqx.filter_eval_shape(to_peft_tensors, base, like).items()}
    modules = adapted = {_module(name) for name in found} - {""}
    if targets == [ALL_LINEAR]:
        every = eqx.filter_eval_shape(
            lambda: init_adapter(base, rank=1, scale=1.0, targets=[ALL_LINEAR], key=jax.random.PRNGKey(0))
        )
        adapted = {_module(name) for name in eqx.filter_eval_shape(to_peft_tensors, base, every)}
    elif targets is not None:
        of_base = {_hf_module(base, name) for name in tensor_shapes(base)}
        adapted = {module for module in of_base if any(is_match(module, target) for target in targets)}
    problems = {
        "the files lack": expected.keys() - found.keys(),
        "lora.targets or the model lack": found.keys() - expected.keys(),
        "of another shape than in the model are": {
            f"{name} {found[name]}, not {expected[name]}"
            for name in found.keys() & expected.keys()
            if found[name] != expected[name]
        },
        f"target_modules in {CONFIG} differs from the tensors in": adapted ^ modules,
    }
    if any(problems.values()):
        texts = [f"{problem} {listing(sorted(names))}" for problem, names in problems.items() if names]
        raise AdapterFormatError(
            f"the adapter in {str(folder)!r} does not fit initialize_from and lora.targets: {'; '.join(texts)}; use "
            f"the model that it was trained for, and lora.targets: [{', '.join(_targets(base, found))}]"
            f"{_remedy_of_weights(found)}"
        )
    return folder


def _remedy_of_weights(names: Iterable[str]) -> str:
    """End of a sentence about tensors that replace weights of the base; empty if there are none."""
    if not (replaced := [name for name in names if not _module(name)]):
        return ""
    start = f"; {replaced[0]} replaces a weight of the model itself, so"
    if all("embed_tokens" in name or "lm_head" in name for name in replaced):
        return f"{start} leave it out with PEFT's save_pretrained(FOLDER, save_embedding_layers=False)"
    return f"{start} merge the adapter into its base with PEFT's merge_and_unload, and use that as initialize_from"


def _is_targets(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


_SUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (lambda value: value == "LORA", "LORA"),
    "r": (lambda value: type(value) is int and 0 < value < 2**31, "a positive integer"),
    "lora_alpha": (lambda value: type(value) in (int, float) and 0 < value < 1e30, "a positive number"),
    "target_modules": (_is_targets, "a list of names, or a text"),
    "task_type": (lambda value: value in (None, "CAUSAL_LM"), "CAUSAL_LM"),
    "use_rslora": (lambda value: value in (None, True, False), "true or false"),
    "bias": (lambda value: value == "none", "none"),
    "init_lora_weights": (lambda value: value in (True, False, "gaussian", "orthogonal", "eva"), "true"),
}
"""Checks of keys of `adapter_config.json`, and the supported values. The first four keys are required."""
_WITHOUT_EFFECT = {
    *("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode"),
    # They act in training only, or are values of options that other keys switch on.
    *("lora_dropout", "fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
}


def _read_settings(folder: Path) -> tuple[int, float, list[str] | None]:
    """Return rank, factor of the product, and targets; None for those of a regular expression."""
    name = f"{CONFIG} of the adapter in {str(folder)!r}"
    try:
        check_descriptions(folder)
        raw = json.loads(read_small(folder / CONFIG).decode())
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterFormatError(
            f"{name} cannot be read: {first_line(error)}; set lora.adapter to a folder that PEFT or `python -m "
            "marin_rl.export --adapter` wrote"
        ) from error
    wrong = []
    for key in sorted({*list(_SUPPORTED)[:4], *raw} - _WITHOUT_EFFECT):
        is_supported, supported = _SUPPORTED.get(key, (operator.not_, "false"))
        if not is_supported(value := raw.get(key)):
            wrong.append(f"{key} is {json.dumps(value):.80} (supported: {supported})")
    if wrong:
        raise AdapterFormatError(
            f"{name} has values that are not supported: {', '.join(wrong)}; merge the adapter into its base with "
            "PEFT's merge_and_unload, and use the result as initialize_from"
        )
    rank, targets = raw["r"], raw["target_modules"]
    # Rank-stabilized LoRA (Kalajdzievski 2023) divides by the root.
    scale = raw["lora_alpha"] / (math.sqrt(rank) if raw.get("use_rslora") else rank)
    if isinstance(targets, str):
        targets = [ALL_LINEAR] if targets.lower() == ALL_LINEAR else None
    return rank, scale, targets


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors of an adapter."""
    try:
        headers = read_headers(folder / WEIGHTS)
        if wrong := [f"{name} ({dtype})" for name, (dtype, _) in headers.items() if dtype not in WEIGHT_TYPES]:
            raise ValueError(f"these tensors are not of {', '.join(WEIGHT_TYPES)}: {listing(wrong)}")
        if not headers:
            raise ValueError("it has no tensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterFormatError(
            f"{WEIGHTS} of the adapter in {str(folder)!r} is missing or damaged: {first_line(error)}; write it with "
            "PEFT's save_pretrained(FOLDER)"
        ) from error
    return {name: shape for name, (_, shape) in headers.items()}
