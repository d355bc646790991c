# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Shows doctests as code in the API reference; Markdown would read `>>>` as a quotation."""

import re

import griffe

# A doctest runs from its first prompt to the next empty line.
_DOCTEST = re.compile(r"(?m)^>>> .*(?:\n.+)*")


class DoctestBlocks(griffe.Extension):
    """Fences the doctests of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring of an object that has just been read."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
