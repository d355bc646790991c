# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.rewards.reply_text import check_pattern, extract_last


def test_last_match_counts():
    assert extract_last(r"<answer>(.*?)</answer>", "<answer>1</answer> no <answer>2</answer>") == "2"


def test_no_match_is_none():
    assert extract_last(r"#### (\d+)", "42") is None


def test_missing_group_names_field():
    with pytest.raises(ValueError, match=r"reply_regex: 'abc' has 0 groups but needs 1"):
        check_pattern("reply_regex", "abc", groups=1)
