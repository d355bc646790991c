# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""In-process sampler with the learner's weights, on the learner's mesh, in compute precision."""

from collections.abc import Sequence

import haliax as hax
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.config.train_config import TrainConfig
from marin_rl.sampling.levanter_sampler import LevanterSampler
from marin_rl.sampling.sampler import SampleRequest, WeightPoll
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, WeightVersion


class PolicySampler:
    """Samples from the policy in training."""

    def __init__(
        self,
        config: TrainConfig,
        model: LmHeadModel,
        tokenizer: ChatTokenizer,
        trainer: TrainerConfig,
        version: WeightVersion,
        weight_poll: WeightPoll | None = None,
    ) -> None:
        """Make the sampler without compiling.

        Args:
            config: Limits and sizes.
            model: Weights of the learner. They are shared, not copied: call `update` after each step that donates them.
            tokenizer: Supplies the stop tokens.
            trainer: Mesh, axis mapping and compute precision.
            version: Number of training steps.
            weight_poll: Polls for newer weights during decoding; None for no polls.
        """
        self._trainer = trainer
        with trainer.use_device_mesh(), hax.axis_mapping(trainer.compute_axis_mapping):
            self._sampler = LevanterSampler(
                trainer.mp.cast_to_compute(model),
                config=config.sampling,
                stop_token_ids=tokenizer.stop_token_ids,
                max_context=config.rollouts.max_length,
                version=version,
                weight_poll=weight_poll,
            )

    @property
    def batch_size(self) -> int:
        """See `marin_rl.sampling.sampler.Sampler`."""
        return self._sampler.batch_size

    def update(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Use new weights for later samples.

        Args:
            model: New weights of the learner; shared, not copied, if compute and parameter precision are equal.
            version: Number of training steps.
        """
        self._sampler.update_weights(self._trainer.mp.cast_to_compute(model), version)

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """See `marin_rl.sampling.sampler.Sampler`."""
        with self._trainer.use_device_mesh(), hax.axis_mapping(self._trainer.compute_axis_mapping):
            return self._sampler.sample(requests)
