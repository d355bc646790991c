# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures of experts: routing, replayed or not, and the experts of a layer, for learner and sampler.

`with_routing` replaces levanter's blocks. Levanter's cannot take a given choice, log by a callback to the host, and
cannot split experts over devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq
from haliax.partitioning import physical_axis_name
from haliax.util import ensure_tuple
from jaxtyping import Array, Bool, Float, Float32, Int
from levanter.models.llama import LlamaMlp
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.models.mixtral import MixtralSparseMoeBlock, MixtralTransformer

from marin_rl.types import no_expert
from marin_rl.utils.devices.sharding import on_each_shard, sharding_of
from marin_rl.utils.levanter_line import mixture_blocks

TOP_EXPERTS = "top_experts"
"""Axis of the experts of a token."""
SORTED_TOKENS = 256
"""Above this number of tokens on a device, an accelerator computes only the chosen experts of each. With fewer, all
experts are read in any case, and products with all of them take no longer than the reading."""


class MixtureShape(NamedTuple):
    """Sizes and coefficients of the router of an architecture."""

    layers: int
    """Number of layers with experts."""
    experts: int
    """Number of experts of a layer."""
    per_token: int
    """Number of experts that a token uses."""
    normalizes: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    balance_coefficient: float
    """Weight of the balancing loss, as defined by `Routing.balance`; 0 without one."""
    z_coefficient: float
    """Weight of the z-loss; 0 without one."""

    @property
    def dtype(self) -> np.dtype:
        """Type of recorded choices, in which `no_expert` is not the number of an expert."""
        small = np.dtype(np.uint8)
        return small if self.experts <= no_expert(small) else np.dtype(np.uint16)


def mixture_shape(model: LmConfig) -> MixtureShape | None:
    """Return the sizes of the mixture of a levanter config; None for a dense model."""
    config: Any = model
    match LmConfig.get_choice_name(type(model)):
        case "mixtral":
            per_token = config.num_experts_per_tok
            # Levanter divides the loads by their sum and by the number of experts of a token.
            balance = (config.lbl_coef or 0.0) / per_token**2
            z = config.rzl_coef or 0.0
            return MixtureShape(config.num_layers, config.n_routed_experts, per_token, True, balance, z)
        case "qwen3_moe":
            return MixtureShape(
                sum(config.layers_with_experts),
                config.num_experts,
                config.num_experts_per_tok,
                config.norm_topk_prob,
                config.router_aux_loss_coef or 0.0,
                config.router_z_loss_coef or 0.0,
            )
    return None


class Routing(NamedTuple):
    """Router statistics of every layer: sums over tokens with the weights of `with_routing`, float32."""

    weight: Float32[Array, " layers"]
    """Sum of the weights, equal for all layers."""
    loads: Float32[Array, "layers experts"]
    """Weight of the tokens that use each expert."""
    probabilities: Float32[Array, "layers experts"]
    """Weighted sum of the router's probabilities."""
    z: Float32[Array, " layers"]
    """Weighted sum of the squared log-sum-exp of the router's logits."""
    entropy: Float32[Array, " layers"]
    """Weighted sum of the entropy (nats) of the router's probabilities."""
    differing: Float32[Array, " layers"]
    """Weight of the tokens with a given choice that is not the router's own."""

    @property
    def balance(self) -> Float32[Array, " layers"]:
        """The balancing loss of each layer, `experts · Σ_e load_e · probability_e / weight`.

        With the weights of all tokens adding up to 1 over the microbatches of an update, their sum is the mean of the
        loss of Fedus et al. 2022 (arXiv 2101.03961), which is `per_token` for equal loads, as in transformers.
        """
        products = jnp.sum(jax.lax.stop_gradient(self.loads) * self.probabilities, axis=-1)
        return self.loads.shape[-1] * products / jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny)


class _Chosen(NamedTuple):
    experts: Int[Array, "*tokens top"]
    weights: Float32[Array, "*tokens top"]
    differs: Bool[Array, "*tokens"]


