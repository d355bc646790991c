# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exact resume and replay of runs with a critic, several updates per step, and resampling.

Compared with the run in `tests/faults/test_resume.py` they have more state: critic weights and optimizer moments, the
assignment of minibatches, and the position in the task stream.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from marin_rl.runs.rollout_store import read_rollouts
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.runs.stored_rollout import StoredGroups, groups_of_table
from marin_rl.sessions.replay import replay_step
from tests.tiny_run import MIXTURE, TinyRun, interrupted_after, make_run, outcome, without_timings
from tests.training.reopened_run import config_of

STEPS = 3

PPO: dict[str, Any] = {
    "advantage": {"type": "gae"},
    "critic": {"shared_trunk": False},
    "policy_loss": {"type": "ppo_clip"},
    "kl": {"type": "in_reward", "beta": 0.1},
    "updates": {"epochs": 2, "minibatches": 2},
}

GSPO: dict[str, Any] = {
    "advantage": {"type": "grpo"},
    "policy_loss": {"type": "gspo"},
    "off_policy_correction": {"type": "mask"},
    "updates": {"minibatches": 2},
    "filter": {"type": "resample", "max_batches": 3},
    "rollouts__group_size": 2,
}
"""Groups of two, which often have equal rewards and are then replaced."""

EXACT: dict[str, Any] = {"kl": {"type": "exact", "beta": 0.5, "divergence": "forward"}, "updates": {"minibatches": 1}}
"""The initial policy teaches in every update."""


SEVERAL_UPDATES: dict[str, Any] = {"policy_loss": {"type": "ppo_clip"}, "updates": {"minibatches": 2}}

QUIET: dict[str, Any] = {"rollouts__prompts_per_step": 1, "rollouts__group_size": 2}
"""Steps of one group, whose rewards are often equal, so that there is no update."""


