# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the soak looks at in the end; that runs survive is tested in tests/faults/test_dead_workers.py."""

import contextlib
import sys
from pathlib import Path

import pytest

from experiments.lab.soak import (
    LiveRun,
    SoakError,
    check_end,
    whole_and_once,
)
from tests.tiny_run import TinyRun, copy_of


def ended(run: TinyRun) -> LiveRun:
    return LiveRun(run.argv, run.path, run.path.parent / "output.txt")


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        ({"groups": 5, "members": 4, "staleness": 0}, "groups of every step"),
        ({"groups": 4, "members": 3, "staleness": 0}, "each whole"),
        ({"groups": 4, "members": 4, "staleness": -1}, "none too old"),
    ],
)
def test_what_is_wrong_is_named(finished_run: TinyRun, expected: dict[str, int], wrong: str) -> None:
    assert whole_and_once(ended(finished_run), groups=4, members=4, staleness=0) == 6
    with pytest.raises(SoakError, match=f"^failed checks: {wrong}; 6 steps, 24 groups"):
        whole_and_once(ended(finished_run), **expected)


def test_a_lost_step_and_a_group_of_two_steps_are_seen(finished_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "copy")
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join([*lines[:3], *lines[4:]]))
    with pytest.raises(SoakError, match="steps in order"):
        whole_and_once(ended(run), groups=4, members=4, staleness=0)
    (run.path / "rollouts" / "step-00000003.parquet").unlink()
    with pytest.raises(SoakError, match="steps in order; 5 steps, 20 groups"):
        whole_and_once(ended(run), groups=4, members=4, staleness=0)


@pytest.mark.parametrize(
    ("program", "may"),
    [
        ("import os; os.kill(os.getpid(), 9)", True),
        ("print('going on'); print(\"error: Ray's node 12 on this machine has died\"); exit(1)", True),
        ("print('error: a worker has failed'); exit(1)", False),
        ("", False),
    ],
)
def test_a_run_may_end_only_if_it_or_its_ray_was_killed(tmp_path: Path, program: str, may: bool) -> None:
    run = LiveRun((), tmp_path, tmp_path / "output.txt")
    run.output.write_text("going on\nerror: Ray's node 11 on this machine has died\n")
    ended = LiveRun((), tmp_path, run.output, prefix=[sys.executable, "-u", "-c", program])
    ended.start()
    ended.end()
    with contextlib.nullcontext() if may else pytest.raises(SoakError, match=r"the run ended by itself with status \d"):
        check_end(ended)
