# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Descriptions of config fields, read from the source of their classes.

The first of these is used: the docstring below the field, the comment on its lines, the `Args` of the class's
docstring, and the same of its base classes. Some of levanter's fields have none of them.

Draccus' `get_attribute_docstring` misses fields with defaults on several lines, and does not read `Args`.
"""

import ast
import functools
import inspect
import io
import itertools
import re
import textwrap
import tokenize
import typing
from typing import Any

from marin_rl.utils.levanter_line import field_of_key


def field_doc(section: Any, name: str) -> str:
    """Description of the field `name` of a dataclass as one paragraph; empty if the field is not described."""
    plain = typing.get_origin(section) or section
    field = field_of_key(plain, name)
    for ancestor in plain.__mro__:
        if doc := _field_docs(ancestor).get(field) or _args_of(ancestor).get(field):
            return doc
    return ""


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
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(("noqa", "type:"))
    }
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    docs: dict[str, str] = {}
    for node, following in itertools.zip_longest(body, body[1:]):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = _paragraph(doc)
            case ast.AnnAssign(target=ast.Name(id=name), lineno=first, end_lineno=int(last)), _:
                docs[name] = _paragraph(" ".join(comments.get(line, "") for line in range(first, last + 1)))
    return docs


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
