# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Where a per-token value stands, and the only code that moves it.

**The convention.** Every per-token array of marin_rl is aligned with the token it speaks about: entry
`t` of `loss_mask`, `policy_logprobs`, `advantages`, … belongs to `input_ids[t]`. A causal language
model says at position `t - 1` what it thinks of token `t`; values that come from such a position are
moved one place to the right by [`to_tokens`][marin_rl.batching.alignment.to_tokens], and values that
another library wants at the predicting position are moved one place to the left by
[`to_predictors`][marin_rl.batching.alignment.to_predictors]. Nothing else in the project shifts.
"""

import haliax as hax
from haliax import NamedArray


def to_predictors(per_token: NamedArray) -> NamedArray:
    """Move values from each token to the position that predicts it.

    `out[t] = per_token[t + 1]`, and the last position, which predicts nothing, gets 0.

    Args:
        per_token: `{..., position}`, aligned with the tokens.

    Returns:
        `{..., position}`, aligned with the predicting positions. Of `input_ids`, these are the targets.
    """
    Pos = per_token.resolve_axis("position")
    moved = hax.roll(per_token, -1, Pos)
    return hax.where(hax.arange(Pos) == Pos.size - 1, hax.zeros((), dtype=per_token.dtype), moved)


def to_tokens(per_predictor: NamedArray) -> NamedArray:
    """Move values from each predicting position to the token it predicts.

    `out[t] = per_predictor[t - 1]`, and token 0, which nothing predicts, gets 0.

    Args:
        per_predictor: `{..., position}`, aligned with the predicting positions.

    Returns:
        `{..., position}`, aligned with the tokens.
    """
    Pos = per_predictor.resolve_axis("position")
    moved = hax.roll(per_predictor, 1, Pos)
    return hax.where(hax.arange(Pos) == 0, hax.zeros((), dtype=per_predictor.dtype), moved)
