# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""All reward components of an environment: who is asked when, and what becomes of a lost answer."""

import asyncio
import collections
import logging
from collections.abc import Sequence

from marin_rl.rewards.align import StepIndexError, align_steps
from marin_rl.rewards.component import RewardComponent, RewardComponentConfig, RewardConfigError, RewardScope
from marin_rl.rewards.failures import RewardCallError, RewardFailure
from marin_rl.rewards.functions import EvaluateResult, RewardRequest
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import RewardResult

logger = logging.getLogger(__name__)


class RewardPipeline:
    """Asks the components, and turns what they say into evaluations. A lost answer costs its own rollouts only."""

    def __init__(self, components: Sequence[RewardComponent]):
        """A pipeline that is not started yet.

        Raises:
            RewardConfigError: if two components have the same name.
        """
        counts = collections.Counter(component.name for component in components)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise RewardConfigError(f"rewards: {', '.join(twice)} is there twice; give one of them another `name`")
        self._components = tuple(components)

    async def start(self) -> None:
        """Check every component.

        Raises:
            RewardConfigError: if one cannot be used.
        """
        for component in self._components:
            await component.check()

    def has(self, scope: RewardScope) -> bool:
        """Whether there are components of a scope."""
        return any(component.scope is scope for component in self._components)

    async def score_rollout(self, request: RewardRequest) -> list[RewardResult]:
        """What the pointwise components say about a rollout, in the config's order."""
        [evaluations] = await self._judge(RewardScope.POINTWISE, [request])
        return evaluations

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[list[RewardResult]]:
        """What the components of scope `group` say about all attempts at one prompt: a list for each rollout."""
        return await self._judge(RewardScope.GROUP, requests)

    async def score_batch(self, requests: Sequence[RewardRequest]) -> list[list[RewardResult]]:
        """What the components of scope `batch` say about all rollouts of a step: a list for each rollout."""
        return await self._judge(RewardScope.BATCH, requests)

    async def close(self) -> None:
        """Close every component; the sandbox is the caller's."""
        await asyncio.gather(*(component.close() for component in self._components))

    async def _judge(self, scope: RewardScope, requests: Sequence[RewardRequest]) -> list[list[RewardResult]]:
        asked = [component for component in self._components if component.scope is scope]
        answers = await asyncio.gather(*(self._ask(component, requests) for component in asked))
        return [[answer[index] for answer in answers] for index in range(len(requests))]

    async def _ask(self, component: RewardComponent, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        if not requests:
            return []
        try:
            results = await component.judge(requests)
        except RewardCallError as error:
            return [self._lost(component, request, error.cause, error.detail) for request in requests]
        return [self._evaluation(component, *pair) for pair in zip(requests, results, strict=True)]

    def _evaluation(self, component: RewardComponent, request: RewardRequest, result: EvaluateResult) -> RewardResult:
        if not result.is_score_valid:
            why = result.error or result.reason or "it says that its score is not valid"
            return self._lost(component, request, RewardFailure.INVALID_SCORE, why)
        try:
            steps = align_steps(
                request.rollout_id, request.messages, result.step_outputs or (), request.num_prompt_messages
            )
        except StepIndexError as error:
            return self._lost(component, request, RewardFailure.STEP_INDEX, str(error))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "rollout %s: reward %r, aligner input (message, reward) %s, output (turn, reward) %s",
                request.rollout_id,
                component.name,
                [(step.step_index, step.base_reward) for step in result.step_outputs or ()],
                [(turn, step.base_reward) for turn, step in steps.items()],
            )
        return RewardResult(
            component=component.name,
            weight=component.weight,
            score=result.total_score,
            steps=tuple(steps.values()),
            metrics=dict(result.metrics),
            reason=result.reason,
            error=result.error,
        )

    def _lost(
        self, component: RewardComponent, request: RewardRequest, cause: RewardFailure, detail: str
    ) -> RewardResult:
        error = f"{cause.value}: {detail}"
        # One line; the record keeps the rest.
        logger.warning("reward %r lost rollout %s: %.300s", component.name, request.rollout_id, error.split("\n")[0])
        return RewardResult(
            component=component.name, weight=component.weight, score=None, error=error, lost=cause.value
        )


def build_pipeline(configs: Sequence[RewardComponentConfig], sandbox: Sandbox) -> RewardPipeline:
    """The pipeline of a config's `rewards`.

    Raises:
        RewardConfigError: if two components have the same name.
    """
    return RewardPipeline([config.build(sandbox) for config in configs])
