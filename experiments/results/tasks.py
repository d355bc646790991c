# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The tasks of the results page, and the runs of each."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from experiments.results.runs import Run

RL, CONTROL = "its own", "random"
"""Labels: the rewards of the task, and random ones."""
SEEDS, COMPARED_SEEDS = (1, 2, 3), (1, 2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of the page."""

    config: str
    """Its experiment."""
    quick_steps: int
    """Steps of its quick version, which takes a minute or two."""
    band: tuple[float, float] | None = None
    """Bounds of the sampled held-out score after them: the range of all measured seeds, and 0.1 more on both sides."""
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

    def runs(self) -> Iterator[Run]:
        """Return a run for each seed, and the control of the first one."""
        yield from map(self.run, SEEDS)
        seed = SEEDS[0]
        options = f"--config {self.config} --seed {seed} --probability {self.chance}"
        command = f"experiments.rloo_controls random_reward {options}"
        directory = f"{self.run_dir}-random-reward-seed{seed}"
        yield Run(CONTROL, seed, command, directory, self.before)


SFT_DATA = "experiments.tasks.sft_data"
TASKS = {
    "sums": Task("experiments/rloo.yaml", 50, (0.28, 0.7), chance=0.25),
    "catcount": Task(
        "experiments/tasks/catcount.yaml",
        20,
        before=(SFT_DATA, "marin_rl.sft --config experiments/tasks/catcount_sft.yaml"),
        chance=0.35,
    ),
    "reverse_text": Task(
        "experiments/tasks/reverse_text.yaml",
        20,
        before=(SFT_DATA, "marin_rl.sft --config experiments/tasks/reverse_text_sft.yaml"),
        chance=0.6,
    ),
    "letter_count": Task("experiments/tasks/letter_count.yaml", 25),
    "sum_digits": Task("experiments/tasks/sum_digits.yaml", 25, chance=0.3),
    "countdown": Task("experiments/tasks/countdown.yaml", 25, chance=0.25),
    "arithmetic": Task(
        "experiments/tasks/arithmetic.yaml",
        20,
        before=("experiments.external.tinker.data", "marin_rl.sft --config experiments/external/tinker/small.yaml"),
    ),
    "tictactoe": Task("experiments/tasks/tictactoe.yaml", 30, chance=0.3),
    "tictactoe_self": Task("experiments/tasks/tictactoe_self.yaml", 20),
}
"""Tasks by the name of their record."""

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
        start = f"experiments.objectives start {options}"
        for name in OBJECTIVES:
            yield Run(name, seed, f"experiments.objectives {name} {options}", f"{folder}/{name}-seed{seed}", (start,))
