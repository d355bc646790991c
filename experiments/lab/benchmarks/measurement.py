# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Shared parts of the benchmarks: command-line settings, statistics, compile counts and JSON reports."""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.levanter_line import distribution_of


class BenchmarkedRunError(RuntimeError):
    """A timed run failed; the message contains its output."""


DEFAULT_CONFIG = Path(__file__).parents[2] / "rloo.yaml"

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""jax's event for every program that is compiled or loaded from the persistent cache."""

PACKAGES = ("marin_rl", "jax", "jaxlib", "levanter", "haliax", "equinox", "optax", "numpy")


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser for a benchmark's flags."""
    return argparse.ArgumentParser(description=description, allow_abbrev=False)


def config_arguments(rest: Sequence[str]) -> list[str]:
    """Return the arguments for `marin_rl.train`, with `experiments/rloo.yaml` as the default config."""
    if any(argument.partition("=")[0] == "--config" for argument in rest):
        return list(rest)
    return ["--config", str(DEFAULT_CONFIG), *rest]


def load_config(rest: Sequence[str]) -> TrainConfig:
    """Return the config that `marin_rl.train` would run with these arguments.

    Args:
        rest: `--config FILE` and `--a.b value` overrides; without `--config`, experiments/rloo.yaml.
    """
    return parse_config(TrainConfig, config_arguments(rest)).config


def timed(function: Callable[[], Any]) -> float:
    """Return wall-clock seconds of one call. The function must wait for the device."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def take_turns(kinds: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every kind in each round; the order rotates from round to round."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for _ in range(rounds):
        for kind in order:
            seconds[kind].append(timed(kinds[kind]))
        order = [*order[1:], order[0]]
    return seconds


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float | int]:
    """Summarize the ratios of two series, round by round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Summarize a series of measurements: median, extremes and count.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0, 'count': 3}
    """
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


@dataclasses.dataclass
class CompileCount:
    """Counter of compiled programs."""

    programs: int = 0


@contextlib.contextmanager
def counted_compiles() -> Iterator[CompileCount]:
    """Count the programs that are compiled, or loaded from the persistent cache, inside the `with` block."""
    count = CompileCount()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            count.programs += 1

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        monitoring.unregister_event_duration_listener(listen)


def without_compilation_cache() -> None:
    """Disable the persistent compilation cache, so that first calls compile."""
    jax.config.update("jax_enable_compilation_cache", False)


def program_bytes(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    """Return the memory of one program on each device from the compiler's analysis; None if it is not available."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {"arguments": None, "outputs": None, "temporaries": None}
    return {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
    }


def describe_machine() -> dict[str, Any]:
    """Return devices, cores and versions. Initializes jax, so call it after measuring."""
    return {
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cpu_cores": os.cpu_count(),
        "cpu_architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(distribution_of(name)) for name in PACKAGES},
    }


def make_report(name: str, arguments: Sequence[str], settings: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """Return the JSON report of a benchmark.

    Args:
        name: the benchmark's module name.
        arguments: command line.
        settings: sizes of the measured problem.
        figures: measurements; their names contain the units.
    """
    report = {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"experiments.lab.benchmarks.{name}", *arguments]),
        "machine": describe_machine(),
        "settings": dict(settings),
        "figures": dict(figures),
    }
    return json.dumps(report, indent=2, allow_nan=False)


def shown(value: float | None) -> str:
    """Format a number with 4 significant digits, or thousands separators.

    >>> shown(0.012345), shown(12345678), shown(None)
    ('0.01235', '12,345,678', '')
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def say(message: str) -> None:
    """Print progress to standard error; standard output contains only the JSON report."""
    print(message, file=sys.stderr, flush=True)
