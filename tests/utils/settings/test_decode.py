# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import enum
import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import draccus
import jmp
import pytest
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.optim.config import OptimizerConfig
from levanter.tracker import TrackerConfig

from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import IS_NEW, OTHER
from marin_rl.utils.settings.decode import decode, encode
from marin_rl.utils.settings.section_types import ConfigError

ItemT = TypeVar("ItemT")


class Color(enum.StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


@dataclasses.dataclass(frozen=True)
class Shape(draccus.ChoiceRegistry):
    """A choice."""


@Shape.register_subclass("circle")
@dataclasses.dataclass(frozen=True)
class Circle(Shape):
    radius: float = 1.0
    color: Color = Color.RED
    size: int = 0

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError(f"radius is {self.radius}; it cannot be negative")
        if self.size < 0:
            raise ValueError(f"shape.size is {self.size}; it cannot be negative")


@Shape.register_subclass("square")
@dataclasses.dataclass(frozen=True)
class Square(Shape):
    side: float
    inner: Shape | None = None


@dataclasses.dataclass(frozen=True)
class From(Generic[ItemT]):
    start: int
    value: ItemT


@dataclasses.dataclass(frozen=True)
class Everything:
    number: int
    share: float = 0.5
    name: str = "x"
    flag: bool = False
    maybe: int | None = None
    anything: Any = None
    shape: Shape = Circle(3.0)
    shapes: tuple[Shape, ...] = ()
    pair: tuple[int, str] = (1, "a")
    table: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    mode: Literal["fast", "slow"] = "fast"
    color: Color = Color.RED
    schedule: int | list[From[float]] = 1
    atoms: dict[str, str | int | float | bool | None] = dataclasses.field(default_factory=dict)
    folder: Path = Path("here")
    wait: timedelta = timedelta(minutes=15)
    policy: jmp.Policy = dataclasses.field(default_factory=lambda: jmp.get_policy("f32"))
    names: set[str] = dataclasses.field(default_factory=set)
    one_or_many: Shape | tuple[Shape, ...] = ()


FULL = Everything(
    number=3,
    share=1e-8,
    name="no",
    flag=True,
    maybe=4,
    anything={"a": [1, None]},
    shape=Square(2.0, inner=Square(1.0, inner=Circle(0.5, Color.DARK_BLUE))),
    shapes=(Circle(), Square(1.5)),
    pair=(2, "b"),
    table={"a": [1, 2]},
    mode="slow",
    color=Color.DARK_BLUE,
    schedule=[From(0, 0.5), From(10, 2.0)],
    atoms={"a": "1", "b": 1, "c": 1.5, "d": True, "e": None, "f": "true"},
    folder=Path("/a/b"),
    wait=timedelta(hours=2),
    policy=jmp.get_policy("p=f32,c=bf16"),
    names={"z"},
    one_or_many=(Circle(), Circle(2.0)),
)


def plain_types(value: Any) -> set[type]:
    match value:
        case dict():
            return {dict}.union(*(plain_types(item) for pair in value.items() for item in pair))
        case list():
            return {list}.union(*(plain_types(item) for item in value))
    return {type(value)}


@pytest.mark.parametrize("config", [FULL, Everything(number=0)])
def test_encoding_is_plain_and_decodes_to_an_equal_config(config):
    encoded = encode(config)
    assert plain_types(encoded) <= {dict, list, str, int, float, bool, type(None)}
    assert decode(Everything, encoded) == config


def test_union_of_item_and_list_accepts_a_single_item():
    config = decode(Everything, {"number": 1, "one_or_many": {"type": "square", "side": 1}})
    assert config.one_or_many == Square(1.0)
    assert decode(Everything, encode(config)) == config


@pytest.mark.parametrize("registry", [LmConfig, OptimizerConfig, TrackerConfig])
def test_every_choice_of_levanter_round_trips(registry):
    for name, choice in registry.get_known_choices().items():
        assert decode(registry, encode(choice(), registry)) == choice(), name


def test_trainer_config_round_trips_with_booleans():
    config = TrainerConfig(mp=jmp.get_policy("p=f32,c=bfloat16"))
    assert decode(TrainerConfig, encode(config)) == config
    assert config.jax_config["jax_softmax_custom_jvp"] is True


def test_checkpoint_policy_round_trips():
    from haliax import ScanCheckpointPolicy

    config = LlamaConfig(gradient_checkpointing=ScanCheckpointPolicy(save_carries="offload"))
    assert decode(LlamaConfig, encode(config)) == config


def test_partial_section_keeps_the_default_of_its_field():
    config = decode(Everything, {"number": 1, "shape": {"color": "dark-blue"}})
    assert config.shape == Circle(3.0, Color.DARK_BLUE)
    assert decode(Everything, {"number": 1, "shape": {"type": "square", "side": 2}}).shape == Square(2.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": 1.5}, r"^number is 1.5 \(float\), but it takes an integer"),
        ({"number": None}, r"^number is None \(null\), but it takes an integer"),
        ({}, r"^number is missing; it takes an integer and has no default$"),
        ({"number": 1, "name": False}, r"^name is False \(bool\), but it takes text: YAML reads yes, no"),
        (
            {"number": 1, "share": math.nan},
            r"^share is nan \(float\), but it takes a number: it must be finite",
        ),
        (
            {"number": 1, "nmae": "x"},
            r"^unknown key nmae; did you mean 'name' or 'names' or 'maybe'\?$",
        ),
        ({"number": 1, "shape": 3}, r"^shape is 3 \(int\), but it takes a section with a type \(one of circle, square"),
        (
            {"number": 1, "shape": {"type": "circel"}},
            r"^shape.type is 'circel', which is not one of its types; did you mean 'circle'\? Valid here: circle, squ",
        ),
        ({"number": 1, "shape": {"type": ["circle"]}}, r"^shape.type is \['circle'\], which is not one of its types"),
        ({"number": 1, "shape": "square"}, r"^shape is 'square' \(str\), but .*: write \{type: square\}$"),
        ({"number": 1, "shape": {"radius": 1, "size": -1}}, r"^shape.size is -1; it cannot be negative$"),
        ({"number": 1, "shape": {"radius": -1.0}}, r"^shape: radius is -1.0; it cannot be negative$"),
        ({"number": 1, "shapes": [{"type": "circle"}, {"radius": 1}]}, r"^shapes.1 needs a type: type is one of circ"),
        ({"number": 1, "shapes": {"type": "circle"}}, r"^shapes is .*, but it takes a list"),
        (
            {"number": 1, "shape": {"type": "square", "side": 1, "inner": {"type": "square", "sied": 2}}},
            r"^unknown key shape.inner.sied; did you mean 'side'\? Valid here: type, side, inner$",
        ),
        (
            {"number": 1, "pair": [1]},
            r"^pair is \[1\] \(list\), but it takes a list of 2 \(an integer, text\): 2 items",
        ),
        ({"number": 1, "name": 1.1}, r"^name is 1\.1 \(float\), but it takes text: write it in quotes"),
        ({"number": 1, "table": {"a": [1, "b"]}}, r"^table.a.1 is 'b' \(str\), but it takes an integer"),
        ({"number": 1, "table": [1]}, r"^table is \[1\] \(list\), but it takes a mapping"),
        ({"number": 1, "mode": "fats"}, r"^mode is 'fats' \(str\), but it takes one of fast, slow"),
        ({"number": 1, "color": "blue"}, r"^color is 'blue' \(str\), but it takes one of red, dark-blue"),
        (
            {"number": 1, "schedule": [{"start": 1, "value": "x"}]},
            r"^schedule.0.value is 'x' \(str\), but it takes a n",
        ),
        ({"number": 1, "wait": "soon"}, r"^wait is 'soon' \(str\), but it takes a timedelta"),
        ({"number": 1, "policy": "f33"}, r"^policy is 'f33' \(str\), but it takes a Policy"),
        ({"number": 1, 3: 4}, r"^unknown key 3; Valid here"),
        ([], r"^the config is \[\] \(list\), but it takes a section with number"),
    ],
)
def test_invalid_values_are_reported_by_key(given, message):
    with pytest.raises(ConfigError, match=message):
        decode(Everything, given)


