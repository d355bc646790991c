# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from marin_rl.config.sections import Mode, ReplayConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import AbstractEnvironment, Episode, Split, Step
from marin_rl.environments.streams import MixtureEnvironment, MixturePartConfig
from marin_rl.objectives.shaping import OverlongConfig, RewardTruncatedConfig
from marin_rl.rollouts.config import DropGroupsConfig, LongPrompts, ResampleGroupsConfig
from marin_rl.rollouts.run_rollouts import AllRolloutsFailedError, RolloutRunner
from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest
from marin_rl.training.collect import Collected
from marin_rl.training.run_state import Progress
from marin_rl.types import Message, RolloutStatus, Task
from marin_rl.utils.host_status import StopRequestedError
from tests.training.bare_run import END, BareRun, bare_run, local_rollouts, make_config, make_runner


@dataclasses.dataclass
class Exam(AbstractEnvironment):
    """Tasks with an `answer` that sets the rewards of attempts: `mixed` (0, 1, 0, 1), `equal` (all 1) or `broken`."""

    kinds: Sequence[str]
    name: str = "exam"
    started: list[str] = dataclasses.field(default_factory=list)
    prompts: Sequence[str] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        prompts = self.prompts or [f"t{index}" for index in range(len(self.kinds))]
        return [
            Task(f"t{index}", self.name, (Message(role="user", content=prompts[index]),), kind)
            for index, kind in enumerate(self.kinds)
        ]

    async def start(self, task: Task, seed: int) -> Episode:
        self.started.append(task.id)
        return Sitting(task.answer, self.started.count(task.id))


@dataclasses.dataclass(frozen=True)
class Sitting:
    kind: str
    attempt: int

    async def step(self, reply: str) -> Step:
        if self.kind == "broken":
            raise TimeoutError("no verdict")
        return Step({"correct": float(self.kind == "equal" or self.attempt % 2 == 0)})

    async def close(self) -> None:
        pass


def reply_a(request: SampleRequest) -> Sequence[int]:
    return (97, END)


def collect(
    kinds: Sequence[str], steps: int = 1, script=reply_a, **changes: Any
) -> tuple[BareRun, RolloutRunner, list[Collected]]:
    """Collect the first steps of a run on tasks of these kinds."""
    run = bare_run(make_config(**changes), Exam(kinds))
    runner = make_runner(run.config, script, run.environment)
    return run, runner, [next_step(run, runner) for _ in range(steps)]


def next_step(run: BareRun, runner: RolloutRunner) -> Collected:
    """Collect the groups of the next step."""
    runner.sampler.version = run.progress.step
    run.progress.step += 1
    run.rollout_source = local_rollouts(run.config, runner)
    return run.collect(run.progress.step)


def order(run: BareRun, count: int) -> list[Task]:
    """Draw the first tasks of a run without changing its state."""
    return run.environment.stream(run.config.seed).draw({}, count)[0]


def kinds(groups: Sequence) -> list[str]:
    return [group.rollouts[0].task.answer for group in groups]


def names(groups: Sequence) -> list[str]:
    return [group.rollouts[0].task.id for group in groups]


def counts(found: Collected) -> dict[str, float]:
    return {
        name.removeprefix("filter/"): value for name, value in found.metrics().items() if name.startswith("filter/")
    }


# The order of tasks.


# Long prompts. A prompt has the name of its task and three template tokens: t9 has 5, t10 has 6.


def skipping(longest: int, kinds: Sequence[str] = ("mixed",) * 14, **changes: Any) -> BareRun:
    config = make_config(**changes)
    rollouts = dataclasses.replace(config.rollouts, max_prompt_length=longest, long_prompts=LongPrompts.SKIP)
    return bare_run(dataclasses.replace(config, rollouts=rollouts), Exam(kinds))


def test_tasks_with_long_prompts_are_skipped_and_counted():
    run, everything = skipping(5), bare_run(make_config(), Exam(["mixed"] * 14))
    expected = [task.id for task in everything.draw_tasks(28) if int(task.id[1:]) < 10]
    assert len(expected) == 20
    assert [task.id for task in run.draw_tasks(20)] == expected
    assert run.progress.tasks_drawn == 20
    assert 4 <= run.progress.prompts_skipped <= 8


