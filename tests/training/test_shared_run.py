# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from marin_rl.config.sections import Mode
from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.rewards.component import FunctionRewardConfig, RewardScope
from marin_rl.runs.checkpoint import CheckpointConfig
from marin_rl.runs.run_directory import config_differences
from marin_rl.sampling.config import OpenAiSamplerConfig, ReloadConfig
from marin_rl.training.shared_run import (
    check_shared_sampling,
    check_weight_address,
    require_same_config,
    require_same_inputs,
    require_same_tasks,
    require_shared_folder,
)
from marin_rl.utils import multihost
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.logs import LogLevel
from marin_rl.utils.settings.yaml_text import to_yaml
from tests.training.bare_run import make_config

FITTING = make_config(mode=Mode.ASYNC)


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)


def test_settings_that_processes_cannot_share_are_rejected(two_processes: None, monkeypatch: pytest.MonkeyPatch):
    server = OpenAiSamplerConfig(
        "http://127.0.0.1:8000/v1", "policy", reload=ReloadConfig("weights", "reload.py", "load")
    )
    with pytest.raises(ValueError, match=r"sampler is openai and mode is sync, but training runs in 2 .*; set mode: a"):
        check_shared_sampling(server, [])
    reward = FunctionRewardConfig("rewards.py", "rank", scope=RewardScope.BATCH)
    config = make_config(environment=dataclasses.replace(FITTING.environment, rewards=(reward,)))
    with pytest.raises(ValueError, match=r"environment\.rewards\.0 has scope: batch, .* 2 processes, .*: group"):
        check_shared_sampling(config.sampler, config.batch_scoped_rewards())
    check_shared_sampling(FITTING.sampler, FITTING.batch_scoped_rewards())
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    check_shared_sampling(server, config.batch_scoped_rewards())


def test_loopback_weight_host_is_rejected_for_several_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multihost, "gather_texts", lambda own: ("first", "second"))
    refused = r"weights\.host is 127\.0\.0\.1, but training runs on 2 hosts \(first, second\), .*: 0\.0\.0\.0"
    with pytest.raises(ValueError, match=refused):
        check_weight_address("127.0.0.1")
    check_weight_address("0.0.0.0")
    monkeypatch.setattr(multihost, "gather_texts", lambda own: ("first", "first"))
    check_weight_address("127.0.0.1")


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
    require_same_config(to_yaml(config))
    of_main = to_yaml(FITTING)
    other = dataclasses.replace(
        config, run_dir="elsewhere", ray_address="auto", weights=WeightTransferConfig(host="::")
    )
    lines = config_differences(of_main, to_yaml(other), ["ray_address", "weights", "run_dir"])
    assert lines == ["  seed: 0 there, 1 now"]
    answers += ["\n".join(lines)]
    with pytest.raises(RunDirectoryError, match=r"different configs; .*process 1:\n  seed: 0 there, 1 now\nstart all"):
        require_same_config(to_yaml(FITTING))


def test_processes_may_differ_only_in_what_they_do_alone(monkeypatch: pytest.MonkeyPatch):
    """A process that saves more often than the others would wait for them."""
    sent: list[str] = []
    monkeypatch.setattr(multihost, "is_multihost", lambda: True)
    monkeypatch.setattr(multihost, "on_main", lambda work: to_yaml(FITTING))
    monkeypatch.setattr(multihost, "gather_texts", lambda own: sent.append(own) or ("", own))
    require_same_config(to_yaml(dataclasses.replace(FITTING, run_dir="b", log_level=LogLevel.DEBUG)))
    assert sent == [""]
    with pytest.raises(RunDirectoryError, match=r"process 1:\n  checkpoint.every: \d+ there, 7 now\nstart all"):
        require_same_config(to_yaml(dataclasses.replace(FITTING, checkpoint=CheckpointConfig(every=7))))


def test_error_names_other_input_files(monkeypatch: pytest.MonkeyPatch):
    of_main = {"environment": {"a.jsonl": "1", "b.jsonl": "2"}, "tokenizer": {"t/tokenizer.json": "3"}}
    monkeypatch.setattr(multihost, "is_multihost", lambda: True)
    monkeypatch.setattr(multihost, "on_main", lambda work: json.dumps(of_main))
    monkeypatch.setattr(multihost, "gather_texts", lambda own: ("", own))
    require_same_inputs(of_main)
    with pytest.raises(multihost.ProcessesDifferError) as raised:
        require_same_inputs({"environment": {"a.jsonl": "1", "b.jsonl": "other"}})
    assert "process 1:\nenvironment: b.jsonl was changed\ntokenizer: t/tokenizer.json is missing" in str(raised.value)


def test_error_names_splits_with_other_tasks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multihost, "is_multihost", lambda: True)
    rows: list[np.ndarray] = []
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: rows.append(own) or np.stack([rows[0], own]))
    # The calls are made by the main process and by two others.
    require_same_tasks(ArithmeticConfig(size=200, seed=1).build())
    require_same_tasks(ArithmeticConfig(size=200, seed=1).build())
    with pytest.raises(
        multihost.ProcessesDifferError, match=r"tasks of the environment 'arithmetic' .* process 1 in train"
    ):
        require_same_tasks(ArithmeticConfig(size=200, seed=2).build())


def test_error_names_processes_that_do_not_see_the_run_directory(answers: list[str], tmp_path: Path):
    answers += [json.dumps({"sees": True, "path": "'/data/run' on host b"})]
    require_shared_folder(tmp_path)
    answers += [json.dumps({"sees": False, "path": "'/home/run' on host b"})]
    with pytest.raises(
        RunDirectoryError, match=r"training process 1 \('/home/run' on host b\) does not see .* set run_dir to an abs"
    ):
        require_shared_folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_error_names_the_cause_if_the_run_directory_cannot_be_read(
    answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    answers += [json.dumps({"sees": True, "path": "'/data/run' on host b"})]
    with pytest.raises(
        RunDirectoryError, match=r"training process 0 \(.*: \[Errno 13\] Permission denied\) does not see"
    ):
        require_shared_folder(tmp_path)
