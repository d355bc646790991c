# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollouts as flat arrays over their tokens, and the conversion of sampled rollouts and demonstrations to them."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64, Shaped, UInt

from marin_rl.objectives.advantage_inputs import split
from marin_rl.types import EXPERT_DTYPES, Rollout, no_expert

NO_TURN = -1
"""Turn id of tokens that were not sampled."""
TOKEN_ARRAYS = {
    "input_ids": np.int32,
    "loss_mask": np.bool_,
    "turn_ids": np.int32,
    "policy_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "values": np.float32,
    "advantages": np.float64,
    "returns": np.float64,
    "importance_weights": np.float64,
}
"""The arrays of a `RolloutBatch` over tokens, and their types."""
Experts = UInt[np.ndarray, "tokens layers experts_per_token"]
"""Experts that the router chose for each token, in each layer with experts; uint8 or uint16."""


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """Rollouts as flat arrays: the tokens of all sequences of all rollouts, one after another, without padding.

    Most rollouts are one sequence. If the chat template rewrites the history, a rollout has several sequences and is
    still counted as one rollout. Entry `t` of every array over tokens belongs to token `t`. The *action tokens* of a
    rollout are those on the loss mask.

    Raises:
        ValueError: if an array has another type or length than the others, or a value that is not allowed; names the
            array, and for a value the rollout.
    """

    ids: tuple[str, ...]
    """Id of each rollout."""
    lengths: tuple[tuple[int, ...], ...]
    """Per rollout, the number of tokens of each sequence."""
    input_ids: Int32[np.ndarray, " tokens"]
    """Token ids."""
    loss_mask: Bool[np.ndarray, " tokens"]
    """True for the sampled tokens (for supervised text, the target tokens)."""
    turn_ids: Int32[np.ndarray, " tokens"]
    """Turn (0, 1, …) of each sampled token; -1 outside the loss mask."""
    policy_logprobs: Float32[np.ndarray, " tokens"]
    """Log-probabilities (nats) under the sampling policy; 0 outside the loss mask."""
    reference_logprobs: Float32[np.ndarray, " tokens"]
    """Log-probabilities (nats) under the frozen reference; 0 outside the loss mask and until scored."""
    values: Float32[np.ndarray, " tokens"]
    """The critic's value of each sampled token's state; 0 outside the loss mask and until scored."""
    advantages: Float64[np.ndarray, " tokens"]
    """A, the factor of the policy term; 0 outside the loss mask and until computed."""
    returns: Float64[np.ndarray, " tokens"]
    """Regression targets of the critic; 0 outside the loss mask and without a critic."""
    importance_weights: Float64[np.ndarray, " tokens"]
    """Off-policy correction of the policy term, 1 without a correction; 0 outside the loss mask."""
    experts: Experts | None = None
    """Experts that the sampler's router chose when it read each token; `no_expert` if it recorded no choice, and for
    the last token of a sequence, which it does not read. None if they are not collected."""

    def __post_init__(self) -> None:
        shape = (int(self.token_offsets[-1]),)
        for name, dtype in TOKEN_ARRAYS.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"RolloutBatch: {name} is {array.dtype} of shape {array.shape}, expected {np.dtype(dtype)} of "
                    f"shape {shape}"
                )
        chosen = self.experts
        if chosen is not None and (chosen.ndim != 3 or chosen.shape[:1] != shape or chosen.dtype not in EXPERT_DTYPES):
            raise ValueError(
                f"RolloutBatch: experts is {chosen.dtype} of shape {chosen.shape}, expected uint8 or uint16 of shape "
                f"({shape[0]}, layers, experts_per_token)"
            )
        if self.loss_mask[self.first_tokens].any():
            starts = np.isin(np.arange(self.loss_mask.size), self.first_tokens)
            raise self._error(
                starts & self.loss_mask, "loss_mask includes the first token of a sequence, which is never predicted"
            )
        is_sampled = self.turn_ids >= 0
        if not np.array_equal(is_sampled, self.loss_mask):
            raise self._error(is_sampled != self.loss_mask, "turn_ids must be >= 0 for loss tokens and -1 elsewhere")
        for name, largest, expected in (
            ("policy_logprobs", 0.0, "finite and <= 0"),
            ("reference_logprobs", 0.0, "finite and <= 0"),
            ("values", np.finfo(np.float32).max, "finite"),
        ):
            array = getattr(self, name)
            # The extremes of an array with NaN are NaN, for which every comparison is false.
            if array.size and not (array.min() > -np.inf and array.max() <= largest):
                raise self._error(~((array > -np.inf) & (array <= largest)), f"{name} must be {expected}")

    def _error(self, wrong: Bool[np.ndarray, " tokens"], message: str) -> ValueError:
        rollout = int(np.searchsorted(self.token_offsets, np.argmax(wrong), side="right")) - 1
        return ValueError(f"rollout {self.ids[rollout]}: {message}")

    @property
    def arrays(self) -> dict[str, Shaped[np.ndarray, "tokens ..."]]:
        """The arrays over tokens by name; `experts` only if they are collected."""
        arrays = {name: getattr(self, name) for name in TOKEN_ARRAYS}
        return arrays if self.experts is None else arrays | {"experts": self.experts}

    @functools.cached_property
    def sequence_offsets(self) -> Int64[np.ndarray, " sequence_bounds"]:
        """Index of the first token of each sequence, and at last the number of tokens."""
        return _offsets([*itertools.chain.from_iterable(self.lengths)])

    @property
    def first_tokens(self) -> Int64[np.ndarray, " sequences"]:
        """Index of the first token of each sequence that has tokens."""
        return self.sequence_offsets[:-1][np.diff(self.sequence_offsets) > 0]

    @functools.cached_property
    def token_offsets(self) -> Int64[np.ndarray, " rollout_bounds"]:
        """Index of the first token of each rollout, and at last the number of tokens."""
        return _offsets([*map(sum, self.lengths)])

    @functools.cached_property
    def num_loss_tokens(self) -> Int64[np.ndarray, " rollouts"]:
        """Number of action tokens of each rollout."""
        return np.diff(_offsets(self.loss_mask)[self.token_offsets])

    @property
    def observation_mask(self) -> Bool[np.ndarray, " tokens"]:
        """True for the observations within each sequence: all tokens after its first loss token that have no loss.

        The first observation of a sequence is excluded. It contains the task and, if the template rewrote the history,
        earlier turns.
        """
        before = _offsets(self.loss_mask)
        at_start = np.repeat(before[self.sequence_offsets[:-1]], np.diff(self.sequence_offsets))
        return ~self.loss_mask & (before[:-1] > at_start)

    def split(self, values: Shaped[np.ndarray, "tokens ..."]) -> list[Shaped[np.ndarray, "_tokens ..."]]:
        """Split an array over tokens into one view per rollout."""
        return split(values, [*map(sum, self.lengths)])

    def actions(self, values: Shaped[np.ndarray, " tokens"]) -> list[Shaped[np.ndarray, " _actions"]]:
        """Return the values of the action tokens of each rollout."""
        return split(values[self.loss_mask], self.num_loss_tokens.tolist())

    def from_actions(
        self, name: str, per_rollout: Sequence[float | Shaped[np.ndarray, " _actions"]]
    ) -> Float64[np.ndarray, " tokens"]:
        """Return an array over tokens, 0 outside the loss mask, from the values of the action tokens of each rollout.

        A number is the value of all action tokens of its rollout. Errors name the values by `name`.

        Raises:
            ValueError: if there is neither a number nor one value per action token; names the rollout.
        """
        if len(per_rollout) != len(self.ids):
            raise ValueError(f"{len(self.ids)} rollouts but {name} for {len(per_rollout)}; pass one array per rollout")
        parts = [np.zeros(0)]
        for id, count, values in zip(self.ids, self.num_loss_tokens.tolist(), per_rollout, strict=True):
            shape = np.shape(values)
            if shape not in ((), (count,)):
                raise ValueError(f"rollout {id} has {count} loss tokens, but its {name} have shape {shape}")
            parts.append(np.asarray(values) if shape else np.full(count, values))
        array = np.zeros(self.input_ids.shape)
        array[self.loss_mask] = np.concatenate(parts)
        return array

    def with_advantages(
        self,
        advantages: Sequence[float | Float64[np.ndarray, " _actions"]],
        value_targets: Sequence[float | Float64[np.ndarray, " _actions"]] | None = None,
    ) -> "RolloutBatch":
        """Return the batch with the advantages of each rollout, and with its value targets if there is a critic.

        They are one number for a whole rollout, or one for each of its action tokens.

        Raises:
            ValueError: if they are neither; names the rollout.
        """
        batch = dataclasses.replace(self, advantages=self.from_actions("advantages", advantages))
        if value_targets is None:
            return batch
        return dataclasses.replace(batch, returns=self.from_actions("returns", value_targets))

    def check_experts(self, count: int) -> None:
        """Check that the chosen experts exist in a model with `count` experts. Twice the same one has both weights.

        Raises:
            ValueError: if one does not exist, or a token has a choice in a part of its places; names the rollout.
        """
        if self.experts is None:
            return
        is_none = self.experts == no_expert(self.experts.dtype)
        wrong = ((self.experts >= count) & ~is_none) | (is_none != is_none[..., :1])
        if wrong.any():
            tokens = wrong.any(axis=(1, 2))
            found = self.experts[np.argmax(tokens)]
            raise self._error(tokens, f"a token has the experts {found.tolist()}, but the model has {count}")

    def tokens_of(self, rollouts: Int64[np.ndarray, " some"]) -> Int64[np.ndarray, " some_tokens"]:
        """Return the indices of the tokens of some rollouts, which are given by their indices."""
        lengths, end = np.diff(self.token_offsets)[rollouts], self.token_offsets[1:][rollouts]
        return np.repeat(end - np.cumsum(lengths), lengths) + np.arange(lengths.sum())

    def take(self, rollouts: Int64[np.ndarray, " some"]) -> "RolloutBatch":
        """Return a batch of some rollouts, which are given by their indices, in the given order."""
        tokens, indices = self.tokens_of(rollouts), rollouts.tolist()
        return RolloutBatch(
            ids=tuple([self.ids[index] for index in indices]),
            lengths=tuple([self.lengths[index] for index in indices]),
            **{name: array[tokens] for name, array in self.arrays.items()},
        )

    def without_loss(self, rollouts: Int64[np.ndarray, " some"]) -> "RolloutBatch":
        """Remove all tokens of some rollouts, which are given by their indices, from the loss; the tokens stay."""
        arrays = {name: getattr(self, name).copy() for name in TOKEN_ARRAYS if name != "input_ids"}
        tokens = self.tokens_of(rollouts)
        for name, array in arrays.items():
            array[tokens] = NO_TURN if name == "turn_ids" else 0
        return dataclasses.replace(self, **arrays)


