# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""All prompts of a conversation from one rendering, for templates that only append.

The syntax tree of a template can prove that its text up to a message depends on no later message, and its text after
the last message on no message. Then a prompt is the text up to its end, and the text after the last message. Other
templates are rendered once per prompt.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jinja2
from jinja2 import nodes

_PAST = {"first", "index", "index0", "previtem"}
"""Attributes of `loop` that do not depend on later messages."""


class _LooksAheadError(Exception):
    """A template reads a message that some prompts do not have."""


class _Forward:
    """Messages that are only iterated over, sliced from a start on, or indexed within the shortest prompt."""

    def __init__(self, messages: Sequence[Any], start: int, shared: int, note: Callable[[int], object]):
        self._messages, self._start, self._shared, self._note = messages, start, shared, note

    def __iter__(self) -> Iterator[Any]:
        for position in range(self._start, len(self._messages)):
            self._note(position)
            yield self._messages[position]
        self._note(len(self._messages))

    def __getitem__(self, key: Any) -> Any:
        is_slice = isinstance(key, slice)
        start = key.start or 0 if is_slice else key
        if not isinstance(start, int) or not 0 <= start < self._shared - self._start:
            # The sandbox of Jinja would take a LookupError for an undefined value.
            raise _LooksAheadError
        if not is_slice:
            return self._messages[self._start + start]
        if key.stop is not None or key.step is not None:
            raise _LooksAheadError
        return _Forward(self._messages, self._start + start, self._shared, self._note)


def render_prefixes(
    template: jinja2.Template, messages: Sequence[Any], counts: Sequence[int], variables: Mapping[str, Any]
) -> Iterator[str] | None:
    """Render a conversation's first messages, for each of several numbers of messages, at once.

    Args:
        template: a template that `is_append_only`.
        messages: the conversation.
        counts: ascending numbers of messages, at least 1.
        variables: other variables of the template.

    Returns:
        The texts; None if the template does not read all messages, or reads one ahead.
    """
    chunks: list[str] = []
    starts: dict[int, int] = {}
    try:
        forward = _Forward(messages, 0, counts[0], lambda position: starts.setdefault(position, len(chunks)))
        for chunk in template.generate(messages=forward, **variables):
            chunks.append(chunk)
    except _LooksAheadError:
        return None
    if not starts.keys() >= {*counts, len(messages)}:
        return None
    text, end = "".join(chunks), "".join(chunks[starts[len(messages)] :])
    lengths = [0, *itertools.accumulate(map(len, chunks))]
    return (text[: lengths[starts[count]]] + end for count in counts)


def is_append_only(tree: nodes.Template) -> bool:
    """Return whether the syntax tree of a template proves that `render_prefixes` is exact.

    The messages are read in order by one loop of the top level, and otherwise only by an index, or by a slice whose
    name is treated alike; both are checked when they are rendered. The loop reads no attribute of `loop` that depends
    on later messages. The text after it reads no variable that the template sets.
    """
    messages = {"messages"}
    assigns = tree.find_all(nodes.Assign)
    assigned = [(node.target.name, node.node) for node in assigns if isinstance(node.target, nodes.Name)]
    messages |= {name for name, value in assigned if _read_by(value, messages)}
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _read_by(node.iter, messages)]
    # The text of a recursive loop is written at its end.
    if len(loops) != 1 or loops[0].recursive or loops[0].test or loops[0].else_ or any(tree.find_all(nodes.Block)):
        return False
    readers = [loops[0].iter, *(value for name, value in assigned if name in messages)]
    readers += [node for node in tree.find_all(nodes.Getitem) if not isinstance(node.arg, nodes.Slice)]
    harmless = {id(_read_by(node, messages)) for node in readers}
    past = [node for node in tree.find_all(nodes.Getattr) if node.attr in _PAST]
    harmless |= {id(_read_by(node.node, {"loop"})) for node in past}
    names = list(tree.find_all(nodes.Name))
    changed = {*messages, "loop", *(name.name for name in names if name.ctx != "load")}
    changed |= {macro.name for macro in tree.find_all(nodes.Macro)}
    end = {name.name for node in tree.body[tree.body.index(loops[0]) + 1 :] for name in node.find_all(nodes.Name)}
    watched = [name for name in names if name.ctx == "load" and name.name in {*messages, "loop"}]
    return all(id(name) in harmless for name in watched) and not end & changed


def _read_by(node: nodes.Node, names: Set[str]) -> nodes.Name | None:
    """Return the variable, one of some names, that an expression is or takes an item or a slice of."""
    inner = node.node if isinstance(node, nodes.Getitem) else node
    return inner if isinstance(inner, nodes.Name) and inner.name in names else None
