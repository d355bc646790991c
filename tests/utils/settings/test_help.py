# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import re

import pytest
from levanter.optim.config import AdamConfig

from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.settings.field_docs import field_doc, section_doc
from marin_rl.utils.settings.help import all_keys, help_text, overview_text
from marin_rl.utils.settings.section_types import ConfigError, field_types
from tests.config_classes import config_classes


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def entry(text: str, key: str) -> str:
    """Lines of the help text from one key to the next."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip().split(" (")[0] == key)
    end = next((i for i in range(start + 1, len(lines)) if indent(lines[i]) <= indent(lines[start])), len(lines))
    return " ".join(line.strip() for line in lines[start:end])


def test_every_field_has_name_type_default_and_description():
    text = help_text(TrainConfig, section="all", width=100)
    assert entry(text, "run_dir").startswith("run_dir (text; required) Run directory, a path or an address")
    assert entry(text, "updates") == "updates Epochs and minibatches per step."
    assert entry(text, "updates.epochs") == (
        "updates.epochs (an integer of at least 1; default: 1) Epochs over the rollouts of a step."
    )
    assert entry(text, "critic").startswith("critic (a section or null; default: null) Critic, required by")
    assert entry(text, "critic.coefficient").startswith("critic.coefficient (a number above 0; default: ")
    assert entry(text, "environment.rewards.N.weight").startswith(
        "environment.rewards.N.weight (a number; default: 1.0)"
    )
    assert entry(text, "filter").startswith(
        "filter (type: keep, drop, resample; default type: keep) Handling of groups"
    )
    assert entry(text, "filter.max_batches").startswith("filter.max_batches (an integer of at least 2; default: ")
    assert "kl.type in_loss\n" in text
    selected = help_text(TrainConfig, flags={"dry_run": "Only check."}, width=80)
    assert "  --dry_run\n      Only check.\n" in selected
    assert "filter.type keep" in selected
    assert "filter.max_batches" not in selected


def test_all_fields_of_levanters_sections_are_listed():
    text = help_text(TrainConfig, width=100) + help_text(TrainConfig, section="model.llama", width=100)
    for section, config in (("trainer", TrainerConfig), ("optimizer", AdamConfig)):
        for name in field_types(config):
            assert f"{section}.{name}" in text
    assert "trainer.distributed.num_processes" in text
    assert entry(text, "model.seq_len").endswith("maximum length of the input sequence. Defaults to 2048.")
    assert "model.n_embd" not in text


def test_every_field_of_this_project_has_a_description():
    missing = [
        f"{cls.__name__}.{name}" for cls in config_classes() for name in field_types(cls) if not field_doc(cls, name)
    ]
    assert missing == []


def test_lines_fit_the_terminal():
    for width in (60, 100):
        lines = help_text(TrainConfig, width=width).splitlines()
        assert [line for line in lines if len(line) > width and " " in line.strip()] == []


def test_help_of_a_section_or_an_option():
    assert help_text(TrainConfig, section="updates", width=100).splitlines()[0] == "  updates"
    assert "updates" not in help_text(TrainConfig, section="trainer.distributed", width=100)
    text = help_text(TrainConfig, section="model.gemma", width=100)
    assert text.startswith("  model.type gemma\n")
    assert "model.hidden_dim" in text


@pytest.mark.parametrize(
    ("section", "hint"),
    [("update", "did you mean updates"), ("model.lama", "did you mean model.llama"), ("zzz", "lists")],
)
def test_help_of_an_unknown_section_suggests_another(section, hint):
    with pytest.raises(ConfigError, match=f"--help {section}: this key or option does not exist; .*{hint}"):
        help_text(TrainConfig, section=section)


def test_overview_has_the_defaults_of_the_important_keys_and_all_keys():
    text = overview_text(TrainConfig, {"dry_run": "Only check."}, "train", TrainConfig.common_keys)
    rows = dict(re.findall(r"^  ([\w.]+) +(\S+) ", text, re.MULTILINE))
    assert set(TrainConfig.common_keys) <= rows.keys()
    shown = {key: rows[key] for key in ("run_dir", "model", "num_steps", "rollouts.group_size", "advantage", "mode")}
    assert shown == {
        **{"run_dir": "required", "model": "null", "num_steps": "200", "rollouts.group_size": "8"},
        **{"advantage": "rloo", "mode": "sync"},
    }
    assert "--dry_run        only check\n" in text
    assert set(field_types(TrainConfig)) <= set(re.findall(r"\w+", text.partition("All keys:")[2]))
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 45


def test_all_keys_depend_on_the_selected_choices():
    keys = all_keys(TrainConfig, {"model": {"type": "gpt2"}})
    assert {"run_dir", "updates.epochs", "kl.beta", "optimizer.beta1", "model.embed_pdrop"} <= set(keys)
    assert "model.rope" not in keys
    assert "model.rope" in all_keys(TrainConfig, {"model": {"type": "llama"}})
    assert all_keys(TrainConfig, {"model": {"type": "nonsense"}, "trainer": 3})


# Descriptions.


@dataclasses.dataclass(frozen=True)
class Base:
    """First paragraph
    in two lines.

    Args:
        listed (int, optional): from the list,
            in two lines.
        other: not a field.
    """

    below: int = 1  # not this
    """The docstring
    wins."""
    beside: int = 1  # the comment beside it

    # heads several fields
    first: int = 1
    listed: int = 1
    broken: dict[str, int] = dataclasses.field(default_factory=dict)  # beside the last of its lines
    nothing: int = 1


@dataclasses.dataclass(frozen=True)
class Derived(Base):
    below: int = 2
    own: int = 3
    """Its own."""


def test_order_of_sources():
    assert field_doc(Base, "below") == "The docstring wins."
    assert field_doc(Base, "beside") == "the comment beside it"
    assert field_doc(Base, "listed") == "from the list, in two lines."
    assert field_doc(Base, "broken") == "beside the last of its lines"
    assert field_doc(Base, "first") == field_doc(Base, "nothing") == ""


def test_base_classes_are_searched():
    assert field_doc(Derived, "own") == "Its own."
    assert field_doc(Derived, "below") == "The docstring wins."
    assert field_doc(Derived, "beside") == "the comment beside it"


def test_class_without_source_has_no_descriptions():
    built = dataclasses.make_dataclass("Made", [("a", int)])
    assert field_doc(built, "a") == ""
    assert section_doc(built) == ""


def test_section_doc_is_the_first_paragraph():
    assert section_doc(Base) == "First paragraph in two lines."
    assert section_doc(Derived) == ""
