# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Evaluation of rollouts by all reward components of an environment.

Importing this module registers all types of components.
"""

import asyncio
import collections
import logging
from collections.abc import Sequence

import marin_rl.rewards.code
import marin_rl.rewards.judge  # noqa: F401
from marin_rl.rewards.combine import StepIndexError, align_steps
from marin_rl.rewards.component import RewardComponent, RewardComponentConfig, RewardConfigError, RewardScope
from marin_rl.rewards.failures import RewardCallError, RewardFailure
from marin_rl.rewards.functions import EvaluateResult, RewardRequest
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import RewardResult

logger = logging.getLogger(__name__)


class RewardPipeline:
    """Scores rollouts with all components. A failed call affects only its own rollouts."""

    def __init__(self, components: Sequence[RewardComponent]):
        """Create a pipeline that is not started yet.

        Raises:
            RewardConfigError: if two components have the same name.
        """
        counts = collections.Counter(component.name for component in components)
        duplicates = sorted(name for name, count in counts.items() if count > 1)
        if duplicates:
            raise RewardConfigError(f"rewards: duplicate names {', '.join(duplicates)}; give each a unique `name`")
        self._components = tuple(components)

    async def start(self) -> None:
        """Check all components.

        Raises:
            RewardConfigError: if a component is not usable.
        """
        for component in self._components:
            await component.check()

    def has(self, scope: RewardScope) -> bool:
        """Return whether there are components with this scope."""
        return any(component.scope is scope for component in self._components)

    async def score_rollout(self, request: RewardRequest) -> list[RewardResult]:
        """Return the results of the pointwise components for a rollout, in the config's order."""
        [results] = await self._score(RewardScope.POINTWISE, [request])
        return results

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[list[RewardResult]]:
        """Return the results of the components with scope `group` for the rollouts of one prompt, per rollout."""
        return await self._score(RewardScope.GROUP, requests)

    async def score_batch(self, requests: Sequence[RewardRequest]) -> list[list[RewardResult]]:
        """Return the results of the components with scope `batch` for all rollouts of a step, per rollout."""
        return await self._score(RewardScope.BATCH, requests)

    async def close(self) -> None:
        """Close all components; the caller closes the sandbox."""
        await asyncio.gather(*(component.close() for component in self._components))

    async def _score(self, scope: RewardScope, requests: Sequence[RewardRequest]) -> list[list[RewardResult]]:
        components = [component for component in self._components if component.scope is scope]
        results = await asyncio.gather(*(self._call(component, requests) for component in components))
        return [[by_rollout[index] for by_rollout in results] for index in range(len(requests))]

    async def _call(self, component: RewardComponent, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        if not requests:
            return []
        try:
            results = await component.score(requests)
        except RewardCallError as error:
            return [self._failed(component, request, error.cause, error.detail) for request in requests]
        return [self._result(component, *pair) for pair in zip(requests, results, strict=True)]

    def _result(self, component: RewardComponent, request: RewardRequest, result: EvaluateResult) -> RewardResult:
        if not result.is_score_valid:
            detail = result.error or result.reason or "the function returned is_score_valid=False"
            return self._failed(component, request, RewardFailure.INVALID_SCORE, detail)
        try:
            steps = align_steps(
                request.rollout_id, request.messages, result.step_outputs or (), request.num_prompt_messages
            )
        except StepIndexError as error:
            return self._failed(component, request, RewardFailure.STEP_INDEX, str(error))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "rollout %s: reward %r, rewards by message %s, rewards by turn %s",
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

    def _failed(
        self, component: RewardComponent, request: RewardRequest, cause: RewardFailure, detail: str
    ) -> RewardResult:
        error = f"{cause.value}: {detail}"
        # Log only the first line; the stored rollout contains the whole error.
        logger.warning(
            "reward %r failed for rollout %s: %.300s", component.name, request.rollout_id, error.split("\n")[0]
        )
        return RewardResult(
            component=component.name, weight=component.weight, score=None, error=error, failure=cause.value
        )


def build_pipeline(configs: Sequence[RewardComponentConfig], sandbox: Sandbox) -> RewardPipeline:
    """Build the pipeline of a config's `rewards`.

    Args:
        configs: configs of the components.
        sandbox: sandbox for user code and model-written code.

    Raises:
        RewardConfigError: if two components have the same name.
    """
    return RewardPipeline([config.build(sandbox) for config in configs])
