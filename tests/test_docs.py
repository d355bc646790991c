# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Examples of the documentation work, and runs log exactly the metrics that it defines."""

import collections
import dataclasses
import doctest
import fnmatch
import importlib
import importlib.util
import json
import math
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pydantic
import pytest
import yaml
from draccus.utils import is_choice_type

from marin_rl import evaluate, export, launch, plan, replay, run_job, train
from marin_rl.config.algorithms import ALGORITHM, algorithms
from marin_rl.config.command_line import merge_layers, parse_config, read_arguments
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import EnvironmentConfig, Split
from marin_rl.environments.dataset import JsonlConfig
from marin_rl.models.model_settings import MODEL_TYPES
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig
from marin_rl.pods.chips import parse_topology
from marin_rl.pods.config import LaunchConfig
from marin_rl.pods.preflight import COMMANDS
from marin_rl.rewards import EvaluateResult, StepOutput
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.grading import GraderConfig
from marin_rl.serving.options import ChatConfig, ServeConfig, TinkerConfig
from marin_rl.sessions.command import TRAIN_FLAGS
from marin_rl.sessions.recipes import config_class, config_class_of
from marin_rl.sessions.replay import parse_shape
from marin_rl.utils.devices.slice_names import parse_slice
from marin_rl.utils.levanter_line import ONLY_NEW
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError, field_types, plain_type, section_of
from marin_rl.utils.settings.yaml_text import parse_yaml
from tests.config_classes import config_classes
from tests.distributed.thread_workers import thread_workers
from tests.needs_iris import NEEDS_IRIS
from tests.tiny_run import MIXTURE, TinyRun, make_run
from tests.training.test_preference_run import make_run as make_dpo_run
from tests.training.test_preference_run import train as train_dpo
from tests.training.test_supervised_run import make as make_sft_run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A fenced block: the language, with the title of a block that has one, and the text."""
CELL = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"`([^`]+)`")

WHOLE = {"run_dir": "runs/x", "model": {"type": "llama"}, "environment": {"type": "arithmetic"}}
"""Required sections of a config, to which the sections of a page are added."""


def blocks(language: str) -> list[Any]:
    """The fenced blocks of a language on all pages, each named by page and line."""
    params = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                params.append(pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return params


@pytest.fixture
def registries() -> Iterator[None]:
    """Restore the registries that the examples of a page change."""
    changed = (EnvironmentConfig, AdvantageConfig, PolicyLossConfig)
    registered = [registry._choice_registry for registry in changed]
    before = [dict(registry) for registry in registered]
    yield
    for registry, former in zip(registered, before, strict=True):
        registry.clear()
        registry.update(former)


def table_under(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its first row."""
    text = (ROOT / "docs" / "pages" / page).read_text(encoding="utf-8")
    below = text.partition(f"{heading}\n")[2].partition("\n|")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in CELL.split(line)[1:-1]] for line in below.splitlines()[2:]]


def whole_config(*layers: str) -> TrainConfig:
    """Decode a config from layers of sections, later ones on top."""
    return decode(TrainConfig, merge_layers(TrainConfig, [WHOLE, *(parse_yaml(layer, "the page") for layer in layers)]))


def config_error(*layers: str) -> str:
    """Error of an invalid config; empty if it is valid."""
    try:
        whole_config(*layers)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_decodes(text: str, extending: None) -> None:
    values = parse_yaml(text, "the page")
    kind = config_class(values)
    config: Any = whole_config(text) if kind is TrainConfig else decode(kind, values)
    for section in values.keys() - {ALGORITHM}:
        assert getattr(config, section) is not None


def test_the_table_of_algorithms_has_the_sections_of_each() -> None:
    rows = table_under("objectives.md", "### Algorithms by name")
    shown = {name.strip("`"): [yaml.safe_load(part) for part in CODE.findall(cell)] for name, cell, *_ in rows}
    merged = {name: {key: value for part in parts for key, value in part.items()} for name, parts in shown.items()}
    assert merged == algorithms(TrainConfig.sampling.max_new_tokens)


