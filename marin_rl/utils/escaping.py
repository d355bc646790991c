# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Escaping of text from models and files, so that it cannot control a terminal or reorder a line."""

import unicodedata

_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control, format (bidirectional overrides, zero-width), surrogate, private, unassigned, line and paragraph
separators."""


def escape(text: str) -> str:
    r"""Replace invisible and control characters by escape sequences; keep newlines.

    >>> escape("a\x1b[31mred\u202eb\tc")
    'a\\x1b[31mred\\u202eb\\tc'
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in _HIDDEN_CATEGORIES
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def escape_line(text: str) -> str:
    r"""Like `escape`, but also replace newlines.

    >>> escape_line("a\nb")
    'a\\nb'
    """
    return escape(text).replace("\n", "\\n")


def replace_surrogates(text: str) -> str:
    r"""Replace lone surrogates, which UTF-8 cannot encode and tokenizers reject, by question marks.

    >>> replace_surrogates("a\ud800b")
    'a?b'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, length: int) -> str:
    """Leave out the middle of a text that has more than `length` characters; both ends of a prompt or reply matter.

    >>> shorten("Compute 12+34. Reply with the number only.", 21)
    'Compute 12…mber only.'
    """
    if len(text) <= length:
        return text
    end = (length - 1) // 2
    return f"{text[: length - 1 - end]}…{text[len(text) - end :]}"


def shown_bytes(piece: bytes) -> str:
    r"""Decode a token's bytes to one line of text; incomplete UTF-8 characters become byte escapes.

    >>> shown_bytes(b"5\n"), shown_bytes(b"\xc3")
    ('5\\n', '\\xc3')
    """
    return escape_line(piece.decode("utf-8", "backslashreplace"))
