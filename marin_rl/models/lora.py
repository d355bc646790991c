# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Low-rank adapters of the linear layers of a model (Hu et al. 2021).

An `Adapter` has the matrices A and B alone: it is what is trained, saved, and sent to samplers. The base that it adapts
stays as it is. `with_adapter` joins the two without a copy of the base, and `merge_adapter` makes a plain model.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn import Linear
from haliax.util import ensure_tuple
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.utils.errors import nearest

M = TypeVar("M")

RANK = "lora_rank"
"""Name of the axis between A and B."""


class LoraTargetError(ValueError):
    """A target of an adapter is not a linear layer of the model."""


class LowRank(eqx.Module):
    """The matrices of an adapted linear layer, stacked over layers like its weight."""

    a: NamedArray
    """A: `{layer, lora_rank, In...}`."""
    b: NamedArray
    """B: `{layer, Out..., lora_rank}`."""


class Adapter(eqx.Module):
    """The matrices of all adapted layers of a model."""

    layers: dict[str, LowRank]
    """By the path of the linear layer in levanter's model, such as `transformer.layers.stacked.self_attn.q_proj`."""
    scale: float = eqx.field(static=True)
    """Factor of the product of A and B: alpha / rank."""


class LoraLinear(eqx.Module):
    """A linear layer with an adapter: `y = x W + scale · (x A) B`."""

    linear: Linear
    """The layer of the base."""
    low_rank: LowRank
    """A and B."""
    scale: float = eqx.field(static=True)
    """Factor of the product of A and B."""

    def __call__(self, inputs: NamedArray, *, key: Any = None) -> NamedArray:
        """Apply the layer; `key` is unused, as in `Linear`."""
        hidden = inputs.dot(self.low_rank.a, axis=self.linear.In)
        change = hax.auto_sharded(hidden.dot(self.low_rank.b, axis=RANK) * self.scale)
        return self.linear(inputs) + change

    @property
    def weight(self) -> NamedArray:
        """The merged weight `W + scale · A B`, computed in float32, in the type of `W`."""
        weight, a, b = (array.astype(jnp.float32) for array in (self.linear.weight, self.low_rank.a, self.low_rank.b))
        product = a.dot(b, axis=RANK, precision=jax.lax.Precision.HIGHEST)
        merged = weight + product.rearrange(weight.axes) * self.scale
        return merged.astype(self.linear.weight.dtype)


def init_adapter(model: LmHeadModel, *, rank: int, scale: float, targets: Sequence[str], key: jax.Array) -> Adapter:
    """Make a new adapter, which changes nothing: A is uniform in `±1 / sqrt(inputs)` as in PEFT, and B is 0.

    Args:
        model: the base, or its shapes.
        rank: rank of the product of A and B, at least 1.
        scale: factor of the product, `alpha / rank`.
        targets: names of the modules to adapt; see `adapted_modules`.
        key: random key of A.

    Raises:
        LoraTargetError: if a target cannot be adapted.
    """
    Rank = Axis(RANK, rank)

    def init(linear: Linear, key: jax.Array) -> LowRank:
        In, Out = (cast(tuple[Axis, ...], ensure_tuple(axes)) for axes in (linear.In, linear.Out))
        stacked = tuple(axis for axis in linear.weight.axes if axis not in (*In, *Out))
        bound = 1 / math.sqrt(math.prod(axis.size for axis in In))
        a = hax.random.uniform(key, (*stacked, Rank, *In), minval=-bound, maxval=bound)
        return LowRank(a, hax.zeros((*stacked, *Out, Rank)))

    modules = adapted_modules(model, targets)
    keys = jax.random.split(key, len(modules))
    return Adapter({path: init(linear, key) for (path, linear), key in zip(modules.items(), keys, strict=True)}, scale)


def check_targets(config: LmConfig, targets: Sequence[str]) -> None:
    """Raise a LoraTargetError if a target cannot be adapted in a model with this config; uses no device."""

    def build() -> LmHeadModel:
        return config.build(Axis("vocab", 1), key=jax.random.PRNGKey(0))

    adapted_modules(eqx.filter_eval_shape(build), targets)


def adapted_modules(model: LmHeadModel, targets: Sequence[str]) -> dict[str, Linear]:
    """Return the linear layers that targets name, by path in the order of the model.

    Args:
        model: the base, or its shapes.
        targets: each names all modules whose path is equal to it or ends with `.` and the target.

    Raises:
        LoraTargetError: if a target names no linear layer; the message names those that can be adapted.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, Linear))
    linear = {_path_text(path): node for path, node in leaves if isinstance(node, Linear)}
    for target in targets:
        if not any(is_match(path, target) for path in linear):
            name, last = LmConfig.get_choice_name(type(model.config)), {path.rpartition(".")[-1] for path in linear}
            raise LoraTargetError(
                f"lora.targets: {target!r} names no linear layer of this {name} model; embeddings, a head tied to "
                f"them and the experts of a mixture cannot be adapted; {nearest(target, sorted(last))}"
            )
    return {path: node for path, node in linear.items() if any(is_match(path, target) for target in targets)}


def is_match(path: str, target: str) -> bool:
    """Return whether a target names a module: by its whole path, or by the end of it."""
    return path == target or path.endswith(f".{target}")


def _path_text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def with_adapter(base: LmHeadModel, adapter: Adapter) -> LmHeadModel:
    """Return the model that an adapter makes of its base; its arrays are those of the base and of the adapter.

    Args:
        base: the model, or its shapes.
        adapter: its paths are those of linear layers of `base`.
    """

    def adapt(path: Any, node: Any) -> Any:
        low_rank = adapter.layers.get(_path_text(path))
        return node if low_rank is None else LoraLinear(node, low_rank, adapter.scale)

    return jax.tree_util.tree_map_with_path(adapt, base, is_leaf=lambda node: isinstance(node, Linear))


def split_adapter(model: LmHeadModel) -> tuple[LmHeadModel, Adapter]:
    """Return the base and the adapter of a model from `with_adapter`."""
    paths = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, LoraLinear))
    adapted = {_path_text(path): node for path, node in paths if isinstance(node, LoraLinear)}

    def restore(node: Any) -> Any:
        return node.linear if isinstance(node, LoraLinear) else node

    base = jax.tree.map(restore, model, is_leaf=lambda node: isinstance(node, LoraLinear))
    return base, Adapter({path: node.low_rank for path, node in adapted.items()}, next(iter(adapted.values())).scale)


def has_adapter(model: object) -> bool:
    """Return whether a tree of modules has adapted layers."""
    leaves = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, LoraLinear))
    return any(isinstance(leaf, LoraLinear) for leaf in leaves)


def merge_adapter(model: M) -> M:
    """Replace the adapted layers of a model by plain ones with the weight `W + scale · A B`.

    Args:
        model: any tree of modules; one without adapted layers is returned as it is.
    """

    def merge(node: Any) -> Any:
        if not isinstance(node, LoraLinear):
            return node
        return eqx.tree_at(lambda linear: linear.weight, node.linear, node.weight)

    return jax.tree.map(merge, model, is_leaf=lambda node: isinstance(node, LoraLinear))