@NEEDS_IRIS
@pytest.mark.parametrize("text", blocks('yaml title="pods.yaml"'))
def test_iris_reads_the_cluster_file_and_has_its_slices(text: str, tmp_path: Path) -> None:
    from iris.cluster.config import load_config, validate_config

    file = tmp_path / "pods.yaml"
    file.write_text(text)
    cluster = load_config(file)
    validate_config(cluster)
    hosts = {group.resources.device_variant: group.num_vms for group in cluster.scale_groups.values()}
    assert hosts == {kind: parse_slice(kind).num_hosts for kind in ("v5litepod-4", "v5litepod-16", "v6e-8", "v6e-64")}


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


def test_doctests_of_the_pages_pass() -> None:
    """Doctests of a page share their names."""
    runner = doctest.DocTestRunner(verbose=False)
    shown = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join(match[2] for match in FENCE.finditer(text) if match[1] == "pycon")
        test = doctest.DocTestParser().get_doctest(code, {}, page.name, page.name, 0)
        shown += len(test.examples)
        runner.run(test)
    assert shown > 5
    assert runner.failures == 0


MISSPELT = re.compile("unknown key|is not one of its types|it takes one of")


def inline_configs() -> list[Any]:
    """Every config fragment in a sentence or a table, such as `kl: {type: none}`."""
    sections = "|".join(TrainConfig.__dataclass_fields__)
    pattern = re.compile(rf"(?:{sections}): \{{.*\}}")
    return [
        pytest.param(code, id=f"{page.name}: {code}")
        for page in PAGES
        for code in dict.fromkeys(CODE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))))
        if pattern.fullmatch(code) and "…" not in code
    ]


REFUSED = table_under("objectives.md", "## Combinations that are refused")


@pytest.mark.parametrize("text", inline_configs())
def test_inline_configs_have_existing_keys(text: str) -> None:
    """A fragment may be incomplete or an invalid combination, but must not be misspelt."""
    assert not MISSPELT.search(config_error(text))


@pytest.mark.parametrize(("refused", "remedy"), [(row[0], row[2]) for row in REFUSED])
def test_refused_combinations_are_refused_and_remedies_work(refused: str, remedy: str) -> None:
    refused, remedy = CODE.findall(refused)[0], CODE.findall(remedy)[0]
    wrong = config_error(refused)
    assert any(section in wrong for section in parse_yaml(refused, "the page"))
    assert not MISSPELT.search(wrong)
    assert config_error(refused, remedy) == ""


@pytest.fixture
def extending(registries: None) -> None:
    """Register the examples of the page on extending."""
    page = (ROOT / "docs" / "pages" / "contributing.md").read_text(encoding="utf-8")
    for match in FENCE.finditer(page):
        if match[1] == "python":
            exec(compile(match[2], "<docs>", "exec"), {"__name__": "docs_example"})


SHOWN = re.compile(r"-m (marin_rl\.(?:train|evaluate|export|launch|serve|chat|run_job|replay|plan)\b[^#\n]*)")


def shown_commands() -> list[Any]:
    """Arguments of each `python -m marin_rl...` in a fenced block, except in Python and those with `[OPTIONS]`.

    The bash blocks of `getting_started.md` are run by a separate test.
    """
    return [
        pytest.param(shlex.split(command), id=f"{page.name}: {command.strip()}")
        for page in PAGES
        for block in FENCE.finditer(page.read_text(encoding="utf-8"))
        if block[1] != "python" and (page.name, block[1]) != ("getting_started.md", "bash")
        for command in SHOWN.findall(block[2])
        if " [" not in command
    ]


@pytest.mark.parametrize("words", shown_commands())
def test_commands_have_valid_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch, extending: None) -> None:
    """Their options and the named experiments exist; nothing is run."""
    monkeypatch.chdir(ROOT)
    check_command(["experiments/rloo.yaml" if word == "other.yaml" else word for word in words])


