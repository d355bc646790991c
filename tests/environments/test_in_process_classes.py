# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio

from marin_rl.environments import AbstractEnvironment, InProcessConfig, Split, Step
from marin_rl.types import Task
from marin_rl.utils.user_code import sharing

TASK = Task("1", "own", ({"role": "user", "content": "1"},), "")


class Own(AbstractEnvironment):
    name = "own"

    def tasks(self, split):
        return [TASK]

    async def start(self, task, seed):
        raise NotImplementedError


class Computed:
    reads = 0

    @property
    def tasks(self):
        Computed.reads += 1
        return [{"prompt": str(number)} for number in range(64)]

    def start(self, task, seed):
        pass

    def step(self, reply):
        return Step(rewards={"won": 1.0})


def test_a_class_of_environments_is_built():
    with sharing({"Own": Own}):
        assert InProcessConfig("Own").build().tasks(Split.TRAIN) == [TASK]


def test_attempts_do_not_compute_tasks_again():
    with sharing({"Computed": Computed}):
        environment = InProcessConfig("Computed").build()
    before = Computed.reads
    episode = asyncio.run(environment.start(environment.tasks(Split.TRAIN)[0], 0))
    assert asyncio.run(episode.step("")).rewards == {"won": 1.0}
    assert Computed.reads == before
