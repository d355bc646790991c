# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The page in a browser: pointer and keyboard, light and dark, wide and narrow."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from marin_rl.runs.stored_rollout import StoredAdvantages
from marin_rl.types import Observation, RewardResult, RolloutGroup, Task, TurnReward
from marin_rl.utils.output import escape
from marin_rl.view import main
from tests.rollouts.rollout_cases import rollout_of, turn_of, write
from tests.runs.viewer.browser import Browser
from tests.runs.viewer.run_cases import empty_run, small_run, write_records

EVIL = (
    "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'><svg/onload=window.ran=3>"
    '<!--<script>"\'`${window.ran=4}javascript:window.ran=5 \u2028 &lt;b&gt; <a href="javascript:window.ran=6">x</a>'
)
SHOWN_EVIL = EVIL.replace("\u2028", "\\u2028")
FIRST = "#3/training/g-0"


def page_of(run: Path, *more: str) -> Path:
    page = run.parent / "page.html"
    assert main([str(run), "--html", str(page), *more]) == 0
    return page


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(small_run(tmp_path_factory.mktemp("small") / "run"))


def texts(tab: Browser, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")


def tip(tab: Browser) -> str | None:
    return tab.run("document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent")


def ids(tab: Browser) -> list[str]:
    return texts(tab, "#rollouts tbody th")


def follow(tab: Browser, code: str) -> None:
    """Run code that changes the page's address, and wait until the page has followed it."""
    tab.run(f"new Promise((done) => {{ addEventListener('hashchange', done, {{once: true}}); {code}; }}).then(() => 0)")


def choose(tab: Browser, selector: str, value: str) -> None:
    tab.run(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.value = {json.dumps(value)}; "
        "one.dispatchEvent(new Event('input')); one.dispatchEvent(new Event('change')); })()"
    )


@pytest.mark.medium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_page_loads_nothing_has_no_errors_and_fits_the_width(tab, small, dark, width):
    tab.open(small, width=width, height=700, dark=dark, address=FIRST)
    assert tab.requests() == [small.resolve().as_uri()]
    assert tab.complaints() == []
    assert tab.run("document.documentElement.scrollWidth") == width
    assert len(texts(tab, "#curves figure")) == 3
    style = "getComputedStyle(document.documentElement)"
    colours = tab.run(f"[{style}.backgroundColor, {style}.color]")
    assert colours == (["rgb(20, 23, 27)", "rgb(230, 233, 237)"] if dark else ["rgb(255, 255, 255)", "rgb(27, 31, 36)"])


def test_the_table_sorts_filters_and_opens(tab, small):
    tab.open(small)
    stored = ["g-0", "g-1", "g-2", "s2-0", "s2-1", "s1-0", "s1-1"]
    assert ids(tab) == stored
    heads = texts(tab, "#rollouts thead th")
    assert heads[:9] == ["id", "step", "prompt", "answer", "reply", "reward", "reason", "correct", "style"]
    sorts = "[...document.querySelectorAll('#rollouts thead th')].map((head) => head.getAttribute('aria-sort'))"
    click = "document.querySelectorAll('#rollouts thead button')[5].click()"
    tab.run(click)
    assert tab.run(sorts)[1:6] == ["none", "none", "none", "none", "descending"]
    # A rollout without a reward is last in both orders.
    assert ids(tab) == ["g-0", "s2-0", "s1-0", "g-2", "s2-1", "s1-1", "g-1"]
    tab.run(click)
    assert tab.run(sorts)[5] == "ascending"
    assert ids(tab) == ["s2-1", "s1-1", "g-2", "s2-0", "s1-0", "g-0", "g-1"]
    tab.run(click)
    assert set(tab.run(sorts)) == {"none"}
    assert ids(tab) == stored
    choose(tab, "#filter-status", "completed")
    choose(tab, "#filter-least", "0.5")
    assert ids(tab) == ["g-0", "s2-0", "s1-0"]
    choose(tab, "#filter-text", "NAÏVE")
    assert ids(tab) == ["g-0"]
    assert texts(tab, "#count") == ["1 of 1 rollouts, filtered from 7, first those of groups with different rewards"]
    follow(tab, "document.querySelector('#rollouts tbody a').click()")
    assert texts(tab, "#h-one") == ["g-0"]
    assert tab.run("document.activeElement.id") == "h-one"
    assert tab.run("location.hash") == FIRST


def test_rows_are_links_that_keyboard_and_back_button_follow(tab, small):
    tab.open(small)
    links = "[...document.querySelectorAll('#rollouts tbody a')]"
    assert tab.run(f"{links}.map((link) => link.getAttribute('href'))")[:2] == [FIRST, "#3/training/g-1"]
    # Each part of a row is the link, also for the middle button.
    hit = "(box) => document.elementFromPoint(box.right - 3, box.top + box.height / 2)"
    tab.run("document.querySelector('#rollouts tbody').scrollIntoView()")
    assert tab.run(f"({hit})(document.querySelectorAll('#rollouts tbody tr')[1].getBoundingClientRect()).hash") == (
        "#3/training/g-1"
    )
    tab.run(f"{links}[0].focus()")
    follow(tab, "document.activeElement.click()")
    assert (texts(tab, "#h-one"), texts(tab, "tr[aria-current=true] th")) == (["g-0"], ["g-0"])
    follow(tab, f"{links}[3].click()")
    assert texts(tab, "#h-one") == ["s2-0"]
    tab.run("scrollTo(0, 0)")
    tab.run(f"{links}[3].click()")
    assert tab.run("scrollY") > 0
    follow(tab, "history.back()")
    assert texts(tab, "#h-one") == ["g-0"]
    follow(tab, "history.back()")
    assert tab.run("document.getElementById('one').hidden")
    assert texts(tab, "tr[aria-current=true]") == []


def test_rollout_shows_all_of_its_data(tab, small):
    tab.open(small, address=FIRST)
    [shown] = texts(tab, "#one")
    for text in (
        *(
            "2+3 — naïve?",
            "wrong, try again",
            "equal to the answer",
            "TimeoutError: 3 s",
            "half \\u2028 right",
            "chars 2",
        ),
        *("rewards: correct 0.5, style −0.25", 'info: {"tries": [1, null]}', '{"map": "\\u00fc 4x4"}'),
        *("last observation · not answered", "46 ü", "<|261|>46 ü<|end|>"),
        *("action: say", "step return 1.2", "step advantage −0.5", "episode advantage 0.25", "retries 1", "length 3"),
    ):
        assert text in shown, text
    assert texts(tab, "#one .tokens[data-turn='0'] span") == ["", "é", "<|end|>"]
    follow(tab, "document.querySelectorAll('#one .controls button')[1].click()")
    assert texts(tab, "#h-one") == ["g-1"]
    assert "ValueError: no" in texts(tab, "#one")[0]
    assert "It has no turns." in texts(tab, "#one")[0]


def test_tokens_have_the_colour_of_their_value(tab, small):
    tab.open(small, address=FIRST)

    def colours() -> list[list[str]]:
        return tab.run(
            "[...document.querySelectorAll('#one .tokens[data-turn] span')].map("
            "(one) => [one.className.replace('part ', ''), one.style.getPropertyValue('--v')])"
        )

    assert colours() == [["positive", "1.000"]] * 3 + [["negative", "0.500"]] * 2
    assert texts(tab, "#scale") == ["−0.5+0.5"]
    choose(tab, "#colour", "logprob")
    assert [value for _, value in colours()] == ["0.333", "0.667", "1.000", "0.333", "0.667"]
    assert {name for name, _ in colours()} == {"unlikely"}
    choose(tab, "#colour", "difference")
    # Policy minus learner: 0, 0, 0.125 and 0, 0.25.
    assert [name for name, _ in colours()] == ["part", "", "positive", "", "positive"]
    assert [value for name, value in colours() if name == "positive"] == ["0.500", "1.000"]
    choose(tab, "#colour", "value")
    assert [value for _, value in colours()] == ["0.250", "0.125", "0.375", "0.750", "1.000"]


def test_values_are_shown_by_pointer_and_keyboard(tab, small):
    tab.open(small, address=FIRST)
    assert tip(tab) is None
    tab.point_at("#one .tokens[data-turn='0'] span:nth-child(3)")
    assert tip(tab) == (
        "token 2: <|end|> (id 257)\nlog-prob −0.375\nlearner −0.5, difference 0.125\nreference −1\n"
        "value 0.75, target 1\nadvantage 0.5"
    )
    tab.run("document.getElementById('colour').focus()")
    # To the summary of the observation, then to the tokens.
    for _ in range(2):
        tab.press("Tab", 9)
    assert tab.run("document.activeElement.dataset.turn") == "0"
    assert tip(tab).startswith("token 0: part of a character (id 195)")
    tab.press("ArrowRight", 39)
    assert tip(tab).startswith("token 1: é (id 169)")
    tab.press("End", 35)
    tab.press("ArrowRight", 39)
    assert tip(tab).startswith("token 2: <|end|>")
    tab.press("Tab", 9)
    assert tip(tab) is None


def test_values_of_curves_and_bars_are_shown(tab, small):
    tab.open(small)
    tab.run("document.querySelector('#curves svg').focus({focusVisible: true})")
    legend = "#curves figure:first-child .legend"
    assert texts(tab, legend) == ["reward 0.3step 3"]
    tab.press("ArrowLeft", 37)
    assert texts(tab, legend) == ["reward 0.2step 2"]
    tab.run("document.querySelector('#phases svg').focus({focusVisible: true})")
    assert texts(tab, legend) == ["reward "]
    swatches = "#curves figure:nth-child(2) .legend > span:not(.faint)"
    assert texts(tab, swatches) == ["sampled ", "greedy ", "pass@4 "]
    assert texts(tab, "#phases .legend") == ["sample 0.5step 0.25step 3: 0.75 s in all"]
    choose(tab, "#metric", "seconds/sample")
    assert texts(tab, "#curves figcaption")[0] == "seconds/sample"
    assert len(texts(tab, "#curves figure")) == 4


def evil_run(folder: Path) -> Path:
    """A run in which every text is an injection attempt."""
    run = empty_run(folder)
    task = Task(EVIL, EVIL, ({"role": "user", "content": EVIL},), EVIL)
    results = (
        RewardResult(EVIL, 1.0, 1.0, (TurnReward(0, 1.0, EVIL, {EVIL: 1.0}),), {EVIL: 1.0}, EVIL),
        RewardResult("lost", 1.0, None, error=EVIL, failure=EVIL),
    )
    turn = dataclasses.replace(
        turn_of(EVIL, EVIL, action=EVIL, anchor_state=EVIL),
        messages=({"role": EVIL, "content": EVIL}, {"role": "assistant", "content": EVIL}),
    )
    rollout = rollout_of(
        EVIL, EVIL, turns=(turn,), evaluations=results, rewards={EVIL: 1.0}, metrics={EVIL: 2.0}, seconds={EVIL: 1.0}
    )
    lost = rollout_of("lost", EVIL, reward=None, error=EVIL)
    rollout, lost = (dataclasses.replace(one, task=task) for one in (rollout, lost))
    tokens = rollout.num_generated_tokens
    write(run / "rollouts", 1, [RolloutGroup(EVIL, [rollout, lost])], {EVIL: StoredAdvantages(np.ones(tokens))})
    write_records(run, [{"step": 1, EVIL: 1.0, f"eval/{EVIL}": 1.0, f"seconds/{EVIL}": 1.0, "seconds/total": 1.0}])
    return run


def test_no_text_of_a_run_becomes_markup_or_code(tab, tmp_path):
    page = page_of(evil_run(tmp_path / "<img src=x onerror=window.ran=7>"))
    source = page.read_text(encoding="utf-8")
    assert source.count("<script") == source.count("</script") == 2
    tab.open(page)
    tab.run("document.querySelectorAll('#rollouts thead button').forEach((one) => one.click())")
    choose(tab, "#metric", SHOWN_EVIL)
    for index in (0, 1):
        follow(tab, f"document.querySelectorAll('#rollouts tbody a')[{index}].click()")
        [shown] = texts(tab, "#one")
        assert shown.count(SHOWN_EVIL) >= 5
        if "lost" not in texts(tab, "#h-one"):
            assert "".join(texts(tab, "#one .tokens[data-turn] span")) == f"{SHOWN_EVIL}<|end|>"
            assert shown.count(SHOWN_EVIL) >= 12
    assert SHOWN_EVIL in ids(tab)
    assert texts(tab, "#run") == ["<img src=x onerror=window.ran=7>"]
    # An injection would load or run after the page's script at the latest.
    tab.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
    assert tab.run("typeof window.ran") == "undefined"
    assert tab.run("document.querySelectorAll('img, :not(th) > a, iframe, object, embed, form').length") == 0
    assert {link[:1] for link in tab.run("[...document.links].map((link) => link.getAttribute('href'))")} == {"#"}
    assert tab.run("document.scripts.length") == 2
    assert tab.complaints() == []
    assert tab.requests() == [page.resolve().as_uri()]


INJECTIONS = (
    "<!-- <script> --!> </script >",
    "</script\n><script>window.ran = 1</script>",
    "]]><svg><script href='data:,window.ran=1'/><style>*{background:url(https://x.test/a)}</style>",
    "</style><style>@import 'https://x.test/b.css'; h1 { color: rgb(1, 2, 3) }</style>",
    "<link rel=stylesheet href=https://x.test/c.css><link rel=prefetch href=https://x.test/d>",
    "<meta http-equiv=refresh content='0;url=https://x.test/e'><base href=https://x.test/>",
    "<iframe srcdoc='<script>parent.ran=1</script>'></iframe><object data=https://x.test/f></object>",
    "<input autofocus onfocus=window.ran=1><details open ontoggle=window.ran=1><video src=x onerror=window.ran=1>",
    "<form id=data action=https://x.test/g><input name=textContent></form><a id=run href=javascript:window.ran=1>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.ran=1></style></mglyph></table></mtext></math>",
    "<template><img src=x onerror=window.ran=1></template><noscript><img src=https://x.test/h></noscript>",
    "\";window.ran=1;//\\';window.ran=1;//`;${window.ran=1}",
    "\x00<\x00script>window.ran=1</script>\ufeff\u2029window.ran=1",
    "url(https://x.test/i) expression(window.ran=1) -moz-binding:url(x) style=position:fixed",
)


def test_nothing_of_a_rollout_runs_loads_or_styles_anything(tab, tmp_path):
    """Texts as replies, observations, metadata, and names, also those of JavaScript's own properties."""
    run = empty_run(tmp_path / "run")
    rollouts = []
    for number, text in enumerate((*INJECTIONS, "__proto__", "constructor", "toString")):
        message = {"role": text, "content": text, "tools_in_words": text}
        turn = dataclasses.replace(
            turn_of(text, text, rewards={text: 1.0, "other": 1.0}, info={text: text}, anchor_state=text, action=text),
            messages=(message, {"role": "assistant", "content": text}),
        )
        rollout = rollout_of(f"r{number}", turns=(turn,), rewards={text: 1.0}, metrics={text: 1.0})
        last = Observation(({"role": text, "content": text},), tuple(text.encode()))
        rollouts.append(dataclasses.replace(rollout, info={text: [text]}, last_observation=last))
    write(run / "rollouts", 1, [RolloutGroup("g", rollouts)])
    write_records(run, [{"step": step, **dict.fromkeys(("__proto__", "constructor"), 1.0)} for step in (1, 2)])
    page = page_of(run)
    tab.open(page)
    color, address = tab.run("getComputedStyle(document.querySelector('h1')).color"), tab.run("location.href")
    choose(tab, "#metric", "__proto__")
    for number in range(len(rollouts)):
        follow(tab, f"[...document.querySelectorAll('#rollouts tbody a')][{number}].click()")
        name = texts(tab, "#h-one")[0]
        text = next(one for one in rollouts if one.id == name).turns[0].action
        assert texts(tab, "#one")[0].count(escape(text)) >= 8
    tab.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
    assert tab.run("typeof window.ran") == "undefined"
    assert tab.run("document.querySelectorAll('#one :is(script, style, link, meta, iframe, form, a, img)').length") == 0
    assert tab.run("document.querySelectorAll('script, style, link').length") == 3
    assert tab.run("getComputedStyle(document.querySelector('h1')).color") == color
    assert tab.run("location.href").partition("#")[0] == address
    assert tab.run("document.title") == "run"
    assert tab.complaints() == []
    assert tab.requests() == [page.resolve().as_uri()]


def test_policy_blocks_scripts_and_requests(tab, small, tmp_path):
    page = tmp_path / "broken.html"
    injected = (
        "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'><style>h1 { color: rgb(1, 2, 3) }</style>"
    )
    page.write_text(small.read_text(encoding="utf-8").replace("<header>", f"<header>{injected}"), encoding="utf-8")
    tab.open(page)
    assert tab.run("typeof window.ran") == "undefined"
    assert tab.run("getComputedStyle(document.querySelector('h1')).color") != "rgb(1, 2, 3)"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints())
    assert tab.requests() == [page.resolve().as_uri()]
    # The policy allows the page's script.
    assert texts(tab, "#run") == ["run"]


