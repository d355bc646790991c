# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import jax
import pytest

from marin_rl.runtime.evaluation import EvaluationConfig
from marin_rl.runtime.shared_run import check_config
from marin_rl.runtime.warm_start import WarmStartConfig
from marin_rl.runtime.workers_config import Mode
from tests.runtime.bare_run import make_config

FITTING = make_config(mode=Mode.ASYNC, evaluation=EvaluationConfig(tasks=0), warm_start=WarmStartConfig(max_steps=0))


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": Mode.SYNC}, r"mode is sync, but training runs in 2 processes, .*; set mode: async, whose workers"),
        ({"warm_start": WarmStartConfig(max_steps=5)}, r"warm_start\.max_steps is 5, .*; set it to 0, and warm up in"),
        (
            {"evaluation": EvaluationConfig(tasks=3)},
            r"evaluation\.tasks is 3, .*; set it to 0, and measure checkpoints",
        ),
    ],
)
def test_what_needs_the_trainers_sampler_is_refused(two_processes: None, changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        check_config(dataclasses.replace(FITTING, **changes))


def test_workers_that_sample_are_fine(two_processes: None):
    check_config(FITTING)


def test_one_process_may_do_anything():
    check_config(make_config())
