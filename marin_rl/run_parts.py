# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of a run, built from its config in one place, for all commands and for rollout workers."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.reference_config import decays
from marin_rl.config.sections import TOKENS_PER_MICROBATCH, Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, Split
from marin_rl.environments.random_reward import RandomRewardConfig
from marin_rl.learner.attention_kernel import AttentionKernel, attention_kernel
from marin_rl.learner.base_weights import check_base, fingerprint
from marin_rl.learner.critic import assemble
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.scoring import Scorer, Scores
from marin_rl.learner.starting_weights import first_policy
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.learner.weight_reloader import WeightReloader, load_reload_function
from marin_rl.models.lora import Adapter
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.episode import ConnectAgent
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.sampling.client import read_server_key
from marin_rl.sampling.config import OpenAiSamplerConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.openai_sampler import OpenAiSampler
from marin_rl.sampling.sampler import Sampler, WeightPoll
from marin_rl.sampling.stops import stop_table, stop_text_bytes
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import WeightVersion
from marin_rl.utils.devices.setup import microbatch_rows, platform_of, start_devices
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.errors import Closing
from marin_rl.utils.event_loop import BackgroundLoop
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.timing import notice_if_long

Report = Callable[[str], None]
"""Receives progress messages of one line each."""

LOGPROB_BLOCK_SIZE = {"cpu": 256, "gpu": 1024, "tpu": 1024}
"""Tokens on each device whose logits are in memory at once, by platform, if the config does not set their number."""


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The parts of a run. A command makes those that it uses: each is made once, when it is first read.

    A part whose construction raises is made again when it is read again.
    """

    config: TrainConfig
    """Config of the run."""
    trainer: AbstractTrainerConfig
    """Mesh, precision and sharding in this process, as returned by `start_devices`. A command without devices, which
    reads no part that needs them, has the section of the config."""
    resources: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """Closes the opened parts: event loop and reward functions."""
    report: Report = lambda message: None
    """Called if the tasks take long to prepare."""
    replace_reward: Callable[[RewardComponentConfig], RewardComponentConfig] = lambda component: component
    """Returns the reward component to build in the place of a configured one."""

    @classmethod
    def start(
        cls,
        config: TrainConfig,
        section: AbstractTrainerConfig | None = None,
        *,
        alone: bool = False,
        of_other_machine: bool = False,
        resources: contextlib.ExitStack | None = None,
        report: Report = lambda message: None,
    ) -> "RunParts":
        """Start the devices of this process.

        Args:
            config: config of the run.
            section: trainer section of this process; None for that of the config.
            alone: as for `start_devices`.
            of_other_machine: as for `start_devices`.
            resources: closes the opened parts; None if the command opens none.
            report: called if the tasks take long to prepare.

        Raises:
            DeviceError: if the mesh does not fit the devices, or a required accelerator is missing.
        """
        trainer = start_devices(
            section or config.trainer,
            rows_per_device=config.rollouts.rows_per_device,
            alone=alone,
            of_other_machine=of_other_machine,
        )
        return cls(config, trainer, contextlib.ExitStack() if resources is None else resources, report)

    # Tasks, rewards and rollouts: without devices.

    @functools.cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Chat tokenizer of the policy."""
        return self.config.tokenizer.build()

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
        loop, sandbox = self.loop, Sandbox(self.config.sandbox)
        runs_programs = self.environment.connect_sandbox(sandbox)
        self.check_answers()
        section = self.config.environment
        random_rewards = section.random_rewards(self.environment) if isinstance(section, RandomRewardConfig) else None
        reward_functions = RewardFunctions(
            self._reward_components, sandbox, loop, runs_programs=runs_programs, random_rewards=random_rewards
        )
        self.resources.enter_context(Closing(reward_functions.close))
        return reward_functions

    def check_answers(self) -> None:
        """Check that the reward functions can use the answers of all tasks.

        Raises:
            RewardConfigError: if one cannot use an answer; the message names the task.
        """
        for name, components in self._reward_components.items():
            for component in components:
                tasks = (task for split in Split for task in self.environment.tasks(split))
                component.check_answers(task for task in tasks if task.environment == name)

    @property
    def _reward_components(self) -> dict[str, tuple[RewardComponentConfig, ...]]:
        """Reward components by environment name."""
        configured = self.config.environment.reward_components(self.environment)
        return {name: tuple(map(self.replace_reward, components)) for name, components in configured.items()}

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
                read_server_key(sampler.api_key_env, "sampler")

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
            SamplerError: if a server's responses are invalid.
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
            load_weights=WeightReloader(server.reload, server.base_url, tokenizer, self.trainer, sampling.stop),
        )
        sampler.update_weights(policy, version)
        sampler.check_server()
        return sampler

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
        )

    # The learner.

    @functools.cached_property
    def kernel(self) -> AttentionKernel:
        """Attention kernel of the learner."""
        return attention_kernel(self.config.model, platform_of(self.trainer), self.config.context_shards)

    @functools.cached_property
    def model(self) -> LmConfig:
        """Model config with the attention kernel, and a block size of it that divides the rows.

        Raises:
            ValueError: if the attention kernel does not support `rollouts.row_length`.
        """
        assert self.config.model is not None
        return self.kernel.configure(self.config.model, self.config.rollouts.positions(self.kernel))

    @functools.cached_property
    def layout(self) -> RowLayout:
        """Shape of the microbatches.

        A row of R positions and P computed pairs of a query and a key costs `R + P / (6 · hidden size)`: the second
        term is attention, relative to the flops of the linear layers of a transformer. With `per_device_parallelism`,
        rows with shared prompts have at most as many positions as that many other rows.

        Raises:
            ValueError: if the attention kernel does not support `rollouts.row_length`.
        """
        rollouts = self.config.rollouts
        packed = rollouts.packing is not False
        layout = self._layout(rollouts.positions(self.kernel), self.trainer.rows_per_microbatch, packed=packed)
        platform, devices = platform_of(self.trainer), self.trainer.data_axis_size
        alternatives = []
        separate = dataclasses.replace(rollouts, packing=False)
        if rollouts.packing is None and separate.positions(self.kernel) != layout.row_length:
            rows = microbatch_rows(self.config.trainer, separate.rows_per_device(platform, devices)) * devices
            alternatives.append(self._layout(separate.positions(self.kernel), rows, packed=False))
        if rollouts.share_prompts and packed and rollouts.row_length is None:
            shared = self._layout_of_groups(layout.row_length)
            alternatives += [] if shared is None else [shared]
        return dataclasses.replace(layout, alternatives=tuple(alternatives))

    def _layout_of_groups(self, row_length: int) -> RowLayout | None:
        """Return the layout of rows with shared prompts, if there is one, given the length of other rows."""
        config, kernel, platform = self.config, self.kernel, platform_of(self.trainer)
        if not kernel.supports_shared_prompts(config.model):
            return None
        own_rows, devices = microbatch_rows(config.trainer, 0), self.trainer.data_axis_size
        most_tokens = own_rows * row_length or TOKENS_PER_MICROBATCH[platform]
        group = config.rollouts.group_row(config.sampling.max_new_tokens, kernel, most_tokens)
        if group is None or not kernel.supports_shared_prompts(config.model, group):
            return None
        default_rows = config.rollouts.group_rows_per_device
        rows = most_tokens // group.row_length if own_rows else default_rows(group, platform, devices)
        return self._layout(group.row_length, rows * devices, packed=True, group=group)

    def _layout(self, row_length: int, rows: int, *, packed: bool, group: GroupRow | None = None) -> RowLayout:
        model = self.config.model
        hidden = 1024 if model is None else model.Embed.size
        return RowLayout(
            row_length,
            rows,
            packed,
            whole_rollouts=self.config.policy_loss.is_sequence_level,
            group=group,
            row_cost=row_length + self.kernel.attention_pairs(row_length, group) / (6 * hidden),
        )

    @property
    def logprob_block(self) -> int:
        """Tokens per device whose logits are in memory at once."""
        return self.config.logprob_block_size or LOGPROB_BLOCK_SIZE[platform_of(self.trainer)]

    @functools.cached_property
    def loss(self) -> RlLoss:
        """The configured loss."""
        return RlLoss(
            policy_loss=self.config.policy_loss,
            kl=self.config.kl,
            temperature=self.config.sampling.temperature,
            block_size=self.logprob_block,
            critic=self.config.critic,
        )

    @functools.cached_property
    def learner(self) -> Learner:
        """The learner, for batches in the layout of the run."""
        return self.make_learner(self.layout, self.base)

    def make_learner(self, layout: RowLayout, base: LmHeadModel | None) -> Learner:
        """Make a learner for batches in a layout.

        Args:
            layout: shape of a microbatch.
            base: base of the adapter, or its shapes; None if whole models are trained.
        """
        config = self.config
        capacity = layout.microbatches(math.ceil(config.rollouts.rollouts_per_step / config.updates.minibatches))
        return Learner(
            self.trainer,
            config.optimizer,
            self.loss,
            num_updates=config.num_updates,
            capacity=capacity,
            frozen=None if base is None else Frozen(base),
            decay=next(iter(decays(config.reference)), None) if config.needs_reference else None,
        )

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer of rollouts, at the temperature of the sampler."""
        return self.make_scorer(self.layout, self.tokenizer.pad_token_id)

    def make_scorer(self, layout: RowLayout, pad_token_id: int) -> Scorer:
        """Make a scorer for batches in a layout."""
        return Scorer(
            self.trainer,
            layout,
            pad_token_id=pad_token_id,
            temperature=self.config.sampling.temperature,
            block_size=self.logprob_block,
            capacity=layout.microbatches(self.config.rollouts.rollouts_per_step),
        )

    def score(self, trained: Any, batch: RolloutBatch) -> Scores:
        """Score rollouts with trained weights: those of the policy, or of its adapter, with or without critic."""
        return self.scorer.score(self.assemble(trained), batch)

    # Weights.

    @functools.cached_property
    def base(self) -> LmHeadModel | None:
        """The weights that the run's adapter changes, in the compute type of the trainer; None without an adapter.

        Raises:
            PolicyModelError: if `initialize_from` cannot be loaded.
        """
        return None if self.config.lora is None else self.load_base(self.model)

    def load_base(self, model: LmConfig) -> LmHeadModel:
        """Load the weights that the run's adapter changes.

        Args:
            model: architecture, with the attention kernel.

        Raises:
            PolicyModelError: if `initialize_from` cannot be loaded.
        """
        # The type of the run's trainer also in workers with another precision, so that all have the same base.
        return self._load_policy(model, self.config.trainer.mp.compute_dtype)

    @functools.cached_property
    def base_fingerprint(self) -> str:
        """Fingerprint of the base, which checkpoints hold; empty without an adapter."""
        return "" if self.base is None else fingerprint(self.base, self.trainer)

    def check_base(self, saved: str) -> None:
        """Check that the base is the one of a checkpoint, from its `Progress.base`.

        Raises:
            OtherBaseError: if it is not.
        """
        check_base(saved, self.base_fingerprint, str(self.config.initialize_from))

    def assemble(self, trained: Any) -> Any:
        """Return the model of trained weights: they themselves, or an adapter with its base."""
        return assemble(trained, self.base)

    def first_policy(self) -> LmHeadModel | Adapter:
        """Load or initialize the trained part of the policy.

        Raises:
            PolicyModelError: if `initialize_from` cannot be loaded, or does not fit `model` or the tokenizer.
            LoraTargetError: if a module that `lora.targets` names cannot be adapted.
        """
        if self.base is None:
            return self._load_policy(self.model, None)
        key = jax.random.PRNGKey(derive_seed(self.config.seed, "adapter") % 2**32)
        return self.policy_spec(self.base.vocab_size).new_adapter(key)

    def _load_policy(self, model: LmConfig, dtype: DTypeLike | None) -> LmHeadModel:
        config = self.config
        return first_policy(config.initialize_from, model, self.tokenizer, self.trainer, config.seed, dtype)

    def policy_spec(self, vocab_size: int) -> PolicySpec:
        """Return the shapes of the run's weights, for a vocabulary size of the model."""
        return PolicySpec(self.model, vocab_size, self.trainer, self.config.critic, self.config.lora)

    def saved_spec(self, checkpoint: Checkpoint) -> PolicySpec:
        """Return the shapes of the weights in a checkpoint of the run."""
        return self.policy_spec(int(checkpoint.progress["vocab_size"]))

    def restore_policy(self, checkpoint: Checkpoint) -> LmHeadModel:
        """Load the policy of a checkpoint of the run, with its base if it is an adapter.

        Raises:
            CheckpointError: if the checkpoint holds another model.
            OtherBaseError: if `initialize_from` has other weights than at the start of the run.
        """
        self.check_base(checkpoint.progress.get("base", ""))
        return self.assemble(self.saved_spec(checkpoint).restore_policy(checkpoint))

    def first_state(self, policy: LmHeadModel | Adapter) -> TrainerState:
        """Return the training state before the first update.

        Args:
            policy: the trained part of the first policy; its arrays become part of the state.
        """
        key = jax.random.PRNGKey(derive_seed(self.config.seed, "training") % 2**32)
        spec = self.policy_spec(self.assemble(policy).vocab_size)
        return self.learner.initial_state(spec.attach_critic(policy), key)


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
        from marin_rl.serving.gateway import Gateway

        return Gateway(tokenizer, limits, vocab_size, has_stop_texts=has_stop_texts)

    return lambda recorder: gateway().connect(recorder)
