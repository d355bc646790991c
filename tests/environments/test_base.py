# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import collections

import pytest

from marin_rl.environments.base import Split, split_of


@pytest.mark.parametrize(("held_out", "validation"), [(0.1, 0.05), (0.3, 0.2), (0.0, 0.0)])
def test_shares_of_the_splits_are_those_asked_for(held_out, validation):
    counts = collections.Counter(split_of(f"{a}+{b}", held_out, validation) for a in range(100) for b in range(100))
    assert counts[Split.HELD_OUT] / 10_000 == pytest.approx(held_out, abs=0.015)
    assert counts[Split.VALIDATION] / 10_000 == pytest.approx(validation, abs=0.015)


def test_a_larger_held_out_share_keeps_what_was_held_out():
    problems = [f"{a}x{b}" for a in range(50) for b in range(50)]
    small = {problem for problem in problems if split_of(problem, 0.1, 0.0) is Split.HELD_OUT}
    large = {problem for problem in problems if split_of(problem, 0.3, 0.0) is Split.HELD_OUT}
    assert small < large


def test_the_split_of_a_text_is_the_same_on_every_machine():
    # Written down once: a split that moved would put problems of an old run's training set into the held-out one.
    splits = [split_of(f"{n}+{n}=", 0.3, 0.3) for n in range(6)]
    assert splits == [Split.HELD_OUT] * 5 + [Split.TRAIN]
