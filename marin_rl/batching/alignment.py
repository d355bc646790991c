# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Alignment of per-token arrays with tokens and with predicting positions.

Every per-token array of marin_rl is aligned with its token: entry `t` of `loss_mask`, `policy_logprobs`,
`advantages`, … belongs to `input_ids[t]`. A causal language model predicts token `t` at position `t - 1`.
[`to_tokens`][marin_rl.batching.alignment.to_tokens] shifts model outputs one position to the right;
[`to_predictors`][marin_rl.batching.alignment.to_predictors] shifts token values one position to the left,
for libraries that index them by the predicting position. No other code shifts arrays.
"""

import haliax as hax
from haliax import NamedArray


def to_predictors(per_token: NamedArray) -> NamedArray:
    """Shift values from each token to the position that predicts it.

    `out[t] = per_token[t + 1]`; the last position predicts no token and gets 0.

    Args:
        per_token: `{..., position}`, aligned with tokens.

    Returns:
        `{..., position}`, aligned with predicting positions. For `input_ids` these are the targets.
    """
    Pos = per_token.resolve_axis("position")
    moved = hax.roll(per_token, -1, Pos)
    return hax.where(hax.arange(Pos) == Pos.size - 1, hax.zeros((), dtype=per_token.dtype), moved)


def to_tokens(per_predictor: NamedArray) -> NamedArray:
    """Shift values from each predicting position to the token it predicts.

    `out[t] = per_predictor[t - 1]`; token 0 has no predicting position and gets 0.

    Args:
        per_predictor: `{..., position}`, aligned with predicting positions.

    Returns:
        `{..., position}`, aligned with tokens.
    """
    Pos = per_predictor.resolve_axis("position")
    moved = hax.roll(per_predictor, 1, Pos)
    return hax.where(hax.arange(Pos) == 0, hax.zeros((), dtype=per_predictor.dtype), moved)
