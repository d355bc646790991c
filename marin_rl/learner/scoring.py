# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Log-probabilities and values of rollouts under given weights, without a gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import haliax as hax
import numpy as np
from haliax import NamedArray
from jaxtyping import Float32
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl import multihost
from marin_rl.batching.packing import RowLayout
from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.batching.rl_example import RlExample, pack_to_score
from marin_rl.learner.critic import ActorCritic, policy_of
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.learner.train_step import place


class Scores(NamedTuple):
    """Log-probabilities and values of one rollout under some weights."""

    logprobs: Float32[np.ndarray, "batch position"]
    """Log-probabilities (nats) of the tokens, 0 off the loss mask."""
    values: Float32[np.ndarray, "batch position"]
    """The critic's values, 0 off the loss mask and without a critic."""


class Scorer:
    """Computes log-probabilities and values of rollouts, in microbatches of one shape.

    Used for the frozen reference, for the policy's log-probabilities before an update, and for the critic's values.
    """

    def __init__(
        self, trainer: TrainerConfig, layout: RowLayout, *, pad_token_id: int, temperature: float, block_size: int
    ):
        self._trainer = trainer
        self._layout = layout
        self._pad_token_id = pad_token_id

        def score(model: LmHeadModel | ActorCritic, batch: RlExample) -> tuple[NamedArray, NamedArray]:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                model = trainer.mp.cast_to_compute(model)
                policy = policy_of(model)
                trunk = policy_activations(policy, batch)
                logprobs, _ = token_logprobs(
                    trunk, policy.get_lm_head(), batch, temperature=temperature, block_size=block_size
                )
                values = model.values(batch, trunk) if isinstance(model, ActorCritic) else hax.zeros_like(logprobs)
            return logprobs, values

        self._score = hax.named_jit(score, axis_resources=trainer.parameter_axis_mapping)

    def score(self, model: LmHeadModel | ActorCritic, rollouts: Sequence[ProcessedRollout]) -> list[Scores]:
        """Compute log-probabilities and values of every token on the loss mask.

        Args:
            model: the weights; unchanged.
            rollouts: any number.

        Returns:
            One entry per rollout, with the shape of its arrays.
        """
        packed = pack_to_score(rollouts, self._layout, pad_token_id=self._pad_token_id)
        with self._trainer.use_device_mesh():
            mesh, mapping = self._trainer.device_mesh, self._trainer.compute_axis_mapping
            scored = [self._score(model, place(batch, mesh, mapping)) for batch in packed.microbatches]
        axes = packed.microbatches[0].input_ids.axes
        logprobs, values = (
            packed.unpack([multihost.fetch(array.rearrange(axes).array) for array in arrays])
            for arrays in zip(*scored, strict=True)
        )
        # Rounding may lift the log-probability of a near-certain token above 0.
        return [Scores(np.minimum(a, 0.0), b) for a, b in zip(logprobs, values, strict=True)]
