# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from marin_rl.environments.base import Episode, Split, Step
from marin_rl.environments.composite import CompositeEnvironment
from marin_rl.environments.mixture import MixtureStream
from marin_rl.environments.task_stream import task_stream
from marin_rl.objectives.shaping import OverlongConfig, RewardTruncatedConfig
from marin_rl.rollouts.filters import DropGroupsConfig, ResampleGroupsConfig
from marin_rl.rollouts.rollout_builder import LongPrompts
from marin_rl.rollouts.run_rollouts import AllRolloutsFailedError, RolloutRunner
from marin_rl.rollouts.scheduler import RolloutScheduler
from marin_rl.runtime.collect import Collected, collect_groups, draw_tasks
from marin_rl.runtime.open_rollout_source import make_replay, make_staleness_limits
from marin_rl.runtime.progress import Progress
from marin_rl.runtime.rollout_source import LocalRollouts, StopRequestedError
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.runtime.workers_config import Mode, ReplayConfig
from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest
from marin_rl.timing import PhaseTimer
from marin_rl.types import Message, RolloutStatus, Task
from tests.runtime.bare_run import END, bare_run, make_config, make_runner


@dataclasses.dataclass
class Exam:
    """Tasks whose `answer` says how their attempts do: `mixed` (0, 1, 0, 1), `equal` (all 1) or `broken`."""

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


def says_a(request: SampleRequest) -> Sequence[int]:
    return (97, END)


def collect(
    kinds: Sequence[str], steps: int = 1, script=says_a, **changes: Any
) -> tuple[TrainingRun, RolloutRunner, list[Collected]]:
    """The first steps of a run on tasks of these kinds."""
    run = bare_run(make_config(**changes), Exam(kinds))
    runner = make_runner(run, script, run.environment)
    return run, runner, [further(run, runner) for _ in range(steps)]


def further(run: TrainingRun, runner: RolloutRunner) -> Collected:
    """One step more."""
    runner.sampler.version = run.progress.step
    run.progress.step += 1
    run.rollout_source = LocalRollouts(run.config, runner)
    return collect_groups(run, run.progress.step, PhaseTimer())


def order(run: TrainingRun, count: int) -> list[Task]:
    """The tasks that a run begins with; the run stays where it is."""
    return task_stream(run.environment, run.config.seed).draw({}, count)[0]


def kinds(groups: Sequence) -> list[str]:
    return [group.rollouts[0].task.answer for group in groups]


def names(groups: Sequence) -> list[str]:
    return [group.rollouts[0].task.id for group in groups]


def counts(found: Collected) -> dict[str, float]:
    return {
        name.removeprefix("filter/"): metric.value
        for name, metric in found.metrics.items()
        if name.startswith("filter/")
    }


# The order of tasks.


def test_every_task_comes_once_in_an_epoch_and_every_epoch_has_an_order_of_its_own():
    run = bare_run(make_config(), Exam(["mixed"] * 11))
    drawn = [task.id for task in draw_tasks(run, 33)]
    epochs = [drawn[:11], drawn[11:22], drawn[22:]]
    everything = sorted(f"t{index}" for index in range(11))
    assert [sorted(epoch) for epoch in epochs] == [everything] * 3
    assert len({tuple(epoch) for epoch in [*epochs, everything]}) == 4


def test_the_order_goes_on_wherever_it_is_taken_up_and_another_seed_has_another():
    environment = Exam(["mixed"] * 11)
    run, other = bare_run(make_config(), environment), bare_run(make_config(seed=1), environment)
    whole = order(run, 30)
    assert [*draw_tasks(run, 7), *draw_tasks(run, 1), *draw_tasks(run, 22)] == whole
    assert run.progress.tasks_drawn == 30
    assert order(other, 30) != whole


def test_steps_draw_one_after_the_other():
    run, _, found = collect(["mixed"] * 11, steps=3)
    assert [name for step in found for name in names(step.groups)] == [task.id for task in order(run, 12)]
    assert run.progress.tasks_drawn == 12


# Long prompts. A prompt is its task's name and three tokens of the template: t9 has 5, t10 has 6.


def skipping(longest: int, kinds: Sequence[str] = ("mixed",) * 14, **changes: Any) -> TrainingRun:
    config = make_config(**changes)
    rollouts = dataclasses.replace(config.rollouts, max_prompt_length=longest, long_prompts=LongPrompts.SKIP)
    return bare_run(dataclasses.replace(config, rollouts=rollouts), Exam(kinds))


