# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weights within one process: the copy that the learner made is what the worker gets."""

import itertools
import weakref
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.types import WeightVersion
from marin_rl.weights.device_copy import Array, DeviceCopier
from marin_rl.weights.errors import NoWeightsError, ServerLostError
from marin_rl.weights.plan import Wanted, check_fit, check_names, wanted_arrays
from marin_rl.weights.sharded_sender import check_order
from marin_rl.weights.shelf import VersionShelf
from marin_rl.weights.tree import named_leaves, replace_leaves

T = TypeVar("T")

_SENDERS: "weakref.WeakValueDictionary[str, InProcessSender]" = weakref.WeakValueDictionary()
"""Open senders by address, as servers are found by theirs."""

_NUMBERS = itertools.count()


class InProcessSender:
    """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""

    def __init__(self, *, dtype: str | None) -> None:
        """Make a sender that holds the newest version alone, on its devices.

        Args:
            dtype: what floating-point arrays are cast to; None leaves them as they are.
        """
        self._address = f"in-process:{next(_NUMBERS)}"
        self._copy = DeviceCopier(dtype)
        self.shelf: VersionShelf[dict[str, Array]] = VersionShelf(1, self._address)
        self._published: WeightVersion | None = None
        _SENDERS[self._address] = self

    @property
    def address(self) -> str:
        """`in-process:<number>`; means something in this process alone."""
        return self._address

    @property
    def published(self) -> WeightVersion | None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        return self._published

    def publish(self, weights: object, version: WeightVersion) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]; visible when the call returns."""
        check_order(self._published, version)
        self.shelf.put(version, self._copy(named_leaves(weights)))
        self._published = version

    def flush(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """See [`WeightSender`][marin_rl.weights.protocol.WeightSender]."""
        self.shelf.clear()
        _SENDERS.pop(self._address, None)


class InProcessReceiver:
    """See [`WeightReceiver`][marin_rl.weights.protocol.WeightReceiver]."""

    def __init__(self, address: str, *, cast: bool) -> None:
        """Look for nothing yet.

        Args:
            address: a sender's, of this process.
            cast: whether floating-point arrays may arrive in another floating-point dtype than is wanted.
        """
        self._address = address
        self._cast = cast

    def newest(self) -> WeightVersion | None:
        """See [`WeightReceiver`][marin_rl.weights.protocol.WeightReceiver]."""
        return max(self._sender().shelf.versions(), default=None)

    def receive(self, like: T, version: WeightVersion | None = None) -> tuple[T, WeightVersion]:
        """See [`WeightReceiver`][marin_rl.weights.protocol.WeightReceiver].

        Arrays that already lie as `like` asks are shared with every other receiver: do not donate them.
        """
        wanted = wanted_arrays(like)
        chosen, held = self._held(version)
        check_names(wanted.keys(), held.keys())
        for name, want in wanted.items():
            check_fit(name, want, held[name].shape, held[name].dtype, cast=self._cast)
        return replace_leaves(like, {name: _as_wanted(held[name], want) for name, want in wanted.items()}), chosen

    def close(self) -> None:
        """Nothing is held between calls."""

    def _sender(self) -> InProcessSender:
        sender = _SENDERS.get(self._address)
        if sender is None:
            raise ServerLostError(f"no open sender of this process has the address {self._address!r}")
        return sender

    def _held(self, version: WeightVersion | None) -> tuple[WeightVersion, dict[str, Array]]:
        shelf = self._sender().shelf
        if version is not None:
            return version, shelf.get(version)
        newest = shelf.newest()
        if newest is None:
            raise NoWeightsError(f"{self._address} has published nothing yet")
        return newest


def _as_wanted(array: Array, want: Wanted) -> Array:
    if want.sharding is None:
        return np.array(array, dtype=want.dtype)
    if array.dtype != want.dtype:
        array = jnp.asarray(array).astype(want.dtype)
    return jax.device_put(array, want.sharding)
