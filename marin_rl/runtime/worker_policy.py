# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a rollout worker plays with: its own environment and sampler, under weights that it fetches."""

import contextlib
from collections.abc import Callable, Sequence
from typing import cast

import jax
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis
from jax.sharding import NamedSharding
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.closing import Closing
from marin_rl.learner.policy_model import model_shape
from marin_rl.rollouts.orders import GroupOrder
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.crew import Played, play_orders
from marin_rl.runtime.devices import start_devices
from marin_rl.runtime.policy_sampler import PolicySampler
from marin_rl.runtime.training_run import make_player, open_judges
from marin_rl.types import WeightVersion
from marin_rl.weights.protocol import WeightReceiver


class ReceivedPolicy:
    """Plays under the newest weights that it has fetched."""

    def __init__(self, config: TrainConfig, vocab_size: int, token: str) -> None:
        """Bring up devices, environment and reward functions; weights come with the first `fetch`.

        Args:
            config: the run's.
            vocab_size: of the model, which may be larger than the tokenizer's.
            token: the run's secret.
        """
        assert config.model is not None
        self._config = config
        self._token = token
        self._trainer = start_devices(config.trainer_config(), rows_per_device=config.rollouts.rows_per_device)
        self._like = placed_shape(model_shape(config.model, Axis("vocab", vocab_size), self._trainer), self._trainer)
        self._tokenizer = config.tokenizer.build()
        self._environment = config.environment.build()
        self._receiver: WeightReceiver | None = None
        self._addresses: tuple[str, ...] = ()
        self._sampler: PolicySampler | None = None
        self._version: WeightVersion | None = None
        with contextlib.ExitStack() as opened:
            self._judges, self._loop = open_judges(config, self._environment, opened)
            opened.enter_context(Closing(self._close_receiver))
            self._opened = opened.pop_all()

    @property
    def version(self) -> WeightVersion | None:
        """Of the weights that it has; None for none."""
        return self._version

    @property
    def room(self) -> int:
        """Groups that fill the sampler; at least one."""
        return max(self._config.sampling.max_seqs // self._config.rollouts.group_size, 1)

    def fetch(self, addresses: Sequence[str]) -> None:
        """Take the newest weights that are offered at these addresses."""
        if tuple(addresses) != self._addresses or self._receiver is None:
            self._close_receiver()
            self._receiver = self._config.weights.open_receiver(addresses, self._token)
            self._addresses = tuple(addresses)
        model, version = self._receiver.receive(self._like)
        if self._sampler is None:
            self._sampler = PolicySampler(self._config, model, self._tokenizer, self._trainer, version)
        else:
            self._sampler.update(model, version)
        self._version = version

    def play(self, orders: Sequence[GroupOrder], hand_in: Callable[[Played], None]) -> None:
        """Play groups, all of them together, and hand in each as soon as it is whole."""
        assert self._sampler is not None, "weights are fetched first"
        player = make_player(self._config, self._environment, self._tokenizer, self._sampler, self._loop, self._judges)
        play_orders(self._config, player, orders, player.timer, hand_in)

    def close(self) -> None:
        """End what runs beside it."""
        self._opened.close()

    def _close_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def placed_shape(shape: LmHeadModel, trainer: TrainerConfig) -> LmHeadModel:
    """Shapes and dtypes with the places that the trainer's mesh and parameter mapping give them.

    Args:
        shape: of a model, without arrays.
        trainer: as `start_devices` completed it.
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