KINDS = {
    "ppo": PPO,
    "gspo": GSPO,
    "exact": EXACT,
    "mixture": MIXTURE | SEVERAL_UPDATES,
    "recompute": MIXTURE | SEVERAL_UPDATES | {"routing_replay": "recompute"},
    "quiet": QUIET,
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """An uninterrupted run."""

    run: TinyRun
    settings: dict[str, Any]

    @property
    def progress(self) -> list[dict[str, Any]]:
        """Progress in the checkpoint of each step."""
        manifests = [self.run.checkpoint(step) / "manifest.json" for step in range(STEPS + 1)]
        return [json.loads(manifest.read_text())["progress"] for manifest in manifests]


@pytest.fixture(scope="module")
def train(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Train each kind of run once."""
    trained: dict[str, Trained] = {}

    def by_name(name: str) -> Trained:
        if name not in trained:
            start = {"initialize_from": str(finished_run.path), "warm_start__max_steps": 0}
            settings = {
                **({} if name in ("mixture", "recompute") else start),
                **KINDS[name],
                "num_steps": STEPS,
                "evaluation": {"every": 2, "tasks": 4, "greedy": False},
                "checkpoint": {"every": 1, "keep_every": 1},
            }
            run = make_run(tmp_path_factory.mktemp(name), **settings)
            assert run.train() == 0
            trained[name] = Trained(run, settings)
        return trained[name]

    return by_name


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "step"),
    [("ppo", 1), ("ppo", 2), ("gspo", 1), ("gspo", 2), ("exact", 2), ("mixture", 1), ("quiet", 1), ("quiet", 2)],
)
def test_resumed_run_equals_uninterrupted_run(name: str, step: int, train: Callable[[str], Trained], tmp_path: Path):
    whole = train(name).run
    resumed = interrupted_after(whole, step, tmp_path / "copy")
    assert resumed.train() == 0
    found, expected = outcome(resumed), outcome(whole)
    assert [record["step"] for record in found["records"]] == list(range(STEPS + 1))
    for piece in expected:
        assert found[piece] == expected[piece], piece


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("ppo", True),
        ("ppo", False),
        ("gspo", True),
        ("gspo", False),
        ("exact", True),
        ("mixture", True),
        ("quiet", True),
    ],
)
def test_replayed_step_equals_the_run(
    name: str, stored: bool, train: Callable[[str], Trained], monkeypatch: pytest.MonkeyPatch
):
    """With the stored scores, and with scores computed again."""
    if not stored:

        def without_scores(table: pa.Table) -> StoredGroups:
            found = groups_of_table(table)
            return found._replace(scores={id: {} for id in found.scores})

        monkeypatch.setattr("marin_rl.sessions.replay.groups_of_table", without_scores)
    run = train(name).run
    replayed = replay_step(RunDirectory(run.path), config_of(run), 3)
    assert (replayed.start, replayed.weight_difference) == (2, 0.0)
    assert without_timings(replayed.metrics) == without_timings(replayed.recorded)


@pytest.mark.medium
def test_the_initial_policy_is_the_teacher_of_an_exact_divergence(train: Callable[[str], Trained]):
    records = train("exact").run.records()[1:]
    assert abs(records[0]["loss/ref_kl_avg"]) < 1e-6
    assert 1e-5 < records[1]["loss/ref_kl_avg"] < records[2]["loss/ref_kl_avg"]
    for record in records:
        total = record["loss/policy_avg"] + 0.5 * record["loss/ref_kl_avg"]
        assert record["loss/total"] == pytest.approx(total, rel=1e-4, abs=1e-6)
        assert "objective/kl" not in record


@pytest.mark.medium
def test_ppo_step_has_several_updates(train: Callable[[str], Trained]):
    trained = train("ppo")
    records = trained.run.records()[1:]
    assert [record["updates"] for record in records] == [4.0, 8.0, 12.0]
    assert [progress["updates"] for progress in trained.progress] == [0, 4, 8, 12]
    # Two epochs train on every token twice.
    assert trained.progress[-1]["trained_tokens"] == 2 * trained.progress[-1]["sampled_tokens"]
    for record in records:
        assert record["loss/value_avg"] > 0
        assert np.isfinite([record[name] for name in ("critic/explained_variance", "val/clipfrac_avg")]).all()
        # After the first update of a step, the policy differs from the one that sampled.
        assert record["policy/approxkl_avg"] > 0
        # These metrics compare the sampler with the policy before the first update.
        assert record["mismatch/logprob_difference_max"] < 1e-5
    # The value head starts at 0.
    assert records[0]["critic/explained_variance"] == 0.0
    assert records[1]["critic/explained_variance"] != 0.0
    # The policy moves away from the reference, which is the policy before RL.
    assert records[0]["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(records[2]["objective/kl"]) > 1e-4


@pytest.mark.medium
def test_updates_use_the_experts_that_sampled(train: Callable[[str], Trained]):
    """The later updates of a step, too, whose router may choose others."""
    records = train("mixture").run.records()[1:]
    assert records[0]["mismatch/logprob_difference_max"] < 1e-5
    assert sum(record["router/differing"] for record in records) > 0
    for record in records:
        assert record["loss/router_balance_avg"] > 0
        loads = [value for name, value in record.items() if name.startswith("router/load/")]
        assert np.mean(loads) == pytest.approx(1)
        assert (record["router/load_min"], record["router/load_max"]) == (min(loads), max(loads))


@pytest.mark.medium
def test_resampled_groups_advance_the_task_stream(train: Callable[[str], Trained]):
    trained = train("gspo")
    records, drawn = trained.run.records()[1:], [progress["tasks_drawn"] for progress in trained.progress]
    finished = [
        sum(record[f"filter/{name}"] for name in ("kept_groups", "dropped_zero_spread", "dropped_ungraded"))
        for record in records
    ]
    assert np.diff(drawn).tolist() == finished
    assert any(record["filter/replaced"] > 0 for record in records)
    assert all(0 <= record["filter/replaced"] <= 8 and record["filter/kept_groups"] <= 4 for record in records)
    # Every sampled rollout is counted and stored with its status.
    assert [record["episode"] for record in records] == [2.0 * count for count in drawn[1:]]
    for step in (2, 3):
        [table] = read_rollouts(trained.run.path / "rollouts", [step], purposes=["training"])
        assert len(table) == 2 * finished[step - 1]
        reasons = table["not_trained"].to_pylist()
        assert reasons.count(None) == 2 * records[step - 1]["filter/kept_groups"]
        assert set(reasons) <= {None, "filtered"}
    assert {"mismatch/weight_mean", "mismatch/weight_max"} <= set(records[0])


@pytest.mark.medium
def test_training_starts_from_policy_of_run_with_critic(train: Callable[[str], Trained], tmp_path: Path):
    trained = train("ppo")
    settings = {
        **trained.settings,
        "initialize_from": str(trained.run.path),
        "num_steps": 0,
        "advantage": {"type": "rloo"},
    }
    further = make_run(tmp_path, **{**settings, "critic": None, "updates": {}, "policy_loss": {"type": "reinforce"}})
    assert further.train() == 0
    last = {key: value for key, value in trained.run.records()[-1].items() if key.startswith("eval/")}
    assert further.records() == [{"step": 0, **last}]
