# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments of trainers at their limits, each of which once had another effect than the one that it names."""

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest

import marin_rl
from marin_rl.environments.splits import EmptySplitError
from marin_rl.utils.errors import RunDirectoryError

MODEL = {
    **{"type": "llama", "seq_len": 16, "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 1},
    **{"num_heads": 2, "num_kv_heads": 2, "gradient_checkpointing": False},
}
TASKS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(64)]


def length(task, reply):
    return float(len(reply))


def open_trainer(tmp_path: Path, tasks: Any = TASKS, reward: Any = length, **settings: Any) -> marin_rl.RLTrainer:
    tiny: dict[str, Any] = {
        "tokenizer": {"path": "bytes"},
        "rollouts": {"prompts_per_step": 2, "group_size": 2, "max_length": 12},
        "sampling": {"max_new_tokens": 3, "max_seqs": 4},
        "warm_start": {"max_steps": 0},
        "num_steps": 1,
        "run_dir": tmp_path / "run",
    }
    return marin_rl.RLTrainer(MODEL, tasks, reward, **{**tiny, **settings})


def test_shares_that_the_tasks_cannot_fill_are_refused_at_once(tmp_path):
    with pytest.raises(EmptySplitError):
        open_trainer(tmp_path, TASKS[:1], environment={"held_out": 0.9})


def test_a_run_that_holds_nothing_out_is_not_evaluated_on_held_out_tasks(tmp_path):
    assert open_trainer(tmp_path, environment={"held_out": 0.0}).config.evaluation.tasks == 0
    assert open_trainer(tmp_path).config.evaluation.tasks > 0


def test_sections_of_rewards_without_a_function(tmp_path):
    components = open_trainer(tmp_path, reward=[length, {"type": "code"}]).config.environment.rewards
    assert [component.name for component in components] == ["length", "code"]


def test_a_reward_joins_those_of_a_section(tmp_path):
    section = {"type": "arithmetic", "rewards": [{"type": "code"}]}
    components = open_trainer(tmp_path, section).config.environment.rewards
    assert [component.name for component in components] == ["code", "length"]


def test_load_says_that_there_is_no_run(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        marin_rl.RLTrainer.load(tmp_path / "absent")


@pytest.mark.medium
def test_a_thread_trains_and_a_slash_names_the_same_run(tmp_path):
    trainer = open_trainer(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(trainer.train).result()
    steps = len(trainer.metrics)
    assert steps > 0
    open_trainer(tmp_path, run_dir=f"{tmp_path}/run/").train()
    assert len(trainer.metrics) == steps
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        trainer.sample("1+1=", max_new_tokens=0)
