# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The cost of the sandbox: a reward function called directly, and through the pool at every isolation level.

    python -m experiments.lab.benchmarks.benchmark_sandbox
    python -m experiments.lab.benchmarks.benchmark_sandbox --calls 2000 --workers 4 --imports numpy sympy

The function compares two strings, so the benchmark measures the pool: single calls, and groups of calls, with a process
for each call and with shared processes, in turn. `--imports` adds a round per module with a file that imports it: a
larger process takes longer to fork. Seconds of CPU time are those of the trainer, the workers and all their processes.
"""

import asyncio
import contextlib
import functools
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.lab.benchmarks.measurement import benchmark_parser, make_report, ratios, say, spread
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardFunction, RewardRequest, evaluate
from marin_rl.rewards.sandbox.isolation import IS_LINUX, Isolation
from marin_rl.rewards.sandbox.pool import Sandbox, UserFunction
from marin_rl.rewards.sandbox.processes import list_descendants

FILE = """
from marin_rl.rewards import EvaluateResult, reward_function
{imports}

def compare(messages, ground_truth, **kwargs):
    return EvaluateResult(score=float(messages[-1]["content"] == ground_truth))

separate = reward_function(compare)
shared = reward_function(stateless=True)(compare)
"""

FUNCTIONS = ("separate", "shared")
"""Each call has a process, or up to 64 calls have one."""

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
    function: RewardFunction = module.separate
    milliseconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(DIRECT_CALLS):
            evaluate(function, [request], {})
        milliseconds.append(1000 * (time.perf_counter() - start) / DIRECT_CALLS)
    return spread(milliseconds)


async def measure_pool(file: Path, request: RewardRequest, level: Isolation, arguments: Any) -> dict[str, Any] | None:
    """Time calls through the pool; None if the machine does not support the isolation level.

    Args:
        file: file with the functions.
        request: request to score.
        level: isolation level.
        arguments: command-line arguments.
    """
    start = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        config = SandboxConfig(require=Isolation.NONE, workers=arguments.workers)
        sandbox = await stack.enter_async_context(Sandbox(config, strongest=level))
        if sandbox.isolation is not level:
            return None
        started = time.perf_counter() - start
        call = functools.partial(sandbox.call, UserFunction(str(file), "separate"), [request], {})
        start = time.perf_counter()
        await call()
        first = time.perf_counter() - start
        milliseconds = []
        for _ in range(arguments.calls):
            start = time.perf_counter()
            await call()
            milliseconds.append(1000 * (time.perf_counter() - start))
        groups = await _measure_groups(sandbox, str(file), request, arguments)
    return {
        "start_seconds": started,
        "first_call_seconds": first,
        "call_milliseconds": spread(milliseconds) | {"p90": statistics.quantiles(milliseconds, n=10)[-1]},
        "groups": groups,
    }


async def _measure_groups(sandbox: Sandbox, file: str, request: RewardRequest, arguments: Any) -> dict[str, Any]:
    """Return wall and CPU milliseconds of a call, by function.

    The functions take turns, so that their ratios do not depend on the load of the machine.
    """
    wall: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    cpu: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    await sandbox.load(file)
    # Let every worker load the file.
    await asyncio.gather(
        *(sandbox.call(UserFunction(file, "separate"), [request], {}) for _ in range(2 * arguments.workers))
    )
    for _ in range(arguments.rounds):
        for name in FUNCTIONS:
            start, used = time.perf_counter(), _cpu_seconds()
            results = await sandbox.call_each(UserFunction(file, name), [request] * arguments.calls, {})
            wall[name].append(1000 * (time.perf_counter() - start) / arguments.calls)
            # At least the resolution of /proc.
            spent = max(_cpu_seconds() - used, 1 / os.sysconf("SC_CLK_TCK"))
            cpu[name].append(1000 * spent / arguments.calls)
            assert [result.score for result in results if isinstance(result, EvaluateResult)] == [1.0] * arguments.calls
    assert sandbox.batches_calls(UserFunction(file, "shared"))
    return {
        name: {
            "call_milliseconds": spread(wall[name]),
            "call_cpu_milliseconds": spread(cpu[name]),
            "wall_speedup": ratios(wall["separate"], wall[name]),
            "cpu_speedup": ratios(cpu["separate"], cpu[name]),
        }
        for name in FUNCTIONS
    }


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants, also of those that have ended."""
    times = os.times()
    below = list_descendants(os.getpid()) if IS_LINUX else {}
    return sum(times[:4]) + sum(_cpu_seconds_with_children(process) for process in below)


def _cpu_seconds_with_children(process: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{process}/stat", "rb") as statistics:
        fields = statistics.read().rpartition(b")")[2].split()
        return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def measure_file(imports: str, arguments: Any) -> dict[str, Any]:
    """Return all figures for one file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rewards.py"
        file.write_text(FILE.format(imports=imports), encoding="utf-8")
        request = request_of_length(arguments.characters)
        figures: dict[str, Any] = {"direct_milliseconds": measure_direct(file, request, 5)}
        for level in Isolation:
            measured = asyncio.run(measure_pool(file, request, level, arguments))
            figures[level.value] = measured
            say(f"{imports or 'no imports'}, isolation {level.value}: {_summary(measured)}")
    return figures


def _summary(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "not offered"
    groups = (
        f"{name} {one['call_milliseconds']['median']:.3f} ms ({one['call_cpu_milliseconds']['median']:.3f} CPU)"
        for name, one in measured["groups"].items()
    )
    return f"{measured['call_milliseconds']['median']:.2f} ms a single call; in a group: {', '.join(groups)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("A reward function called directly and through the sandbox")
    parser.add_argument("--calls", type=int, default=512, help="calls of each kind, at least 2")
    parser.add_argument("--rounds", type=int, default=5, help="groups of each kind")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the pool")
    parser.add_argument("--characters", type=int, default=2000, help="length of the judged reply")
    parser.add_argument("--imports", nargs="*", default=["numpy"], help="modules that a file of its own imports")
    arguments = parser.parse_args(argv)
    figures = {"plain": measure_file("", arguments)}
    figures |= {module: measure_file(f"import {module}", arguments) for module in arguments.imports}
    print(make_report("benchmark_sandbox", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
