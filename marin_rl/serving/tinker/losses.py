# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The losses of the Tinker API: plain sums over tokens, with a target, a factor and old log-probs for each token.

With `l = log π(target)`, `q` the old log-prob, `A` the advantage, and `r = exp(l - q)`:

| loss | term of a token | settings and their defaults |
|---|---|---|
| `cross_entropy` | `-w l` | |
| `importance_sampling` | `-r A` | |
| `ppo` | `-min(r A, clip(r, low, high) A)` | `clip_low_threshold` 0.8, `clip_high_threshold` 1.2 |
| `cispo` | `-stop(clip(r, low, high)) l A` | `clip_low_threshold` 0, `clip_high_threshold` 4 |
| `dro` | `-(l A - beta (l - q)² / 2)` | `beta`, without a default |

Source: the documentation of the Tinker SDK, "Loss functions".
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from marin_rl.serving.tinker.records import MAX_TOPK, Datum, ForwardBackward, RequestError

TARGETS = "target_tokens"


@dataclasses.dataclass(frozen=True)
class Loss:
    """Inputs and settings of a loss."""

    factor: str
    """Name of the input that multiplies each term; a token whose factor is 0 has the term 0, except in `dro`."""
    has_old: bool
    """Whether the loss reads `logprobs`."""
    takes_top_k: bool
    """Whether a position may have several targets."""
    settings: Mapping[str, float | None]
    """Names of settings and their defaults; None without one."""


_CLIP = ("clip_low_threshold", "clip_high_threshold")
LOSSES = {
    "cross_entropy": Loss("weights", has_old=False, takes_top_k=True, settings={}),
    "importance_sampling": Loss("advantages", has_old=True, takes_top_k=True, settings={}),
    "ppo": Loss("advantages", has_old=True, takes_top_k=False, settings=dict(zip(_CLIP, (0.8, 1.2), strict=True))),
    "cispo": Loss("advantages", has_old=True, takes_top_k=False, settings=dict(zip(_CLIP, (0.0, 4.0), strict=True))),
    "dro": Loss("advantages", has_old=True, takes_top_k=False, settings={"beta": None}),
}


class LossSettings(NamedTuple):
    """A loss and its settings, as arguments of a compiled program."""

    number: np.int32
    """Index of the loss in `LOSSES`."""
    low: np.float32
    high: np.float32
    beta: np.float32


def read_settings(request: ForwardBackward) -> LossSettings:
    """Return the loss of a request.

    Raises:
        RequestError: if the loss or a setting is unknown, or a setting is missing or not finite.
    """
    if (loss := LOSSES.get(request.loss_fn)) is None:
        raise RequestError(f"loss_fn is {request.loss_fn!r:.100}; supported are {', '.join(LOSSES)}")
    if unknown := [name for name in request.config if name not in loss.settings]:
        known = ", ".join(loss.settings) or "none"
        raise RequestError(f"loss_fn_config has {unknown[0]!r:.100}; {request.loss_fn} takes {known}")
    values = {**loss.settings, **request.config}
    for name, value in values.items():
        if value is None:
            raise RequestError(f"{request.loss_fn} needs loss_fn_config[{name!r}]")
        if not abs(value) <= float(np.finfo(np.float32).max):
            raise RequestError(f"loss_fn_config[{name!r}] is {value}; it must be finite in float32")
    low, high = (np.float32(values.get(name, 0.0)) for name in _CLIP)
    number = list(LOSSES).index(request.loss_fn)
    return LossSettings(np.int32(number), low, high, np.float32(values.get("beta", 0.0)))


def check_datum(datum: Datum, index: int, request: ForwardBackward, vocab_size: int) -> None:
    """Check the inputs of the loss of a datum.

    Raises:
        RequestError: if an input is missing, unknown or not finite, has another shape than the targets, or a token is
            not in the vocabulary; names the datum.
    """
    loss, where = LOSSES[request.loss_fn], f"datum {index}"
    names = (TARGETS, loss.factor, *(["logprobs"] if loss.has_old else []))
    for name in names:
        # A forward pass of cross-entropy needs no weights.
        if name not in datum.inputs and name != "weights":
            raise RequestError(f"{where} has no loss_fn_inputs[{name!r}]; {request.loss_fn} takes {', '.join(names)}")
    if unknown := [name for name in datum.inputs if name not in names]:
        raise RequestError(
            f"{where} has loss_fn_inputs[{unknown[0]!r:.100}]; {request.loss_fn} takes {', '.join(names)}"
        )
    targets, length = datum.inputs[TARGETS], len(datum.tokens)
    if not length:
        raise RequestError(f"{where} has no tokens")
    for name, values in datum.inputs.items():
        if values.shape != targets.shape:
            raise RequestError(f"{where}: {name} has the shape {values.shape}, but {TARGETS} {targets.shape}")
        if name != TARGETS and not np.isfinite(values).all():
            raise RequestError(f"{where}: {name} has NaN or infinite values")
    if targets.shape[:1] != (length,) or targets.ndim not in (1, 2) or not targets.size:
        raise RequestError(
            f"{where}: {TARGETS} has the shape {targets.shape}, but model_input has {length} tokens; it must be "
            f"[{length}] or [{length}, k]"
        )
    most = MAX_TOPK if loss.takes_top_k else 1
    if targets[0].size > most:
        raise RequestError(
            f"{where}: {TARGETS} has {targets[0].size} targets a position; {request.loss_fn} takes at most {most}"
        )
    for name, tokens in (("model_input", datum.tokens), (TARGETS, targets)):
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise RequestError(f"{where}: {name} has token {wrong}; the model's vocabulary has {vocab_size} tokens")


def token_terms(
    settings: LossSettings,
    logprobs: Float32[Array, "*shape"],
    factors: Float32[Array, "*shape"],
    old: Float32[Array, "*shape"],
) -> Float32[Array, "*shape"]:
    """Compute the term of every token.

    `settings` are traced, so that all losses are one program. `factors` are weights `w` or advantages `A`; `logprobs`
    are `l` of the targets, `old` are `q`, or 0 without them.
    """
    # An infinite ratio must not make NaN of a term or gradient that does not depend on it: where the factor is 0, where
    # the ratio is clipped, and in losses without one.
    log_ratio = jnp.where(factors == 0, 0.0, logprobs - old)

    def cross_entropy() -> Array:
        return -factors * logprobs

    def importance_sampling() -> Array:
        return -jnp.exp(log_ratio) * factors

    def clipped_ratio() -> Array:
        return jnp.clip(jnp.exp(jax.lax.stop_gradient(log_ratio)), settings.low, settings.high)

    def ppo() -> Array:
        clipped = clipped_ratio() * factors
        is_free = jnp.exp(log_ratio) * factors <= clipped
        return -jnp.where(is_free, jnp.exp(jnp.where(is_free, log_ratio, 0.0)) * factors, clipped)

    def cispo() -> Array:
        return -clipped_ratio() * logprobs * factors

    def dro() -> Array:
        return -(logprobs * factors - settings.beta / 2 * jnp.square(logprobs - old))

    return jax.lax.switch(settings.number, (cross_entropy, importance_sampling, ppo, cispo, dro))
