# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The frozen reference policy, run once over each batch."""

import dataclasses
from collections.abc import Sequence

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.batching.rl_example import BatchShape, RlExample, make_batch
from marin_rl.learner.logprobs import token_logprobs
from marin_rl.objectives.aggregation import TokenMeanConfig


class ReferencePolicy:
    """Scores rollouts under weights that never change.

    Built only where the KL coefficient is above 0; otherwise no reference is loaded or run.
    """

    def __init__(
        self, model: LmHeadModel, trainer: TrainerConfig, *, shape: BatchShape, temperature: float, block_size: int
    ):
        self._model = model
        self._trainer = trainer
        self._shape = shape

        def score(model: LmHeadModel, batch: RlExample) -> NamedArray:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                model = trainer.mp.cast_to_compute(model)
                logprobs, _ = token_logprobs(model, batch, temperature=temperature, block_size=block_size)
            return logprobs

        self._score = hax.named_jit(score, axis_resources=trainer.parameter_axis_mapping)

    def score(self, rollouts: Sequence[ProcessedRollout]) -> list[ProcessedRollout]:
        """The same rollouts with their `reference_logprobs` filled in.

        Args:
            rollouts: what fits into one batch.
        """
        batch = make_batch(rollouts, [0.0] * len(rollouts), TokenMeanConfig(), self._shape)
        with self._trainer.use_device_mesh():
            scored = self._score(self._model, batch)
        rows = np.minimum(np.asarray(jax.device_get(scored.rearrange(batch.input_ids.axes).array)), 0.0)
        ends = np.cumsum([rollout.input_ids.shape[0] for rollout in rollouts], dtype=int)
        return [
            dataclasses.replace(rollout, reference_logprobs=part)
            for rollout, part in zip(rollouts, np.split(rows, ends)[:-1], strict=True)
        ]
