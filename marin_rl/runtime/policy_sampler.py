# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sampler of a run: the learner's weights, on the learner's mesh, in compute precision."""

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
    """Samples from the policy that is being trained."""

    def __init__(
        self,
        config: TrainConfig,
        model: LmHeadModel,
        tokenizer: ChatTokenizer,
        trainer: TrainerConfig,
        version: WeightVersion,
        weight_poll: WeightPoll | None = None,
    ) -> None:
        """Make the sampler; nothing is compiled yet.

        Args:
            config: limits and sizes.
            model: the learner's weights. They are shared, not copied: hand over the new ones with `update`
                after every step that donates these.
            tokenizer: names the stop tokens.
            trainer: mesh, axis mapping and compute precision.
            version: steps of training behind the weights.
            weight_poll: when newer ones may come while sequences are being decoded; None for never.
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
        """Sample from `model` from now on.

        Args:
            model: the learner's new weights; shared, not copied, where compute and parameter precision agree.
            version: steps of training behind them.
        """
        self._sampler.update_weights(self._trainer.mp.cast_to_compute(model), version)

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """See `marin_rl.sampling.sampler.Sampler`."""
        with self._trainer.use_device_mesh(), hax.axis_mapping(self._trainer.compute_axis_mapping):
            return self._sampler.sample(requests)