def batch_rollouts(
    rollouts: Sequence[Rollout], *, max_length: int | None = None, experts: bool = False
) -> RolloutBatch:
    """Convert sampled rollouts to a batch with exactly the sampled tokens.

    Reference log-probabilities, values, advantages and returns are 0, and importance weights 1. A failed rollout keeps
    its finished turns.

    Args:
        rollouts: the rollouts.
        max_length: maximum number of tokens of a sequence; None: no limit.
        experts: whether to collect the experts that the sampler's router chose.

    Raises:
        ValueError: if a sequence is longer than `max_length`, or the experts of a turn are missing or those of other
            tokens or layers; names the rollout.
    """
    lengths = [sequence_lengths(rollout) for rollout in rollouts]
    for rollout, of_rollout in zip(rollouts, lengths, strict=True):
        if max_length is not None and (longest := max(of_rollout, default=0)) > max_length:
            raise ValueError(
                f"rollout {rollout.id}: a sequence of {longest} tokens does not fit into rows of {max_length} "
                "positions; raise rollouts.max_length"
            )
    turns = [(index, turn) for rollout in rollouts for index, turn in enumerate(rollout.turns)]
    runs = [run for _, turn in turns for run in (turn.observation_tokens, turn.generation.token_ids)]
    turn_of_run = np.array([turn for index, _ in turns for turn in (NO_TURN, index)], np.int32)
    turn_ids = np.repeat(turn_of_run, np.array([*map(len, runs)], np.int64))
    policy_logprobs = np.zeros(turn_ids.shape, np.float32)
    logprobs = itertools.chain.from_iterable(turn.generation.logprobs for _, turn in turns)
    policy_logprobs[turn_ids >= 0] = np.array([*logprobs], np.float32)
    chosen = _join_experts(rollouts) if experts else None
    return make_batch(
        [rollout.id for rollout in rollouts],
        lengths,
        input_ids=np.array([*itertools.chain.from_iterable(runs)], np.int32),
        turn_ids=turn_ids,
        policy_logprobs=policy_logprobs,
        **({} if chosen is None else {"experts": chosen}),
    )


