# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Samplers of the current policy, in this process or at an external server, for trainer and rollout workers."""

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
    """Sampler of the policy in training."""

    @property
    def batch_size(self) -> int:
        """See `marin_rl.sampling.sampler.Sampler`."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """See `marin_rl.sampling.sampler.Sampler`."""
        ...

    def update(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Use new weights for later samples.

        Args:
            model: New weights of the learner.
            version: Number of training steps.
        """
        ...


class OpenAIEngine:
    """Samples at an OpenAI-compatible server that loads the policy's weights."""

    def __init__(
        self,
        config: TrainConfig,
        server: OpenAiSamplerConfig,
        model: LmHeadModel,
        tokenizer: ChatTokenizer,
        trainer: TrainerConfig,
        version: WeightVersion,
    ) -> None:
        """Load the weights into the server and check its responses.

        Args:
            config: Limits and sizes.
            server: Address of the server, and how it loads weights.
            model: Weights of the learner.
            tokenizer: Supplies the stop tokens.
            trainer: Mesh and axis mapping of the weights.
            version: Number of training steps.

        Raises:
            UserFileError: If the user's function is missing or raises.
            SamplerError: If the server's responses are invalid.
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
        """See [`PolicyEngine`][marin_rl.runtime.policy_engine.PolicyEngine]. Waits for the server."""
        self._weights.serve(model, version)
        self._sampler.version = version

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """See `marin_rl.sampling.sampler.Sampler`."""
        return self._sampler.sample(requests)


class NoSampler:
    """Placeholder for the trainer's sampler, which does not support several processes."""

    batch_size = 1
    """See `marin_rl.sampling.sampler.Sampler`."""

    def update(self, model: object, version: WeightVersion) -> None:
        """Ignore the weights."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Fail.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the trainer cannot sample when it runs in several processes")


def open_trainer_engine(
    config: TrainConfig,
    model: LmHeadModel,
    tokenizer: ChatTokenizer,
    trainer: TrainerConfig,
    version: WeightVersion,
) -> PolicyEngine:
    """Open the trainer's sampler: the configured one in `mode: sync`, otherwise levanter's.

    Args:
        config: Selects the engine; limits and sizes.
        model: Weights of the learner.
        tokenizer: Supplies the stop tokens.
        trainer: Mesh, axis mapping and compute precision.
        version: Number of training steps.

    Returns:
        The sampler.
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
    """Open the configured sampler.

    Args:
        config: Selects the engine; limits and sizes.
        model: Weights of the learner.
        tokenizer: Supplies the stop tokens.
        trainer: Mesh, axis mapping and compute precision.
        version: Number of training steps.
        weight_poll: Polls for newer weights during decoding in this process; None for no polls.

    Returns:
        The sampler.
    """
    if isinstance(config.sampler, OpenAiSamplerConfig):
        return OpenAIEngine(config, config.sampler, model, tokenizer, trainer, version)
    return PolicySampler(config, model, tokenizer, trainer, version, weight_poll)
