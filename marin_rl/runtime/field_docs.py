# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Descriptions of config fields, read from the source of their classes.

The first of these is used: the docstring below the field, the comment on its line, the comment directly above it
(unless further fields follow without a blank line), the `Args` of the class's docstring, the same of its base classes,
and, for fields that levanter does not describe, `LEVANTER_FIELD_DOCS`.
"""

import ast
import functools
import inspect
import io
import re
import textwrap
import tokenize
import typing
from typing import Any

from marin_rl.runtime.levanter_field_docs import LEVANTER_FIELD_DOCS


def field_doc(section: Any, name: str) -> str:
    """Description of a field as one paragraph; empty if the field is not described.

    Args:
        section: the dataclass.
        name: name of the field.
    """
    plain = typing.get_origin(section) or section
    for ancestor in plain.__mro__:
        doc = _field_docs(ancestor).get(name) or _args_of(ancestor).get(name)
        if doc:
            return doc
    return LEVANTER_FIELD_DOCS.get(name, "") if plain.__module__.split(".")[0] in ("levanter", "haliax") else ""


def section_doc(section: Any) -> str:
    """First paragraph of a class's docstring; empty if it is the one that `dataclass` generates."""
    plain = typing.get_origin(section) or section
    text = inspect.cleandoc(plain.__dict__.get("__doc__") or "")
    return "" if text.startswith(f"{plain.__name__}(") else _paragraph(text.split("\n\n")[0])


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        # Built-in classes, and classes defined interactively.
        return {}
    lines, comments = source.splitlines(), _comments(source)
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    docs: dict[str, str] = {}
    for index, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            below = _docstring(body[index + 1]) if index + 1 < len(body) else ""
            end = node.end_lineno or node.lineno
            inline = " ".join(comments[number] for number in range(node.lineno, end + 1) if number in comments)
            alone = end >= len(lines) or not lines[end].strip()
            above = _comment_above(node.lineno, lines, comments) if alone else ""
            docs[node.target.id] = _paragraph(below or inline or above)
    return docs


def _docstring(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _comments(source: str) -> dict[int, str]:
    """Comments by line number, starting at 1."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(("noqa", "type:"))
    }


def _comment_above(line: int, lines: list[str], comments: dict[int, str]) -> str:
    first = line
    while first > 1 and lines[first - 2].strip().startswith("#"):
        first -= 1
    return " ".join(comments[number] for number in range(first, line) if number in comments)


_ARGUMENT = re.compile(r"^(\w+)(?: \([^)]*\))?: *(.*)$")


@functools.cache
def _args_of(cls: type) -> dict[str, str]:
    """Descriptions in the `Args` section of a class's docstring, by name."""
    _, _, text = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Args:\n")
    parts_by_name: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in textwrap.dedent(text).splitlines():
        match = _ARGUMENT.match(line)
        if match:
            current = parts_by_name.setdefault(match[1], [match[2]])
        elif current is not None and line.startswith(" "):
            current.append(line)
        else:
            current = None
    return {name: _paragraph(" ".join(parts)) for name, parts in parts_by_name.items()}


def _paragraph(text: str) -> str:
    return " ".join(text.split())
