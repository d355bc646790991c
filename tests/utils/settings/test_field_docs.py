# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

from levanter.models.llama import LlamaConfig

from marin_rl.config.train_config import TrainerConfig
from marin_rl.utils.settings.field_docs import field_doc, section_doc


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

    # the comment above it, # with a sign
    # in two lines
    above: int = 1

    # heads several fields
    first: int = 1
    second: int = 1
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
    assert field_doc(Base, "above") == "the comment above it, # with a sign in two lines"
    assert field_doc(Base, "listed") == "from the list, in two lines."
    assert field_doc(Base, "broken") == "beside the last of its lines"
    for name in ("first", "second", "nothing"):
        assert field_doc(Base, name) == ""


def test_base_classes_are_searched():
    assert field_doc(Derived, "own") == "Its own."
    assert field_doc(Derived, "below") == "The docstring wins."
    assert field_doc(Derived, "beside") == "the comment beside it"


def test_class_without_source_has_no_descriptions():
    built = dataclasses.make_dataclass("Made", [("a", int)])
    assert field_doc(built, "a") == ""
    assert section_doc(built) == ""


def test_fallback_covers_only_undescribed_fields_of_levanter():
    assert field_doc(LlamaConfig, "rope") == "Rotary position embedding."
    assert field_doc(TrainerConfig, "id") == "Name of the run in trackers; null: the name of the run directory."
    built = dataclasses.make_dataclass("Made", [("rope", int)])
    assert field_doc(built, "rope") == ""


def test_section_doc_is_the_first_paragraph():
    assert section_doc(Base) == "First paragraph in two lines."
    assert section_doc(Derived) == ""
