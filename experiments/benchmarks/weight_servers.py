# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One training host of benchmark_weight_transfer.py, in a process of its own.

It holds an equal share of the rows of every array, and serves it as a run does and as plain bytes over a socket. It
prints both ports and ends when its standard input is closed.
"""

import dataclasses
import json
import socket
import sys
import threading

import numpy as np

from marin_rl.weights.arrow_flight import WeightServer
from marin_rl.weights.bounds import whole
from marin_rl.weights.manifest import Manifest, Piece, checksum
from marin_rl.weights.shelf import VersionShelf
from marin_rl.weights.snapshot import Snapshot

ARRAYS = 16
"""Arrays that the weights consist of."""

COLUMNS = 1024
"""Columns of each array."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What one server holds."""

    token: str
    """The run's secret."""
    host: int
    """Which training host."""
    hosts: int
    """How many there are."""
    rows: int
    """Rows of each array, in all; a multiple of `hosts`."""
    chunk_mb: int
    """Mebibytes of a chunk."""


def shape_of_arrays(rows: int) -> tuple[int, int]:
    """Shape of each array, of float32."""
    return (rows, COLUMNS)


def make_snapshot(share: Share) -> Snapshot:
    """The share's rows, filled with noise."""
    chunk_bytes = share.chunk_mb * 2**20
    shape = shape_of_arrays(share.rows)
    own = share.rows // share.hosts
    bounds = ((share.host * own, (share.host + 1) * own), *whole(shape[1:]))
    noise = np.random.default_rng(share.host)
    pieces, data = [], []
    for number in range(ARRAYS):
        flat = noise.integers(0, 2**8, own * COLUMNS * 4, dtype=np.uint8)
        checksums = [checksum(flat[start : start + chunk_bytes]) for start in range(0, len(flat), chunk_bytes)]
        pieces.append(Piece(f"['{number}']", shape, "float32", bounds, tuple(checksums)))
        data.append(flat)
    return Snapshot(Manifest(1, share.host, share.hosts, chunk_bytes, tuple(pieces)), tuple(data))


def serve_plainly(snapshot: Snapshot, listener: socket.socket) -> None:
    """Send everything to whoever connects, one after the other, until the socket is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            for data in snapshot.data:
                connection.sendall(data.data)


def main(share: Share) -> None:
    """Serve until standard input ends."""
    snapshot = make_snapshot(share)
    shelf: VersionShelf[Snapshot] = VersionShelf(1, f"host {share.host}")
    shelf.put(1, snapshot)
    server = WeightServer(shelf, share.token, "grpc+tls://127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_plainly, args=(snapshot, listener), daemon=True).start()
        print(json.dumps({"flight": server.port, "socket": listener.getsockname()[1]}), flush=True)
        sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main(Share(**json.loads(sys.argv[1])))
