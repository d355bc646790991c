# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Text from models and files, made safe to show: what would act on a terminal or reorder a line is written out."""

import unicodedata

_KEPT = frozenset("\n")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control, format (bidirectional overrides, zero-width), surrogate, private, unassigned, line and paragraph
separators."""


def escape(text: str) -> str:
    r"""The text with every character that is not plainly seen written as an escape; newlines stay.

    >>> escape("a\x1b[31mred\u202eb\tc")
    'a\\x1b[31mred\\u202eb\\tc'
    """
    if text.isprintable():
        return text
    return "".join(character if _is_shown(character) else _escaped(character) for character in text)


def escape_line(text: str) -> str:
    r"""As `escape`, with newlines written out too.

    >>> escape_line("a\nb")
    'a\\nb'
    """
    return escape(text).replace("\n", "\\n")


def shown_bytes(piece: bytes) -> str:
    r"""A token's bytes in one line; what is only part of a character is written as bytes.

    >>> shown_bytes(b"5\n"), shown_bytes(b"\xc3")
    ('5\\n', '\\xc3')
    """
    return escape_line(piece.decode("utf-8", "backslashreplace"))


def _is_shown(character: str) -> bool:
    return character in _KEPT or unicodedata.category(character) not in _HIDDEN_CATEGORIES


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