class RoutedExperts(eqx.Module):
    """The experts of a layer, in place of levanter's block."""

    block: Any
    """Levanter's, with the weights."""
    given: NamedArray | None
    """`{..., top_experts}`, experts to use; the largest value of the type for the router's own choice."""
    token_weights: NamedArray | None
    """`{...}` float32, weights in the statistics; None without statistics."""
    shape: MixtureShape = eqx.field(static=True)

    def __call__(self, x: NamedArray, *, key: None = None) -> tuple[NamedArray, tuple[NamedArray, Routing | None]]:
        """Return the output, and the chosen experts with the statistics."""
        embed = self.block.config.Embed.name
        tokens = tuple(axis for axis in x.axes if axis.name != embed)
        x = x.rearrange((*tokens, embed))
        logits = router_logits(self.block.gate, x)
        given = None if self.given is None else self.given.rearrange((*tokens, TOP_EXPERTS)).array
        chosen = choose(logits, self.shape, given)
        out = self._mix(x, chosen.experts, chosen.weights.astype(x.dtype))
        routing = None
        if self.token_weights is not None:
            routing = _statistics(logits, chosen, self.token_weights.rearrange(tokens).array)
        Top = Axis(TOP_EXPERTS, self.shape.per_token)
        recorded = NamedArray(chosen.experts.astype(self.shape.dtype), (*tokens, Top))
        return NamedArray(out, x.axes), (recorded, routing)

    def _mix(self, x: NamedArray, experts: Array, weights: Array) -> Array:
        """Add up the experts of each token on each device, and over the devices that split experts or hidden layers."""
        Experts, Embed = self.block.config.Experts, self.block.config.Embed
        gate, up, down, activation = _weights(self.block)
        Mlp = gate.Out
        axes, splits_experts = x.axes[:-1], physical_axis_name(Experts)
        summed = (*ensure_tuple(splits_experts or ()), *ensure_tuple(physical_axis_name(Mlp) or ()))

        def mix(x: Array, experts: Array, weights: Array, *matrices: Array) -> Array:
            first = 0 if splits_experts is None else jax.lax.axis_index(splits_experts) * matrices[0].shape[0]
            flat = x.reshape(-1, x.shape[-1]), experts.reshape(-1, experts.shape[-1]) - first
            out = mixture(*flat, weights.reshape(flat[1].shape), *matrices, activation=activation)
            return jax.lax.psum(out, summed).reshape(x.shape) if summed else out.reshape(x.shape)

        by_token = sharding_of(*axes)
        in_, out_ = sharding_of(Experts, None, Mlp), sharding_of(Experts, Mlp, None)
        matrices = (
            gate.weight.rearrange((Experts, Embed, Mlp)),
            up.weight.rearrange((Experts, Embed, Mlp)),
            down.weight.rearrange((Experts, Mlp, Embed)),
        )
        run = on_each_shard(mix, (by_token, by_token, by_token, in_, in_, out_), by_token)
        return run(x.array, experts, weights, *(matrix.array for matrix in matrices))


def _weights(block: Any) -> tuple[Any, Any, Any, Callable[[Array], Array]]:
    """Return the linear layers of the experts of a block: gate, up and down; and the activation."""
    experts = block.experts
    if isinstance(block, MixtralSparseMoeBlock):
        return experts.w1, experts.w3, experts.w2, experts.act
    return experts.gate_proj, experts.up_proj, experts.down_proj, experts.act


def router_logits(gate: hax.nn.Linear, x: NamedArray) -> Float32[Array, "*tokens experts"]:
    """Compute the router's logits in float32, also of weights in bfloat16: rounding would change choices."""
    weight = gate.weight.rearrange((x.axes[-1], ...)).array
    return jnp.einsum("...d,de->...e", x.array, weight, preferred_element_type=jnp.float32)