def check_command(words: list[str]) -> None:
    """Check the options of a command, and that the files exist that it names."""
    module, *argv = words
    if "--help" in argv:
        with pytest.raises(SystemExit):
            train.main(argv)
    elif module == "marin_rl.train":
        assert parse_config(TrainConfig, argv, TRAIN_FLAGS).config.run_dir
    elif module in ("marin_rl.sft", "marin_rl.dpo"):
        kind = config_class_of(module.removeprefix("marin_rl."))
        assert parse_config(kind, argv, TRAIN_FLAGS).config.run_dir
    elif module == "marin_rl.export":
        assert parse_config(export.ExportRunConfig, argv, export.FLAGS).config.run
    elif module == "marin_rl.launch":
        check_launch(argv)
    elif module == "marin_rl.replay":
        arguments, rest = replay.argument_parser().parse_known_args(argv)
        config = parse_config(TrainConfig, rest, defaults=WHOLE if arguments.run else None).config
        assert arguments.step or parse_shape(arguments.fake, config.rollouts.max_length)
    elif module == "marin_rl.plan":
        arguments, rest = plan.argument_parser().parse_known_args(argv)
        assert parse_topology(arguments.topology).num_chips
        assert parse_config(config_class(collections.ChainMap(*read_arguments(rest, ()).layers())), rest).config.model
    elif module == "marin_rl.serve":
        assert parse_config(ServeConfig, argv).config.port
    elif module == "marin_rl.run_job":
        assert run_job.argument_parser().parse_args(argv).result
    elif module == "marin_rl.chat":
        assert parse_config(ChatConfig, argv).config.run
    elif module == "marin_rl.tinker":
        assert parse_config(TinkerConfig, argv).config.port
    else:
        assert parse_config(evaluate.EvaluateConfig, argv, evaluate.FLAGS).config.run


def check_launch(argv: list[str]) -> None:
    """Check a command of marin_rl.launch, and the command behind it."""
    parsed = parse_config(LaunchConfig, argv[: argv.index("--")], launch.FLAGS)
    assert (parsed.config.cluster is None) == ("local" in parsed.flags)
    command, *arguments = argv[argv.index("--") + 1 :]
    assert command in COMMANDS
    check_command([f"marin_rl.{command}", *arguments])


RUN = re.compile(r"(?<![\w/])(?:gs://[a-z]+/)?runs/[\w*-]+(?:/[\w*-]+)*(?![\w/*-]|\.py)")
"""A run directory, or the beginning of the path of a file in one; `*` as in a shell."""
TRAINING = re.compile(r"-m marin_rl\.(?:train|sft|dpo|launch)\b([^#`]*)")


def made_by(line: str, page: str) -> set[str]:
    """The run directory that a line of a page makes, by a command without `--dry_run`, or names as one to make."""
    if "-m marin_rl.tinker" in line:
        return {TinkerConfig.folder}
    if line.startswith("run_dir: "):
        return {line.split()[1]}
    command = TRAINING.search(line)
    if in_python := re.search(r'run_dir="([^"]+)"', line):
        return {in_python[1]}
    if command is None or "--dry_run" in command[1] or "[" in command[1]:
        return set()
    words = command[1].split()
    if "--run_dir" in words:
        return {words[words.index("--run_dir") + 1]}
    config = words[words.index("--config") + 1] if "--config" in words else ""
    if (ROOT / config).is_file():
        return {str(yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))["run_dir"])}
    titled = re.search(rf'^```yaml title="{re.escape(config)}"\nrun_dir: (\S+)', page, re.MULTILINE)
    return {titled[1]} if titled else set()


def unmade_runs(page: str, made: set[str]) -> list[str]:
    """Runs that a page names before a line of it has made them; adds those that it makes to `made`."""
    missing = []
    for line in page.splitlines():
        made |= made_by(line, page)
        for name in RUN.findall(re.sub(r"--run_dir \S+", "", line)):
            folders = [name, *(str(parent) for parent in PurePosixPath(name).parents)]
            if not any(fnmatch.fnmatch(one, folder) for one in made for folder in folders):
                missing.append(name)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_run_that_a_page_names_is_made_before_it_there_or_in_the_readme(page: Path) -> None:
    made: set[str] = set()
    missing = {one: unmade_runs(one.read_text(encoding="utf-8"), made) for one in (PAGES[0], page)}
    assert not missing[page]