def test_tasks_with_long_prompts_are_skipped_counted_and_replaced_by_the_next():
    run, everything = skipping(5), bare_run(make_config(), Exam(["mixed"] * 14))
    expected = [task.id for task in draw_tasks(everything, 28) if int(task.id[1:]) < 10]
    assert len(expected) == 20
    assert [task.id for task in draw_tasks(run, 20)] == expected
    assert run.progress.tasks_drawn == 20
    assert 4 <= run.progress.prompts_skipped <= 8


def test_a_run_that_is_taken_up_again_skips_as_one_that_was_never_stopped():
    run, whole = skipping(5), skipping(5)
    expected = [task.id for task in draw_tasks(whole, 17)]
    before = [task.id for task in draw_tasks(run, 8)]
    again = bare_run(run.config, run.environment, progress=Progress(**dataclasses.asdict(run.progress)))
    assert before + [task.id for task in draw_tasks(again, 9)] == expected
    assert again.progress == whole.progress


def test_where_every_prompt_is_too_long_the_run_ends():
    with pytest.raises(
        PromptTooLongError, match=r"14 training tasks in a row have more than 4 tokens.*max_prompt_length"
    ):
        draw_tasks(skipping(4), 14)


def test_the_only_fitting_task_may_come_early_in_one_pass_and_late_in_the_next():
    run = skipping(5)
    run.environment = Exam(["mixed"] * 3, prompts=("a", "too long", "long too"))
    assert {task.id for _ in range(40) for task in draw_tasks(run, 1)} == {"t0"}
    # 39 whole passes, and the one in which the last task was drawn.
    assert 78 <= run.progress.prompts_skipped <= 80


def test_a_stream_that_never_draws_a_fitting_task_ends_the_run():
    run = skipping(5)
    parts = [Exam(["mixed"], name="long", prompts=("too long",)), Exam(["mixed"], name="short")]
    # The part with the task that fits has hardly any weight.
    weights = {"long": 1.0, "short": 1e-300}
    streams = {part.name: part for part in parts}
    run.environment = CompositeEnvironment("both", streams, lambda seed: MixtureStream(streams, weights, seed))
    with pytest.raises(PromptTooLongError, match=r"1020 training tasks in a row have more than 5 tokens"):
        draw_tasks(run, 1)


def test_a_step_has_all_its_groups_and_says_how_many_tasks_were_skipped():
    _, _, found = collect(["mixed"] * 14, steps=3, rollouts=skipping(5).config.rollouts)
    assert [len(step.groups) for step in found] == [4, 4, 4]
    assert all(int(name[1:]) < 10 for step in found for name in names(step.groups))
    assert sum(step.metrics["prompts/skipped"].value for step in found) > 0


# Filtering.


def test_by_default_everything_is_kept():
    run, _, [found] = collect(["mixed", "equal", "mixed", "broken"])
    assert sorted(kinds(found.groups)) == ["broken", "equal", "mixed", "mixed"]
    assert found.left_out == []
    assert counts(found) == {"kept_groups": 4, "dropped_zero_spread": 0, "dropped_ungraded": 0, "replaced": 0}
    assert run.progress.tasks_drawn == 4


def test_groups_that_teach_nothing_are_dropped_and_counted_by_cause():
    run, _, [found] = collect(["mixed", "equal", "equal", "broken"], filter=DropGroupsConfig())
    assert kinds(found.groups) == ["mixed"]
    assert sorted(kinds(found.left_out)) == ["broken", "equal", "equal"]
    assert counts(found) == {"kept_groups": 1, "dropped_zero_spread": 2, "dropped_ungraded": 1, "replaced": 0}
    assert run.progress.tasks_drawn == 4


def test_metrics_are_of_everything_that_was_sampled():
    _, _, [found] = collect(["mixed", "equal", "equal", "broken"], filter=DropGroupsConfig())
    # Of twelve graded rollouts ten are right, and of sixteen four failed.
    assert found.metrics["objective/scores"].value == pytest.approx(10 / 12)
    assert found.metrics["rollouts/failed"].value == 4
    assert found.metrics["groups/zero_spread_share"].value == pytest.approx(2 / 3)
    assert len(found.sampled) == 4