def choose(
    logits: Float32[Array, "*tokens experts"], shape: MixtureShape, given: Int[Array, "*tokens top"] | None = None
) -> _Chosen:
    """Choose the experts of each token, and compute their weights.

    ```
    p = softmax(logits),   E = given, or the indices of the largest logits,   w_e = p_e   for e in E
    ```

    Normalized weights are divided by their sum. The gradient of the weights flows through the logits, and none through
    the choice.
    """
    own = jax.lax.top_k(jax.lax.stop_gradient(logits), shape.per_token)[1]
    experts, differs = own, jnp.zeros(own.shape[:-1], bool)
    if given is not None:
        experts = jnp.where(given == no_expert(given.dtype), own, given.astype(own.dtype))
        differs = (jnp.sort(experts, axis=-1) != jnp.sort(own, axis=-1)).any(axis=-1)
    of_chosen = jnp.take_along_axis(logits, experts, axis=-1)
    if shape.normalizes:
        return _Chosen(experts, jax.nn.softmax(of_chosen, axis=-1), differs)
    return _Chosen(experts, jnp.exp(of_chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), differs)


def _statistics(logits: Array, chosen: _Chosen, weights: Float32[Array, "*tokens"]) -> Routing:
    tokens = tuple(range(weights.ndim))
    logs = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(logs)
    uses = jax.nn.one_hot(chosen.experts, logits.shape[-1], dtype=jnp.float32).sum(axis=-2)
    entropy = -jnp.sum(probabilities * logs, axis=-1)
    return Routing(
        jnp.sum(weights),
        jnp.sum(weights[..., None] * uses, axis=tokens),
        jnp.sum(weights[..., None] * probabilities, axis=tokens),
        jnp.sum(weights * jax.nn.logsumexp(logits, axis=-1) ** 2),
        jnp.sum(weights * jax.lax.stop_gradient(entropy)),
        jnp.sum(weights * chosen.differs),
    )


def mixture(*arrays: Array, activation: Callable[[Array], Array]) -> Array:
    """Compute `dense_mixture` of few tokens, and of all on a CPU, and otherwise `sorted_mixture`.

    A CPU has no kernel for products of groups of rows.
    """
    dense, sort = (functools.partial(form, activation=activation) for form in (dense_mixture, sorted_mixture))
    if len(arrays[0]) <= SORTED_TOKENS:
        return dense(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=dense, default=sort)


