# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marin_rl.runs.rollout_store import RolloutStoreError, list_files, read_file
from marin_rl.runs.viewer.html_page import page_data
from marin_rl.runs.viewer.selection import (
    RolloutNotFoundError,
    Selection,
    find_rollout,
    list_rollouts,
    logprob_differences,
    newest_step,
    open_rollouts,
    parse_steps,
)
from marin_rl.types import RolloutStatus
from tests.rollouts.rollout_cases import group_of, write
from tests.runs.viewer.run_cases import empty_run, small_run


@pytest.fixture
def folder(tmp_path):
    return open_rollouts(small_run(tmp_path / "run"))


@pytest.fixture
def mixed(tmp_path):
    """A renamed file with rollouts of two steps and of an evaluation."""
    run = small_run(tmp_path / "run")
    tables = [read_file(file.path) for file in list_files(run / "rollouts")]
    pq.write_table(pa.concat_tables(tables), tmp_path / "all of them.parquet")
    return open_rollouts(tmp_path / "all of them.parquet")


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), ["s1-0", "s1-1", "s2-0", "s2-1", "g-0", "g-1", "g-2", "held-0"]),
        (Selection(steps=range(2, 4), min_reward=1.0), ["s2-0", "g-0", "held-0"]),
        (Selection(evaluation=True), ["held-0"]),
    ],
)
def test_rows_of_a_file_are_filtered(mixed, selection, expected):
    assert [row["id"] for row in list_rollouts(mixed, selection, limit=99).rows] == expected
    assert {rollout["id"] for rollout in page_data(mixed, selection, 99)["rollouts"]} == set(expected)


def test_rollout_of_a_file_is_found_by_id(mixed):
    assert find_rollout(mixed, "g-0")["turns"][1]["reward"] == 1.0
    assert find_rollout(mixed, "s2-1", range(2, 3))["step"] == 2
    with pytest.raises(RolloutNotFoundError, match="no stored rollout has the id 's2-1'"):
        find_rollout(mixed, "s2-1", range(1, 2))


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), ["s1-0", "s1-1", "s2-0", "s2-1", "g-0", "g-1", "g-2"]),
        (Selection(steps=range(2, 4)), ["s2-0", "s2-1", "g-0", "g-1", "g-2"]),
        (Selection(evaluation=True), ["held-0"]),
        (Selection(environment="sums", status=RolloutStatus.FAILED), ["g-1"]),
        (Selection(environment="chess"), []),
        (Selection(min_reward=0.25), ["s1-0", "s2-0", "g-0", "g-2"]),
        (Selection(max_reward=0.25), ["s1-1", "s2-1", "g-2"]),
    ],
)
def test_filters_are_combined(folder, selection, expected):
    assert [row["id"] for row in list_rollouts(folder, selection, limit=99).rows] == expected


def test_list_is_limited_with_the_total_count_and_has_the_reply_of_each_rollout(folder):
    listing = list_rollouts(folder, Selection(), limit=3)
    assert ([row["id"] for row in listing.rows], listing.total) == (["s1-0", "s1-1", "s2-0"], 7)
    rows = list_rollouts(folder, Selection(), limit=99).rows
    stored = {row["id"]: find_rollout(folder, row["id"])["turns"] for row in rows}
    replies = {name: turns[-1]["messages"][-1]["content"] if turns else "" for name, turns in stored.items()}
    assert {row["id"]: row["reply"] for row in rows} == replies
    assert len(set(replies.values())) > 1


def test_differences_are_policy_minus_learner(folder):
    first, second = find_rollout(folder, "g-0")["turns"]
    assert logprob_differences(first) == [-0.125 + 0.125, -0.25 + 0.25, -0.375 + 0.5]
    assert logprob_differences(second) == [-0.125 + 0.125, -0.25 + 0.5]
    assert logprob_differences(find_rollout(folder, "s1-0")["turns"][0]) is None


def test_newest_step(folder, tmp_path):
    assert newest_step(folder, evaluation=False) == 3
    assert newest_step(open_rollouts(empty_run(tmp_path / "empty")), evaluation=True) is None


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        *(("12", (12, 12)), ("10-20", (10, 20)), ("10-", (10, 10**12 - 1)), ("-20", (0, 20))),
        *((text, "is not a range of steps; write 12, 10-20") for text in ("", "-", "x", "1-x", "1-2-3", "1.5", "--")),
        ("5-3", "the range of steps '5-3' is empty; write the lower step first: 3-5"),
    ],
)
def test_ranges_of_steps(text, ends):
    if isinstance(ends, str):
        with pytest.raises(ValueError, match=ends):
            parse_steps(text)
    else:
        assert (parse_steps(text)[0], parse_steps(text)[-1]) == ends


def test_errors_name_the_stored_steps_and_damaged_files(folder, tmp_path):
    write(folder.rollouts, 5, [group_of("held", 0.0)], purpose="evaluation")
    assert [find_rollout(folder, "held-0", steps)["step"] for steps in (None, range(3, 4))] == [5, 3]
    for selection, message in (
        (Selection(steps=range(4, 9)), "no stored rollouts of training; steps 1 to 3 are stored"),
        (Selection(steps=range(2, 3), evaluation=True), "no stored rollouts of an evaluation; steps 3 to 5 are stored"),
    ):
        for read in (lambda selection: list_rollouts(folder, selection, limit=99), lambda s: page_data(folder, s, 99)):
            with pytest.raises(RolloutNotFoundError, match=message):
                read(selection)
    with pytest.raises(RolloutNotFoundError, match="no stored rollout has the id 'nobody'; steps 1 to 5 are stored"):
        find_rollout(folder, "nobody", range(2, 3))
    with pytest.raises(RolloutNotFoundError, match="no rollouts are stored"):
        find_rollout(open_rollouts(empty_run(tmp_path / "empty")), "nobody")
    (folder.rollouts / "step-00000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(RolloutStoreError, match="step-00000002"):
        list_rollouts(folder, Selection(), limit=1)
