# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Batches whose targets are any tokens at any position, and not the next ones of their rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Int64, Shaped

from marin_rl.batching.packing import RowLayout, Slot, count_microbatches
from marin_rl.batching.rl_example import TokenRows, locate_tokens

_DTYPES = {
    "targets": np.int32,
    "loss_mask": np.bool_,
    "advantages": np.float32,
    "policy_logprobs": np.float32,
}


class TargetExample(TokenRows):
    """One microbatch of `TokenRows` with targets, whose arrays have the axes `{batch, position, target}`.

    Values at a position belong to the model's prediction after reading its token.
    """

    targets: NamedArray
    """int32, the tokens to score."""
    loss_mask: NamedArray
    """bool, False for padding."""
    advantages: NamedArray
    """float32, advantage or weight of each target; 0 for padding."""
    policy_logprobs: NamedArray
    """float32, log-probs (nats) under the sampling policy; 0 for padding, and without them."""


class PackedTargets(NamedTuple):
    """Sequences with targets, as microbatches of one shape."""

    microbatches: tuple[TargetExample, ...]
    """The microbatches, on the host."""
    places: Int64[np.ndarray, " tokens"]
    """Index of each token of the sequences in the positions of all microbatches."""
    lengths: list[int]
    """Number of tokens of each sequence."""

    def unpack(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the values of each sequence, `[length, ...]`, from those of microbatches, `[row, position, ...]`."""
        stacked = np.stack(values)
        found = stacked.reshape(-1, *stacked.shape[3:])[self.places]
        return np.split(found, np.cumsum(self.lengths)[:-1])


def pack_targets(
    tokens: Sequence[np.ndarray],
    values: Mapping[str, Sequence[Shaped[np.ndarray, "_ target"]]],
    layout: RowLayout,
    slots: Sequence[Slot],
    pad_token_id: int,
) -> PackedTargets:
    """Put sequences into microbatches of one shape.

    The number of targets of a position is rounded up to a power of two.

    Args:
        tokens: token ids of each sequence.
        values: `targets` of each sequence, and optionally `advantages` and `policy_logprobs`; all with equal numbers of
            targets. Sequences that share a prompt have equal values in it.
        layout: shape of a microbatch.
        slots: place of each sequence. With a group, a slot has one token more, the last target, which the model does
            not read.
        pad_token_id: token id of padding.
    """
    lengths, count = [*map(len, tokens)], values["targets"][0].shape[1]
    rows = count_microbatches([slots]), layout.rows_per_microbatch, layout.tokens_per_row
    places, on_tokens = locate_tokens(np.cumsum([0, *lengths]), [[slot] for slot in slots], rows)
    del on_tokens["rollout_ids"]
    if layout.group is None:
        del on_tokens["prompt_segment_ids"]
    arrays = {name: np.zeros(rows, np.int32) for name in on_tokens}
    for name, given in on_tokens.items():
        arrays[name].reshape(-1)[places] = given
    arrays["input_ids"] = np.full(rows, pad_token_id, np.int32)
    arrays["input_ids"].reshape(-1)[places] = np.concatenate(tokens)
    width = 1 << (count - 1).bit_length()
    arrays |= {name: np.zeros((*rows, width), dtype) for name, dtype in _DTYPES.items()}
    arrays["loss_mask"].reshape(-1, width)[places, :count] = True
    for name, given in values.items():
        arrays[name].reshape(-1, width)[places, :count] = np.concatenate(given)
    axes = tuple(map(Axis, ("batch", "position", "target"), (*rows[1:], width)))
    microbatches = tuple(
        # On the host: `hax.named` would put every array on the default device.
        TargetExample(
            **{name: NamedArray(cast(jax.Array, one[index]), axes[: one.ndim - 1]) for name, one in arrays.items()},
            group=layout.group,
        )
        for index in range(rows[0])
    )
    return PackedTargets(microbatches, places, lengths)
