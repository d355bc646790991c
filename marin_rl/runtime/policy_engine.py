# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The engine that samples from the policy: in this process, or outside; the trainer's and a rollout worker's."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl import multihost
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.runtime.policy_sampler import PolicySampler
from marin_rl.runtime.served_weights import WeightReloader
from marin_rl.sampling.config import OpenAiSamplerConfig
from marin_rl.sampling.openai_sampler import OpenAiSampler
from marin_rl.sampling.sampler import SampleRequest, WeightPoll
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, WeightVersion


@runtime_checkable
class PolicyEngine(Protocol):
    """A sampler of the policy that is being trained."""

    @property
    def batch_size(self) -> int:
        """See `marin_rl.sampling.sampler.Sampler`."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """See `marin_rl.sampling.sampler.Sampler`."""
        ...

    def update(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Sample from `model` from now on.

        Args:
            model: the learner's new weights.
            version: steps of training behind them.
        """
        ...


class OpenAIEngine:
    """Samples at a server, which is given the policy's weights."""

    def __init__(
        self,
        config: TrainConfig,
        server: OpenAiSamplerConfig,
        model: LmHeadModel,
        tokenizer: ChatTokenizer,
        trainer: TrainerConfig,
        version: WeightVersion,
    ) -> None:
        """Have the server load the weights, and see what it answers.

        Args:
            config: limits and sizes.
            server: where it is, and how it loads weights.
            model: the learner's weights.
            tokenizer: names the stop tokens.
            trainer: mesh and axis mapping of the weights.
            version: steps of training behind them.

        Raises:
            UserFileError: if the user's function is missing or raises.
            SamplerError: if the server does not answer what it must.
        """
        self._weights = WeightReloader(server.reload, server.base_url, tokenizer, trainer)
        self._sampler = OpenAiSampler(
            server,
            config=config.sampling,
            stop_token_ids=tokenizer.stop_token_ids,
            max_context=config.rollouts.max_length,
            vocab_size=model.vocab_size,
        )
        self.update(model, version)
        self._sampler.check_server()

    @property
    def batch_size(self) -> int:
        """See `marin_rl.sampling.sampler.Sampler`."""
        return self._sampler.batch_size

    def update(self, model: LmHeadModel, version: WeightVersion) -> None:
        """See [`PolicyEngine`][marin_rl.runtime.policy_engine.PolicyEngine]; returns when the server has them."""
        self._weights.serve(model, version)
        self._sampler.version = version

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """See `marin_rl.sampling.sampler.Sampler`."""
        return self._sampler.sample(requests)


class NoSampler:
    """Stands where the trainer's own sampler would, which does not work over several processes."""

    batch_size = 1
    """See `marin_rl.sampling.sampler.Sampler`."""

    def update(self, model: object, version: WeightVersion) -> None:
        """Nothing samples from them."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Nobody may ask.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the trainer does not sample where it runs in several processes")


def open_trainer_engine(
    config: TrainConfig,
    model: LmHeadModel,
    tokenizer: ChatTokenizer,
    trainer: TrainerConfig,
    version: WeightVersion,
) -> PolicyEngine:
    """The trainer's own: the configured one in `mode: sync`, and levanter's where a worker has that.

    Args:
        config: names the engine; limits and sizes.
        model: the learner's weights.
        tokenizer: names the stop tokens.
        trainer: mesh, axis mapping and compute precision.
        version: steps of training behind the weights.
    """
    if multihost.is_multihost():
        return NoSampler()
    if config.mode is Mode.ASYNC:
        return PolicySampler(config, model, tokenizer, trainer, version)
    return open_worker_engine(config, model, tokenizer, trainer, version)


def open_worker_engine(
    config: TrainConfig,
    model: LmHeadModel,
    tokenizer: ChatTokenizer,
    trainer: TrainerConfig,
    version: WeightVersion,
    weight_poll: WeightPoll | None = None,
) -> PolicyEngine:
    """The configured one, which samples what is trained on.

    Args:
        config: names the engine; limits and sizes.
        model: the learner's weights.
        tokenizer: names the stop tokens.
        trainer: mesh, axis mapping and compute precision.
        version: steps of training behind the weights.
        weight_poll: when newer weights may come while sequences are being decoded, in this process; None for never.
    """
    if isinstance(config.sampler, OpenAiSamplerConfig):
        return OpenAIEngine(config, config.sampler, model, tokenizer, trainer, version)
    return PolicySampler(config, model, tokenizer, trainer, version, weight_poll)
