# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Policy of a rollout worker: environment and sampler with the weights that it fetches."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import cast

import jax
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis
from jax.sharding import NamedSharding
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.closing import Closing
from marin_rl.config.sections import Refresh
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.coordinator import Announcement
from marin_rl.distributed.rollout_runner import make_runner, open_reward_functions
from marin_rl.distributed.rollout_source import FinishedGroup, stream_group_requests
from marin_rl.distributed.samplers import open_worker_sampler
from marin_rl.distributed.scheduler import GroupRequest
from marin_rl.distributed.weight_prefetcher import TRANSIENT_ERRORS, WeightPrefetcher, Weights
from marin_rl.learner.devices import start_devices
from marin_rl.learner.policy_model import model_shape
from marin_rl.sampling.sampler import Sampler, WeightPoll
from marin_rl.types import WeightVersion
from marin_rl.weights.fetch import WeightReceiver

logger = logging.getLogger(__name__)


class ReceivedPolicy:
    """Runs groups with the newest weights that it has fetched."""

    def __init__(
        self, config: TrainConfig, vocab_size: int, secret: str, announced: Callable[[], Announcement]
    ) -> None:
        """Start devices, environment and reward functions; the first `fetch` loads the weights.

        Args:
            config: Config of the run.
            vocab_size: Vocabulary size of the model, which may be larger than the tokenizer's.
            secret: The run's secret.
            announced: Returns the newest weights; called while groups run with `workers.refresh: in_flight`.
        """
        assert config.model is not None
        self._config = config
        self._secret = secret
        self._announced = announced
        self._trainer = start_devices(
            config.trainer_config(), rows_per_device=config.rollouts.rows_per_device, alone=True
        )
        self._like = placed_shape(model_shape(config.model, Axis("vocab", vocab_size), self._trainer), self._trainer)
        self._tokenizer = config.tokenizer.build()
        self._environment = config.environment.build()
        self._receiver: WeightReceiver | None = None
        self._addresses: tuple[str, ...] = ()
        self._sampler: Sampler | None = None
        self._version: WeightVersion | None = None
        self._prefetcher = WeightPrefetcher(self._fetch_newer)
        with contextlib.ExitStack() as opened:
            self._reward_functions, self._loop = open_reward_functions(config, self._environment, opened)
            opened.enter_context(Closing(self._prefetcher.close))
            self._opened = opened.pop_all()

    @property
    def version(self) -> WeightVersion | None:
        """Version of the weights; None before the first fetch."""
        return self._version

    @property
    def room(self) -> int:
        """Number of groups that fill the sampler; at least 1."""
        return max(self._config.sampling.max_seqs // self._config.rollouts.group_size, 1)

    def fetch(self, addresses: Sequence[str]) -> bool:
        """Fetch the newest weights at these addresses, or use newer ones that are already being fetched.

        Returns:
            Whether the weights arrived. If not, they may be available to other workers, and the caller retries.

        Raises:
            ServerLostError: If the first fetch fails, which indicates a configuration error; likewise the other errors
                of a weight transfer.
        """
        try:
            received = self._prefetcher.complete() or self._receive(addresses)
        except TRANSIENT_ERRORS as error:
            if self._version is None:
                raise
            logger.warning("newer weights did not arrive (%s); retrying", error)
            return False
        self._use(received)
        return True

    @property
    def is_in_flight(self) -> bool:
        """Whether weights are updated while groups run."""
        return self._config.workers.refresh is Refresh.IN_FLIGHT

    def run(
        self, requests: Sequence[GroupRequest], on_group_done: Callable[[FinishedGroup], Sequence[GroupRequest]]
    ) -> None:
        """Run groups concurrently, return each when it is finished, and start the next ones in its place."""
        assert self._sampler is not None, "call fetch first"
        runner = make_runner(
            self._config, self._environment, self._tokenizer, self._sampler, self._loop, self._reward_functions
        )
        stream_group_requests(self._config, runner, requests, on_group_done)

    def close(self) -> None:
        """Stop weight prefetching, reward workers and the event loop."""
        self._opened.close()

    def _use(self, weights: Weights) -> None:
        model, version = weights
        if self._sampler is None:
            weight_poll = (
                WeightPoll(self._poll_weights, self._config.workers.decode_steps_per_weight_poll)
                if self.is_in_flight
                else None
            )
            self._sampler = open_worker_sampler(
                self._config, model, self._tokenizer, self._trainer, version, weight_poll
            )
        else:
            self._sampler.update_weights(model, version)
        self._version = version

    def _poll_weights(self) -> None:
        received = self._prefetcher.poll(self._version)
        if received is not None:
            logger.info("updating weights in flight from version %s to %s", self._version, received.version)
            self._use(received)

    def _fetch_newer(self, version: WeightVersion | None) -> Weights | None:
        announced = self._announced()
        return self._receive(announced.addresses) if announced.is_newer_than(version) else None

    def _receive(self, addresses: Sequence[str]) -> Weights:
        if tuple(addresses) != self._addresses or self._receiver is None:
            self._receiver = self._config.weights.open_receiver(addresses, self._secret)
            self._addresses = tuple(addresses)
        model, version = self._receiver.receive(self._like)
        return Weights(model, version)


def placed_shape(shape: LmHeadModel, trainer: TrainerConfig) -> LmHeadModel:
    """Return shapes and dtypes with the shardings of the trainer's mesh and parameter mapping.

    Args:
        shape: Shapes of a model.
        trainer: Trainer config, completed by `start_devices`.
    """
    mesh, mapping = trainer.device_mesh, trainer.parameter_axis_mapping

    def place(leaf: object) -> object:
        if isinstance(leaf, NamedArray):
            sharding = NamedSharding(mesh, pspec_for_axis(leaf.axes, mapping))
            array = jax.ShapeDtypeStruct(leaf.array.shape, leaf.array.dtype, sharding=sharding)
            return NamedArray(cast(jax.Array, array), leaf.axes)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, jax.P()))
        return leaf

    return jax.tree.map(place, shape, is_leaf=lambda node: isinstance(node, NamedArray))