def _join_experts(rollouts: Sequence[Rollout]) -> Experts | None:
    """Return the experts that the router chose for all tokens; None if there are no turns."""
    turns = [(rollout, index, turn) for rollout in rollouts for index, turn in enumerate(rollout.turns)]
    parts: list[np.ndarray] = []
    for rollout, index, turn in turns:
        found = turn.generation.experts
        if found is None:
            raise ValueError(
                f"rollout {rollout.id}: turn {index} has no chosen experts. routing_replay: rollout needs a sampler "
                "that reports the chosen experts; set routing_replay to recompute or null. A replay of stored rollouts "
                "needs those that a run with rollout_store.experts: true stored"
            )
        first = parts[0] if parts else found
        # The last token of a sequence has no row.
        shape = (turn.num_tokens - turn.starts_sequence, *first.shape[1:])
        if found.shape != shape or found.dtype != first.dtype:
            raise ValueError(
                f"rollout {rollout.id}: the experts of turn {index} are {found.dtype} of shape {found.shape}, expected "
                f"{first.dtype} of shape {shape}"
            )
        if parts and turn.starts_sequence:
            parts.append(_no_experts(first))
        parts.append(found)
    return np.concatenate([*parts, _no_experts(parts[0])]) if parts else None


def _no_experts(like: np.ndarray) -> np.ndarray:
    """Return a row without recorded choices."""
    return np.full((1, *like.shape[1:]), no_expert(like.dtype), like.dtype)


