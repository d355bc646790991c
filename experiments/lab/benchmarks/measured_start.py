# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""`marin_rl.train` that writes what its start has cost, for `benchmark_startup`.

python -m experiments.lab.benchmarks.measured_start RESULT.json --config experiments/rloo.yaml

At the record of the first update `RESULT.json` gets CPU seconds of this process, and number and seconds of programs
that were compiled or loaded from the cache.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from experiments.lab.benchmarks.measurement import counted_compiles
from marin_rl.sessions.step_records import StepRecords
from marin_rl.train import main as train
from marin_rl.utils.timing import compile_clock

CPU_SECONDS, PROGRAMS, COMPILE_SECONDS = "cpu_seconds", "programs", "compile_seconds"
"""Keys of the result. The last one has the seconds of tracing, lowering and compiling, concurrent ones once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and write the result; return the exit status."""
    result, *arguments = sys.argv[1:] if argv is None else argv
    clock, record = compile_clock(), StepRecords.record
    compiled = clock.seconds

    def write_at_first_update(self: StepRecords, step: int, metrics: Mapping[str, float]) -> None:
        record(self, step, metrics)
        if step == 1:
            cpu, seconds = time.process_time(), clock.seconds - compiled
            found = {CPU_SECONDS: cpu, PROGRAMS: count.programs, COMPILE_SECONDS: seconds}
            Path(result).write_text(json.dumps(found))

    with counted_compiles() as count, mock.patch.object(StepRecords, "record", write_at_first_update):
        return train(arguments)


if __name__ == "__main__":
    sys.exit(main())
