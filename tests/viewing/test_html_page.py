# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.errors import RunDirectoryError
from marin_rl.viewing.html_page import escaped_json, render, write_page
from marin_rl.viewing.page_data import page_data
from marin_rl.viewing.selection import Selection, open_rollouts
from tests.viewing.run_cases import small_run

PLAIN = {"run": "", "steps": 0, "notes": [], "curves": {}, "panels": [], "phases": {}, "rollouts": []}


class Elements(HTMLParser):
    """Elements of a page, with the content of its scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.inside: dict[str, str] = {}
        self.open = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        kind = dict(attrs).get("type", "")
        self.open = f"{tag} {kind}".strip() if tag in ("script", "style", "title") else ""

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open:
            self.inside[self.open] = self.inside.get(self.open, "") + data


@pytest.fixture
def run(tmp_path):
    return open_rollouts(small_run(tmp_path / "run"))


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_json_round_trips(value):
    text = escaped_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_texts_do_not_change_the_elements_of_the_page(text):
    evil = {**PLAIN, "run": text, "notes": [text, f"</script>{text}<script>", f"<!--{text}-->", "<!--<script>"]}
    page = Elements(render(evil))
    assert page.tags == Elements(render(PLAIN)).tags
    assert json.loads(page.inside["script application/json"]) == evil


def test_page_is_self_contained(run, tmp_path):
    target = tmp_path / "page.html"
    assert write_page(run, target, Selection(), 500) == 7
    text = target.read_text(encoding="utf-8")
    page = Elements(text)
    assert not {"link", "img", "iframe", "base", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "style") or name.startswith("on")]
    outside = re.findall(r"https?://[^\s\"']+", text)
    assert set(outside) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in page.inside["style"]
    assert json.loads(page.inside["script application/json"]) == json.loads(
        json.dumps(page_data(run, Selection(), 500))
    )


def test_policy_allows_only_the_script_and_the_style(run, tmp_path):
    text = render(page_data(run, Selection(), 500))
    page = Elements(text)
    [policy] = [value for name, value in page.attributes if name == "content" and "default-src" in (value or "")]
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.inside[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_script_does_not_create_markup_from_text():
    script = Elements(render(PLAIN)).inside["script"]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "fetch(",
        "import(",
    ):
        assert word not in script, word


def test_unwritable_page_is_named(run, tmp_path):
    with pytest.raises(RunDirectoryError, match="cannot write"):
        write_page(run, tmp_path / "missing" / "page.html", Selection(), 500)