def test_long_value_is_shortened_in_the_message():
    with pytest.raises(ConfigError) as refused:
        decode(Everything, {"number": "x" * 100_000})
    assert str(refused.value) == f"number is '{'x' * 199}... (str), but it takes an integer"


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        decode(Everything, {"nmae": "x", "share": "much", "shape": {"type": "cube"}})
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["unknown", "number", "share", "shape.type"]


def test_abbreviations_by_initials_are_suggested():
    with pytest.raises(ConfigError, match="unknown key lr; did you mean 'learning_rate'"):
        decode(OptimizerConfig, {"type": "adam", "lr": 0.1})


def test_defaults_of_keys_that_only_the_other_line_of_levanter_has_are_accepted():
    key, default = ("cross_entropy_block_size", None) if IS_NEW else ("dense_router_gradient", False)
    assert decode(LmConfig, {"type": "mixtral", key: default}) == decode(LmConfig, {"type": "mixtral"})
    with pytest.raises(ConfigError, match=f"unknown key {key}; it exists only with {OTHER} in place of the installed"):
        decode(LmConfig, {"type": "mixtral", key: 1})
    with pytest.raises(ConfigError, match=f"unknown key {key}; did you mean|Valid here"):
        decode(TrainerConfig, {key: default})


def test_integers_are_accepted_as_text_and_as_floats():
    config = decode(Everything, {"number": 1, "name": 5, "share": 1})
    assert (config.name, config.share) == ("5", 1.0)
    assert isinstance(config.share, float)


def test_arithmetic_error_in_a_section_names_it():
    with pytest.raises(ConfigError, match=r"^model: integer modulo by zero$"):
        decode(LmConfig, {"type": "llama", "num_kv_heads": 0}, path=("model",))


@pytest.mark.medium
def test_precision_round_trips_before_levanter_is_imported():
    program = (
        "import sys, jmp; import marin_rl.utils.devices.trainer_config\n"
        "from marin_rl.utils.settings.decode import decode, encode\n"
        "policy = jmp.get_policy('p=f32,c=bf16')\n"
        "assert decode(jmp.Policy, encode(policy)) == policy and 'levanter' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
