# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from marin_rl import multihost
from marin_rl.config.sections import EvaluationConfig, Mode, WarmStartConfig
from marin_rl.config.yaml_text import to_yaml
from marin_rl.errors import RunDirectoryError
from marin_rl.training.run_directory import config_differences
from marin_rl.training.shared_run import check_config, require_same_config, require_shared_folder
from marin_rl.weights.config import ArrowFlightConfig
from tests.training.bare_run import make_config

FITTING = make_config(mode=Mode.ASYNC, evaluation=EvaluationConfig(tasks=0), warm_start=WarmStartConfig(max_steps=0))


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mode": Mode.SYNC},
            r"mode is sync, but training runs in 2 processes, .*; set mode: async, so that rollout workers",
        ),
        ({"warm_start": WarmStartConfig(max_steps=5)}, r"warm_start\.max_steps is 5, .*; set it to 0, and warm up in"),
        (
            {"evaluation": EvaluationConfig(tasks=3)},
            r"evaluation\.tasks is 3, .*; set it to 0, and measure checkpoints",
        ),
    ],
)
def test_settings_that_need_the_trainers_sampler_are_rejected(
    two_processes: None, changes: dict[str, object], message: str
):
    with pytest.raises(ValueError, match=message):
        check_config(dataclasses.replace(FITTING, **changes))


def test_rollout_workers_are_accepted(two_processes: None):
    check_config(FITTING)


def test_loopback_weight_host_is_rejected_for_several_hosts(two_processes: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multihost, "gather_texts", lambda own: ("first", "second"))
    with pytest.raises(
        ValueError,
        match=r"weights\.host is 127\.0\.0\.1, but training runs on 2 hosts \(first, second\), .*: 0\.0\.0\.0",
    ):
        check_config(FITTING)
    check_config(dataclasses.replace(FITTING, weights=ArrowFlightConfig(host="0.0.0.0")))
    monkeypatch.setattr(multihost, "gather_texts", lambda own: ("first", "first"))
    check_config(FITTING)


def test_one_process_accepts_all_settings():
    check_config(make_config())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Responses of the second process to the next exchanges; this process is the main one."""
    answers: list[str] = []
    monkeypatch.setattr(multihost, "is_multihost", lambda: True)
    monkeypatch.setattr(multihost, "is_main", lambda: True)
    monkeypatch.setattr(multihost, "on_main", lambda work: work())
    monkeypatch.setattr(multihost, "gather_texts", lambda own: (own, answers.pop(0)))
    return answers


def test_error_names_processes_with_another_config(answers: list[str]):
    config = dataclasses.replace(FITTING, seed=1)
    answers += [""]
    require_same_config(config, ())
    of_main = to_yaml(FITTING)
    other = dataclasses.replace(config, run_dir="elsewhere", ray_address="auto", weights=ArrowFlightConfig(host="::"))
    lines = config_differences(of_main, to_yaml(other), ["ray_address", "weights", "run_dir"])
    assert lines == ["  seed: 0 there, 1 now"]
    answers += ["\n".join(lines)]
    with pytest.raises(RunDirectoryError, match=r"different configs; .*process 1:\n  seed: 0 there, 1 now\nstart all"):
        require_same_config(FITTING, ())


def test_error_names_processes_that_do_not_see_the_run_directory(answers: list[str], tmp_path: Path):
    answers += [json.dumps({"sees": True, "path": "'/data/run' on host b"})]
    require_shared_folder(tmp_path)
    answers += [json.dumps({"sees": False, "path": "'/home/run' on host b"})]
    with pytest.raises(
        RunDirectoryError, match=r"training process 1 \('/home/run' on host b\) does not see .* set run_dir to an abs"
    ):
        require_shared_folder(tmp_path)
    assert not list(tmp_path.iterdir())
