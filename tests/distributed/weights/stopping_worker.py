# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_arrow_flight.py: a worker that stops itself at the first chunk; prints the result."""

import io
import json
import logging
import os
import signal
import sys


def main(secret: str, port: str) -> None:
    import numpy as np

    from marin_rl.distributed.weights.arrow_flight import FlightSource
    from marin_rl.distributed.weights.fetch import WeightReceiver
    from marin_rl.utils.retry import Clock, RetryConfig

    stopped = []
    # Failed attempts are logged.
    log = io.StringIO()
    logging.basicConfig(stream=log, level=logging.WARNING)

    class StoppingSource(FlightSource):
        def fetch(self, manifest, chunks):
            for data in super().fetch(manifest, chunks):
                if not stopped:
                    stopped.append(manifest.version)
                    os.kill(os.getpid(), signal.SIGSTOP)
                yield data

    source = StoppingSource(f"grpc+tls://127.0.0.1:{port}", secret, streams=2)
    receiver = WeightReceiver([source], RetryConfig(), cast=False, clock=Clock(sleep=lambda seconds: None))
    received, version = receiver.receive({name: np.zeros(600, np.float32) for name in "abcd"})
    told = {"version": version, "values": np.unique(list(received.values())).tolist(), "refused": log.getvalue()}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
