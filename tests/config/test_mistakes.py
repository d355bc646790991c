# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys

import pytest

from tests.config.mistakes import LEVANTER, MISTAKES, write_files

Results = dict[str, tuple[int, str, bool]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Exit status and output of each mistake, and whether levanter was imported, in a process that makes them all."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    command = [sys.executable, "-m", "tests.config.mistakes", str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.medium
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_reported(case: str, results: Results):
    status, output, imported = results[case]
    lines = output.rstrip("\n").split("\n")
    assert status == 1
    assert output.startswith("error: ")
    assert "Traceback" not in output
    for text in MISTAKES[case].texts:
        assert text in output
    assert len(lines) == len(set(lines)) == MISTAKES[case].lines, output
    assert not imported or case in LEVANTER
