# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from marin_rl.utils.seeds import derive_seed


def test_the_seed_never_changes():
    # Pinned: a resumed run must repeat the draws, also on another machine and with a later version.
    assert derive_seed(0, "train", 1, 2, 3) == 4340622469884738727


def test_seeds_are_below_two_to_the_63_and_depend_on_every_part_and_its_position():
    parts = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (1, 2), (2, 1), (1, 23), (12, 3), ("ab", "c"), ("a", "bc")]
    parts += [(1,), ("1",), (), (0,), *(("x", index) for index in range(2000))]
    seeds = [derive_seed(*each) for each in parts]
    assert len(set(seeds)) == len(seeds)
    assert 2**62 < max(seeds) < 2**63
    assert min(seeds) >= 0