def test_resumed_run_skips_same_tasks():
    run, whole = skipping(5), skipping(5)
    expected = [task.id for task in whole.draw_tasks(17)]
    before = [task.id for task in run.draw_tasks(8)]
    again = bare_run(run.config, run.environment, progress=Progress(**dataclasses.asdict(run.progress)))
    assert before + [task.id for task in again.draw_tasks(9)] == expected
    assert again.progress == whole.progress


def test_all_prompts_too_long_raises():
    with pytest.raises(
        PromptTooLongError, match=r"14 training tasks in a row have more than 4 tokens.*max_prompt_length"
    ):
        skipping(4).draw_tasks(14)


def test_stream_without_fitting_tasks_raises():
    run = skipping(5)
    parts = [Exam(["mixed"], name="long", prompts=("too long",)), Exam(["mixed"], name="short")]
    # The part with the fitting task has almost no weight.
    weights = {"long": 1.0, "short": 1e-300}
    configs = {name: MixturePartConfig(ArithmeticConfig(), weight) for name, weight in weights.items()}
    run.environment = MixtureEnvironment("both", {part.name: part for part in parts}, configs)
    with pytest.raises(PromptTooLongError, match=r"1020 training tasks in a row have more than 5 tokens"):
        run.draw_tasks(1)


def test_step_is_complete_and_counts_skipped_tasks():
    _, _, found = collect(["mixed"] * 14, steps=3, rollouts=skipping(5).config.rollouts)
    assert [len(step.groups) for step in found] == [4, 4, 4]
    assert all(int(name[1:]) < 10 for step in found for name in names(step.groups))
    assert sum(step.metrics()["prompts/skipped"] for step in found) > 0


# Filtering.


def test_default_filter_keeps_all_groups():
    run, _, [found] = collect(["mixed", "equal", "mixed", "broken"])
    assert sorted(kinds(found.groups)) == ["broken", "equal", "mixed", "mixed"]
    assert found.left_out == []
    assert counts(found) == {"kept_groups": 4, "dropped_zero_spread": 0, "dropped_ungraded": 0, "replaced": 0}
    assert run.progress.tasks_drawn == 4


def test_uninformative_groups_are_dropped_and_counted_by_reason():
    run, _, [found] = collect(["mixed", "equal", "equal", "broken"], filter=DropGroupsConfig())
    assert kinds(found.groups) == ["mixed"]
    assert sorted(kinds(found.left_out)) == ["broken", "equal", "equal"]
    assert counts(found) == {"kept_groups": 1, "dropped_zero_spread": 2, "dropped_ungraded": 1, "replaced": 0}
    assert run.progress.tasks_drawn == 4


def test_metrics_include_dropped_groups():
    _, _, [found] = collect(["mixed", "equal", "equal", "broken"], filter=DropGroupsConfig())
    # Ten of twelve scored rollouts are correct, and four of sixteen failed.
    assert found.metrics()["objective/scores"] == pytest.approx(10 / 12)
    assert found.metrics()["rollouts/failed"] == 4
    assert found.metrics()["groups/zero_spread_share"] == pytest.approx(2 / 3)
    assert len(found.sampled) == 4


RESAMPLE = ResampleGroupsConfig(max_batches=5)


def test_resampling_replaces_dropped_groups_with_next_tasks():
    run, runner, [found] = collect(["mixed", "equal"] * 10, filter=RESAMPLE)
    answers = [task.answer for task in order(run, 60)]
    # Each round requests as many groups as are missing, so the step ends with the task that completes it.
    fourth = [index for index, kind in enumerate(answers) if kind == "mixed"][3]
    assert kinds(found.groups) == ["mixed"] * 4
    assert run.progress.tasks_drawn == fourth + 1
    assert names(found.groups) == [task.id for task in order(run, fourth + 1) if task.answer == "mixed"]
    started = list(dict.fromkeys(runner.environment.started))
    assert started == [task.id for task in order(run, fourth + 1)]


