# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.runs.viewer import html_page
from marin_rl.runs.viewer.html_page import escaped_json, page_data, render, write_page
from marin_rl.runs.viewer.selection import Selection, open_rollouts
from marin_rl.utils.errors import RunDirectoryError
from tests.rollouts.rollout_cases import group_of, write
from tests.runs.viewer.run_cases import empty_run, small_run, write_records

PLAIN = {"run": "", "about": "", "notes": [], "curves": {}, "plots": [], "phases": {}, "rollouts": []}


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


@pytest.mark.medium
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
    write_page(page_data(run, Selection(), 500), target)
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
    words = ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch(", "import("]
    assert [word for word in words if word in script] == []


def test_unwritable_page_is_named(run, tmp_path):
    with pytest.raises(RunDirectoryError, match=r"cannot write .*page\.html.*; choose another --html"):
        write_page(PLAIN, tmp_path / "missing" / "page.html")


def data_of(run, *, selection=None, max_rollouts=500):
    return page_data(open_rollouts(run), selection or Selection(), max_rollouts)


@given(st.lists(st.binary(max_size=6), max_size=12))
def test_token_texts_concatenate_to_the_text_of_their_bytes(pieces):
    texts = html_page.texts_of(pieces)
    assert len(texts) == len(pieces)
    whole = b"".join(pieces).decode("utf-8", "backslashreplace")
    assert "".join(texts) == html_page.escape(whole)


@given(st.integers(1, 500), st.integers(1, 500))
def test_evenly_spaced_with_both_ends(count, selected):
    indices = html_page.evenly_spaced(count, selected)
    assert indices == sorted(set(indices))
    assert len(indices) == min(count, selected)
    assert indices[-1] == count - 1
    if selected > 1:
        assert indices[0] == 0
        steps = [after - before for before, after in itertools.pairwise(indices)]
        assert max(steps, default=1) - min(steps, default=1) <= 1


def test_page_of_a_small_run_is_complete(tmp_path):
    data = data_of(small_run(tmp_path / "run"))
    about = "3 steps recorded · 7 rollouts on this page"
    assert (data["run"], data["about"], data["notes"]) == ("run", about, [])
    assert [rollout["id"] for rollout in data["rollouts"]] == ["g-0", "g-1", "g-2", "s2-0", "s2-1", "s1-0", "s1-1"]
    assert data["curves"]["steps"] == [0, 1, 2, 3]
    assert data["curves"]["series"]["eval/sums/accuracy_greedy"] == [0.0, None, None, 0.6]
    json.dumps(data, allow_nan=False)


def test_long_run_is_sampled_at_evenly_spaced_steps(tmp_path):
    run = empty_run(tmp_path / "run")
    for step in range(1, 26):
        # The first step has fewer rollouts than its share, so the others get more.
        write(run / "rollouts", step, [group_of(f"s{step}", *[1.0] * (1 if step == 1 else 8))])
    data = data_of(run, max_rollouts=30)
    steps = [rollout["step"] for rollout in data["rollouts"]]
    assert len(steps) == 30
    assert sorted(set(steps)) == [1, 4, 6, 9, 12, 14, 17, 20, 22, 25]
    assert [steps.count(step) for step in (1, 4, 25)] == [1, 3, 4]
    assert data["notes"] == [
        "The page shows rollouts of 10 of 25 stored steps: 1, 4, 6, 9, 12, 14, 17, 20, 22, 25.",
        "The page contains 30 of 73 rollouts of these steps, first those of groups with different rewards (at most 30 "
        "rollouts and 1,000,000 tokens); select others with --step or a filter, or raise --limit.",
    ]


def test_tokens_are_bounded_and_shared_by_the_steps(tmp_path, monkeypatch):
    run = empty_run(tmp_path / "run")
    for step in (1, 2, 3):
        # The first step has fewer rollouts than its share, so the others get more.
        write(run / "rollouts", step, [group_of(f"s{step}", *[1.0] * (1 if step == 1 else 8))])
    # Eight tokens per rollout: six of the prompt and two of the answer.
    monkeypatch.setattr(html_page, "MAX_TOKENS", 50)
    data = data_of(run)
    assert [rollout["id"] for rollout in data["rollouts"]] == ["s3-0", "s3-1", "s3-2", "s2-0", "s2-1", "s1-0"]
    assert "contains 6 of 17 rollouts" in data["notes"][0]


def test_records_are_thinned_except_evaluations(tmp_path):
    run = empty_run(tmp_path / "run")
    records = [{"step": step, "loss": float(step), "seconds/total": 1.0, "seconds/step": 0.5} for step in range(2500)]
    records[0]["seconds/compile"] = 0.25
    for record in records[::7]:
        record["eval/a"] = 1.0
    write_records(run, records)
    data = data_of(run)
    curves = data["curves"]
    assert {0, 2499} <= set(curves["steps"])
    assert sum(value is not None for value in curves["series"]["eval/a"]) == len(records[::7])
    assert len(curves["steps"]) < 1000 + len(records[::7])
    assert f"The curves show {len(curves['steps'])} of 2500 records" in data["notes"][0]
    bars = data["phases"]["bars"]
    assert len(bars) <= html_page.MAX_BARS
    assert (bars[0]["first"], bars[0]["last"], bars[-1]["last"]) == (0, 41, 2499)
    assert {tuple(bar["seconds"]) for bar in bars} == {(0.5,)}
    assert data["phases"]["names"] == ["step"]


def test_numbers_are_rounded_and_nan_and_infinities_are_null(tmp_path):
    run = empty_run(tmp_path / "run")
    losses = ['"NaN"', '"Infinity"', "-0.123456789"]
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses)]
    (run / "metrics.jsonl").write_text("".join(lines))
    assert data_of(run)["curves"]["series"] == {"loss": [None, None, -0.123457]}
