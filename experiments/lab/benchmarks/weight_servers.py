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

from marin_rl.distributed.weight_manifest import ArrayPiece, Manifest, Snapshot
from marin_rl.distributed.weight_sender import CHUNK_BYTES
from marin_rl.distributed.weight_server import WeightServer
from marin_rl.utils.devices.boxes import volume, whole


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
    """Shape of each float32 array by name. The first host has those whose first axis is not divisible."""


def make_snapshot(share: Share) -> Snapshot:
    """Return the share's rows, filled with noise."""
    noise = np.random.default_rng(share.host)
    pieces, data = [], []
    for name, shape in share.shapes.items():
        bounds = whole(shape)
        if shape and shape[0] % share.hosts == 0:
            rows = shape[0] // share.hosts
            bounds = ((share.host * rows, (share.host + 1) * rows), *bounds[1:])
        elif share.host > 0:
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
