# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run as one self-contained page: no network, no library, nothing in it but what the run wrote.

Texts of models are data and stay data: they travel as JSON that cannot end its element, the script puts them on the
page with `textContent` alone, and the page's policy lets no other script run and nothing be loaded.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from marin_rl.runtime.run_directory import write_atomically
from marin_rl.viewing.page_data import page_data
from marin_rl.viewing.selection import RolloutSource, Selection

_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(source: RolloutSource, target: Path, selection: Selection, max_rollouts: int) -> int:
    """Write the page of a run.

    Args:
        source: the run, or one file of rollouts.
        target: the file, replaced whole.
        selection: which rollouts are on it.
        max_rollouts: most of them.

    Returns:
        How many rollouts it holds.

    Raises:
        RunDirectoryError: if the file cannot be written, or metrics.jsonl is damaged.
        RolloutStoreError: if a file of rollouts is damaged.
    """
    data = page_data(source, selection, max_rollouts)
    write_atomically(target, render(data))
    return len(data["rollouts"])


def render(data: Mapping[str, Any]) -> str:
    """The page's text.

    Args:
        data: what it shows, as `page_data` gives it.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": html.escape(policy, quote=False),
        "title": html.escape(data["run"]),
        "style": style,
        "data": escaped_json(data),
        "script": script,
    }
    parts = _asset("page.html").split("%%")
    return "".join(part if index % 2 == 0 else values[part] for index, part in enumerate(parts))


def escaped_json(value: Any) -> str:
    r"""JSON that means the same inside a script element, whatever texts it holds.

    >>> escaped_json("</script>")
    '"\\u003c/script\\u003e"'
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _asset(name: str) -> str:
    return resources.files("marin_rl.viewing").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
