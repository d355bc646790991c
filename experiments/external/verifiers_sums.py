# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A taskset of `verifiers` on the problems of `experiments.external.expected`, for `vf-eval`."""

import json
import os
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    """A problem."""

    answer: str
    """The reply that is right."""


class SumTask(vf.Task[SumData]):
    """Scores a reply."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1 if the reply is the answer, otherwise 0."""
        return float(trace.last_reply == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """The problems in the file that the environment variable PROBLEMS names."""

    def load(self) -> list[SumTask]:
        """Return all problems."""
        rows = map(json.loads, Path(os.environ["PROBLEMS"]).read_text(encoding="utf-8").splitlines())
        return [SumTask(SumData(prompt=row["prompt"], answer=row["answer"]), self.config.task) for row in rows]