def dense_mixture(
    x: Float[Array, "token embed"],
    experts: Int[Array, "token top"],
    weights: Float[Array, "token top"],
    gate: Float[Array, "expert embed mlp"],
    up: Float[Array, "expert embed mlp"],
    down: Float[Array, "expert mlp embed"],
    *,
    activation: Callable[[Array], Array],
) -> Float[Array, "token embed"]:
    """Compute every expert for every token, and add those of each token: `Σ_e w_e · down_e(act(gate_e x) · up_e x)`.

    Experts outside the range of the matrices are left out. No token's rounding depends on another one.
    """
    combine = jnp.sum(jax.nn.one_hot(experts, len(gate), dtype=weights.dtype) * weights[..., None], axis=-2)
    hidden = activation(jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
    return jnp.einsum("tef,efd->td", hidden * combine[..., None], down)


def sorted_mixture(
    x: Float[Array, "token embed"],
    experts: Int[Array, "token top"],
    weights: Float[Array, "token top"],
    gate: Float[Array, "expert embed mlp"],
    up: Float[Array, "expert embed mlp"],
    down: Float[Array, "expert mlp embed"],
    *,
    activation: Callable[[Array], Array],
) -> Float[Array, "token embed"]:
    """Compute the same as `dense_mixture` with the tokens sorted by expert, each for its experts only.

    There is no capacity, so no token is dropped.
    """
    count, top = experts.shape
    is_own = (experts >= 0) & (experts < len(gate))
    # Experts of other devices come last, in no group.
    group = jnp.where(is_own, experts, len(gate)).reshape(-1)
    order = jnp.argsort(group)
    sizes = jnp.bincount(group, length=len(gate) + 1)[:-1].astype(jnp.int32)
    rows = jnp.where((group[order] < len(gate))[:, None], x[order // top], 0)
    hidden = activation(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    outputs = jax.lax.ragged_dot(hidden, down, sizes)
    # Rows in no group are not computed, and may hold anything, as may their cotangents.
    by_choice = outputs[jnp.argsort(order)].reshape(count, top, -1)
    by_choice = jnp.where(is_own[..., None], by_choice, 0)
    return jnp.einsum("tkd,tk->td", by_choice, weights)


def with_routing(
    model: LmHeadModel, *, given: NamedArray | None = None, token_weights: NamedArray | None = None
) -> LmHeadModel:
    """Return a mixture with its experts replaced by `RoutedExperts`.

    Call it inside the function that is differentiated; weights are not copied.

    Args:
        model: a mixture.
        given: `{layer, batch, position, top_experts}`, experts to use; the largest value of the type for none.
        token_weights: `{batch, position}` float32, weights of the tokens in the statistics; None for no statistics.
    """
    shape = mixture_shape(model.config)
    assert shape is not None
    transformer = cast(Any, model).transformer
    blocks = mixture_blocks()

    def replace(layers: Any, given: NamedArray | None, token_weights: NamedArray | None) -> Any:
        def routed(node: Any) -> Any:
            return RoutedExperts(node, given, token_weights, shape) if isinstance(node, blocks) else node

        return jax.tree.map(routed, layers, is_leaf=lambda node: isinstance(node, blocks))

    layers = transformer.layers
    if isinstance(layers, BlockSeq):
        numbers = iter(range(len(layers.blocks)))
        parts = [
            replace(layer, None if given is None else given["layer", next(numbers)], token_weights)
            if has_experts(layer)
            else layer
            for layer in layers.blocks
        ]
        layers = eqx.tree_at(lambda node: node.blocks, layers, parts)
    else:
        given = None if given is None else given.rename({"layer": layers.Block.name})
        # A scan slices the arrays of all layers.
        spread = None if token_weights is None else token_weights.broadcast_axis(layers.Block)
        layers = replace(layers, given, spread)
    return eqx.tree_at(lambda node: node.transformer.layers, model, layers)


def has_experts(layer: Any) -> bool:
    """Return whether a layer of a mixture has experts; some layers of `qwen3_moe` may be dense."""
    return not isinstance(getattr(layer, "mlp", None), LlamaMlp)


def routed_activations(
    model: LmHeadModel, input_ids: NamedArray, mask: Any, position_ids: NamedArray
) -> tuple[NamedArray, NamedArray, Routing | None]:
    """Run the trunk of a model from `with_routing`.

    Returns:
        Activations before the head; the chosen experts `{layer, ..., top_experts}`; and the statistics.
    """
    transformer = cast(Any, model).transformer
    x = cast(Any, model).embeddings.embed(input_ids)
    # Mixtral's layers take no positions; rotary embeddings are relative.
    positions = {} if isinstance(transformer, MixtralTransformer) else {"pos_ids": position_ids}
    layers = transformer.layers
    if isinstance(layers, BlockSeq):
        extras: list[Any] = []
        for layer in layers.blocks:

            def run(layer: Any, x: NamedArray) -> tuple[NamedArray, Any]:
                return layer(x, mask, key=None, **positions)

            x, extra = (run if layers.gradient_checkpointing.disable else eqx.filter_checkpoint(run))(layer, x)
            if has_experts(layer):
                extras.append(extra)
        Layer = Axis("layer", len(extras))
        experts = hax.stack(Layer, [chosen for chosen, _ in extras])
        routing = (
            None if extras[0][1] is None else jax.tree.map(lambda *parts: jnp.stack(parts), *(s for _, s in extras))
        )
    else:
        x, (experts, routing) = layers.scan(x, mask, key=None, **positions)
        experts = experts.rename({layers.Block.name: "layer"})
    return transformer.norm(x), experts, routing
