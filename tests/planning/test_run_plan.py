# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.planning.run_plan import Lengths, default_lengths
from tests.planning.plan_cases import tiny_config


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], Lengths(24, 8)),
        (["--rollouts.max_prompt_length", "10"], Lengths(10, 8)),
        (["--rollouts.max_turns", "3"], Lengths(8, 24)),
        (["--rollouts.max_turns", "9"], Lengths(1, 31)),
        (["--rollouts.max_turns", "3", "--rollouts.max_tokens", "20"], Lengths(12, 20)),
    ],
)
def test_longest_rollouts_fill_the_context(overrides: list[str], lengths: Lengths):
    assert default_lengths(tiny_config(*overrides)) == lengths
