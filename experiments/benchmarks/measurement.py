# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the benchmarks share: settings from a command line, spread, compile counts, and the JSON they print."""

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

from marin_rl.runtime.config import TrainConfig, levanter_defaults
from marin_rl.runtime.config_parsing import parse_config

DEFAULT_CONFIG = Path(__file__).parents[1] / "rloo.yaml"

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What jax reports for every program that it compiles or takes from the persistent cache."""

PACKAGES = ("marin_rl", "jax", "jaxlib", "levanter", "haliax", "equinox", "optax", "numpy")


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """A parser for a benchmark's own flags."""
    return argparse.ArgumentParser(description=description, allow_abbrev=False)


def config_arguments(rest: Sequence[str]) -> list[str]:
    """A command line of `marin_rl.train`: what was given, with `experiments/rloo.yaml` as the default config."""
    if any(argument.partition("=")[0] in ("--config", "--config_path") for argument in rest):
        return list(rest)
    return ["--config", str(DEFAULT_CONFIG), *rest]


def load_config(rest: Sequence[str]) -> TrainConfig:
    """The config that `marin_rl.train` would run with these arguments.

    Args:
        rest: `--config FILE` and `--a.b value` overrides; without `--config`, experiments/rloo.yaml.
    """
    return parse_config(TrainConfig, config_arguments(rest), levanter_defaults()).config


def timed(function: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call. The function must wait for the device itself."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """A series of measurements as a report gives it: median, extremes and how many there were.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0, 'count': 3}
    """
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


@dataclasses.dataclass
class CompileCount:
    """Programs compiled so far."""

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
    """Make first calls compile, whatever earlier processes left in the persistent cache."""
    jax.config.update("jax_enable_compilation_cache", False)


def program_bytes(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    """Memory of one program on each device, as the compiler plans it; None where the backend does not tell."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {"arguments": None, "outputs": None, "temporaries": None}
    return {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
    }


def device_peak_bytes() -> int | None:
    """Most memory in use on the first device since the process began; None where it is not counted (CPU)."""
    statistics_of_device = jax.local_devices()[0].memory_stats()
    return None if statistics_of_device is None else statistics_of_device.get("peak_bytes_in_use")


def describe_machine() -> dict[str, Any]:
    """Devices, cores and versions behind the figures. Brings up jax, so call it after measuring."""
    return {
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cpu_cores": os.cpu_count(),
        "cpu_architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }


def make_report(name: str, arguments: Sequence[str], settings: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """The JSON object that a benchmark prints.

    Args:
        name: the benchmark's module name.
        arguments: its command line.
        settings: the sizes that it ran with.
        figures: what it measured; units stand in the names.
    """
    report = {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"experiments.benchmarks.{name}", *arguments]),
        "machine": describe_machine(),
        "settings": dict(settings),
        "figures": dict(figures),
    }
    return json.dumps(report, indent=2, allow_nan=False)


def say(message: str) -> None:
    """Tell whoever watches how far the benchmark is; standard output holds the JSON alone."""
    print(message, file=sys.stderr, flush=True)
