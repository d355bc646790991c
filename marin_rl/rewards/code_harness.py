# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Test harness of model-written programs: chooses the code of a reply, runs it, and reports return values as data.

The source of this file is sent to the sandbox and runs in the program's process, so that hostile text can at most
exhaust that process. It imports the standard library only and holds no expected results. A program can read and replace
everything here, which changes only the data that it sends.
"""

import __future__

import ast
import contextlib
import itertools
import json
import os
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

MAX_ENDS = 20
"""Number of fences that are tried as the end of one block."""

_PYTHON = re.compile(r"\{?\s*\.?i?py(thon)?[ ]?[\d.]*\b", re.IGNORECASE)
_LINE_START = re.compile(r"[ \t]*([-*+]|\d{1,9}[.)])?[ \t]*")
_READS = {"input", "stdin", "open", "read", "fileinput"}
"""Names in programs that read input."""
_WRITES = {"print", "write", "writelines", "stdout"}
"""Names in programs that print."""


class Candidate(NamedTuple):
    """Text of a reply that is valid Python."""

    code: str
    """The text."""
    tree: ast.Module
    """Its syntax tree."""
    is_tagged: bool
    """Whether the text is a block tagged as Python."""


class _Fence(NamedTuple):
    line: int
    mark: str
    """The run of backticks or tildes."""
    info: str
    """The language, and the rest of the line."""
    starts_line: bool


def candidates(reply: str) -> list[Candidate]:
    r"""Return the complete blocks of a reply that are valid Python, in their order.

    The text before the first fence is a block, because the prompt may have opened it; so is a reply without fences. A
    fence in a string does not end a block: a block ends at the first fence before which the text is valid. A fence
    without a language that does not end a tagged block may begin or end one.

    >>> [candidate.code for candidate in candidates("so:\n```python\nprint(1)\n```\ndone")]
    ['print(1)\n']
    """
    lines = reply.replace("\r\n", "\n").split("\n")
    fences = [fence for number, line in enumerate(lines) if (fence := _fence(line, number)) is not None]
    before = lines[: fences[0].line] if fences else lines
    # The fence may end a line of code.
    found = [_parse(before) or _parse(["\n".join(before).partition("```")[0]])]
    position = 0
    while position < len(fences):
        candidate, position = _block(lines, fences, position)
        found.append(candidate)
    return [candidate for candidate in found if candidate is not None]


def _fence(line: str, number: int) -> _Fence | None:
    """Return the last fence of a line, if it can begin or end a block."""
    place = max(line.rfind("```"), line.rfind("~~~"))
    if place < 0:
        return None
    before = line[: place + 1].rstrip(line[place])
    info = line[place + 3 :].rstrip()
    if info[:1].isspace():
        # "``` python" names a language, "``` and so on" ends a block.
        info = info.strip() if _PYTHON.fullmatch(info.strip()) else ""
    starts_line = _LINE_START.fullmatch(before) is not None
    if not starts_line and (not info or line[place : place + 3] in before):
        return None
    return _Fence(number, line[len(before) : place + 3], info, starts_line)


def _block(lines: Sequence[str], fences: Sequence[_Fence], position: int) -> tuple[Candidate | None, int]:
    """Return the block that a fence begins, or None if it is not valid Python, and the position of the next fence."""
    opening = fences[position]
    ends = itertools.islice(_ends(opening, fences, position + 1), MAX_ENDS)
    first = next(ends, None)
    after = position + 1 if first is None else first + (not fences[first].info)
    if opening.info and not _PYTHON.match(opening.info):
        return None, after
    for end in () if first is None else itertools.chain([first], ends):
        candidate = _parse(lines[opening.line + 1 : fences[end].line], bool(opening.info))
        if candidate is not None:
            may_begin = fences[end].info or not (opening.info or end > position + 1)
            return candidate, end if may_begin else end + 1
    # The block may end within a line.
    limit = fences[position + 1].line if position + 1 < len(fences) else len(lines)
    code, mark, _ = "\n".join(lines[opening.line + 1 : limit]).partition(opening.mark)
    if mark:
        return _parse([code], bool(opening.info)), position + 1
    return None, after if opening.info else position + 1


def _ends(opening: _Fence, fences: Sequence[_Fence], position: int) -> Iterator[int]:
    for index in range(position, len(fences)):
        if fences[index].starts_line and fences[index].mark.startswith(opening.mark):
            yield index


def _parse(lines: Sequence[str], is_tagged: bool = False) -> Candidate | None:
    """Return the candidate of these lines; None if they are not valid Python, or hold no statement."""
    code = "\n".join(lines) + "\n"
    # Blocks in lists are indented.
    for form in dict.fromkeys((code, textwrap.dedent(code))):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.parse(form)
            return Candidate(form, tree, is_tagged) if tree.body else None
    return None


def choose_definitions(reply: str, names: Set[str]) -> str | None:
    """Return the last block of a reply that defines the called names, or None if no block defines any.

    If no block defines all of them, it is the last that defines the most. Imported names count less than definitions,
    because a block of examples can import the functions. `names` are those in the calls; built-in functions may be
    among them. The reply is without thoughts.
    """
    best: tuple[tuple[int, int], str | None] = (0, 0), None
    for candidate in candidates(reply):
        defined, imported = _names(candidate.tree)
        rank = len(names & defined), len(names & imported)
        if rank != (0, 0) and rank >= best[0]:
            best = rank, candidate.code
    return best[1]


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a module defines, and those that it imports."""
    defined, imported = set(), set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        match nodes.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.alias(name=name, asname=asname):
                imported.add((asname or name).split(".")[0])
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                pass
            case node:
                nodes.extend(ast.iter_child_nodes(node))
    return defined, imported


