# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The page of several runs in a browser."""

from pathlib import Path

import pytest

from marin_rl.view import main
from tests.runs.viewer.browser import Browser
from tests.runs.viewer.test_comparison import new_run, of_task, store
from tests.runs.viewer.test_page_in_browser import EVIL, INJECTIONS, SHOWN_EVIL, choose, follow, ids, texts


def page_of(folder: Path, *runs: Path | str) -> Path:
    page = folder / "page.html"
    assert main([*map(str, runs), "--html", str(page)]) == 0
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one setting and a run of another; two tasks."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for number, (name, seed) in enumerate((("a-seed1", 1), ("a-seed2", 2), ("b", 1))):
        records = [{"step": step, "train/rewards": number / 4 + step / 8, "other": 1.0} for step in range(3)]
        runs.append(new_run(folder / name, f"seed: {seed}\nlr: {name[0]}\n", records))
        rollouts = [of_task("x", "x-0", 1.0, f"reply {number}"), of_task("y", "y-0", number / 2, f"word{number}")]
        store(runs[-1], 2, [*rollouts, *[of_task("x", f"x-{index}") for index in range(1, 6)]])
    return page_of(folder, *runs)


@pytest.mark.medium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_page_loads_nothing_has_no_errors_and_fits_the_width(tab: Browser, page, dark, width):
    tab.open(page, width=width, height=700, dark=dark)
    assert tab.requests() == [page.resolve().as_uri()]
    assert tab.complaints() == []
    assert tab.run("document.documentElement.scrollWidth") == width
    shown = (
        "[...document.querySelectorAll('section')].filter((one) => one.offsetHeight).map((one) => one.children[0].id)"
    )
    assert tab.run(shown) == ["h-overview", "h-curves", "h-rollouts"]


def test_curves_have_bands_and_show_their_last_values(tab: Browser, page):
    tab.open(page)
    figure = "#curves figure:first-child"
    assert texts(tab, f"{figure} .legend") == ["a (2 seeds) 0.375 (0.25 to 0.5)b 0.75"]
    band = tab.run(f"document.querySelector('{figure} .band').getAttribute('points')").split()
    lines = tab.run(f"[...document.querySelectorAll('{figure} .curve')].map((one) => one.getAttribute('points'))")
    # The lower edge from left to right, then the upper edge; the mean of two runs is in the middle.
    edges = [[float(point.split(",")[1]) for point in part] for part in (band[:3], band[:2:-1])]
    mean = [float(point.split(",")[1]) for point in lines[0].split()]
    assert [(low + high) / 2 for low, high in zip(*edges, strict=True)] == pytest.approx(mean, abs=0.11)
    assert all(low > high for low, high in zip(*edges, strict=True))
    assert len(lines) == 2
    tab.run("document.querySelector('#curves svg').focus()")
    tab.press("Home", 36)
    assert texts(tab, f"{figure} .legend") == ["a (2 seeds) 0.125 (0 to 0.25)b 0.5step 0"]
    tab.run("document.activeElement.blur()")
    assert texts(tab, f"{figure} .legend") == ["a (2 seeds) 0.375 (0.25 to 0.5)b 0.75"]


def test_any_metric_can_be_drawn_for_all_groups(tab: Browser, page):
    tab.open(page)
    assert texts(tab, "#metric option") == ["choose…", "other", "train/rewards"]
    choose(tab, "#metric", "other")
    assert texts(tab, "#curves figure:first-child figcaption") == ["other"]
    assert texts(tab, "#curves figure:first-child .legend") == ["a (2 seeds) 1 (1 to 1)b 1"]


def test_tasks_are_side_by_side_and_filtered(tab: Browser, page):
    tab.open(page)
    assert texts(tab, "#overview thead th") == ["a (2 seeds)", "b"]
    assert texts(tab, "#rollouts thead th") == ["task", "a-seed1 step 2", "a-seed2 step 2", "b step 2"]
    # The runs differ on the task y.
    assert ids(tab) == ["question yanswer: 5", "question xanswer: 5"]
    cells = [texts(tab, f"#rollouts tbody tr:nth-child({row}) td") for row in (1, 2)]
    assert [cell[:8] for cell in cells[0]] == ["0word0", "0.5word1", "1word2"]
    assert cells[1][1].startswith("mean 1 · 6 rollouts1reply 1")
    assert cells[1][1].endswith("2 more")
    choose(tab, "#filter-text", "WORD1")
    # The replies of the other runs are shown too.
    assert len(texts(tab, "#rollouts tbody a")) == 3
    assert texts(tab, "#count") == ["1 of 1 tasks, filtered from 2, first those on which the runs differ most"]


def test_a_reply_opens_its_rollout(tab: Browser, page):
    tab.open(page)
    follow(tab, "document.querySelectorAll('#rollouts tbody a')[1].click()")
    # All runs have the same ids; the address has the number of the run.
    assert tab.run("location.hash") == "#1/2/training/y-0"
    assert texts(tab, "#one dd")[0] == "a-seed2"
    assert "word1" in texts(tab, "#one .tokens[data-turn]")[0]
    assert texts(tab, "#rollouts a[aria-current=true]") == ["0.5"]
    assert tab.complaints() == []


def test_texts_of_runs_do_not_become_markup(tab: Browser, tmp_path):
    evil = (EVIL, *INJECTIONS, "__proto__")
    runs = []
    for number in range(2):
        config = f"lr: {number}\nprompt: {'<img src=x onerror=window.ran=8>' * number}\n"
        names = (*evil, "constructor", "train/rewards")
        records = [{"step": step, **dict.fromkeys(names, 1.0)} for step in range(2)]
        run = new_run(tmp_path / f"<img src=x onerror=window.ran={number}>", config, records)
        store(run, 1, [of_task(text, f"{text}{number}", float(number), text, environment=text) for text in evil])
        runs.append(run)
    page = page_of(tmp_path, f"<b><script>window.ran()<script>={runs[0]}", runs[1])
    tab.open(page)
    choose(tab, "#metric", "__proto__")
    assert texts(tab, "#curves figure:first-child figcaption") == ["__proto__"]
    follow(tab, "document.querySelector('#rollouts tbody a').click()")
    tab.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
    assert any(SHOWN_EVIL in text for text in texts(tab, "#rollouts .reply"))
    assert len(texts(tab, "#rollouts tbody tr")) == len(evil)
    assert tab.run("typeof window.ran") == "undefined"
    assert tab.run("document.querySelectorAll('img, b b, iframe, object, embed, form').length") == 0
    assert tab.run("document.querySelectorAll('script, style, link').length") == 3
    assert tab.complaints() == []
    assert tab.requests() == [page.resolve().as_uri()]


def test_runs_without_rollouts_have_no_table(tab: Browser, tmp_path):
    runs = [new_run(tmp_path / name, f"lr: {name}\n") for name in "ab"]
    tab.open(page_of(tmp_path, *runs))
    assert texts(tab, "#curves p") == ["No records yet."]
    assert tab.run("document.getElementById('h-rollouts').parentElement.hidden")
    assert tab.complaints() == []
