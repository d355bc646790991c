# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator

import pytest

from tests.runs.viewer.browser import CHROMIUM, Browser, browser


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser tab, shared by all tests; each test opens its own page."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
