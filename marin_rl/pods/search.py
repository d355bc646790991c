# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The largest microbatch and the most slots of the sampler that fit the memory of a chip."""

import dataclasses
from collections.abc import Callable, Collection

from marin_rl.config.train_config import TrainConfig
from marin_rl.pods.run_plan import ON_ONE_HOST, Plan

MakePlan = Callable[[TrainConfig, Collection[str]], Plan]
"""Makes the plan of a config, with the programs of these names only."""


def largest_that_fit(config: TrainConfig, first: Plan, make: MakePlan) -> dict[str, int | None]:
    """Return the largest `trainer.per_device_parallelism` and `sampling.max_seqs` that fit, each by itself.

    The values of the config are doubled while they fit, or halved until they fit. Larger values are not tried if an
    update already is one microbatch, or all rollouts of a step have slots.

    Args:
        config: training config.
        first: its plan.
        make: makes the plans of the other values.

    Returns:
        The largest value of each setting; None if not even 1 fits.
    """

    def fits_rows(rows: int) -> bool:
        trainer = dataclasses.replace(config.trainer, per_device_parallelism=rows)
        return make(dataclasses.replace(config, trainer=trainer), ("update", "score")).fits

    def fits_slots(slots: int) -> bool:
        sampling = dataclasses.replace(config.sampling, max_seqs=slots)
        return make(dataclasses.replace(config, sampling=sampling), ON_ONE_HOST).fits

    rows, slots = first.per_device_parallelism, config.sampling.max_seqs
    most_rows = rows * first.step.microbatches // first.step.updates
    found = {"trainer.per_device_parallelism": _largest(rows, most_rows, first.fit("update", "score"), fits_rows)}
    if any(program.name in ON_ONE_HOST for program in first.programs):
        found["sampling.max_seqs"] = _largest(slots, first.step.rollouts, first.fit(*ON_ONE_HOST), fits_slots)
    return found


def _largest(start: int, most: int, start_fits: bool, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of a value and its doubles up to `most` that fits, or else of its halves; None if none does.

    >>> [_largest(8, 100, limit >= 8, lambda value: value <= limit) for limit in (0, 5, 40, 1000)]
    [None, 4, 32, 100]
    """
    value = start
    if not start_fits:
        while value > 1:
            value //= 2
            if fits(value):
                return value
        return None
    while value < most and fits(min(2 * value, most)):
        value = min(2 * value, most)
    return value
