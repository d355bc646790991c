# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio

import pytest

from marin_rl.environments.external import MissingPackageError, require_package, run_in_thread


def test_a_missing_package_names_the_extra():
    require_package("json", "json")
    with pytest.raises(
        MissingPackageError,
        match=r"environment.type 'games' needs the package no_games.*pip install 'marin_rl\[games\]'",
    ):
        require_package("no_games", "games")


def test_coroutines_run_within_another_event_loop():
    async def outer() -> int:
        return run_in_thread(asyncio.sleep(0, 7))

    assert asyncio.run(outer()) == run_in_thread(asyncio.sleep(0, 7)) == 7
