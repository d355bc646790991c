# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The two ends of a weight transfer.

The learner publishes, workers receive. A version becomes visible whole or not at all, and one `receive` returns one
version, never a mixture. Only arrays travel; whatever else a tree holds is the receiver's own.
"""

from typing import Protocol, TypeVar, runtime_checkable

from marin_rl.types import WeightVersion

T = TypeVar("T")


@runtime_checkable
class WeightSender(Protocol):
    """One for each training host."""

    @property
    def address(self) -> str:
        """Where receivers find it: what `open_receiver` takes."""
        ...

    @property
    def published(self) -> WeightVersion | None:
        """The newest version that receivers can see; None before the first."""
        ...

    def publish(self, weights: object, version: WeightVersion) -> None:
        """Offer weights. Returns as soon as the learner may donate or overwrite its arrays.

        The copy to the host goes on in the background; the version becomes visible when it ends. Until then the devices
        hold one more copy. At most one is under way: a call waits for the one before. On several training hosts, all
        call it, in the same order.

        Args:
            weights: a tree of arrays, such as a model.
            version: steps of training behind them; greater than all before.

        Raises:
            ValueError: if the version is not greater than the one before, or a leaf cannot travel.
            Exception: what went wrong in the background since the last call.
        """
        ...

    def flush(self) -> None:
        """Wait until everything published is visible.

        Raises:
            Exception: what went wrong in the background.
        """
        ...

    def close(self) -> None:
        """Wait for what is under way, then stop serving and free threads, ports and files."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """One for each worker."""

    def newest(self) -> WeightVersion | None:
        """The newest version that every sender holds; None before the first.

        Raises:
            WeightTransferError: if a sender cannot be asked.
        """
        ...

    def receive(self, like: T, version: WeightVersion | None = None) -> tuple[T, WeightVersion]:
        """Fetch one version.

        Args:
            like: the tree that is wanted, with arrays or `jax.ShapeDtypeStruct`s as leaves. Their shardings say which
                parts are fetched and where they are put; leaves without one go to the default device.
            version: the version; None for the newest.

        Returns:
            `like` with the arrays that were published, and their version.

        Raises:
            VersionGoneError: if `version` is given and not held by every sender.
            MismatchedWeightsError: if what was published does not fit `like`.
            WrongTokenError: if the token is not the run's.
            WeightTransferError: if the weights did not arrive in the time that retries may take.
        """
        ...

    def close(self) -> None:
        """Free what the receiver holds."""
        ...
