# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.rewards.patterns import FormatConfig, check_pattern, extract_last


def test_last_match_counts():
    assert extract_last(r"<answer>(.*?)</answer>", "<answer>1</answer> no <answer>2</answer>") == "2"


def test_no_match_is_none():
    assert extract_last(r"#### (\d+)", "42") is None


def test_format_must_match_the_whole_reply():
    config = FormatConfig(regex=r"(?s)<think>.*</think>-?\d+", weight=0.25)
    assert config.reward("<think>a\nb</think>4") == 0.25
    assert config.reward("<think>a</think>4 apples") == 0.0


def test_broken_pattern_names_field_and_pattern():
    with pytest.raises(ValueError, match=r"format\.regex: '\(' is not a regular expression"):
        FormatConfig(regex="(")


def test_missing_group_names_field():
    with pytest.raises(ValueError, match=r"reply_regex: 'abc' has 0 groups but needs 1"):
        check_pattern("reply_regex", "abc", groups=1)
