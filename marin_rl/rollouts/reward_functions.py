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
from marin_rl.rollouts.event_loop import PATIENCE, BackgroundLoop
from marin_rl.rollouts.rollout_builder import RolloutBuilder

logger = logging.getLogger(__name__)


@runtime_checkable
class RewardScorer(Protocol):
    """Who judges rollouts, called in the event loop. Each says what it has to say to the drafts themselves."""

    @property
    def has_batch_scope(self) -> bool:
        """Whether rollouts of different groups are judged together, so that no group is whole before all are."""
        ...

    async def score_rollout(self, builder: RolloutBuilder) -> None:
        """Judge a rollout that has ended."""
        ...

    async def score_group(self, builders: Sequence[RolloutBuilder]) -> None:
        """Judge the attempts at one prompt together."""
        ...

    async def score_batch(self, builders: Sequence[RolloutBuilder]) -> None:
        """Judge all rollouts of a step together."""
        ...


class NoRewardScorer:
    """Nobody: environments alone give rewards."""

    @property
    def has_batch_scope(self) -> bool:
        """They do not."""
        return False

    async def score_rollout(self, builder: RolloutBuilder) -> None:
        """Say nothing."""

    async def score_group(self, builders: Sequence[RolloutBuilder]) -> None:
        """Say nothing."""

    async def score_batch(self, builders: Sequence[RolloutBuilder]) -> None:
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
    def has_batch_scope(self) -> bool:
        """See `RewardScorer`."""
        return any(pipeline.has(RewardScope.BATCH) for pipeline in self._pipelines.values())

    async def _start(self) -> None:
        await self._sandbox.start()
        for pipeline in self._pipelines.values():
            await pipeline.start()

    async def score_rollout(self, builder: RolloutBuilder) -> None:
        """See `RewardScorer`."""
        pipeline = self._pipelines.get(builder.task.environment)
        if pipeline is not None and not builder.has_failed:
            with _counted([builder]):
                builder.judged(await pipeline.score_rollout(builder.reward_request()))

    async def score_group(self, builders: Sequence[RolloutBuilder]) -> None:
        """See `RewardScorer`."""
        await self._judge(RewardScope.GROUP, builders)

    async def score_batch(self, builders: Sequence[RolloutBuilder]) -> None:
        """See `RewardScorer`."""
        await self._judge(RewardScope.BATCH, builders)

    async def _judge(self, scope: RewardScope, builders: Sequence[RolloutBuilder]) -> None:
        await asyncio.gather(
            *(
                self._judge_together(
                    pipeline, scope, [builder for builder in builders if builder.task.environment == name]
                )
                for name, pipeline in self._pipelines.items()
                if pipeline.has(scope)
            )
        )

    async def _judge_together(
        self, pipeline: RewardPipeline, scope: RewardScope, builders: Sequence[RolloutBuilder]
    ) -> None:
        present = [builder for builder in builders if not builder.has_failed]
        if not present:
            return
        requests = [builder.reward_request() for builder in present]
        ask = pipeline.score_group if scope is RewardScope.GROUP else pipeline.score_batch
        with _counted(present):
            said = await ask(requests)
        for builder, evaluations in zip(present, said, strict=True):
            builder.judged(evaluations)

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
def _counted(builders: Sequence[RolloutBuilder]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        for builder in builders:
            builder.seconds["reward"] += time.perf_counter() - start
