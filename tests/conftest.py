# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What every test needs: jax on the CPU, no network, and programs compiled once per session."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says nothing about the code on a machine that does other things too.
hypothesis.settings.register_profile("no deadlines", deadline=None)
hypothesis.settings.load_profile("no deadlines")

# Set before anything imports jax, and in the environment, so that subprocesses and workers inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As the package does, which tests do not always import first.
os.environ.setdefault("EQX_ON_ERROR", "off")
# Compiling takes longer than running in almost every test. "0" runs the tests with the programs of a real run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

pytest_plugins = ["tests.tiny_run"]

_OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _OWN_CACHE = tempfile.mkdtemp(prefix="marin_rl_jax_cache_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _OWN_CACHE
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


_XLA_FLAGS = os.environ.get("XLA_FLAGS")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse modules that change the devices of every process started after them.

    Collecting doctests imports every file, the scripts among the tests too.
    """
    found = os.environ.get("XLA_FLAGS")
    if found != _XLA_FLAGS:
        raise pytest.UsageError(f"a module set XLA_FLAGS={found} when it was imported; do so under __main__ alone")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker begins one when the others have nothing left to run."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


_MAPS = Path("/proc/self/maps")
_MOST_MAPS = 20_000
"""Of the 65,530 pieces of memory that Linux lets a process map by default. Each compiled program takes some for good,
and where there are none left, threads cannot be started and XLA crashes."""


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Forget compiled programs between modules when there are many; the cache on disk has most of them."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        import jax

        jax.clear_caches()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)
