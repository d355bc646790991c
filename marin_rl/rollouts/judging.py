# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions on rollouts: the second stage, after a rollout was played and before it is compared.

Pointwise components judge a rollout as soon as it has ended, while others are still being sampled; components of a
group once all of its rollouts have, and those of the batch at the end.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from marin_rl.closing import Closing
from marin_rl.rewards.component import RewardComponentConfig, RewardScope
from marin_rl.rewards.pipeline import RewardPipeline, build_pipeline
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.draft import Draft
from marin_rl.rollouts.event_loop import PATIENCE, BackgroundLoop

logger = logging.getLogger(__name__)


@runtime_checkable
class Judges(Protocol):
    """Who judges rollouts, called in the event loop. Each says what it has to say to the drafts themselves."""

    @property
    def judge_batches(self) -> bool:
        """Whether rollouts of different groups are judged together, so that no group is whole before all are."""
        ...

    async def judge_one(self, draft: Draft) -> None:
        """Judge a rollout that has ended."""
        ...

    async def judge_group(self, drafts: Sequence[Draft]) -> None:
        """Judge the attempts at one prompt together."""
        ...

    async def judge_batch(self, drafts: Sequence[Draft]) -> None:
        """Judge all rollouts of a step together."""
        ...


class NoJudges:
    """Nobody: environments alone give rewards."""

    @property
    def judge_batches(self) -> bool:
        """They do not."""
        return False

    async def judge_one(self, draft: Draft) -> None:
        """Say nothing."""

    async def judge_group(self, drafts: Sequence[Draft]) -> None:
        """Say nothing."""

    async def judge_batch(self, drafts: Sequence[Draft]) -> None:
        """Say nothing."""


class RewardFunctions:
    """The reward components of a run's environments, and the sandbox that their code runs in."""

    def __init__(
        self,
        components: Mapping[str, Sequence[RewardComponentConfig]],
        sandbox: Sandbox,
        loop: BackgroundLoop,
        *,
        runs_programs: bool = False,
    ) -> None:
        """Start the sandbox and check every component; no sandbox is started where there is nothing to run in it.

        Args:
            components: by name of the environment whose rollouts they judge.
            sandbox: where their code runs; not started yet.
            loop: where all of this happens.
            runs_programs: whether an environment's tools run in the sandbox too, so that it is started in any case.

        Raises:
            RewardConfigError: if a component cannot be used.
            IsolationError: if the machine offers less isolation than the sandbox requires.
        """
        self._loop = loop
        self._sandbox = sandbox
        self._pipelines = {name: build_pipeline(own, sandbox) for name, own in components.items() if own}
        self._is_started = bool(self._pipelines) or runs_programs
        if self._is_started:
            starting = loop.submit(self._start())
            with contextlib.ExitStack() as stack:
                stack.enter_context(Closing(self.close))
                # Nothing more is started behind the back of an interrupt.
                stack.callback(starting.cancel)
                starting.result()
                stack.pop_all()

    @property
    def judge_batches(self) -> bool:
        """See `Judges`."""
        return any(pipeline.has(RewardScope.BATCH) for pipeline in self._pipelines.values())

    async def _start(self) -> None:
        await self._sandbox.start()
        for pipeline in self._pipelines.values():
            await pipeline.start()

    async def judge_one(self, draft: Draft) -> None:
        """See `Judges`."""
        pipeline = self._pipelines.get(draft.task.environment)
        if pipeline is not None and not draft.has_failed:
            with _counted([draft]):
                draft.judged(await pipeline.judge_one(draft.reward_request()))

    async def judge_group(self, drafts: Sequence[Draft]) -> None:
        """See `Judges`."""
        await self._judge(RewardScope.GROUP, drafts)

    async def judge_batch(self, drafts: Sequence[Draft]) -> None:
        """See `Judges`."""
        await self._judge(RewardScope.BATCH, drafts)

    async def _judge(self, scope: RewardScope, drafts: Sequence[Draft]) -> None:
        await asyncio.gather(
            *(
                self._judge_together(pipeline, scope, [draft for draft in drafts if draft.task.environment == name])
                for name, pipeline in self._pipelines.items()
                if pipeline.has(scope)
            )
        )

    async def _judge_together(self, pipeline: RewardPipeline, scope: RewardScope, drafts: Sequence[Draft]) -> None:
        present = [draft for draft in drafts if not draft.has_failed]
        if not present:
            return
        requests = [draft.reward_request() for draft in present]
        ask = pipeline.judge_group if scope is RewardScope.GROUP else pipeline.judge_batch
        with _counted(present):
            said = await ask(requests)
        for draft, evaluations in zip(present, said, strict=True):
            draft.judged(evaluations)

    def close(self) -> None:
        """End every process of theirs; where something blocks their loop, they end with this process."""
        if not self._is_started:
            return
        if self._loop.responds(PATIENCE):
            self._loop.submit(self._close()).result()
        else:
            logger.warning("the event loop is blocked: the workers of the sandbox end when this process does")

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._sandbox.close)
            for pipeline in self._pipelines.values():
                closing.push_async_callback(pipeline.close)


@contextlib.contextmanager
def _counted(drafts: Sequence[Draft]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        for draft in drafts:
            draft.seconds["reward"] += time.perf_counter() - start
