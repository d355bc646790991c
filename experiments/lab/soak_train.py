# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training command with a weight server that can be paused during a transfer, so that it can be killed there.

    python -m experiments.lab.soak_train HOLD --config experiments/rloo_async.yaml ...

While the file HOLD exists, every stream of a weight version of at least the number in the file stops permanently after
its first chunk. The server then creates the file HOLD.reached.
"""

import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from marin_rl import train
from marin_rl.distributed import weight_sender
from marin_rl.distributed.weight_manifest import Chunk
from marin_rl.distributed.weight_server import WeightServer
from marin_rl.types import WeightVersion


def hold_transfers(hold: Path, version: WeightVersion = 0) -> None:
    """Pause transfers of this version and all later ones."""
    reached(hold).unlink(missing_ok=True)
    # Replace the file atomically, because the server may read it at any time.
    written = hold.with_name(f"{hold.name}.new")
    written.write_text(str(version))
    written.replace(hold)


def release_transfers(hold: Path) -> None:
    """Let transfers pass that start from now on."""
    hold.unlink()


def reached(hold: Path) -> Path:
    """Return the path of the file that exists once a transfer is paused."""
    return hold.with_name(f"{hold.name}.reached")


class PausedWeightServer(WeightServer):
    """Weight server that pauses each stream after its first chunk while a file exists."""

    def __init__(self, hold: Path, *arguments: Any, **named: Any) -> None:
        """Start to serve.

        Args:
            hold: see `hold_transfers`.
            arguments: of `WeightServer`.
            named: of `WeightServer`.
        """
        # The base class serves as soon as it is constructed.
        self._hold = hold
        super().__init__(*arguments, **named)

    def send_chunks(self, version: WeightVersion, chunks: list[Chunk]) -> Iterator[pa.RecordBatch]:
        """See `WeightServer`; a paused stream waits until the process ends."""
        for number, batch in enumerate(super().send_chunks(version, chunks)):
            if number == 1 and self._is_held(version):
                reached(self._hold).touch()
                threading.Event().wait()
            yield batch

    def _is_held(self, version: WeightVersion) -> bool:
        try:
            return version >= int(self._hold.read_text())
        except FileNotFoundError:
            return False


if __name__ == "__main__":
    # The trainer's weight sender starts the server of this name.
    weight_sender.WeightServer = functools.partial(PausedWeightServer, Path(sys.argv[1]))  # pyrefly: ignore
    sys.exit(train.main(sys.argv[2:]))
