# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Export a run as one self-contained HTML page, without network access or libraries.

Texts of models cannot become markup or code: they are embedded as JSON that cannot close its element, the script
inserts them with `textContent` only, and the content security policy blocks other scripts and all requests.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from marin_rl.training.run_directory import write_atomically
from marin_rl.viewing.page_data import page_data
from marin_rl.viewing.selection import Selection, StoredRollouts

_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(source: StoredRollouts, target: Path, selection: Selection, max_rollouts: int) -> int:
    """Write the page of a run.

    Args:
        source: the run, or one file of rollouts.
        target: output file, replaced atomically.
        selection: filter of the rollouts.
        max_rollouts: maximum rollouts on the page.

    Returns:
        Number of rollouts on the page.

    Raises:
        RunDirectoryError: if the file cannot be written, or metrics.jsonl is damaged.
        RolloutStoreError: if a file of rollouts is damaged.
    """
    data = page_data(source, selection, max_rollouts)
    write_atomically(target, render(data))
    return len(data["rollouts"])


def render(data: Mapping[str, Any]) -> str:
    """Render the page.

    Args:
        data: content of the page, from `page_data`.

    Returns:
        The HTML text.
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
    r"""Encode a value as JSON that is safe inside a script element.

    >>> escaped_json("</script>")
    '"\\u003c/script\\u003e"'
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _asset(name: str) -> str:
    return resources.files("marin_rl.viewing").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