def test_every_benchmark_is_on_its_page() -> None:
    page = (ROOT / "experiments" / "lab" / "results" / "benchmarks.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^python -m experiments\.lab\.benchmarks\.(\w+) +> ", page, re.MULTILINE))
    assert shown == {path.stem for path in (ROOT / "experiments" / "lab" / "benchmarks").glob("benchmark_*.py")}


LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
"""A link to a file, to a heading of a page, or to a heading of the page itself."""
OUTSIDE = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "experiments").rglob("*.md"))]
"""Pages whose links the build of the docs does not check."""


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_and_headings_exist(page: Path) -> None:
    missing = []
    for name, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{name}#{anchor}" if anchor else name)
    assert missing == []


def test_the_table_of_recipes_lists_every_recipe_with_a_command_that_exists() -> None:
    folder = ROOT / "experiments"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (*folder.glob("*.yaml"), *folder.glob("*.py"))} <= {
        name for name, _ in LINK.findall(text)
    }
    commands = re.findall(r"`python -m (\S+)(?: --config (\S+))?`", text)
    assert [module for module, _ in commands if importlib.util.find_spec(module) is None] == []
    assert [config for _, config in commands if config and not (ROOT / config).is_file()] == []
    assert len(commands) > 20


def test_the_page_on_architecture_lists_the_commands_and_the_rooms_of_the_import_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract, *_ = project["tool"]["importlinter"]["contracts"]
    rooms = {name.strip().removeprefix("marin_rl.") for layer in contract["layers"] for name in layer.split("|")}
    rooms |= {path.stem for path in (ROOT / "marin_rl").glob("[!_]*.py")}
    shown = [CODE.findall(row[0]) for row in table_under("architecture.md", "## Rooms")]
    assert {name for names in shown for name in names} == rooms


# The API reference.

ENTRY = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)