def test_very_long_rollout_is_complete_and_responsive(tab, tmp_path):
    run = empty_run(tmp_path / "run")
    rollout = rollout_of("long", reply="word " * 4000)
    tokens = rollout.num_generated_tokens
    assert tokens > 20_000
    write(run / "rollouts", 1, [RolloutGroup("g", [rollout])], {"long": StoredAdvantages(np.linspace(-1, 1, tokens))})
    tab.open(page_of(run), width=360, address="#1/training/long")
    assert len(texts(tab, "#one .tokens[data-turn] span")) == tokens
    choose(tab, "#colour", "logprob")
    tab.point_at(f"#one .tokens[data-turn] span:nth-child({tokens})")
    assert tip(tab).startswith(f"token {tokens - 1}: <|end|>")
    assert tab.run("document.documentElement.scrollWidth") == 360


def test_page_of_an_empty_run(tab, tmp_path):
    tab.open(page_of(empty_run(tmp_path / "run")))
    assert texts(tab, "#about") == ["0 steps recorded · 0 rollouts on this page"]
    assert texts(tab, "#curves p") == ["No records yet."]
    assert texts(tab, "#phases p") == ["No timings yet."]
    assert texts(tab, "#count") == ["0 of 0 rollouts"]
    assert tab.complaints() == []