def test_all_groups_may_be_dropped():
    _, _, [found] = collect(["equal"] * 4, filter=DropGroupsConfig())
    assert found.groups == []
    assert counts(found) == {"kept_groups": 0, "dropped_zero_spread": 4, "dropped_ungraded": 0, "replaced": 0}


RESAMPLE = ResampleGroupsConfig(max_batches=5)


def test_resampling_plays_the_next_tasks_for_those_that_are_missing():
    run, runner, [found] = collect(["mixed", "equal"] * 10, filter=RESAMPLE)
    ordered = [task.answer for task in order(run, 60)]
    # Each round plays as many as are missing, so the step ends right after the task that completed it.
    fourth = [index for index, kind in enumerate(ordered) if kind == "mixed"][3]
    assert kinds(found.groups) == ["mixed"] * 4
    assert run.progress.tasks_drawn == fourth + 1
    assert names(found.groups) == [task.id for task in order(run, fourth + 1) if task.answer == "mixed"]
    played = list(dict.fromkeys(runner.environment.started))
    assert played == [task.id for task in order(run, fourth + 1)]


def test_nothing_is_lost_and_nothing_has_the_name_of_another():
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


def test_resampling_ends_at_its_bound():
    run, _, [found] = collect(["equal"] * 7, filter=ResampleGroupsConfig(max_batches=3))
    assert found.groups == []
    assert len(found.left_out) == run.progress.tasks_drawn == 12
    assert counts(found) == {"kept_groups": 0, "dropped_zero_spread": 12, "dropped_ungraded": 0, "replaced": 8}


def test_nothing_is_replaced_where_all_teach():
    run, _, [found] = collect(["mixed"] * 7, filter=RESAMPLE)
    assert counts(found) == {"kept_groups": 4, "dropped_zero_spread": 0, "dropped_ungraded": 0, "replaced": 0}
    assert run.progress.tasks_drawn == 4


def test_replacements_may_fail_as_a_whole_but_not_the_first_batch():
    exam = ["broken"] * 30 + ["mixed"] * 3
    config = make_config(filter=ResampleGroupsConfig(max_batches=2))
    run = bare_run(config, Exam(exam))
    ordered = [task.answer for task in order(run, 30)]
    # A good task and seven broken ones: three in the first batch, four in place of those.
    start = next(i for i in range(25) if ordered[i] == "mixed" and ordered[i + 1 : i + 8] == ["broken"] * 7)
    run.progress.task_stream = {"drawn": start}
    found = further(run, make_runner(run, says_a, run.environment))
    assert counts(found) == {"kept_groups": 1, "dropped_zero_spread": 0, "dropped_ungraded": 7, "replaced": 4}
    run.progress.task_stream = {"drawn": start + 1}
    with pytest.raises(AllRolloutsFailedError, match="all 16 rollouts failed; the first, train-2-0-0"):
        further(run, make_runner(run, says_a, run.environment))


def test_a_run_that_is_taken_up_again_samples_what_it_would_have_sampled():
    changes = {"filter": RESAMPLE}
    exam = ["mixed", "equal", "equal", "mixed", "equal", "broken", "mixed"] * 2
    run, runner, first = collect(exam, steps=2, **changes)
    saved = dataclasses.asdict(run.progress)
    asked = len(runner.sampler.requests)
    third = further(run, runner)
    resumed = bare_run(make_config(**changes), Exam(exam), progress=Progress(**saved))
    again_player = make_runner(resumed, says_a, resumed.environment)
    # What an attempt earns here depends on how often its task came before; that memory is this test's, not the run's.
    again_player.environment.started += [
        rollout.task.id for step in first for group in step.sampled for rollout in group.rollouts
    ]
    again = further(resumed, again_player)
    assert again.groups == third.groups
    assert again.left_out == third.left_out
    assert again_player.sampler.requests == runner.sampler.requests[asked:]
    assert resumed.progress == run.progress


def test_a_step_that_is_stopped_while_it_waits_leaves_no_trace():
    exam = ["mixed", "equal", "equal", "mixed", "equal"] * 4
    run, runner, _ = collect(exam, filter=RESAMPLE)
    runner.sampler.version = run.progress.step
    before = dataclasses.asdict(run.progress), run.orders.state, run.replay.ages(1)
    started, rounds = len(runner.environment.started), len(runner.sampler.requests)

    def stop_requested() -> bool:
        # Some groups of the first batch were equal, so a second batch was ordered.
        return len(runner.sampler.requests) > rounds + 16

    with pytest.raises(StopRequestedError):
        collect_groups(run, 2, PhaseTimer(), stop_requested)
    assert len(runner.environment.started) > started + 16
    assert (dataclasses.asdict(run.progress), run.orders.state, run.replay.ages(1)) == before
    del runner.environment.started[started:]
    asked = len(runner.sampler.requests)
    again = further(run, runner)
    whole, other, [_, expected] = collect(exam, steps=2, filter=RESAMPLE)
    assert (again.groups, again.left_out) == (expected.groups, expected.left_out)
    assert runner.sampler.requests[asked:] == other.sampler.requests[rounds:]
    assert run.progress == whole.progress


