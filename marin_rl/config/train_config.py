# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The settings of an RL run. Each section is defined in a module that imports neither levanter nor transformers."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

import marin_rl.objectives.gae
import marin_rl.objectives.gigpo
import marin_rl.rewards.pipeline  # noqa: F401
from marin_rl.config.algorithms import ALGORITHM, NAMES
from marin_rl.config.reference_config import (
    CheckpointReferenceConfig,
    InitialReferenceConfig,
    PolicyReferenceConfig,
    ReferenceConfig,
    ServerReferenceConfig,
    uses_initial_policy,
)
from marin_rl.config.run_config import RUN_CHECKS, AbstractRunConfig, Check
from marin_rl.config.sections import (
    AbstractRowConfig,
    EvaluationConfig,
    Mode,
    ReplayConfig,
    RolloutConfig,
    RoutingReplay,
    UpdateConfig,
    WarmStartConfig,
)
from marin_rl.config.workers_config import Refresh, TransferDtype, WeightTransferConfig, WorkersConfig
from marin_rl.environments.base import EnvironmentConfig
from marin_rl.learner.config import CriticConfig, ObservationLossConfig
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.advantages import RlooConfig
from marin_rl.objectives.aggregation import AggregationConfig, SequenceSumConfig
from marin_rl.objectives.distillation import DistillationConfig
from marin_rl.objectives.importance import NoCorrectionConfig, OffPolicyCorrectionConfig
from marin_rl.objectives.kl import KlConfig, NoKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig, ReinforceLossConfig
from marin_rl.objectives.shaping import KeepTruncatedConfig, OverlongConfig, TruncationConfig
from marin_rl.rewards.component import RewardScope
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rollouts.config import FilterConfig, KeepGroupsConfig
from marin_rl.runs.rollout_store import RolloutStoreConfig
from marin_rl.sampling.config import LevanterSamplerConfig, OpenAiSamplerConfig, SamplerConfig, SamplingConfig
from marin_rl.utils.settings.fields import is_loopback, may_change, may_change_by_name, nested_sections


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(AbstractRunConfig):
    """Configuration of an RL run."""

    command = "train"
    source_key = "environment"
    samples = True
    common_keys: ClassVar[tuple[str, ...]] = (
        *(ALGORITHM, "environment", "run_dir", "model", "initialize_from", "tokenizer.path", "seed", "num_steps"),
        *("rollouts.prompts_per_step", "rollouts.group_size", "rollouts.max_length", "rollouts.max_turns"),
        *("sampling.max_new_tokens", "sampling.temperature", "advantage", "policy_loss", "kl", "optimizer", "mode"),
        *("evaluation.every", "checkpoint.every"),
    )
    expanded_keys: ClassVar[Mapping[str, str]] = {
        ALGORITHM: f"Published objective, which given keys override: {', '.join(NAMES)}."
    }
    """Keys of files and command lines that are replaced by others before they are decoded, with descriptions."""

    environment: EnvironmentConfig
    """Source of the tasks and their rewards."""
    rollouts: RolloutConfig = RolloutConfig()
    """Rollouts per step, their limits, and the layout of batch rows."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of the policy."""
    sampler: SamplerConfig = dataclasses.field(
        default=LevanterSamplerConfig(),
        metadata=may_change("base_url", "model", "reload", "api_key_env", "timeout", "retry"),
    )
    """Inference engine that samples answers."""
    sandbox: SandboxConfig = SandboxConfig()
    """Isolation and resource limits of reward functions and of programs written by a model."""
    advantage: AdvantageConfig = RlooConfig()
    """Advantage estimator."""
    policy_loss: PolicyLossConfig = ReinforceLossConfig()
    """Policy term of the loss."""
    kl: KlConfig = NoKlConfig()
    """KL penalty against the reference policy."""
    reference: ReferenceConfig = dataclasses.field(
        default=InitialReferenceConfig(), metadata=may_change("base_url", "api_key_env", "timeout", "retry")
    )
    """Reference policy of `kl`, and teacher of `distillation`; loaded only if one of them needs it."""
    distillation: DistillationConfig | None = None
    """On-policy distillation from the reference; null: none."""
    aggregation: AggregationConfig = SequenceSumConfig()
    """Aggregation of the token losses to a scalar."""
    observation_loss: ObservationLossConfig | None = None
    """Auxiliary loss on the observations of the environment; null: none."""
    critic: CriticConfig | None = None
    """Critic, required by `advantage: {type: gae}`; null: no critic."""
    updates: UpdateConfig = UpdateConfig()
    """Epochs and minibatches per step."""
    off_policy_correction: OffPolicyCorrectionConfig = NoCorrectionConfig()
    """Importance correction for differences between the probabilities of sampler and learner."""
    routing_replay: RoutingReplay | None = None
    """Experts of the updates of a mixture of experts: `rollout` for those that sampled, `recompute` for those of the
    weights before the step; null: each update routes anew."""
    overlong: OverlongConfig = OverlongConfig()
    """Soft penalty on answers close to the length limit."""
    truncation: TruncationConfig = KeepTruncatedConfig()
    """Handling of rollouts that were cut off at a limit."""
    filter: FilterConfig = KeepGroupsConfig()
    """Handling of groups in which all rewards are equal."""
    mode: Mode = Mode.SYNC
    """`sync` alternates sampling and training in the same processes; `async` samples in rollout workers during
    training, and needs the extra `ray`."""
    workers: WorkersConfig = dataclasses.field(
        default=WorkersConfig(),
        metadata=may_change("num_workers", "resources", "tpu_slice", "heartbeat_timeout", "no_progress_timeout"),
    )
    """Rollout workers, for `mode: async`."""
    ray_address: str | None = dataclasses.field(default=None, metadata=may_change())
    """Ray cluster of the rollout workers: `auto` for the cluster of this machine, or `host:port` of the head node;
    null: a local cluster is started and stopped with the run."""
    replay: ReplayConfig = ReplayConfig()
    """Replay buffer and staleness limits, for `mode: async`."""
    weights: WeightTransferConfig = dataclasses.field(
        default=WeightTransferConfig(),
        metadata=may_change("host", "port", "streams", "retry"),
    )
    """Weight transfer from the trainer to the workers, for `mode: async`."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised training before RL."""
    evaluation: EvaluationConfig = dataclasses.field(
        default=EvaluationConfig(), metadata=may_change("every") | may_change_by_name()
    )
    """Evaluation on held-out tasks."""
    rollout_store: RolloutStoreConfig = dataclasses.field(default=RolloutStoreConfig(), metadata=may_change())
    """Storage of rollouts in the run directory."""

    @property
    def checks(self) -> tuple[Check, ...]:
        """Checks of the settings without levanter's sections."""
        return CHECKS

    @property
    def rows(self) -> AbstractRowConfig:
        """Layout of batch rows."""
        return self.rollouts

    @property
    def replays_experts(self) -> bool:
        """Whether the updates use given experts, which only a mixture of experts has."""
        return self.routing_replay is not None

    @property
    def samples_experts(self) -> bool:
        """Whether the sampler returns the experts that it chose."""
        return self.routing_replay is RoutingReplay.ROLLOUT

    @property
    def temperature(self) -> float:
        """Temperature of the policy's log-probabilities."""
        return self.sampling.temperature

    @property
    def teacher_context_tokens(self) -> int:
        """Maximum number of tokens that the context of a teacher adds to a rollout."""
        contexts = [part.context for part in self.reference.parts if isinstance(part, PolicyReferenceConfig)]
        return max((context.max_tokens for context in contexts if context is not None), default=0)

    @property
    def is_async(self) -> bool:
        """Whether rollout workers sample during training."""
        return self.mode is Mode.ASYNC

    @property
    def trained_critic(self) -> CriticConfig | None:
        """Critic that is trained with the policy; None if there is none."""
        return self.critic

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a reply, for exports."""
        return self.sampling.stop

    def batch_scoped_rewards(self) -> list[str]:
        """Keys of the reward functions that score all rollouts of a step together."""
        sections = nested_sections(self.environment, "environment")
        return [key for key, section in sections if getattr(section, "scope", None) is RewardScope.BATCH]

    @property
    def needs_reference(self) -> bool:
        """Whether the reference scores the rollouts."""
        return self.kl.needs_reference or self.distillation is not None

    @property
    def loads_reference(self) -> bool:
        """Whether the reference scores the rollouts, or teaches in the updates."""
        return self.needs_reference or self.needs_teacher

    @property
    def needs_teacher(self) -> bool:
        """Whether the reference teaches in the updates."""
        return self.kl.needs_teacher

    @property
    def needs_initial_policy(self) -> bool:
        """Whether the weights at the start of RL score the rollouts, or teach in the updates."""
        return self.loads_reference and uses_initial_policy(self.reference)

    @property
    def num_updates(self) -> int:
        """Number of updates of the run, the length of the learning-rate schedule."""
        # A run with 0 steps only warms up and exports, but a schedule needs at least one update.
        return max(self.num_steps, 1) * self.updates.per_step

    @property
    def effective_replay(self) -> ReplayConfig:
        """`replay` in `mode: async`; in `mode: sync` groups are never sampled ahead."""
        return self.replay if self.mode is Mode.ASYNC else ReplayConfig(max_staleness=0)


def _check_adapter(config: TrainConfig) -> Iterator[str]:
    if config.lora is not None and config.critic is not None and not config.critic.shared_trunk:
        yield (
            "critic.shared_trunk is false, but with lora only the adapter is trained, and a separate trunk would be a "
            "second copy of all weights; set critic.shared_trunk: true, or lora: null"
        )
    if isinstance(config.sampler, OpenAiSamplerConfig) and config.sampler.reload.adapter and config.lora is None:
        yield "sampler.reload.adapter is true, but lora is null, so there is no adapter; set lora, or adapter: false"


def _check_workers(config: TrainConfig) -> Iterator[str]:
    if config.ray_address is not None and not re.fullmatch(r"auto|[^/]+:\d{1,5}", config.ray_address):
        yield (
            f"ray_address is {config.ray_address!r}; it must be `auto`, or `host:port` of a cluster's head node, "
            "such as 10.0.0.1:6379. Ray's client protocol (ray://) is not supported: start the run on a machine of "
            "the cluster"
        )
    if config.mode is Mode.ASYNC:
        yield from _check_async(config)


def _check_async(config: TrainConfig) -> Iterator[str]:
    if batch_scoped := config.batch_scoped_rewards():
        yield (
            f"{batch_scoped[0]} has scope: batch, which needs all rollouts of a step together; with mode: async "
            "they run at different times in different workers, so use scope: group, or mode: sync"
        )
    for key, section in nested_sections(config.environment, "environment"):
        if getattr(section, "is_in_process", False):
            yield (
                f"{key} is an object of this Python program, which rollout workers do not have; write it into a file "
                "that the config names, or set mode: sync"
            )
    if isinstance(config.sampler, OpenAiSamplerConfig):
        yield from _check_openai_sampler(config, config.sampler.base_url)
    casts = config.weights.dtype is not TransferDtype.PARAMETER
    yield from config.workers.run_problems(config.ray_address, config.trainer.mp.param_dtype, casts=casts)
    is_local = config.ray_address is None or is_loopback(config.ray_address.rpartition(":")[0])
    if is_loopback(config.weights.host) and not is_local:
        yield (
            f"weights.host is {config.weights.host}, which only this machine can reach, but the workers run on the "
            f"Ray cluster at ray_address {config.ray_address!r}; set weights.host to an address of this machine in a "
            "trusted network, or to 0.0.0.0. If the cluster consists of this machine only, set ray_address: "
            "127.0.0.1:PORT"
        )


def _check_openai_sampler(config: TrainConfig, base_url: str) -> Iterator[str]:
    if config.workers.num_workers != 1:
        yield (
            f"workers.num_workers is {config.workers.num_workers}, but several workers would overwrite each other's "
            f"weights on the server {base_url}; set workers.num_workers: 1, raise sampling.max_seqs, and "
            "put further engines behind that address"
        )
    if config.workers.refresh is Refresh.IN_FLIGHT:
        yield (
            f"workers.refresh is in_flight, but if {base_url} loads weights during an answer, the version "
            "that sampled each token is unknown; set workers.refresh: between_groups"
        )


def _check_agents(config: TrainConfig) -> Iterator[str]:
    if not config.advantage.is_token_level:
        return
    for key in _agents(config):
        yield (
            f"advantage {_advantage_name(config)!r} credits the turns of a rollout in the order of time, but {key} "
            "runs agents, whose conversations may overlap; use advantage: {type: rloo}, or another that compares "
            "rollouts (reinforce without gamma)"
        )


def _agents(config: TrainConfig) -> list[str]:
    """Keys of the environments that run agents."""
    sections = nested_sections(config.environment, "environment")
    return [key for key, section in sections if getattr(section, "runs_agents", False)]


def _check_groups(config: TrainConfig) -> Iterator[str]:
    if config.rollouts.group_size < config.advantage.minimum_group_size:
        yield (
            f"rollouts.group_size is {config.rollouts.group_size}, but advantage {_advantage_name(config)!r} compares "
            f"the rollouts of a prompt and needs at least {config.advantage.minimum_group_size}; "
            "raise it, or use advantage: {type: reinforce}"
        )
    if config.filter.drops and config.rollouts.group_size < 2:
        yield (
            f"filter {FilterConfig.get_choice_name(type(config.filter))!r} drops groups with equal rewards, "
            "which is every group if rollouts.group_size is 1; raise it, or use filter: {type: keep}"
        )


def _check_critic_and_turns(config: TrainConfig) -> Iterator[str]:
    if config.advantage.needs_critic and config.critic is None:
        yield (
            f"advantage {_advantage_name(config)!r} needs a critic; add critic: {{shared_trunk: true}}, or use an "
            "advantage that compares the rollouts of a prompt, such as advantage: {type: rloo}"
        )
    if config.critic is not None and not config.advantage.needs_critic:
        yield (
            f"critic is set, but advantage {_advantage_name(config)!r} does not use it; set advantage: {{type: gae}}, "
            "or critic: null"
        )
    if config.advantage.needs_turns and config.rollouts.max_turns < 2:
        yield (
            f"advantage {_advantage_name(config)!r} compares the turns of a rollout, but rollouts.max_turns is "
            f"{config.rollouts.max_turns}; raise it and use an environment with several turns, or use "
            "advantage: {type: rloo}"
        )


def _check_returns(config: TrainConfig) -> Iterator[str]:
    if not config.advantage.needs_non_negative_returns:
        return
    has_penalty = isinstance(config.kl, RewardKlConfig) and config.kl.beta > 0
    lowering = {
        "kl.type is in_reward": (has_penalty, "kl: {type: in_loss, beta: ...}"),
        f"overlong.buffer is {config.overlong.buffer}": (config.overlong.buffer > 0, "overlong.buffer: 0"),
        f"truncation.reward is {config.truncation.reward}": ((config.truncation.reward or 0) < 0, "a reward of 0"),
    }
    for setting, (is_set, remedy) in lowering.items():
        if is_set:
            yield (
                f"{setting}, which can make returns negative, but advantage {_advantage_name(config)!r} divides by "
                f"their mean; use {remedy}, or advantage: {{type: dr_grpo}}"
            )


def _check_policy_loss(config: TrainConfig) -> Iterator[str]:
    loss_name = PolicyLossConfig.get_choice_name(type(config.policy_loss))
    if config.updates.per_step > 1 and not config.policy_loss.uses_ratio:
        yield (
            f"updates sets {config.updates.per_step} updates per step, but policy_loss {loss_name!r} does not "
            "correct for changes of the policy since sampling; use policy_loss: {type: ppo_clip}, or one update"
        )
    if config.off_policy_correction.is_token_level and config.policy_loss.is_sequence_level:
        name = OffPolicyCorrectionConfig.get_choice_name(type(config.off_policy_correction))
        yield (
            f"off_policy_correction {name!r} weights single tokens, but policy_loss {loss_name!r} has one ratio "
            "per rollout; use off_policy_correction: {type: mask}, which drops whole rollouts"
        )
    if config.advantage.is_token_level and config.policy_loss.is_sequence_level:
        yield (
            f"advantage {_advantage_name(config)!r} differs between the tokens of a rollout, but policy_loss "
            f"{loss_name!r} has one ratio per rollout and would average it; set policy_loss: {{type: ppo_clip}}"
        )
    if config.distillation is not None and config.policy_loss.is_sequence_level:
        yield (
            f"distillation gives every token an advantage of its own, but policy_loss {loss_name!r} has one ratio per "
            "rollout and would average them; set policy_loss: {type: ppo_clip}"
        )


def _check_routing_replay(config: TrainConfig) -> Iterator[str]:
    if config.routing_replay is RoutingReplay.ROLLOUT and isinstance(config.sampler, OpenAiSamplerConfig):
        yield (
            "routing_replay is rollout, but servers with OpenAI's protocol do not report the chosen experts; set "
            "routing_replay: recompute, or sampler: {type: levanter}"
        )


def _check_reference(config: TrainConfig) -> Iterator[str]:
    reference, distillation = config.reference, config.distillation
    if config.kl.needs_teacher and not isinstance(reference, InitialReferenceConfig | CheckpointReferenceConfig):
        yield (
            f"kl.type is exact, which runs the model of the reference in every update, but reference.type is "
            f"{ReferenceConfig.get_choice_name(type(reference))!r}; set reference: {{type: checkpoint}} or "
            "{type: initial}, or use distillation: {coefficient: 1.0}, which scores the sampled tokens"
        )
    if not config.loads_reference and not isinstance(reference, InitialReferenceConfig):
        yield (
            "reference is set, but nothing uses it; add distillation: {coefficient: 1.0}, or a kl, such as "
            "kl: {type: none, watch: true} to measure the distance"
        )
    if distillation is not None and distillation.alone and config.filter.drops:
        yield (
            f"filter {FilterConfig.get_choice_name(type(config.filter))!r} drops groups with equal rewards, but with "
            "distillation.alone rewards teach nothing; use filter: {type: keep}"
        )
    if distillation is not None and distillation.alone and config.critic is not None:
        yield (
            "critic is set, but distillation.alone replaces the advantages that it is for; set critic: null and "
            "advantage: {type: reinforce}, or distillation.alone: false"
        )
    if distillation is not None and distillation.alone and isinstance(config.kl, RewardKlConfig):
        yield (
            "kl.type is in_reward, but distillation.alone replaces the advantages of rewards, so the penalty teaches "
            "nothing; set kl: {type: none} or {type: in_loss}, or distillation.alone: false"
        )
    for part in reference.parts:
        if isinstance(part, ServerReferenceConfig) and config.sampling.temperature != 1.0:
            yield (
                f"sampling.temperature is {config.sampling.temperature:g}, but servers return log-probs of prompts at "
                "temperature 1, which differ from the policy's; set sampling.temperature: 1.0, or load the teacher "
                "with reference: {type: checkpoint}"
            )
        if isinstance(part, PolicyReferenceConfig) and part.context is not None:
            for key in _agents(config):
                yield (
                    f"reference.context adds to the prompt of a task, but {key} runs agents, which write prompts of "
                    "their own; set reference.context: null"
                )


def _check_sizes(config: TrainConfig) -> Iterator[str]:
    if config.observation_loss is not None and config.rollouts.max_turns < 2:
        yield (
            f"observation_loss is set, but rollouts.max_turns is {config.rollouts.max_turns}, so there are no "
            "observations after the prompt; raise it and use an environment with several turns, or set "
            "observation_loss: null"
        )
    if config.updates.minibatches > config.rollouts.rollouts_per_step:
        yield (
            f"updates.minibatches is {config.updates.minibatches}, but a step has only "
            f"{config.rollouts.rollouts_per_step} rollouts; lower it or raise rollouts.prompts_per_step"
        )
    if config.overlong.buffer > config.sampling.max_new_tokens:
        yield (
            f"overlong.buffer is {config.overlong.buffer}, but an answer has at most sampling.max_new_tokens = "
            f"{config.sampling.max_new_tokens} tokens; lower overlong.buffer or raise sampling.max_new_tokens"
        )


def _advantage_name(config: TrainConfig) -> str:
    return AdvantageConfig.get_choice_name(type(config.advantage))


CHECKS: tuple[Check, ...] = (
    *RUN_CHECKS,
    _check_adapter,
    _check_workers,
    _check_agents,
    _check_groups,
    _check_critic_and_turns,
    _check_returns,
    _check_policy_loss,
    _check_routing_replay,
    _check_reference,
    _check_sizes,
)
"""Checks of settings that restrict one another."""
