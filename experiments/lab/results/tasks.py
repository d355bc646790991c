# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The tasks of the results page, and the runs of each."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.lab.results.runs import Record, Run

RL, CONTROL = "its own", "random"
"""Labels: the rewards of the task, and random ones."""
SEEDS, COMPARED_SEEDS = (1, 2, 3), (1, 2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of the page."""

    config: str
    """Its experiment."""
    quick_steps: int
    """Steps of its quick version: a step at which its runs are evaluated."""
    before: tuple[str, ...] = ()
    """Commands that make its start."""
    chance: float = 0.5
    """Probability of a reward of the control: about the mean reward of the first step."""

    @property
    def run_dir(self) -> str:
        """The run directory of the experiment."""
        return "runs" + self.config.removeprefix("experiments").removesuffix(".yaml")

    def run(self, seed: int, steps: int | None = None) -> Run:
        """Return the run of a seed; with a number of steps, the quick version."""
        directory = f"{self.run_dir}{'-quick' if steps else ''}-seed{seed}"
        quick = f" --num_steps {steps} --evaluation.every {steps}" if steps else ""
        command = f"marin_rl.train --config {self.config} --seed {seed} --run_dir {directory}{quick}"
        return Run(RL, seed, command, directory, self.before)

    def band(self, records: Sequence[Record]) -> tuple[float, float]:
        """Return bounds of the sampled held-out score of the quick version, from the records of its runs.

        They are the range of the seeds, widened on both sides by its width, at least by 0.05: a run on one core and
        one on two differ as two seeds do.

        Raises:
            ValueError: if there is no record.
        """
        scores = [
            dict(zip(one.steps, one.sampled, strict=True))[self.quick_steps] for one in records if one.label == RL
        ]
        if not scores:
            raise ValueError(f"{self.config} has no record; run it with --run")
        low, high = min(scores), max(scores)
        margin = max(high - low, 0.05)
        return low - margin, high + margin

    def runs(self) -> Iterator[Run]:
        """Return a run for each seed, and the control of the first one."""
        yield from map(self.run, SEEDS)
        seed = SEEDS[0]
        options = f"--config {self.config} --seed {seed} --probability {self.chance}"
        command = f"experiments.lab.rloo_controls random_reward {options}"
        directory = f"{self.run_dir}-random-reward-seed{seed}"
        yield Run(CONTROL, seed, command, directory, self.before)


SFT_DATA = "experiments.tasks.sft_data"
TICTACTOE = "experiments/tasks/tictactoe.yaml"
TASKS = {
    "sums": Task("experiments/rloo.yaml", 50, chance=0.25),
    "catcount": Task(
        "experiments/tasks/catcount.yaml",
        20,
        before=(SFT_DATA, "marin_rl.sft --config experiments/tasks/catcount_sft.yaml"),
        chance=0.35,
    ),
    "reverse_text": Task(
        "experiments/tasks/reverse_text.yaml",
        50,
        before=(SFT_DATA, "marin_rl.sft --config experiments/tasks/reverse_text_sft.yaml"),
        chance=0.6,
    ),
    "letter_count": Task("experiments/tasks/letter_count.yaml", 50),
    "sum_digits": Task("experiments/tasks/sum_digits.yaml", 50, chance=0.3),
    "countdown": Task("experiments/tasks/countdown.yaml", 50, chance=0.25),
    "arithmetic": Task(
        "experiments/tasks/arithmetic.yaml",
        50,
        before=("experiments.external.tinker.data", "marin_rl.sft --config experiments/external/tinker/small.yaml"),
    ),
    "tictactoe": Task(TICTACTOE, 40, chance=0.3),
    "tictactoe_self": Task(
        "experiments/tasks/tictactoe_self.yaml",
        20,
        before=(f"marin_rl.train --config {TICTACTOE} --num_steps 0 --run_dir runs/tasks/tictactoe_start",),
    ),
}
"""Tasks by the name of their record."""

FIRST_RUN = "first_run"
"""Name of the record of README's first command, with the seed and the cores of its reader."""
README_RUN = Run(RL, 0, "marin_rl.train --config experiments/rloo.yaml", "runs/rloo")

OBJECTIVES = ("rloo", "grpo", "dr_grpo", "maxrl", "gspo", "cispo", "ppo")
"""Objectives of the comparison."""

COMPARED = {
    "objectives_countdown": "experiments/tasks/countdown.yaml",
    "objectives_letter_count": "experiments/tasks/letter_count.yaml",
}
"""Experiments of the comparison of objectives, by the name of its record."""


def compared_runs(config: str) -> Iterator[Run]:
    """Return the runs of all objectives on a task; those of a seed have the same start."""
    folder = f"runs/results/objectives/{Path(config).stem}"
    for seed in COMPARED_SEEDS:
        options = f"--seed {seed} --config {config} --folder {folder}"
        start = f"experiments.lab.objectives start {options}"
        for name in OBJECTIVES:
            yield Run(
                name, seed, f"experiments.lab.objectives {name} {options}", f"{folder}/{name}-seed{seed}", (start,)
            )
