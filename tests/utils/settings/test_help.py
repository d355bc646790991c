# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from typing import Any

import draccus
import pytest
from levanter.models.lm_model import LmConfig
from levanter.optim.config import AdamConfig, OptimizerConfig

from marin_rl.config.train_config import TrainConfig, TrainerConfig
from marin_rl.utils.settings.decode import encode
from marin_rl.utils.settings.help import COMMON_KEYS, SECTIONS, all_keys, help_text
from marin_rl.utils.settings.section_types import ConfigError, default_of, field_types, section_of


@dataclasses.dataclass(frozen=True)
class Advantage(draccus.ChoiceRegistry):
    """Advantage estimator."""


@Advantage.register_subclass("rloo")
@dataclasses.dataclass(frozen=True)
class Rloo(Advantage):
    """Leave-one-out baseline.

    More about it.
    """

    normalize: str = "none"
    """Divisor of the advantages."""


@Advantage.register_subclass("mixed")
@dataclasses.dataclass(frozen=True)
class Mixed(Advantage):
    """A mixture of others."""

    parts: tuple[Advantage, ...] = ()
    """Parts of the mixture."""
    share: float = 0.5
    """Share of the first part."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds."""

    length: int = 7
    """Maximum tokens, with a long explanation that must be wrapped to several lines on narrow terminals."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str
    """Name of the run."""
    limits: Limits = Limits(9)
    """Bounds on rollouts."""
    extra: Limits | None = None
    """More bounds."""
    stages: tuple[Limits, ...] = ()
    """Bounds by stage."""
    advantage: Advantage = Rloo("group")
    """Advantage estimator of the run."""
    model: LmConfig | None = None
    """The architecture."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)
    """The optimizer."""
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    """The trainer."""


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def entry(text: str, key: str) -> str:
    """Lines of the help text from one key to the next."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip().split(" (")[0] == key)
    end = next((i for i in range(start + 1, len(lines)) if indent(lines[i]) <= indent(lines[start])), len(lines))
    return " ".join(line.strip() for line in lines[start:end])


def test_every_field_has_name_type_default_and_description():
    text = help_text(RunConfig, section="all", width=100)
    assert entry(text, "name") == "name (text; required) Name of the run."
    assert entry(text, "limits") == "limits Bounds on rollouts."
    assert entry(text, "limits.length").startswith("limits.length (an integer; default: 9) Maximum tokens")
    assert entry(text, "extra") == "extra (a section or null; default: null) More bounds."
    assert entry(text, "extra.length").startswith("extra.length (an integer; default: 7)")
    assert entry(text, "stages.N.length").startswith("stages.N.length (an integer; default: 7)")
    assert (
        entry(text, "advantage") == "advantage (type: rloo, mixed; default type: rloo) Advantage estimator of the run."
    )
    assert entry(text, "advantage.normalize") == (
        'advantage.normalize (text; default: "group") Divisor of the advantages.'
    )
    assert entry(text, "advantage.share") == "advantage.share (a number; default: 0.5) Share of the first part."
    assert "advantage.type rloo\n      Leave-one-out baseline.\n" in text


def test_without_a_section_only_selected_options_are_described():
    text = help_text(RunConfig, width=100)
    assert entry(text, "advantage").startswith("advantage (type: rloo, mixed; default type: rloo)")
    assert "advantage.normalize" in text
    assert "advantage.share" not in text


def test_all_fields_of_levanters_sections_are_listed():
    text = help_text(RunConfig, width=100) + help_text(RunConfig, section="model.llama", width=100)
    for section, config in (("trainer", TrainerConfig), ("optimizer", AdamConfig)):
        for name in field_types(config):
            assert f"{section}.{name}" in text
    assert "trainer.distributed.num_processes" in text
    assert entry(text, "model.seq_len").endswith("maximum length of the input sequence. Defaults to 2048.")
    assert "model.n_embd" not in text


def test_every_field_of_the_default_sections_has_a_description():
    text = help_text(RunConfig, width=1000) + help_text(RunConfig, section="model.qwen3", width=1000)
    lines = text.splitlines()
    fields = [index for index, line in enumerate(lines) if "; default" in line or "; required" in line]
    assert len(fields) > 80
    bare = [lines[index].strip() for index in fields if indent(lines[index + 1]) != indent(lines[index]) + 4]
    assert bare == []


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_the_terminal(width):
    lines = help_text(RunConfig, width=width).splitlines()
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []


def test_help_of_a_section_or_an_option():
    assert help_text(RunConfig, section="limits", width=100).splitlines()[0] == "  limits"
    assert "limits" not in help_text(RunConfig, section="trainer.distributed", width=100)
    text = help_text(RunConfig, section="model.gemma", width=100)
    assert text.startswith("  model.type gemma\n")
    assert "model.hidden_dim" in text


@pytest.mark.parametrize(
    ("section", "hint"),
    [("limit", "did you mean limits"), ("model.lama", "did you mean model.llama"), ("zzz", "lists")],
)
def test_help_of_an_unknown_section_suggests_another(section, hint):
    with pytest.raises(ConfigError, match=f"--help {section}: this key or option does not exist; .*{hint}"):
        help_text(RunConfig, section=section)


@pytest.mark.parametrize(("key", "shown"), [(key, default) for key, default, _ in COMMON_KEYS])
def test_defaults_of_the_overview_are_those_of_the_classes(key: str, shown: str):
    section, _, name = key.rpartition(".")
    types = field_types(TrainConfig)
    default: Any = default_of(TrainConfig, section or name)
    if default is not dataclasses.MISSING:
        default = encode(default, types[section or name])
    if section and isinstance(default, dict):
        default = default[name]
    assert shown == ("required" if default is dataclasses.MISSING else "null" if default is None else str(default))


def test_sections_of_the_overview_are_those_of_the_class():
    assert set(SECTIONS) == {name for name, kind in field_types(TrainConfig).items() if section_of(kind) is not None}


def test_flags_are_listed():
    assert "  --dry_run\n      Only check.\n" in help_text(RunConfig, flags={"dry_run": "Only check."}, width=80)


def test_all_keys_depend_on_the_selected_choices():
    keys = all_keys(RunConfig, {"model": {"type": "gpt2"}})
    assert {"name", "limits.length", "advantage.share", "optimizer.beta1", "model.embed_pdrop"} <= set(keys)
    assert "model.rope" not in keys
    assert "model.rope" in all_keys(RunConfig, {"model": {"type": "llama"}})
    assert all_keys(RunConfig, {"model": {"type": "nonsense"}, "trainer": 3})
