# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Scoring of rollouts by reward functions, after a rollout has ended and before advantages are computed.

Pointwise components run as soon as a rollout has ended, while others are still sampled. If their calls share processes,
they run when all rollouts of the group have ended, so that the group alone determines which calls share a process.
Components that score groups run after them, and components that score batches at the end.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from marin_rl.environments.random_reward import RandomRewards
from marin_rl.rewards.component import FunctionReward, RewardComponent, RewardComponentConfig, RewardScope
from marin_rl.rewards.judge import without_judge
from marin_rl.rewards.pipeline import build_components, check_components, score_rollouts
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.pool import BATCH_CALLS, Sandbox
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.utils.errors import Closing
from marin_rl.utils.event_loop import STOP_TIMEOUT, BackgroundLoop

logger = logging.getLogger(__name__)


class RewardFunctions:
    """The reward components of a run's environments, and the sandbox in which their code runs.

    Without components, rewards come from the environments alone.
    """

    def __init__(
        self,
        components: Mapping[str, Sequence[RewardComponentConfig]] | None = None,
        sandbox: Sandbox | None = None,
        loop: BackgroundLoop | None = None,
        *,
        runs_programs: bool = False,
        random_rewards: RandomRewards | None = None,
        asks_judges: bool = True,
    ) -> None:
        """Start the sandbox and check every component. Without components no sandbox is started.

        Args:
            components: reward components by environment name; they score rollouts of that environment.
            sandbox: the sandbox of their code, not yet started; by default one with default settings.
            loop: the event loop of all calls; by default a new one.
            runs_programs: whether an environment's tools use the sandbox too, so that it is always started.
            random_rewards: replace all rewards of training tasks, which the components then do not score.
            asks_judges: whether LLM judges are asked; otherwise their scores are 0.

        Raises:
            RewardConfigError: if a component is invalid.
            IsolationError: if the machine offers less isolation than the sandbox requires.
        """
        self._random_rewards = random_rewards
        self._loop = BackgroundLoop() if loop is None else loop
        self._sandbox = SandboxConfig().build() if sandbox is None else sandbox
        self._by_environment = {
            name: build_components(configs if asks_judges else [*map(without_judge, configs)], self._sandbox)
            for name, configs in (components or {}).items()
            if configs
        }
        configs = [config for of_environment in (components or {}).values() for config in of_environment]
        self._starts_sandbox = runs_programs or not all(config.is_in_process for config in configs)
        self._is_started = bool(self._by_environment) or runs_programs
        if self._is_started:
            starting = self._loop.submit(self._start())
            with contextlib.ExitStack() as stack:
                stack.enter_context(Closing(self.close))
                # After an interrupt nothing more may be started.
                stack.callback(starting.cancel)
                starting.result()
                stack.pop_all()

    @property
    def has_batch_scope(self) -> bool:
        """Whether rollouts of different groups are scored together, so that no group is complete before all are."""
        return any(component.scope is RewardScope.BATCH for component in self._components())

    @property
    def separate_calls(self) -> list[str]:
        """Names of the pointwise functions that are not declared stateless, so that each call has its own process."""
        return [one.name for one in self._components() if isinstance(one, FunctionReward) and one.is_undeclared]

    @property
    def rollouts_per_process(self) -> int:
        """Maximum number of rollouts whose calls share a process; 1 if no calls do."""
        return BATCH_CALLS if any(component.waits_for_group for component in self._components()) else 1

    def _components(self) -> list[RewardComponent]:
        return [component for components in self._by_environment.values() for component in components]

    async def _start(self) -> None:
        if self._starts_sandbox:
            await self._sandbox.start()
        await check_components(self._components())

    async def score_rollout(self, builder: RolloutBuilder) -> None:
        """Score a rollout that has ended with the pointwise components that do not wait for its group.

        If its task has random rewards, they replace its rewards, and no component scores it.
        """
        if self._random_rewards is not None:
            builder.draw_rewards(self._random_rewards)
        early = [component for component in self._pointwise(builder) if not component.waits_for_group]
        if early:
            await self._score_pointwise([(component, [builder]) for component in early])

    async def score_rollouts(self, builders: Sequence[RolloutBuilder]) -> None:
        """Score the rollouts of complete groups with the remaining pointwise components, and add the rewards of all.

        The order of the rollouts determines the calls that share a process.
        """

        def missing(environment: str, component: RewardComponent) -> list[RolloutBuilder]:
            present = [one for one in builders if one.task.environment == environment and one.is_scored]
            return [one for one in present if component.name not in one.pointwise_results]

        await self._score_pointwise(
            [
                (component, missing(name, component))
                for name, components in self._by_environment.items()
                for component in components
                if component.scope is RewardScope.POINTWISE
            ]
        )
        for builder in builders:
            # In the order of the config, regardless of timing.
            results = [builder.pointwise_results[component.name] for component in self._pointwise(builder)]
            if results:
                builder.add_rewards(results)

    async def score_group(self, builders: Sequence[RolloutBuilder]) -> None:
        """Score the attempts at one prompt together."""
        await self._score(RewardScope.GROUP, builders)

    async def score_batch(self, builders: Sequence[RolloutBuilder]) -> None:
        """Score all rollouts of a step together."""
        await self._score(RewardScope.BATCH, builders)

    def _pointwise(self, builder: RolloutBuilder) -> list[RewardComponent]:
        """The pointwise components that score a rollout."""
        components = self._by_environment.get(builder.task.environment, []) if builder.is_scored else []
        return [component for component in components if component.scope is RewardScope.POINTWISE]

    async def _score_pointwise(self, calls: Sequence[tuple[RewardComponent, Sequence[RolloutBuilder]]]) -> None:
        async def score(component: RewardComponent, builders: Sequence[RolloutBuilder]) -> None:
            requests = [builder.reward_request() for builder in builders]
            results = await score_rollouts([component], RewardScope.POINTWISE, requests)
            for builder, [result] in zip(builders, results, strict=True):
                builder.pointwise_results[component.name] = result

        with _count_seconds(builder for _, builders in calls for builder in builders):
            await asyncio.gather(*(score(component, builders) for component, builders in calls))

    async def _score(self, scope: RewardScope, builders: Sequence[RolloutBuilder]) -> None:
        async def score_together(components: Sequence[RewardComponent], builders: Sequence[RolloutBuilder]) -> None:
            with _count_seconds(builders):
                results = await score_rollouts(components, scope, [builder.reward_request() for builder in builders])
            for builder, evaluations in zip(builders, results, strict=True):
                builder.add_rewards(evaluations)

        calls = []
        for name, components in self._by_environment.items():
            present = [one for one in builders if one.task.environment == name and one.is_scored]
            if present and any(component.scope is scope for component in components):
                calls.append(score_together(components, present))
        await asyncio.gather(*calls)

    def close(self) -> None:
        """End all sandbox processes; if their event loop is blocked, they end with this process."""
        if not self._is_started:
            return
        if self._loop.responds(STOP_TIMEOUT):
            self._loop.submit(self._close()).result()
        else:
            logger.warning("the event loop is blocked: the workers of the sandbox end when this process does")

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._sandbox.close)
            for component in self._components():
                closing.push_async_callback(component.close)


@contextlib.contextmanager
def _count_seconds(builders: Iterable[RolloutBuilder]) -> Iterator[None]:
    """Count the time of a `with` block as reward time of each of the builders, once."""
    with contextlib.ExitStack() as timing:
        for builder in dict.fromkeys(builders):
            timing.enter_context(builder.count_seconds("reward"))
        yield
