# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.rewards import reply_text
from marin_rl.rewards.reply_text import Found, check_pattern, extract_last, search_reply


def test_last_match_counts():
    assert extract_last(r"<answer>(.*?)</answer>", "<answer>1</answer> no <answer>2</answer>") == "2"


def test_no_match_is_none():
    assert extract_last(r"#### (\d+)", "42") is None


def test_missing_group_names_field():
    with pytest.raises(ValueError, match=r"reply_regex: 'abc' has 0 groups but needs 1"):
        check_pattern("reply_regex", "abc", groups=1)


@pytest.mark.parametrize(
    ("pattern", "text", "whole", "found"),
    [
        (r"#### (\d+)", "#### 41, no: #### 42.", False, Found("42", ".")),
        (r"#### (\d+)", "42", False, None),
        (r"\d+", "42", False, Found(None, "")),
        (r"(a)|b", "ab", False, Found(None, "")),
        (r"(x)", "x" + "y" * 300, False, Found("x", "y" * 100)),
        (r"(?s)<think>.*</think>\d+", "<think>\n</think>42", True, Found(None, "")),
        (r"\d+", "42.", True, None),
        (r"(.)", "\ud800", True, Found("\ud800", "")),
        (r"", "", True, Found(None, "")),
    ],
)
def test_search_of_a_reply(pattern: str, text: str, whole: bool, found: Found | None):
    assert search_reply(pattern, text, whole=whole) == found


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a+)+b", "a" * 100),
        (r"(a|aa)+$", "a" * 100 + "!"),
        (r"(.*?,){30}P", "x," * 60),
        (r"(?s)<answer>(.*?)</answer>", "<answer>" * 100_000),
        (r"\s+(x)", " " * 200_000),
        (r"(\w+\s?)*!", "word " * 100),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_search_without_end_finds_nothing(monkeypatch, caplog, pattern: str, text: str, whole: bool):
    monkeypatch.setattr(reply_text, "SEARCH_SECONDS", 0.1)
    assert search_reply(pattern, text, whole=whole) is None
    # Of a whole text, some of the patterns are refuted at its first character.
    assert whole or caplog.text.count("was given up") == 1
    assert search_reply(r"(\d+)", "42") == Found("42", "")
