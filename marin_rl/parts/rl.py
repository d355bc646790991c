# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of a run, built from its config in one place, for all commands and for rollout workers."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import Prompt, RowLayout, choose_layout
from marin_rl.batching.rows import GroupSizes
from marin_rl.config.reference_config import decays
from marin_rl.config.sections import Mode, RoutingReplay
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Split
from marin_rl.environments.random_reward import RandomRewardConfig
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.scoring import SequenceScorer, sequence_scorer
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.models.lora import has_adapter, merge_adapter
from marin_rl.parts.model import AbstractModelParts, EqualStep, Lengths
from marin_rl.parts.weight_reloader import WeightReloader, load_reload_function
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.episode import ConnectAgent
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.sampling.config import OpenAiSamplerConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.openai_sampler import OpenAiSampler
from marin_rl.sampling.policy_check import MAX_TOKENS
from marin_rl.sampling.sampler import Sampler, WeightPoll
from marin_rl.sampling.stops import stop_table, stop_text_bytes
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import WeightVersion
from marin_rl.utils.errors import Closing
from marin_rl.utils.event_loop import BackgroundLoop
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.timing import notice_if_long


@dataclasses.dataclass(frozen=True)
class RunParts(AbstractModelParts):
    """The parts of an RL run."""

    config: TrainConfig
    asks_judges: bool = True
    """Whether LLM judges are asked, which costs money; otherwise their scores are 0."""

    # Tasks, rewards and rollouts: without devices.

    @functools.cached_property
    def environment(self) -> AbstractEnvironment:
        """Environment of the rollouts; reports if its preparation takes long, such as a download."""
        section = self.config.environment
        name = EnvironmentConfig.get_choice_name(type(section))
        with notice_if_long(self.report, f"preparing the tasks of the environment {name!r} ..."):
            return section.build()

    @functools.cached_property
    def loop(self) -> BackgroundLoop:
        """Event loop of environments and reward functions."""
        loop = BackgroundLoop()
        self.resources.enter_context(Closing(loop.close))
        return loop

    @functools.cached_property
    def reward_functions(self) -> RewardFunctions:
        """Reward functions of the environment, started and checked, in a sandbox that its tools share.

        Raises:
            RewardConfigError: if a function is invalid, or cannot use the answer of a task.
            IsolationError: if the machine provides less isolation than the sandbox requires.
        """
        # The event loop ends after the reward functions.
        loop, sandbox = self.loop, self.config.sandbox.build()
        runs_programs = self.environment.connect_sandbox(sandbox)
        self.check_answers()
        section = self.config.environment
        random_rewards = section.random_rewards(self.environment) if isinstance(section, RandomRewardConfig) else None
        reward_functions = RewardFunctions(
            section.reward_components(self.environment),
            sandbox,
            loop,
            runs_programs=runs_programs,
            random_rewards=random_rewards,
            asks_judges=self.asks_judges,
        )
        self.resources.enter_context(Closing(reward_functions.close))
        return reward_functions

    def check_answers(self) -> None:
        """Check that the reward functions can use the answers of all tasks.

        Raises:
            RewardConfigError: if one cannot use an answer; the message names the task.
        """
        for name, components in self.config.environment.reward_components(self.environment).items():
            for component in components:
                tasks = (task for split in Split for task in self.environment.tasks(split))
                component.check_answers(task for task in tasks if task.environment == name)

    @property
    def limits(self) -> Limits:
        """Limits of every rollout."""
        rollouts = self.config.rollouts
        return Limits(
            max_length=rollouts.max_length,
            max_new_tokens=self.config.sampling.max_new_tokens,
            max_turns=rollouts.max_turns,
            max_tokens=rollouts.max_tokens,
            max_seconds=rollouts.max_seconds,
            max_prompt_length=rollouts.max_prompt_length,
            long_prompts=rollouts.long_prompts,
        )

    def make_runner(
        self, sampler: Sampler, vocab_size: int, reward_functions: RewardFunctions | None = None
    ) -> RolloutRunner:
        """Make a rollout runner.

        Args:
            sampler: sampler of the policy.
            vocab_size: vocabulary size of the policy, which may be larger than the tokenizer's.
            reward_functions: scores finished rollouts; None for those of the run.
        """
        return RolloutRunner(
            self.environment,
            self.tokenizer,
            sampler,
            self.limits,
            self.reward_functions if reward_functions is None else reward_functions,
            self.loop,
            connect=make_gateway(
                self.tokenizer, self.limits, vocab_size, has_stop_texts=bool(self.config.sampling.stop)
            ),
        )

    # Samplers.

    def check_sampler(self, vocab_size: int) -> None:
        """Check stop tokens, stop texts and the function that reloads a server's weights; asks no server.

        Raises:
            UserFileError: if the function is missing.
            ValueError: if a stop text cannot be written with the tokens, or the server's key is not set.
        """
        stop, tokenizer, sampler = self.config.sampling.stop, self.tokenizer, self.config.sampler
        stop_table(vocab_size, tokenizer.stop_token_ids, stop, stop_text_bytes(tokenizer, stop))
        if isinstance(sampler, OpenAiSamplerConfig):
            load_reload_function(sampler.reload)
            # Workers may have the key on other machines.
            if self.config.mode is Mode.SYNC:
                sampler.read_key()

    def open_sampler(
        self, policy: LmHeadModel, version: WeightVersion, weight_poll: WeightPoll | None = None
    ) -> Sampler:
        """Open the configured sampler: in this process, or on a server.

        Args:
            policy: the learner's weights.
            version: number of training steps that produced the weights.
            weight_poll: polls for newer weights during decoding in this process; None disables polling.

        Raises:
            UserFileError: if the function that reloads a server's weights is missing or raises.
            SamplerError: if a server's responses are invalid, or not those of the policy.
        """
        server, sampling, tokenizer = self.config.sampler, self.config.sampling, self.tokenizer
        if not isinstance(server, OpenAiSamplerConfig):
            return self.open_group_sampler(policy, version, weight_poll)
        sampler = OpenAiSampler(
            server,
            config=sampling,
            stop_token_ids=tokenizer.stop_token_ids,
            max_context=self.config.rollouts.max_length,
            token_bytes=stop_text_bytes(tokenizer, sampling.stop),
            vocab_size=policy.vocab_size,
            load_weights=WeightReloader(
                server.reload,
                server.base_url,
                tokenizer,
                self.trainer,
                sampling.stop,
                base=str(self.config.initialize_from),
            ),
            learner=self.learner_logprobs,
        )
        sampler.update_weights(policy, version)
        return sampler

    def learner_logprobs(
        self, policy: LmHeadModel, sequences: Sequence[tuple[int, ...]], temperature: float, dtype: str
    ) -> list[list[float]]:
        """Compute log-probs of the tokens after the first; a `LearnerLogprobs`."""
        with self.trainer.use_device_mesh(), hax.axis_mapping(self.trainer.parameter_axis_mapping):
            policy = eqx.filter_jit(merge_adapter)(policy) if has_adapter(policy) else policy
        if (score := self._scorers.get((dtype, temperature))) is None:
            mp = dataclasses.replace(self.trainer.mp, compute_dtype=jnp.dtype(dtype))
            score = self._scorers[dtype, temperature] = sequence_scorer(
                policy.config,
                dataclasses.replace(self.trainer, mp=mp),
                MAX_TOKENS,
                pad_token_id=self.tokenizer.pad_token_id,
                temperature=temperature,
                block_size=self.logprob_block,
                tokens=MAX_TOKENS,
            )
        return score(policy, sequences)

    @functools.cached_property
    def _scorers(self) -> dict[tuple[str, float], SequenceScorer]:
        """Scorers of `learner_logprobs`, by precision and temperature."""
        return {}

    def open_group_sampler(
        self,
        policy: LmHeadModel,
        version: WeightVersion,
        weight_poll: WeightPoll | None = None,
        *,
        call_seconds: float = math.inf,
    ) -> GroupSampler:
        """Open a sampler in this process, on the learner's mesh.

        `call_seconds` is that of `GroupSampler`. The other arguments are those of `open_sampler`.
        """
        sampling = self.config.sampling
        return GroupSampler(
            policy,
            config=sampling,
            stop_token_ids=self.tokenizer.stop_token_ids,
            max_context=self.config.rollouts.max_length,
            token_bytes=stop_text_bytes(self.tokenizer, sampling.stop),
            version=version,
            weight_poll=weight_poll,
            trainer=self.trainer,
            call_seconds=call_seconds,
            experts=self.config.samples_experts,
        )

    # The learner.

    @property
    def groups(self) -> GroupSizes | None:
        """Sizes of the groups of rollouts of a task; None with `share_prompts: false`."""
        rollouts, longest = self.config.rollouts, self.config.sampling.max_new_tokens
        return GroupSizes(rollouts.prompts_per_step, rollouts.group_size, longest) if rollouts.share_prompts else None

    @property
    def whole_rollouts(self) -> bool:
        """Whether all sequences of a rollout must be in one microbatch, as for ratios of whole rollouts."""
        return self.config.policy_loss.is_sequence_level

    @property
    def optional_arrays(self) -> frozenset[str]:
        """Names of the arrays of a batch that not every loss reads."""
        needed = {
            "ce_weights": self.config.observation_loss is not None,
            "ref_kl_weights": self.config.needs_teacher,
            "router_weights": self.has_router,
            "experts": self.config.replays_experts,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)

    @property
    def own_scorings(self) -> float:
        """How often a step scores its rollouts with the trained weights, on average: see `BatchBuilder`."""
        corrects = self.config.off_policy_correction.needs_sampling_logprobs
        if self.config.critic is not None or corrects or self.scores_experts:
            return 1.0
        store = self.config.rollout_store
        return 1 / store.every if store.learner_logprobs and store.every else 0.0

    @property
    def scores_experts(self) -> bool:
        """Whether the updates of a step use the experts that the scorer chooses."""
        return self.config.routing_replay is RoutingReplay.RECOMPUTE

    @property
    def passes_per_step(self) -> int:
        """How often a step trains on its rollouts."""
        return self.config.updates.epochs

    def equal_step(self, lengths: Lengths | None = None) -> EqualStep:
        """Return a step with rollouts of these lengths; None for the longest."""
        rollouts, updates, count = self.config.rollouts, self.config.updates, self.config.rollouts.rollouts_per_step
        lengths = lengths or longest_rollout(self.config)
        of_update = self.minibatches(count, step=1, epoch=0)[0].tolist()
        return EqualStep(
            f"{rollouts.prompts_per_step:,} prompts x {rollouts.group_size} = {count:,} rollouts of "
            f"{lengths.prompt:,} + {lengths.answer:,} tokens",
            lengths,
            rollouts.prompts_per_step,
            count,
            updates.per_step,
            [[min(sum(lengths), rollouts.max_length)]] * len(of_update),
            [[Prompt(str(index // rollouts.group_size).encode(), lengths.prompt - 1)] for index in of_update],
        )

    @property
    def likely_layout(self) -> RowLayout | None:
        """Layout that the longest rollouts and those of half their length have, so that others likely have it; or None.

        Rollouts of several turns may end early, and then often have another layout than the longest ones.
        """
        longest = self.equal_step()
        half = self.equal_step(Lengths(*(-(-length // 2) for length in longest.lengths)))
        of_longest, of_half = (
            choose_layout(step.of_update, self.layout, prompts=step.prompts)[0] for step in (longest, half)
        )
        return of_longest if of_longest == of_half else None

    def minibatches(self, count: int, step: int, epoch: int) -> list[Int64[np.ndarray, " some"]]:
        """Return the indices of the rollouts of each update of an epoch, in ascending order.

        Several updates split the `count` rollouts of a step at random, and so the groups, in each epoch differently.
        """
        updates, order = self.config.updates, np.arange(count)
        if updates.per_step > 1:
            seed = derive_seed(self.config.seed, "minibatches", step, epoch)
            order = np.random.default_rng(seed).permutation(count)
        return list(map(np.sort, np.array_split(order, updates.minibatches)))

    @functools.cached_property
    def loss(self) -> RlLoss:
        """The configured loss."""
        return RlLoss(
            policy_loss=self.config.policy_loss.per_token,
            kl=self.config.kl,
            temperature=self.config.sampling.temperature,
            block_size=self.logprob_block,
            critic=self.config.critic,
            ce_coefficient=0.0 if self.config.observation_loss is None else self.config.observation_loss.coefficient,
        )

    def make_learner(self, layout: RowLayout, base: LmHeadModel | None, teacher: LmHeadModel | None = None) -> Learner:
        """Make a learner for batches in a layout; see `AbstractModelParts`."""
        config = self.config
        capacity = layout.microbatches(math.ceil(config.rollouts.rollouts_per_step / config.updates.minibatches))
        return Learner(
            self.trainer,
            config.optimizer,
            self.loss,
            num_updates=config.num_updates,
            capacity=capacity,
            frozen=None if base is None and teacher is None else Frozen(base, teacher),
            decay=next(iter(decays(config.reference)), None) if config.needs_reference else None,
        )


def longest_rollout(config: TrainConfig) -> Lengths:
    """Return the longest rollouts of a config: a full answer in every turn, after the longest prompt."""
    answer = min(config.sampling.max_new_tokens * config.rollouts.max_turns, config.rollouts.max_length - 1)
    if config.rollouts.max_tokens is not None:
        answer = min(answer, config.rollouts.max_tokens)
    longest = config.rollouts.max_length - answer
    return Lengths(min(config.rollouts.max_prompt_length or longest, longest), answer)


def make_gateway(
    tokenizer: ChatTokenizer, limits: Limits, vocab_size: int, *, has_stop_texts: bool = False
) -> ConnectAgent:
    """Return the function that serves the policy to agents; its server starts with the first agent.

    Args:
        tokenizer: chat tokenizer of the policy.
        limits: limits of every rollout.
        vocab_size: vocabulary size of the policy.
        has_stop_texts: whether `sampling.stop` ends replies.
    """

    @functools.cache
    def gateway() -> Any:
        # Imported here because the extra `serve` is optional.
        from marin_rl.serving.openai.gateway import Gateway

        return Gateway(tokenizer, limits, vocab_size, has_stop_texts=has_stop_texts)

    return lambda recorder: gateway().connect(recorder)