def reference() -> dict[str, dict[str, Any]]:
    """The options of each object in the API reference, by its full name."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "pages" / "api").glob("*.md"))
    return {name: (yaml.safe_load(options) or {}).get("options", {}) for name, options in ENTRY.findall(text)}


def test_every_object_of_the_reference_exists() -> None:
    for name in reference():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.medium
@pytest.mark.parametrize(
    "cls", sorted(config_classes(), key=lambda cls: cls.__qualname__), ids=lambda cls: cls.__qualname__
)
def test_every_config_class_and_its_fields_are_in_the_reference(cls: type) -> None:
    options = reference()[f"{cls.__module__}.{cls.__qualname__}"]
    own = {
        field.name for field in dataclasses.fields(cast(Any, cls)) if field.name in vars(cls).get("__annotations__", {})
    }
    shown = options.get("members", [])
    assert shown is None or own <= set(shown)


@pytest.mark.parametrize("cls", [EvaluateResult, StepOutput])
def test_the_answer_of_a_reward_function_is_in_the_reference(cls: type[pydantic.BaseModel]) -> None:
    shown = reference()[f"{cls.__module__}.{cls.__qualname__}"]["members"]
    assert set(cls.model_fields) <= set(shown)
    assert "marin_rl.rewards.sandbox.functions.reward_function" in reference()


# The page of metrics.


def defined_metrics() -> list[tuple[str, str]]:
    """Names and ranges (such as `≥ 0, at most ln V`) in the tables of the page; `/max` after `a/min` is `a/max`."""
    definitions: list[tuple[str, str]] = []
    for line in (ROOT / "docs" / "pages" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in CELL.split(line)[1:-1]]
        assert len(cells) == 5, line
        for name in CODE.findall(cells[0]):
            full_name = definitions[-1][0].rsplit("/", 1)[0] + name if name.startswith("/") else name
            definitions.append((full_name, cells[2]))
    return definitions


def pattern(name: str) -> str:
    """A regular expression for a name with placeholders: `eval/<environment>/pass@k`."""
    return re.sub(r"<\w+>", "[^/]+", name).replace("@k", "@[0-9]+")


INTERVAL = re.compile(r"([\[(])([\d.]+), ([\d.]+)[\])]")
BOUND = re.compile(r"([≥>≤]) (\d+)")
ROUNDING = 1e-6


def is_within(value: float, range: str) -> bool:
    """Return whether a value is in a range of the page."""
    if range.startswith("any"):
        return math.isfinite(value)
    if interval := INTERVAL.match(range):
        above = value > float(interval[2]) if interval[1] == "(" else value >= float(interval[2])
        return above and value <= float(interval[3]) + ROUNDING
    bound = BOUND.match(range)
    assert bound, range
    limit = float(bound[2])
    return {">": value > limit, "≥": value >= limit - ROUNDING, "≤": value <= limit + ROUNDING}[bound[1]]


def records(finished_run: TinyRun, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Records of two steps of a run from the weights of another."""
    started = {"initialize_from": str(finished_run.path), "warm_start__max_steps": 0, "num_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)
        run = make_run(folder, **started, evaluation={"tasks": 2, "greedy": False}, **changes)
        assert run.train() == 0
    return run.records()


@pytest.fixture(scope="module")
def everything(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of PPO with a critic, several updates per step, a filter, shaping and corrections."""
    return records(
        finished_run,
        tmp_path_factory.mktemp("everything"),
        advantage={"type": "gae"},
        critic={"shared_trunk": True},
        policy_loss={"type": "ppo_clip"},
        updates={"epochs": 2, "minibatches": 2},
        aggregation={"type": "token_mean"},
        kl={"type": "in_reward", "beta": 0.1},
        distillation={"coefficient": 0.1},
        off_policy_correction={"type": "tis"},
        environment__format=None,
        filter={"type": "resample", "max_batches": 2},
    )


REWARD = """
    from marin_rl.rewards import EvaluateResult, reward_function


    @reward_function
    def shape(messages, ground_truth, **kwargs):
        reply = messages[-1]["content"]
        if len(reply) == 2:
            raise ValueError("two characters")
        return EvaluateResult(score=len(reply) / 3, metrics={"spaces": reply.count(" ")})
"""


@pytest.fixture(scope="module")
def lessons(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of a mixture in order with a user's environment and reward function, and of all streams of the loss."""
    folder = tmp_path_factory.mktemp("lessons")
    (folder / "shape.py").write_text(textwrap.dedent(REWARD))
    words = {
        "type": "tool_use",
        "tools": [{"type": "calculator"}],
        "describe": "none",
        "questions": {"type": "arithmetic", "digits": 1, "size": 100},
        "rewards": [{"type": "function", "path": str(folder / "shape.py"), "function": "shape"}],
    }
    numbers = {"type": "arithmetic", "terms": 2, "digits": 1, "size": 100, "name": "sums"}
    parts = [{"environment": words, "window": 4}, {"environment": numbers, "after": ["arithmetic"]}]
    streams = {"kl": {"type": "exact", "beta": 0.1}, "observation_loss": {}, "rollouts__max_turns": 2}
    return records(finished_run, folder, environment={"type": "mixture", "parts": parts}, **streams)


@pytest.fixture(scope="module")
def all_records(
    finished_run: TinyRun,
    everything: list[dict[str, Any]],
    lessons: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """Records of these runs, of a plain one, of an asynchronous one, of ones on data, and of a mixture of experts."""
    ahead = records(finished_run, tmp_path_factory.mktemp("ahead"), mode="async")
    supervised = make_sft_run(tmp_path_factory.mktemp("supervised"), num_steps=2)
    assert supervised.train() == 0
    preferred = make_dpo_run(tmp_path_factory.mktemp("preferred"), num_steps=2)
    assert train_dpo(preferred) == 0
    short = {"num_steps": 2, "evaluation": {"tasks": 2, "greedy": False, "every": 0}}
    mixture = make_run(tmp_path_factory.mktemp("mixture"), **MIXTURE, **short)
    assert mixture.train() == 0
    runs = (finished_run, supervised, preferred, mixture)
    return [*everything, *lessons, *ahead, *(record for run in runs for record in run.records())]


NOT_ON_A_CPU = {"mfu"}
OTHER_RUNS = {"config/<key>", "eval/<environment>/reward_sampled", "eval/<environment>/reward_greedy"}
"""Metrics of changed runs, and of environments without right and wrong."""
STARTING_POINT = "before_warm_start/"


@pytest.mark.medium
def test_runs_log_exactly_the_defined_metrics_within_their_ranges(all_records: list[dict[str, Any]]) -> None:
    defined = dict(defined_metrics())
    assert len(defined) == len(defined_metrics()) > 60
    logged, undefined, outside = set[str](), set[str](), []
    for name, value in {(name, value) for record in all_records for name, value in record.items()}:
        plain = name.removeprefix(STARTING_POINT)
        # Held-out pairs have the metrics of a batch of pairs.
        plain = plain if plain in defined else plain.removeprefix("eval/held_out/")
        known = [known for known in defined if re.fullmatch(pattern(known), plain)]
        logged |= {definition for definition in known if re.fullmatch(pattern(definition), name)}
        undefined |= set() if known else {name}
        outside += [(name, value, defined[one]) for one in known if not is_within(value, defined[one])]
    assert undefined == set()
    assert defined.keys() - logged == NOT_ON_A_CPU | OTHER_RUNS
    assert outside == []


@pytest.mark.medium
def test_metrics_are_reduced_as_documented(everything: list[dict[str, Any]]) -> None:
    """Statements of the page about several updates, and about sampled, kept and trained rollouts."""
    _, first, second = everything
    for record in (first, second):
        assert record["loss/total"] == pytest.approx(
            record["loss/policy_avg"] + record["loss/kl_avg"] + 0.5 * record["loss/value_avg"], abs=1e-5
        )
        assert record["objective/non_score_reward"] == pytest.approx(0.1 * record["objective/kl"])
        # Four updates: the first has the weights from before the step, the average has all of them.
        assert record["objective/entropy"] != record["policy/entropy_avg"]
        assert record["objective/entropy"] == pytest.approx(record["policy/entropy_avg"], rel=0.2)
        # The policy changes within a step, and the sampler agrees with the weights that it used.
        assert record["policy/approxkl_avg"] > 1e-4
        assert record["mismatch/logprob_difference_max"] < 1e-5
        if not record["filter/dropped_zero_spread"] + record["filter/dropped_ungraded"]:
            kept_score = record["objective/rlhf_reward"] + record["objective/non_score_reward"]
            assert kept_score == pytest.approx(record["objective/scores"])
    assert (first["updates"], first["batch/microbatches"], second["updates"]) == (4, 4, 8)
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert first["critic/explained_variance"] == 0.0  # a new critic predicts 0
    assert second["critic/explained_variance"] != 0.0


@pytest.mark.medium
def test_episodes_include_dropped_groups(everything: list[dict[str, Any]]) -> None:
    """Every group has 4 rollouts."""
    played = 0
    for record in everything[1:]:
        played += sum(record[f"filter/{name}"] for name in ("kept_groups", "dropped_zero_spread", "dropped_ungraded"))
        assert record["episode"] == 4 * played
    assert any(record["filter/dropped_zero_spread"] for record in everything[1:])
    assert any(record["filter/replaced"] > 0 for record in everything[1:])


def test_the_table_of_architectures_lists_those_of_either_line() -> None:
    page = (ROOT / "docs" / "pages" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("## Architectures")[2].partition("\n\nAnything else")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", table)) == {*MODEL_TYPES, *ONLY_NEW}


@pytest.mark.medium
def test_table_of_choices_lists_the_registered_types() -> None:
    page = (ROOT / "docs" / "pages" / "configuration.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", page, re.MULTILINE))
    sections = {name: section_of(kind) for name, kind in field_types(TrainConfig).items()}
    own = {
        name: kind for name, kind in sections.items() if str(getattr(kind, "__module__", "")).startswith("marin_rl.")
    }
    registries = {name: kind for name, kind in own.items() if is_choice_type(plain_type(kind))}
    assert len(registries) == 10
    registries |= {"environment.grader": GraderConfig, "environment.rewards": RewardComponentConfig}
    for section, registry in registries.items():
        assert set(re.findall(r"`(\w+)`", rows[section])) == set(registry.get_known_choices()), section
