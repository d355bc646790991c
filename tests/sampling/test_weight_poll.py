# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.sampling.weight_poll import WeightPoll


@pytest.mark.parametrize("rounds", [0, -3])
def test_there_is_a_round_between_two_looks(rounds: int):
    with pytest.raises(ValueError, match=f"decode_steps must be at least 1, got {rounds}"):
        WeightPoll(lambda: None, rounds)
