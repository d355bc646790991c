# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.utils.escaping import escape, escape_line, shown_bytes


@given(st.text(st.characters()))
def test_escaped_text_has_no_control_characters(text):
    for character in escape(text):
        assert character == "\n" or unicodedata.category(character)[0] not in "C"
    assert "\n" not in escape_line(text)
    escape(text).encode("utf-8")


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_visible_characters_are_unchanged(text):
    assert escape(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "\x1b]8;;https://example.org\x1b\\here\x1b]8;;\x1b\\",
            "\\x1b]8;;https://example.org\\x1b\\here\\x1b]8;;\\x1b\\",
        ),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb\u2066c\u200bd", "a\\u202eb\\u2066c\\u200bd"),
        ("over\rwritten\b", "over\\rwritten\\x08"),
        ("line\u2028end", "line\\u2028end"),
    ],
)
def test_escape_sequences_are_escaped(text, shown):
    assert escape(text) == shown


@given(st.binary())
def test_any_bytes_become_one_line(piece):
    assert "\n" not in shown_bytes(piece)


def test_text_of_other_scripts_and_emoji_is_unchanged():
    assert shown_bytes("naïve 数学 🙂".encode()) == "naïve 数学 🙂"
