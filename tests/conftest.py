# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Settings of all tests: jax on the CPU, no network, and a compilation cache."""

import gc
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run, so that a change fails by its own fault only; the profile `random` draws new ones. The
# duration of an example depends on the load of the machine.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("repeatable")

# Set before jax is imported, and as environment variables, so that subprocesses and workers inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The package sets it too, but tests may import other modules first.
os.environ.setdefault("EQX_ON_ERROR", "off")
# Programs that tests start would compile this package's source each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Almost every test spends more time compiling than running. "0" tests the programs of a real run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Of XLA's two code generators for the CPU, the newer one takes five times as long to compile. More versions of XLA know
# this option than the flag `--xla_cpu_use_fusion_emitters`; an unknown one ends the process. By default, threads
# compile the parts of a program, which takes half as much CPU time again as to compile the whole.
_QUICK = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true --xla_cpu_parallel_codegen_split_count=1"
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0" and _QUICK not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()

# Shells start background jobs with SIGINT ignored, and child processes inherit that; tests send it to runs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.tiny_run", "tests.tiny_learner", "tests.gcs_emulator"]

MAX_CACHE_BYTES = 2**32
"""Size at which the folder of compiled programs begins anew."""
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # It outlives the run; processes and workers that this one starts inherit it.
    _CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "marin_rl" / "tests"
    if _CACHE.is_dir() and sum(entry.stat().st_size for entry in os.scandir(_CACHE)) > MAX_CACHE_BYTES:
        shutil.rmtree(_CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


_XLA_FLAGS = os.environ.get("XLA_FLAGS")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse modules that set XLA_FLAGS, which changes the devices of all later processes.

    The collection of doctests imports every file, including scripts. These modules stay, and full garbage collections
    that visit them take a fifth of the time of tests.
    """
    flags = os.environ.get("XLA_FLAGS")
    if flags != _XLA_FLAGS:
        raise pytest.UsageError(f"a module set XLA_FLAGS={flags} when it was imported; set it only under __main__")
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker starts one when the other workers are idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


_MAPS = Path("/proc/self/maps")
"""The memory maps of this process. Linux limits them to 65,530 by default. Each compiled program keeps some, and at the
limit threads cannot start and XLA crashes."""
_TESTS = itertools.count(1)


def clear_programs(limit: int) -> None:
    """Clear compiled programs if there are more maps than this; the cache on disk has most of them."""
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > limit:
        import jax

        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Clear compiled programs between modules, so that tests of one module share them."""
    yield
    clear_programs(20_000)


def pytest_runtest_teardown() -> None:
    """Clear them also between tests of a module that compiles very many; counting maps takes up to 40 ms."""
    if next(_TESTS) % 10 == 0:
        clear_programs(40_000)
