# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Differences between the two lines of levanter that are supported; no other module asks for a version.

- The old line, for Python 3.11: `levanter` and `haliax`, with transformers 4.
- The new line, for Python 3.12 and later: `marin-levanter` and `marin-haliax`, with transformers 5.

Both install packages named `levanter` and `haliax`. Each entry states the reason for it. Entries of the old line end
when Python 3.11 is no longer supported; an entry that ends at another event states it.
"""

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

DISTRIBUTIONS = ("marin-levanter", "levanter")
"""Names of the distributions that contain levanter, the new line first."""


def installed() -> tuple[str, str]:
    """Name and version of the distribution that contains levanter; two empty texts if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


IS_NEW = installed()[0] == DISTRIBUTIONS[0]
"""Whether the new line is installed."""


def distribution_of(package: str) -> str:
    """Name of the distribution that contains a package, as far as it differs between the lines."""
    return f"marin-{package}" if IS_NEW and package in ("haliax", "levanter") else package


# Model configs. The new line has renamed `seq_len`, which stays the name of the key of a config.

_RENAMED = {"seq_len": "max_seq_len"} if IS_NEW else {}


def field_of_key(section: Any, key: str) -> str:
    """Name of the field of a section's dataclass that a key of a config sets."""
    renamed = _RENAMED.get(key, key)
    return renamed if renamed in section.__dataclass_fields__ else key


def key_of_field(section: Any, field: str) -> str:
    """Key of a config that sets a field of a section's dataclass."""
    return next((key for key in _RENAMED if field_of_key(section, key) == field), field)


def seq_len(positions: int) -> dict[str, Any]:
    """Argument of model configs, and of `dataclasses.replace` of them, for the maximum positions in a sequence."""
    return {_RENAMED.get("seq_len", "seq_len"): positions}


def max_positions(model: Any) -> int:
    """Maximum positions in a sequence of a model config."""
    return getattr(model, field_of_key(type(model), "seq_len"))


# Architectures.


def register_in_place(name: str) -> Any:
    """Return the decorator that registers the model config class of `olmo3` or `qwen3_moe`.

    The new line has classes of these names, which those of marin_rl replace: its `olmo3` does not stack layers of
    different types, and its `qwen3_moe` has no dense layers. Ends when levanter does.
    """
    from levanter.models.lm_model import LmConfig

    if IS_NEW:
        importlib.import_module(f"levanter.models.{name}")
        del LmConfig._choice_registry[name]
    return LmConfig.register_subclass(name)


ONLY_NEW = ("qwen3_moe",)
"""Architectures that only the new line has."""


def line_problem(model_type: object) -> str | None:
    """Problem of an architecture that the installed line does not have; None if it has, or if neither has."""
    if IS_NEW or model_type not in ONLY_NEW:
        return None
    return f"{model_type} needs levanter's current line, {DISTRIBUTIONS[0]}, on Python 3.12 or later"


def architectures(names: Sequence[str]) -> tuple[str, ...]:
    """Architectures, of some, that the installed line has."""
    return tuple(name for name in names if line_problem(name) is None)


def mixture_blocks() -> tuple[type, ...]:
    """Levanter's classes of the experts of a layer."""
    from levanter.models.mixtral import MixtralSparseMoeBlock

    if not IS_NEW:
        return (MixtralSparseMoeBlock,)
    from levanter.models.qwen3_moe import Qwen3MoeSparseMoeBlock  # pyrefly: ignore[missing-import]

    return (MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock)


# Keys of levanter's sections that only one line has. A run records all of its keys, and either line reads it.

OTHER = DISTRIBUTIONS[1] if IS_NEW else DISTRIBUTIONS[0]
"""Name of the distribution of the line that is not installed."""


_DEFAULTS_OF_OTHER_LINE: dict[str, Any] = (
    {"cross_entropy_block_size": None, "nesterov": False, "save_xla_dumps": False}
    if IS_NEW
    else {
        **{"dense_router_gradient": False, "coefficient_type": "quintic", "fork_from": None, "replicate_path": None},
        **{"background": True, "background_max_queue_size": 10000, "background_finish_timeout": 120.0},
        **{"service_teardown_timeout": 60.0, "tokenizer": None},
    }
)
"""Keys of the sections of models, optimizers and trackers that only the other line has, with their defaults."""


