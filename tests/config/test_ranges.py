# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""All fields of the config classes with a range: values at its bounds are accepted, values beyond it refused."""

import math
import typing
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le

from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.utils.settings.checks import ConfigSection, describe_range, range_problem
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError, describe, field_types, is_annotated, members
from tests.config_classes import build, config_classes


def number_fields() -> list[tuple[type, str, Any]]:
    """Class, name and type of the fields with numbers of the config classes."""
    return [
        (cls, name, annotation)
        for cls in sorted(config_classes(), key=lambda cls: cls.__name__)
        for name, annotation in field_types(cls).items()
        if issubclass(cls, ConfigSection)
        and any(is_annotated(option) or option is float for option in members(annotation))
    ]


RANGED = [
    pytest.param(cls, name, bound, id=f"{cls.__name__}.{name}-{type(bound).__name__}")
    for cls, name, annotation in number_fields()
    for option in filter(is_annotated, members(annotation))
    for bound in option.__metadata__
    if not isinstance(bound, str)
]


def test_ranges_are_found():
    assert len(RANGED) > 100


@pytest.mark.parametrize(("cls", "name", "bound"), RANGED)
def test_value_beyond_a_bound_is_refused(cls: type, name: str, bound: Any):
    kind, limit = type(bound).__name__, getattr(bound, type(bound).__name__.lower())
    is_int = int in [getattr(option, "__origin__", option) for option in members(field_types(cls)[name])]
    step = 1 if is_int else max(abs(limit), 1.0) / 1024
    value = {"Ge": limit - step, "Gt": limit, "Le": limit + step, "Lt": limit}[kind]
    value = value if is_int else float(value)
    with pytest.raises(ValueError, match=rf"^{cls.__name__}\.{name} is {value}; it must be ") as refused:
        build(cls, name, value)
    with pytest.raises(ConfigError) as reported:
        decode(cls, {name: value})
    assert str(refused.value).removeprefix(f"{cls.__name__}.") in reported.value.problems
    ranged = next(option for option in members(field_types(cls)[name]) if is_annotated(option))
    assert describe_range(ranged) in describe(field_types(cls)[name])


@pytest.mark.parametrize(
    ("annotation", "accepted", "refused", "words"),
    [
        (typing.Annotated[int, Ge(1)], [1, 2], [0, -1], "at least 1"),
        (typing.Annotated[float, Gt(0), Le(1)] | None, [1e-9, 1.0, None], [0.0, 1.1], "above 0 and at most 1, or null"),
        (typing.Annotated[int, Ge(2), "two to compare"], [2], [1], "at least 2, two to compare"),
        (typing.Annotated[float, Ge(0), Le(1)], [0, 1], [-0.1, 1.5, math.nan], "from 0 to 1"),
        (float, [-1.0], [math.inf, -math.inf, math.nan], "finite"),
    ],
)
def test_words_of_a_range(annotation: Any, accepted: list, refused: list, words: str):
    assert not any(range_problem(annotation, value, "key") for value in accepted)
    for value in refused:
        finite = "" if math.isfinite(value) or words == "finite" else "finite and "
        assert range_problem(annotation, value, "key") == f"key is {value}; it must be {finite}{words}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value: float):
    for cls, name, annotation in number_fields():
        if any(float in (option, getattr(option, "__origin__", None)) for option in members(annotation)):
            with pytest.raises(ValueError, match=rf"^{cls.__name__}\.{name} is {value}; it must be finite"):
                build(cls, name, value)
            with pytest.raises(ConfigError, match=rf"(?m)^{name} is {value} \(float\), .*must be finite"):
                decode(cls, {name: value})


def test_all_values_out_of_range_are_reported_together():
    problems = ["prompts_per_step is 0; it must be at least 1", "max_tokens is -1; it must be at least 1, or null"]
    with pytest.raises(ValueError, match="RolloutConfig") as refused:
        RolloutConfig(prompts_per_step=0, max_tokens=-1)
    assert str(refused.value).split("\n") == [f"RolloutConfig.{problem}" for problem in problems]
    with pytest.raises(ConfigError) as reported:
        decode(RolloutConfig, {"prompts_per_step": 0, "max_turns": "two", "max_tokens": -1})
    found = list(reported.value.problems)
    assert [found[0], found[2]] == problems
    assert found[1].startswith("max_turns is 'two' (str), but it takes an integer")


def test_a_nested_section_is_named_by_its_key():
    with pytest.raises(ConfigError) as reported:
        decode(TrainConfig, {"environment": {"type": "arithmetic"}, "run_dir": "run", "checkpoint": {"keep_last": 1}})
    assert "checkpoint.keep_last is 1; it must be at least 2, one to fall back to" in reported.value.problems
