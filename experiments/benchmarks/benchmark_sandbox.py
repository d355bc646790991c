# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The cost of the sandbox: a reward function called directly, and through the pool at every isolation level.

    python -m experiments.benchmarks.benchmark_sandbox
    python -m experiments.benchmarks.benchmark_sandbox --calls 2000 --workers 4 --imports numpy sympy

The function compares two strings, so the benchmark measures the pool. `--imports` adds a round per module with a file
that imports it: each call forks the process that has loaded the file, and a larger process takes longer to fork.
"""

import asyncio
import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.measurement import benchmark_parser, make_report, say, spread
from marin_rl.rewards.functions import RewardFunction, RewardRequest, evaluate
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox, UserFunction

FILE = """
from marin_rl.rewards import EvaluateResult, reward_function
{imports}

@reward_function
def exact(messages, ground_truth, **kwargs):
    return EvaluateResult(score=float(messages[-1]["content"] == ground_truth))
"""

DIRECT_CALLS = 1000
"""Direct calls that are timed together, because a single call is too short for the clock."""


def request_of_length(characters: int) -> RewardRequest:
    """Return a rollout with a reply of the given length."""
    return RewardRequest(
        rollout_id="rollout",
        messages=({"role": "user", "content": "Repeat."}, {"role": "assistant", "content": "x" * characters}),
        ground_truth="x" * characters,
        task_id="task",
        environment="repeat",
        status="completed",
    )


def measure_direct(file: Path, request: RewardRequest, repeats: int) -> dict[str, float | int]:
    """Return milliseconds of one call in this process."""
    spec = importlib.util.spec_from_file_location("benchmarked_rewards", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: RewardFunction = module.exact
    milliseconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(DIRECT_CALLS):
            evaluate(function, [request], {})
        milliseconds.append(1000 * (time.perf_counter() - start) / DIRECT_CALLS)
    return spread(milliseconds)


async def measure_pool(
    file: Path, request: RewardRequest, level: Isolation, calls: int, workers: int
) -> dict[str, Any] | None:
    """Time calls through the pool; None if the machine does not support the isolation level.

    Args:
        file: file with the function `exact`.
        request: request to score.
        level: isolation level.
        calls: number of sequential calls, and of concurrent calls.
        workers: processes of the pool.
    """
    start = time.perf_counter()
    async with Sandbox(SandboxConfig(require=Isolation.NONE, workers=workers), strongest=level) as sandbox:
        if sandbox.isolation is not level:
            return None
        started = time.perf_counter() - start
        call = functools.partial(sandbox.call, UserFunction(str(file), "exact"), [request], {})
        start = time.perf_counter()
        await call()
        first = time.perf_counter() - start
        milliseconds = []
        for _ in range(calls):
            start = time.perf_counter()
            await call()
            milliseconds.append(1000 * (time.perf_counter() - start))
        # Let every worker load the file before the batch is timed.
        await asyncio.gather(*(call() for _ in range(2 * workers)))
        start = time.perf_counter()
        results = await asyncio.gather(*(call() for _ in range(calls)))
        seconds = time.perf_counter() - start
        assert [result.score for [result] in results] == [1.0] * calls
        assert not sandbox.failures
    return {
        "start_seconds": started,
        "first_call_seconds": first,
        "call_milliseconds": spread(milliseconds) | {"p90": statistics.quantiles(milliseconds, n=10)[-1]},
        "batch_calls_per_second": calls / seconds,
    }


def measure_file(imports: str, arguments: Any) -> dict[str, Any]:
    """Return all figures for one file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rewards.py"
        file.write_text(FILE.format(imports=imports), encoding="utf-8")
        request = request_of_length(arguments.characters)
        figures: dict[str, Any] = {"direct_milliseconds": measure_direct(file, request, 5)}
        for level in Isolation:
            measured = asyncio.run(measure_pool(file, request, level, arguments.calls, arguments.workers))
            figures[level.value] = measured
            median = "not offered" if measured is None else f"{measured['call_milliseconds']['median']:.2f} ms a call"
            say(f"{imports or 'no imports'}, isolation {level.value}: {median}")
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("A reward function called directly and through the sandbox")
    parser.add_argument("--calls", type=int, default=500, help="calls of each kind, at least 2")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the pool")
    parser.add_argument("--characters", type=int, default=2000, help="length of the judged reply")
    parser.add_argument("--imports", nargs="*", default=["numpy"], help="modules that a file of its own imports")
    arguments = parser.parse_args(argv)
    figures = {"plain": measure_file("", arguments)}
    figures |= {module: measure_file(f"import {module}", arguments) for module in arguments.imports}
    print(make_report("benchmark_sandbox", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
