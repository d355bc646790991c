# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Loss of preference pairs: direct preference optimization (DPO) with the sigmoid loss.

A pair is a prompt with a preferred (*chosen*) and a rejected answer. With `Δ_t = log π_t - log π_ref,t` of each answer
token, the *margin* of a pair is `m = Σ_{t in chosen} Δ_t - Σ_{t in rejected} Δ_t`, or with means instead of sums.
"""

import dataclasses
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Lt
from jaxtyping import Array, Bool, Float, Int

from marin_rl.utils.settings.checks import ConfigSection


@dataclasses.dataclass(frozen=True)
class PreferenceLossConfig(ConfigSection):
    """The sigmoid loss of DPO."""

    beta: Annotated[float, Gt(0)] = 0.1
    """β, the factor of the margin: a higher one keeps the policy closer to the reference."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """ε, the assumed probability that chosen and rejected are exchanged: limits the margins that are worth reaching."""
    length_normalized: bool = False
    """Whether the margin is a difference of means over the tokens of each answer instead of sums, so that long answers
    weigh no more than short ones. Margins are then smaller by the length: use a larger beta, such as 5."""


class PairSums(NamedTuple):
    """Sums over the answer tokens of each pair."""

    margins: Float[Array, " pairs"]
    """m, without β."""
    chosen_logratios: Float[Array, " pairs"]
    """Sum of log π - log π_ref (nats) over the chosen answer."""
    rejected_logratios: Float[Array, " pairs"]
    """Sum of log π - log π_ref (nats) over the rejected answer."""
    chosen_logprobs: Float[Array, " pairs"]
    """Sum of log π (nats) over the chosen answer."""
    rejected_logprobs: Float[Array, " pairs"]
    """Sum of log π (nats) over the rejected answer."""
    weights: Float[Array, " pairs"]
    """Sum of the tokens' weights; 0 for an index without a pair."""


def pair_sums(
    logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    signs: Float[Array, "*shape"],
    weights: Float[Array, "*shape"],
    pair_ids: Int[Array, "*shape"],
) -> PairSums:
    """Sum log-probabilities over the tokens of each pair, of which all tokens are in the arrays.

    Args:
        logprobs: log π (nats) of each token under the policy being trained, float32.
        reference_logprobs: log π_ref of the same tokens.
        signs: factor of a token's `log π - log π_ref` in the margin: 1 in the chosen answer and -1 in the rejected one,
            or these divided by the number of tokens of the answer; 0 for tokens that are not answers, whose other
            arrays may have any value.
        weights: weight of each token; 0 for tokens that are not answers.
        pair_ids: pair of each token, in [0, size of the array); -1 for padding.

    Returns:
        The sums by pair id, in arrays as large as those of the tokens; 0 for an id without tokens.

    >>> sums = pair_sums(
    ...     jnp.array([-1.0, -2.0, -4.0]), jnp.array([-2.0, -2.0, -3.0]), jnp.array([1.0, 1.0, -1.0]), jnp.ones(3) / 3,
    ...     jnp.zeros(3, int),
    ... )
    >>> float(sums.margins[0]), float(sums.chosen_logprobs[0]), float(sums.rejected_logratios[0])
    (2.0, -3.0, -1.0)
    """
    logratios, chosen, rejected = logprobs - reference_logprobs, signs > 0, signs < 0
    values = (
        jnp.where(signs != 0, signs * logratios, 0),
        jnp.where(chosen, logratios, 0),
        jnp.where(rejected, logratios, 0),
        jnp.where(chosen, logprobs, 0),
        jnp.where(rejected, logprobs, 0),
        weights,
    )
    per_token = jnp.stack([value.reshape(-1) for value in values], axis=-1)
    sums = jax.ops.segment_sum(per_token, pair_ids.reshape(-1), num_segments=pair_ids.size)
    return PairSums(*sums.T)


def preference_loss(
    margins: Float[Array, "*shape"], beta: float, label_smoothing: float = 0.0
) -> Float[Array, "*shape"]:
    """Compute the loss of each pair, `-(1 - ε) log σ(β·m) - ε log σ(-β·m)`.

    It is log 2 where policy and reference are equal, and its gradient raises the margin, up to `log((1 - ε)/ε)/β`. m is
    a margin of `pair_sums`, β is above 0, and ε, the label smoothing, in [0, 0.5).

    >>> preference_loss(jnp.array([0.0, 200.0, -2e4]), beta=0.5).round().tolist()
    [1.0, 0.0, 10000.0]

    Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7. Label smoothing: Mitchell 2023, "A note on DPO with
    noisy preferences and relationship to IPO" (cDPO). Means over tokens: Lambert et al. 2024 (Tülu 3), arXiv
    2411.15124, length-normalized DPO. In TRL, `loss_type` `sigmoid` and `sigmoid_norm`.
    """
    logits = beta * margins
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) - label_smoothing * jax.nn.log_sigmoid(-logits)


def preference_metrics(
    pairs: PairSums, config: PreferenceLossConfig
) -> dict[str, Float[Array, " pairs"] | Bool[Array, " pairs"]]:
    """Return the loss and the metrics of each pair, by name.

    The *reward* of an answer is `β · Σ_t (log π_t - log π_ref,t)`, also if the margin of the loss is of means.

    Source: Rafailov et al. 2023, arXiv 2305.18290, section 5; names and definitions of TRL's `DPOTrainer`.
    """
    chosen, rejected = config.beta * pairs.chosen_logratios, config.beta * pairs.rejected_logratios
    return {
        "loss/dpo": preference_loss(pairs.margins, config.beta, config.label_smoothing),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": chosen > rejected,
        "logps/chosen": pairs.chosen_logprobs,
        "logps/rejected": pairs.rejected_logprobs,
    }
