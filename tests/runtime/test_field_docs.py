# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

from levanter.models.llama import LlamaConfig
from levanter.trainer import TrainerConfig

from marin_rl.runtime.field_docs import field_doc, section_doc


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


def test_where_meanings_are_read():
    assert field_doc(Base, "below") == "The docstring wins."
    assert field_doc(Base, "beside") == "the comment beside it"
    assert field_doc(Base, "above") == "the comment above it, # with a sign in two lines"
    assert field_doc(Base, "listed") == "from the list, in two lines."
    assert field_doc(Base, "broken") == "beside the last of its lines"
    for name in ("first", "second", "nothing"):
        assert field_doc(Base, name) == ""


def test_ancestors_are_asked_too():
    assert field_doc(Derived, "own") == "Its own."
    assert field_doc(Derived, "below") == "The docstring wins."
    assert field_doc(Derived, "beside") == "the comment beside it"


def test_a_class_without_a_source_has_no_meanings():
    made = dataclasses.make_dataclass("Made", [("a", int)])
    assert field_doc(made, "a") == ""
    assert section_doc(made) == ""


def test_levanters_undescribed_fields_are_described_here_and_only_these():
    assert field_doc(LlamaConfig, "rope") == "Rotary position embedding."
    assert field_doc(TrainerConfig, "seed") == "random seed"
    made = dataclasses.make_dataclass("Made", [("rope", int)])
    assert field_doc(made, "rope") == ""


def test_summary_is_the_first_paragraph():
    assert section_doc(Base) == "First paragraph in two lines."
    assert section_doc(Derived) == ""
