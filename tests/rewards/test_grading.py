# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import draccus
import pytest

from marin_rl.rewards.grading import (
    ExactConfig,
    FormatConfig,
    GraderConfig,
    MathGraderConfig,
)
from marin_rl.rewards.grading_process import GroundTruthError
from marin_rl.utils.settings.decode import decode
from marin_rl.utils.settings.section_types import ConfigError


def test_format_must_match_the_whole_reply():
    config = FormatConfig(regex=r"(?s)<think>.*</think>-?\d+", weight=0.25)
    assert config.reward("<think>a\nb</think>4") == 0.25
    assert config.reward("<think>a</think>4 apples") == 0.0


def test_broken_pattern_names_field_and_pattern():
    with pytest.raises(ValueError, match=r"format\.regex: '\(' is not a regular expression"):
        FormatConfig(regex="(")


@pytest.mark.parametrize("reply", ["046", "46.0", "+46", "46!", "4 6", "64", "", "\u00a0\u200b46"])
def test_exact_rejects_padding(reply: str):
    assert ExactConfig().grade(reply, "46") == 0.0


def test_exact_case():
    assert ExactConfig().grade("paris", "Paris") == 0.0
    assert ExactConfig(ignore_case=True).grade("paris", "Paris") == 1.0


def test_exact_rejects_an_empty_ground_truth():
    with pytest.raises(GroundTruthError, match="' ' is empty"):
        ExactConfig().grade("", " ")


def test_grader_is_chosen_by_type():
    assert draccus.decode(GraderConfig, {"type": "math", "timeout": 2}) == MathGraderConfig(timeout=2.0)
    assert draccus.decode(GraderConfig, {"type": "exact"}) == ExactConfig()
    with pytest.raises(ConfigError, match=r"^grader\.type is 'math_verify', which is now named math; write math$"):
        decode(GraderConfig, {"type": "math_verify"}, ("grader",))
