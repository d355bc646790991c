# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_soak.py: holds versions 1 and 2 of some weights, in a server that can be paused; prints its address."""

import sys
import threading
from pathlib import Path


def main(hold: str, token: str) -> None:
    import numpy as np

    from experiments.soak_train import PausedWeightServer
    from marin_rl.weights.arrow_flight import VersionCache
    from marin_rl.weights.publish import TrainingHost, take_snapshot

    cache, host = VersionCache("the held host"), TrainingHost(0, 1, frozenset())
    for version in (1, 2):
        cache.put(take_snapshot({"w": np.full(4096, version, np.uint8)}, version, host, 1024))
    server = PausedWeightServer(Path(hold), cache, token, "grpc+tls://127.0.0.1:0")
    print(f"grpc+tls://127.0.0.1:{server.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