def test_resampled_rollouts_are_complete_with_unique_ids_and_seeds():
    run, runner, found = collect(["mixed", "equal", "equal", "broken", "mixed"] * 3, steps=3, filter=RESAMPLE)
    rollouts = [rollout for step in found for group in step.sampled for rollout in group.rollouts]
    assert len(rollouts) == 4 * run.progress.tasks_drawn == len(runner.environment.started)
    assert len({rollout.id for rollout in rollouts}) == len(rollouts)
    assert len({rollout.group_id for rollout in rollouts}) == run.progress.tasks_drawn
    seeds = [request.seed for request in runner.sampler.requests]
    assert len(set(seeds)) == len(seeds)
    for step in found:
        assert counts(step)["kept_groups"] == len(step.groups) <= 4
        assert counts(step)["dropped_zero_spread"] == kinds(step.left_out).count("equal")
        assert counts(step)["dropped_ungraded"] == kinds(step.left_out).count("broken")
        assert counts(step)["replaced"] > 0


def test_resampling_stops_at_max_batches():
    run, _, [found] = collect(["equal"] * 7, filter=ResampleGroupsConfig(max_batches=3))
    assert found.groups == []
    assert len(found.left_out) == run.progress.tasks_drawn == 12
    assert counts(found) == {"kept_groups": 0, "dropped_zero_spread": 12, "dropped_ungraded": 0, "replaced": 8}


def test_only_a_fully_failed_first_batch_raises():
    exam = ["broken"] * 30 + ["mixed"] * 3
    config = make_config(filter=ResampleGroupsConfig(max_batches=2))
    run = bare_run(config, Exam(exam))
    ordered = [task.answer for task in order(run, 30)]
    # A good task and seven broken ones: three in the first batch, and four as replacements.
    start = next(i for i in range(25) if ordered[i] == "mixed" and ordered[i + 1 : i + 8] == ["broken"] * 7)
    run.progress.task_stream = {"drawn": start}
    found = next_step(run, make_runner(run.config, reply_a, run.environment))
    assert counts(found) == {"kept_groups": 1, "dropped_zero_spread": 0, "dropped_ungraded": 7, "replaced": 4}
    run.progress.task_stream = {"drawn": start + 1}
    with pytest.raises(AllRolloutsFailedError, match="all 16 rollouts failed; the first, train-2-0-0"):
        next_step(run, make_runner(run.config, reply_a, run.environment))


@pytest.mark.medium
def test_resumed_run_samples_same_groups():
    changes = {"filter": RESAMPLE}
    exam = ["mixed", "equal", "equal", "mixed", "equal", "broken", "mixed"] * 2
    run, runner, first = collect(exam, steps=2, **changes)
    saved = dataclasses.asdict(run.progress)
    num_requests = len(runner.sampler.requests)
    third = next_step(run, runner)
    resumed = bare_run(make_config(**changes), Exam(exam), progress=Progress(**saved))
    resumed_runner = make_runner(resumed.config, reply_a, resumed.environment)
    # Rewards in this test depend on earlier attempts at a task; this state belongs to the test, not to the run.
    resumed_runner.environment.started += [
        rollout.task.id for step in first for group in step.sampled for rollout in group.rollouts
    ]
    again = next_step(resumed, resumed_runner)
    assert again.groups == third.groups
    assert again.left_out == third.left_out
    assert resumed_runner.sampler.requests == runner.sampler.requests[num_requests:]
    assert resumed.progress == run.progress


def test_stopped_step_is_rolled_back():
    exam = ["mixed", "equal", "equal", "mixed", "equal"] * 4
    run, runner, _ = collect(exam, filter=RESAMPLE)
    runner.sampler.version = run.progress.step
    before = dataclasses.asdict(run.progress), run.state.scheduler.state, run.state.replay.ages(1)
    started, rounds = len(runner.environment.started), len(runner.sampler.requests)

    def stop_requested() -> bool:
        # Some groups of the first batch were equal, so a second batch was requested.
        return len(runner.sampler.requests) > rounds + 16

    with pytest.raises(StopRequestedError):
        run.collect(2, stop_requested)
    assert len(runner.environment.started) > started + 16
    assert (dataclasses.asdict(run.progress), run.state.scheduler.state, run.state.replay.ages(1)) == before
    del runner.environment.started[started:]
    num_requests = len(runner.sampler.requests)
    again = next_step(run, runner)
    whole, other, [_, expected] = collect(exam, steps=2, filter=RESAMPLE)
    assert (again.groups, again.left_out) == (expected.groups, expected.left_out)
    assert runner.sampler.requests[num_requests:] == other.sampler.requests[rounds:]
    assert run.progress == whole.progress