def is_key_of_other_line(section: type, key: str) -> bool:
    """Whether an unknown key of a section is one of the other line."""
    is_levanter = any(ancestor.__module__.startswith("levanter.") for ancestor in section.__mro__)
    return is_levanter and key in _DEFAULTS_OF_OTHER_LINE


def is_default_of_other_line(section: type, key: str, value: Any) -> bool:
    """Whether an unknown key of a section is one of the other line, with this value as its default."""
    return is_key_of_other_line(section, key) and _DEFAULTS_OF_OTHER_LINE[key] == value


# Examples and losses.


def lm_example(tokens: Any, loss_mask: Any, attn_mask: Any) -> Any:
    """Levanter's `LmExample`; the new line weights tokens with floats."""
    from levanter.models.lm_model import LmExample

    loss: Any = {"loss_weight": loss_mask.astype("float32")} if IS_NEW else {"loss_mask": loss_mask}
    return LmExample(tokens=tokens, attn_mask=attn_mask, **loss)


def next_token_loss(model: Any, example: Any) -> Any:
    """Levanter's loss of each token of an `LmExample`."""
    if IS_NEW:
        return model.compute_next_token_loss(example, reduction=None)
    from levanter.models.lm_model import compute_next_token_loss

    return compute_next_token_loss(model, example, reduction=None)


# Optimizers and metrics.

UNUSABLE_OPTIMIZERS = (
    ("grug_muon", "rmsprop", "scion") if IS_NEW else ("adamH", "kron", "muonH", "rmsprop", "scion", "sophia-h")
)
"""Levanter's optimizers whose update cannot be compiled: sophia-h needs the loss function, grug_muon a model of plain
arrays, and the others call functions that the installed jax has removed or does not support in a compiled program. A
name is removed when levanter fixes the optimizer."""


def metric(value: Any, reduction: Any) -> Any:
    """Levanter's `Metric` of one value. Its count is an integer; that of the new line is a float.

    With other types XLA merges other sums, and `loss/total` may differ in its last bit.
    """
    from levanter.metrics import Metric, ReductionType

    return Metric(_value=value, _count=int(reduction is ReductionType.MEAN), reduction=reduction)


# Sharding.


def shard(tree: T, mapping: Mapping[str, Any] | None = None) -> T:
    """`haliax.shard` of a tree in a compiled program, by `mapping` or the current axis mapping.

    That of the new line omits constraints that replicate an array, and XLA may then keep it sharded: weights are not
    gathered before the loop that reads them. Ends when haliax no longer takes a specification without axes as one of
    explicit axes (`haliax.partitioning.all_mesh_axes_explicit`).
    """
    import haliax as hax
    import jax
    from haliax.partitioning import current_thread_local_mapping, pspec_for_axis

    def replicate(leaf: Any) -> Any:
        is_array = isinstance(leaf, hax.NamedArray) and isinstance(leaf.array, jax.core.Tracer)
        if not is_array or any(pspec_for_axis(leaf.axes, mapping)):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, jax.sharding.PartitionSpec())

    mapping = current_thread_local_mapping() if mapping is None else mapping
    sharded = tree if mapping is None else hax.shard(tree, dict(mapping))
    if not IS_NEW or mapping is None or jax.sharding.get_abstract_mesh().empty:
        return sharded
    return jax.tree.map(replicate, sharded, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))


# Devices.


def peak_flops(device: Any) -> float | None:
    """Peak floating-point operations per second of a device in bfloat16; None if it is unknown.

    The new line has moved the table of devices to the package fray.
    """
    if IS_NEW:
        from fray.device_flops import DEVICE_FLOPS, jax_device_kind_to_fray_device_type

        # fray's own look-up would log a warning at every step on an unknown device, such as a CPU.
        return DEVICE_FLOPS.get(jax_device_kind_to_fray_device_type(device.device_kind), {}).get("bf16")
    from levanter.utils.flop_utils import device_hardware_flops

    return device_hardware_flops(device)


# The hub of Hugging Face.


def reset_hub_sessions() -> None:
    """Drop the HTTP sessions of huggingface_hub, which keep the settings of their first use.

    Version 1, which the new line needs, has renamed the function.
    """
    from huggingface_hub import utils

    module: Any = utils
    (module.close_session if IS_NEW else module.reset_sessions)()