def make_batch(
    ids: Sequence[str],
    lengths: Sequence[Sequence[int]],
    *,
    turn_ids: Int32[np.ndarray, " tokens"],
    **arrays: Shaped[np.ndarray, "tokens ..."],
) -> RolloutBatch:
    """Make a batch from some of its arrays.

    Lengths are, per rollout, the number of tokens of each sequence. Turn ids are -1 for tokens without loss. `arrays`
    are `input_ids` and other arrays of the batch. By default the loss mask and importance weights are 1 for tokens with
    a turn id, and the other arrays are 0.
    """
    loss_mask = arrays.setdefault("loss_mask", turn_ids >= 0)
    arrays.setdefault("importance_weights", loss_mask.astype(np.float64))
    zeros = {name: np.zeros(turn_ids.shape, dtype) for name, dtype in TOKEN_ARRAYS.items() if name not in arrays}
    return RolloutBatch(tuple(ids), tuple(map(tuple, lengths)), **(zeros | arrays | {"turn_ids": turn_ids}))


def join_batches(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Join at least one batch to one with the rollouts of all.

    Raises:
        ValueError: if only some of those with tokens have experts, or experts of different types.
    """
    # The layers of a batch without tokens are not known.
    parts = [batch.arrays for batch in batches if batch.input_ids.size] or [batches[0].arrays]
    if len(kinds := {str(arrays["experts"].dtype) if "experts" in arrays else "absent" for arrays in parts}) > 1:
        raise ValueError(f"batches with different experts cannot be joined: {', '.join(sorted(kinds))}")
    return RolloutBatch(
        ids=tuple(id for batch in batches for id in batch.ids),
        lengths=tuple(lengths for batch in batches for lengths in batch.lengths),
        **{name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]},
    )


def sequence_lengths(rollout: Rollout) -> list[int]:
    """Return the number of tokens of each sequence of a rollout."""
    lengths: list[int] = []
    for turn in rollout.turns:
        if turn.starts_sequence:
            lengths.append(0)
        lengths[-1] += turn.num_tokens
    return lengths


def _offsets(counts: Sequence[int] | Shaped[np.ndarray, " parts"]) -> Int64[np.ndarray, " bounds"]:
    """Return where each part begins, and the end of the last."""
    return np.append(0, np.cumsum(counts, dtype=np.int64))