# Sampling ahead of training.


def ahead(kinds: Sequence[str], steps: Sequence[int]) -> list[Collected]:
    """Collect steps of a run that samples one step ahead; all requested groups finish at the next wait."""
    config = make_config(mode=Mode.ASYNC, replay=ReplayConfig(max_staleness=1))
    run = bare_run(config, Exam(kinds))
    runner = make_runner(run.config, reply_a, run.environment)
    run.rollout_source = local_rollouts(config, runner)
    found = []
    for step in steps:
        runner.sampler.version = step - 1
        found.append(run.collect(step))
    return found


def test_metrics_describe_finished_groups_when_sampling_ahead():
    first, second, third = ahead(["mixed", "equal", "equal", "broken"] * 4, [1, 2, 3])
    # The groups of two steps are requested together; the second step uses groups that finished with the first.
    assert [len(found.finished) for found in (first, second, third)] == [8, 0, 8]
    assert [len(found.groups) for found in (first, second, third)] == [4, 4, 4]
    for found in (first, third):
        rollouts = [rollout for group in found.finished for rollout in group.rollouts]
        scores = [rollout.total_reward for rollout in rollouts if rollout.rewards]
        assert found.metrics()["objective/scores"] == pytest.approx(sum(scores) / len(scores))
        assert found.metrics()["rollouts/failed"] == sum(not rollout.rewards for rollout in rollouts)
        # Every reply ends with a stop token; the groups trained on have at most 16 rollouts.
        assert found.metrics()["val/num_eos_tokens"] == len(scores) > 16
    assert {"objective/scores", "rollouts/failed"}.isdisjoint(second.metrics())
    # Staleness metrics cover the groups trained on.
    assert [found.metrics()["staleness/max"] for found in (first, second)] == [0.0, 1.0]
    assert [found.metrics()["filter/kept_groups"] for found in (first, second)] == [4.0, 4.0]


def test_stale_groups_are_returned():
    first, late = ahead(["mixed"] * 16, [1, 4])
    assert first.stale == []
    assert late.metrics()["replay/stale"] == 4
    assert [group.id for group in late.stale] == [group.id for group in first.finished if group not in first.groups]


# Rewards are shaped before filtering.


def by_turns(*lengths: int):
    """Replies of these lengths, cyclically."""
    following = itertools.cycle(lengths)
    return lambda request: (*[97] * (next(following) - 1), END)


def test_overlong_penalty_makes_equal_group_informative():
    changes = {"filter": DropGroupsConfig(), "overlong": OverlongConfig(buffer=4, factor=0.5)}
    _, _, [found] = collect(["equal"] * 4, script=by_turns(2, 4, 6, 3), **changes)
    assert len(found.groups) == 4
    for group in found.groups:
        assert [rollout.rewards for rollout in group.rollouts] == [
            {"correct": 1.0, "overlong": penalty} for penalty in (0.0, -0.25, -0.5, -0.125)
        ]
    assert found.metrics()["reward/overlong/mean"] == pytest.approx(-0.875 / 4)


def test_fixed_reward_of_truncated_rollouts_is_used_by_filter():
    def long_reply(request: SampleRequest) -> Sequence[int]:
        return (97,) * 6

    changes = {"filter": DropGroupsConfig(), "truncation": RewardTruncatedConfig(reward=-1.0)}
    _, _, [found] = collect(["mixed"] * 4, script=long_reply, **changes)
    assert found.groups == []
    rollouts = [rollout for group in found.left_out for rollout in group.rollouts]
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.TRUNCATED}
    assert [rollout.rewards for rollout in rollouts] == [{"truncated": -1.0}] * 16