def choose_program(reply: str) -> str | None:
    """Return the last block of a reply that reads input and prints; None if the reply has no code.

    If no block does both, it is the last that does one of them, else the last of all: an excerpt or an example can
    follow the program. Of these blocks, those tagged as Python come first. The reply is without thoughts.
    """
    best: tuple[tuple[int, bool], str | None] = (0, False), None
    for candidate in candidates(reply):
        used = _used_names(candidate.tree)
        rank = (not used.isdisjoint(_READS)) + (not used.isdisjoint(_WRITES)), candidate.is_tagged
        if rank >= best[0]:
            best = rank, candidate.code
    return best[1]


def _used_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                names.add(name)
    return names


def to_json(value: Any) -> Any:
    """Return the JSON value of a result.

    Values of derived types count as the plain types: a `Counter` as dictionary, a named tuple as list, a `Fraction` and
    numpy's scalars as numbers, its arrays as lists.

    Raises:
        TypeError: if it has none, such as a set, or a dictionary whose keys are not strings.

    >>> to_json({"a": (None, 1)})
    {'a': [None, 1]}
    """
    # The frequent types come first, because results can have millions of values.
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("JSON has no keys other than strings")
        return {key: to_json(item) for key, item in value.items()}
    if _is_instance(value, "numpy", "generic", "ndarray"):
        return to_json(value.tolist())
    if _is_instance(value, "numbers", "Real") or _is_instance(value, "decimal", "Decimal"):
        whole = int(value)
        return whole if whole == value else float(value)
    raise TypeError(f"{type(value)} is not JSON")


def _is_instance(value: Any, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in names))


def print_program(reply: str) -> None:
    """Write the program of a reply to stdout, as JSON; null if it has none."""
    print(json.dumps(choose_program(reply)))


def run_calls(reply: str, calls: str) -> None:
    """Evaluate calls of functions of a reply, and write one line for each: JSON of its number and its value.

    A call that raises an error, or whose value is not JSON, has no value. Lines are written to stdout. What the code
    prints is discarded. The process ends with the last call. The reply is without thoughts; `calls` is a JSON list of
    Python expressions.
    """
    expressions = json.loads(calls)
    trees = [ast.parse(expression, mode="eval") for expression in expressions]
    names = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    code = choose_definitions(reply, names)
    if code is None:
        sys.exit("the reply has no complete block of Python code that defines the functions")
    output = os.fdopen(os.dup(1), "w", encoding="ascii")
    # The limit on output is for values.
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    # Dataclasses look up the module of their class.
    module = sys.modules["solution"] = types.ModuleType("solution")
    # Annotations are not evaluated: methods for LeetCode use `List` without importing it, as it is imported there.
    flags = __future__.annotations.compiler_flag
    exec(compile(code, "solution.py", "exec", flags, dont_inherit=True), module.__dict__)
    for number, tree in enumerate(trees):
        try:
            value = eval(compile(tree, "call.py", "eval", dont_inherit=True), module.__dict__)
            line = json.dumps([number, to_json(value)])
        except BaseException:
            line = json.dumps([number])
        output.write(line + "\n")
        output.flush()
    os._exit(0)
