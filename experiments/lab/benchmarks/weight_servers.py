# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One training host of benchmark_weight_transfer.py, in a separate process.

It holds an equal share of the rows of every array, and serves it like a run and as plain bytes over a socket. It prints
both ports, publishes each version that it reads from standard input, and exits when standard input is closed.
"""

import dataclasses
import json
import socket
import sys
import threading

import numpy as np

from marin_rl.distributed.weights.arrow_flight import WeightServer
from marin_rl.distributed.weights.manifest import ArrayPiece, Manifest, Snapshot, volume, whole
from marin_rl.distributed.weights.publish import CHUNK_BYTES


@dataclasses.dataclass(frozen=True)
class Share:
    """The weights of one server."""

    secret: str
    """Secret of the run."""
    host: int
    """Index of the training host."""
    hosts: int
    """Number of training hosts."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each float32 array by name. All but scalars are split along their first axis."""


def make_snapshot(share: Share) -> Snapshot:
    """Return the share's rows, filled with noise."""
    noise = np.random.default_rng(share.host)
    pieces, data = [], []
    for name, shape in share.shapes.items():
        bounds = whole(tuple(shape))
        if shape:
            first, last = (shape[0] * host // share.hosts for host in (share.host, share.host + 1))
            bounds = ((first, last), *bounds[1:])
        if volume(bounds) == 0 or (not shape and share.host > 0):
            continue
        flat = noise.normal(size=volume(bounds)).astype(np.float32).view(np.uint8)
        pieces.append(ArrayPiece(name, tuple(shape), "float32", bounds))
        data.append(flat)
    return Snapshot(Manifest(1, CHUNK_BYTES, tuple(pieces)), tuple(data))


def serve_plainly(snapshot: Snapshot, listener: socket.socket) -> None:
    """Send all bytes to each client, sequentially, until the socket is closed."""
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
    server = WeightServer(share.secret, f"host {share.host}", host="127.0.0.1", port=0)
    server.put(snapshot)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_plainly, args=(snapshot, listener), daemon=True).start()
        num_bytes = sum(len(data) for data in snapshot.data)
        ports = {"flight": server.port, "socket": listener.getsockname()[1], "num_bytes": num_bytes}
        print(json.dumps(ports), flush=True)
        for version in map(int, sys.stdin):
            manifest = dataclasses.replace(snapshot.manifest, version=version)
            server.put(dataclasses.replace(snapshot, manifest=manifest))
            print(version, flush=True)
    server.close()


if __name__ == "__main__":
    main(Share(**json.loads(sys.argv[1])))