# Sampling ahead of training.


def ahead(kinds: Sequence[str], steps: Sequence[int]) -> list[Collected]:
    """Steps of a run that may sample one step ahead; everything that is ordered is played at the next wait."""
    config = make_config(mode=Mode.ASYNC, replay=ReplayConfig(max_staleness=1))
    run = bare_run(config, Exam(kinds))
    run.orders, run.replay = RolloutScheduler(make_staleness_limits(config)), make_replay(config)
    runner = make_runner(run, says_a, run.environment)
    run.rollout_source = LocalRollouts(config, runner)
    found = []
    for step in steps:
        runner.sampler.version = step - 1
        found.append(collect_groups(run, step, PhaseTimer()))
    return found


def test_metrics_are_of_the_groups_that_came_whenever_they_are_trained_on():
    first, second, third = ahead(["mixed", "equal", "equal", "broken"] * 4, [1, 2, 3])
    # Two steps' groups are ordered at once, and the second step takes what came with the first.
    assert [len(found.finished) for found in (first, second, third)] == [8, 0, 8]
    assert [len(found.groups) for found in (first, second, third)] == [4, 4, 4]
    for found in (first, third):
        played = [rollout for group in found.finished for rollout in group.rollouts]
        scores = [rollout.total_reward for rollout in played if rollout.rewards]
        assert found.metrics["objective/scores"].value == pytest.approx(sum(scores) / len(scores))
        assert found.metrics["rollouts/failed"].value == sum(not rollout.rewards for rollout in played)
        # Every answer ends with a stop token; the groups that are trained on have at most 16.
        assert found.metrics["val/num_eos_tokens"].value == len(scores) > 16
    assert {"objective/scores", "rollouts/failed"}.isdisjoint(second.metrics)
    # Staleness is of the groups that are trained on.
    assert [found.metrics["staleness/max"].value for found in (first, second)] == [0.0, 1.0]
    assert [found.metrics["filter/kept_groups"].value for found in (first, second)] == [4.0, 4.0]


def test_dropped_stale_groups_are_handed_on():
    first, late = ahead(["mixed"] * 16, [1, 4])
    assert first.stale == []
    assert late.metrics["replay/stale"].value == 4
    assert [group.id for group in late.stale] == [group.id for group in first.finished if group not in first.groups]


# Shaping comes before filtering.


def by_turns(*lengths: int):
    """Replies of these lengths, one after the other, without end."""
    following = itertools.cycle(lengths)
    return lambda request: (*[97] * (next(following) - 1), END)


def test_a_penalty_on_length_makes_a_group_of_equal_rewards_worth_keeping():
    changes = {"filter": DropGroupsConfig(), "overlong": OverlongConfig(buffer=4, factor=0.5)}
    _, _, [found] = collect(["equal"] * 4, script=by_turns(2, 4, 6, 3), **changes)
    assert len(found.groups) == 4
    for group in found.groups:
        assert [rollout.rewards for rollout in group.rollouts] == [
            {"correct": 1.0, "overlong": penalty} for penalty in (0.0, -0.25, -0.5, -0.125)
        ]
    assert found.metrics["reward/overlong/mean"].value == pytest.approx(-0.875 / 4)


def test_truncated_rollouts_with_a_fixed_reward_are_compared_by_that():
    def cut_off(request: SampleRequest) -> Sequence[int]:
        return (97,) * 6

    changes = {"filter": DropGroupsConfig(), "truncation": RewardTruncatedConfig(reward=-1.0)}
    _, _, [found] = collect(["mixed"] * 4, script=cut_off, **changes)
    assert found.groups == []
    rollouts = [rollout for group in found.left_out for rollout in group.rollouts]
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.TRUNCATED}
    assert [rollout.rewards for rollout in rollouts] == [{"truncated": -1.0}] * 16
