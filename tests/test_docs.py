# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the documentation shows works, and what it defines is what runs log."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest

from marin_rl import evaluate, train
from marin_rl.environments.base import EnvironmentConfig, Split
from marin_rl.environments.dataset import JsonlConfig
from marin_rl.objectives.advantages import AdvantageConfig
from marin_rl.runtime.config import TrainConfig, levanter_defaults
from marin_rl.runtime.config_decoding import decode
from marin_rl.runtime.config_parsing import merge, parse_config, parse_yaml
from tests.tiny_run import TinyRun

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

WHOLE = {"run_dir": "runs/x", "model": {"type": "llama"}, "environment": {"type": "arithmetic"}}
"""What a config needs beside the section that a page shows."""


def blocks(language: str) -> list[Any]:
    """The fenced blocks of a language on all pages, each named by page and line."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


@pytest.fixture
def registries() -> Iterator[None]:
    """Forgets what a page's example registers."""
    registered = [registry._choice_registry for registry in (EnvironmentConfig, AdvantageConfig)]
    before = [dict(registry) for registry in registered]
    yield
    for registry, former in zip(registered, before, strict=True):
        registry.clear()
        registry.update(former)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_decodes(text: str) -> None:
    shown = parse_yaml(text, "the page")
    raw = merge(TrainConfig, merge(TrainConfig, levanter_defaults(), WHOLE), shown)
    config = decode(TrainConfig, raw)
    for section in shown:
        assert getattr(config, section) is not None


@pytest.mark.parametrize("text", blocks("json"))
def test_json_lines_are_problems(text: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    shown = text.splitlines()
    environment = JsonlConfig(str(path), held_out=0.0, validation=0.0).build()
    assert len(environment.tasks(Split.TRAIN)) == len(shown)
    assert all(json.loads(line)["answer"] for line in shown)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text: str, registries: None) -> None:
    exec(compile(text, "<docs>", "exec"), {"__name__": "docs_example"})


@pytest.fixture
def extending(registries: None) -> None:
    """What the page on extending registers."""
    page = (ROOT / "docs" / "pages" / "extending.md").read_text(encoding="utf-8")
    for match in FENCE.finditer(page):
        if match[1] == "python":
            exec(compile(match[2], "<docs>", "exec"), {"__name__": "docs_example"})


def test_the_example_of_an_environment_can_be_named_in_a_config(extending: None) -> None:
    words = ["ant", "bee", "gnu", "heron", "ibex", "jackdaw", "kiwi", "lark", "mole", "newt", "owl", "pike", "quail"]
    config = decode(EnvironmentConfig, {"type": "count_letters", "words": words})
    environment = config.build()
    tasks = [task for split in Split for task in environment.tasks(split)]
    assert sorted(task.id for task in tasks) == words
    assert environment.start(tasks[0], 0).step(f" {tasks[0].answer}").rewards == {"correct": 1.0}
    assert environment.start(tasks[0], 0).step("no").rewards == {"correct": 0.0}


def test_the_example_of_an_advantage_does_what_it_says(extending: None) -> None:
    config = decode(AdvantageConfig, {"type": "best_of_group"})
    assert config.minimum_group_size == 2
    assert np.array_equal(config.compute([1.0, None, 3.0, 3.0]), [0.0, 0.0, 1.0, 1.0])
    assert np.array_equal(config.compute([None, None]), [0.0, 0.0])


SHOWN = re.compile(r"-m (marin_rl\.(?:train|evaluate)\b[^#\n]*)")


def shown_commands() -> list[Any]:
    """What stands behind every `python -m` of ours in a fenced block; the one with `[OPTIONS]` aside."""
    return [
        pytest.param(shlex.split(command), id=f"{page.name}: {command.strip()}")
        for page in PAGES
        for block in FENCE.finditer(page.read_text(encoding="utf-8"))
        for command in SHOWN.findall(block[2])
        if " [" not in command
    ]


@pytest.mark.parametrize("words", shown_commands())
def test_commands_are_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their options exist, and the experiments that they name are there; nothing is run."""
    monkeypatch.chdir(ROOT)
    module, *argv = ["experiments/rloo.yaml" if word == "other.yaml" else word for word in words]
    if "--help" in argv:
        with pytest.raises(SystemExit):
            train.main(argv)
    elif module == "marin_rl.train":
        assert parse_config(TrainConfig, argv, levanter_defaults(), train.FLAGS).config_path is not None
    else:
        assert parse_config(evaluate.EvaluateConfig, argv, {}, evaluate.FLAGS).config.run


# The page of metrics.


def defined_metrics() -> list[str]:
    """The names in the first column of the tables on the page of metrics; `/max` after `a/min` is `a/max`."""
    names: list[str] = []
    for line in (ROOT / "docs" / "pages" / "metrics.md").read_text(encoding="utf-8").splitlines():
        cell = line.split("|")[1] if line.startswith("| `") else ""
        for name in re.findall(r"`([^`]+)`", cell):
            names.append(names[-1].rsplit("/", 1)[0] + name if name.startswith("/") else name)
    return names


def pattern(name: str) -> str:
    """A regular expression for a name with placeholders: `eval/<environment>/pass@k`."""
    return re.sub(r"<\w+>", "[^/]+", name).replace("@k", "@[0-9]+")


@pytest.fixture
def logged(finished_run: TinyRun, new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every name in the records of two runs: one without KL, and one with."""
    monkeypatch.setattr("marin_rl.runtime.session.plot_curves", lambda metrics, curves: None)
    run = new_run(
        initialize_from=str(finished_run.path),
        warm_start__max_steps=0,
        num_steps=1,
        kl={"type": "in_loss", "beta": 0.1},
        evaluation={"tasks": 2, "greedy": False},
    )
    assert run.train() == 0
    return {name for made in (finished_run, run) for record in made.records() for name in record}


NOT_ON_A_CPU = {"mfu"}
STARTING_POINT = "before_warm_start/"


def test_every_metric_is_defined_and_every_definition_is_of_a_metric(logged: set[str]) -> None:
    defined = defined_metrics()
    assert len(defined) == len(set(defined)) > 50
    undefined = {
        name
        for name in logged
        if not any(re.fullmatch(pattern(known), name.removeprefix(STARTING_POINT)) for known in defined)
    }
    assert undefined == set()
    never_logged = {known for known in defined if not any(re.fullmatch(pattern(known), name) for name in logged)}
    assert never_logged == NOT_ON_A_CPU


def test_types_in_the_table_of_choices_are_those_there_are() -> None:
    from marin_rl.objectives.aggregation import AggregationConfig
    from marin_rl.objectives.kl import KlConfig
    from marin_rl.objectives.policy_loss import PolicyLossConfig
    from marin_rl.rewards.grading import GraderConfig

    page = (ROOT / "docs" / "pages" / "configuration.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", page, re.MULTILINE))
    registries = {
        "environment": EnvironmentConfig,
        "environment.grader": GraderConfig,
        "advantage": AdvantageConfig,
        "policy_loss": PolicyLossConfig,
        "kl": KlConfig,
        "aggregation": AggregationConfig,
    }
    for section, registry in registries.items():
        assert set(re.findall(r"`(\w+)`", rows[section])) == set(registry.get_known_choices()), section
