# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of the sections of `TrainConfig` that restrict one another."""

import re
from typing import TYPE_CHECKING

from levanter.models.gpt2 import Gpt2Config
from levanter.models.mixtral import MixtralConfig

from marin_rl.config.sections import Mode
from marin_rl.config.workers_config import Refresh
from marin_rl.config_fields import is_loopback, nested_sections
from marin_rl.kernel_sharding import POSITION
from marin_rl.learner.attention_kernel import PLATFORMS, attention_kernel
from marin_rl.models.conversion import check_model
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.importance import OffPolicyCorrectionConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig
from marin_rl.rollouts.attempt import LongPrompts
from marin_rl.rollouts.filters import FilterConfig
from marin_rl.sampling.config import OpenAiSamplerConfig
from marin_rl.weights.config import ArrowFlightConfig, TransferDtype

if TYPE_CHECKING:
    from marin_rl.config.train_config import TrainConfig


def check_combinations(config: "TrainConfig") -> None:
    """Raise a `ValueError` if sections exclude each other; the message names their keys and the remedy."""
    _check_model(config)
    _check_replay(config)
    _check_workers(config)
    _check_agents(config)
    _check_groups(config)
    _check_critic_and_turns(config)
    _check_policy_loss(config)
    _check_sizes(config)


def _check_model(config: "TrainConfig") -> None:
    if config.model is None and config.initialize_from is None:
        raise ValueError(
            "neither model nor initialize_from is set: name an architecture to start from scratch "
            "(model: {type: llama, ...}) or weights to start from (initialize_from: FOLDER)"
        )
    if config.model is not None and config.rollouts.max_length > config.model.Pos.size:
        raise ValueError(
            f"rollouts.max_length is {config.rollouts.max_length}, but the model's context has {config.model.Pos.size} "
            "tokens (model.seq_len); lower rollouts.max_length or raise model.seq_len"
        )
    _check_context(config)
    _check_row_length(config)
    if config.rollouts.long_prompts is LongPrompts.TRUNCATE_LEFT and config.rollouts.max_prompt_length is None:
        keep = max(config.rollouts.max_length - config.sampling.max_new_tokens, 1)
        raise ValueError(
            "rollouts.long_prompts is truncate_left, but rollouts.max_prompt_length is null; set it to the number "
            f"of tokens to keep, such as rollouts.max_length - sampling.max_new_tokens = {keep}"
        )
    if config.model is not None:
        check_model(config.model, max_length=config.rollouts.max_length)
    if isinstance(config.model, MixtralConfig):
        _check_mixtral(config)
    if getattr(config.model, "scan_layers", True) is False:
        raise ValueError("model.scan_layers is false, but the learner supports scanned layers only; set it to true")


def _check_mixtral(config: "TrainConfig") -> None:
    for key in ("tensor_parallel_axes", "axis_resources"):
        if "experts" in (getattr(config.trainer, key) or ()):
            raise ValueError(
                f"trainer.{key} has 'experts', but levanter cannot shard the experts of a mixtral model over "
                "devices; shard their hidden layers with trainer.tensor_parallel_axes: [mlp] instead"
            )


def _check_context(config: "TrainConfig") -> None:
    axes = config.trainer.tensor_parallel_axes or ()
    if POSITION in config.trainer.axis_resources or (POSITION in axes and len(axes) > 1):
        raise ValueError(
            f"trainer.tensor_parallel_axes is {list(axes)} and trainer.axis_resources is "
            f"{dict(config.trainer.axis_resources)}, but {POSITION!r} can be split over devices only alone: set "
            f"trainer.tensor_parallel_axes: [{POSITION}]"
        )
    if POSITION in axes and isinstance(config.model, Gpt2Config):
        raise ValueError(
            "trainer.tensor_parallel_axes is ['position'], but the positions of a gpt2 model cannot be split over "
            "devices, because it has an attention module of its own; use another axis, such as mlp"
        )


def _check_row_length(config: "TrainConfig") -> None:
    """Validate that a platform supports the row length; the run's platform is checked after jax has started."""
    errors = []
    for platform in PLATFORMS:
        try:
            config.rollouts.positions(attention_kernel(config.model, platform, config.context_shards))
        except ValueError as error:
            errors.append(error)
    if len(errors) == len(PLATFORMS):
        raise errors[0]


def _check_replay(config: "TrainConfig") -> None:
    if config.replay.keep_sampling_weights and not config.off_policy_correction.needs_sampling_logprobs:
        raise ValueError(
            "replay.keep_sampling_weights is true, but off_policy_correction: {type: none} does not use them; "
            "set off_policy_correction: {type: tis}, or keep_sampling_weights: false"
        )
    if config.replay.keep_sampling_weights and config.workers.refresh is Refresh.IN_FLIGHT:
        raise ValueError(
            "replay.keep_sampling_weights is true and workers.refresh is in_flight, but an answer sampled with "
            "several versions of the weights cannot be scored with one; set workers.refresh: between_groups, or "
            "keep_sampling_weights: false"
        )


def _check_workers(config: "TrainConfig") -> None:
    if config.ray_address is not None and not re.fullmatch(r"auto|[^/]+:\d{1,5}", config.ray_address):
        raise ValueError(
            f"ray_address is {config.ray_address!r}; it must be `auto`, or `host:port` of a cluster's head node, "
            "such as 10.0.0.1:6379. Ray's client protocol (ray://) is not supported: start the run on a machine of "
            "the cluster"
        )
    if config.mode is Mode.ASYNC:
        _check_async(config)


def _check_async(config: "TrainConfig") -> None:
    if batch_scoped := config.batch_scoped_rewards():
        raise ValueError(
            f"{batch_scoped[0]} has scope: batch, which needs all rollouts of a step together; with mode: async "
            "they run at different times in different workers, so use scope: group, or mode: sync"
        )
    if isinstance(config.sampler, OpenAiSamplerConfig):
        _check_openai_sampler(config, config.sampler.base_url)
    casts = config.weights.dtype is not TransferDtype.PARAMETER
    config.workers.check_run(config.ray_address, config.trainer.mp.param_dtype, casts=casts)
    is_local = config.ray_address is None or is_loopback(config.ray_address.rpartition(":")[0])
    if isinstance(config.weights, ArrowFlightConfig) and is_loopback(config.weights.host) and not is_local:
        raise ValueError(
            f"weights.host is {config.weights.host}, which only this machine can reach, but the workers run on the "
            f"Ray cluster at ray_address {config.ray_address!r}; set weights.host to an address of this machine in a "
            "trusted network, or to 0.0.0.0. If the cluster consists of this machine only, set ray_address: "
            "127.0.0.1:PORT"
        )


def _check_openai_sampler(config: "TrainConfig", base_url: str) -> None:
    if config.workers.num_workers != 1:
        raise ValueError(
            f"workers.num_workers is {config.workers.num_workers}, but several workers would overwrite each other's "
            f"weights on the server {base_url}; set workers.num_workers: 1, raise sampling.max_seqs, and "
            "put further engines behind that address"
        )
    if config.workers.refresh is Refresh.IN_FLIGHT:
        raise ValueError(
            f"workers.refresh is in_flight, but if {base_url} loads weights during an answer, the version "
            "that sampled each token is unknown; set workers.refresh: between_groups"
        )


def _check_agents(config: "TrainConfig") -> None:
    if not config.advantage.is_token_level:
        return
    for key, section in nested_sections(config.environment, "environment"):
        if getattr(section, "runs_agents", False):
            raise ValueError(
                f"advantage {_advantage_name(config)!r} credits the turns of a rollout in the order of time, but {key} "
                "runs agents, whose conversations may overlap; use advantage: {type: rloo}, or another that compares "
                "rollouts (reinforce without gamma)"
            )


def _check_groups(config: "TrainConfig") -> None:
    if config.rollouts.group_size < config.advantage.minimum_group_size:
        raise ValueError(
            f"rollouts.group_size is {config.rollouts.group_size}, but advantage {_advantage_name(config)!r} compares "
            f"the rollouts of a prompt and needs at least {config.advantage.minimum_group_size}; "
            "raise it, or use advantage: {type: reinforce}"
        )
    if config.filter.drops and config.rollouts.group_size < 2:
        raise ValueError(
            f"filter {FilterConfig.get_choice_name(type(config.filter))!r} drops groups with equal rewards, "
            "which is every group if rollouts.group_size is 1; raise it, or use filter: {type: keep}"
        )


def _check_critic_and_turns(config: "TrainConfig") -> None:
    if config.advantage.needs_critic and config.critic is None:
        raise ValueError(
            f"advantage {_advantage_name(config)!r} needs a critic; add critic: {{shared_trunk: true}}, or use an "
            "advantage that compares the rollouts of a prompt, such as advantage: {type: rloo}"
        )
    if config.critic is not None and not config.advantage.needs_critic:
        raise ValueError(
            f"critic is set, but advantage {_advantage_name(config)!r} does not use it; set advantage: {{type: gae}}, "
            "or critic: null"
        )
    if config.advantage.needs_turns and config.rollouts.max_turns < 2:
        raise ValueError(
            f"advantage {_advantage_name(config)!r} compares the turns of a rollout, but rollouts.max_turns is "
            f"{config.rollouts.max_turns}; raise it and use an environment with several turns, or use "
            "advantage: {type: rloo}"
        )


def _check_policy_loss(config: "TrainConfig") -> None:
    loss_name = PolicyLossConfig.get_choice_name(type(config.policy_loss))
    if config.updates.per_step > 1 and not config.policy_loss.uses_ratio:
        raise ValueError(
            f"updates sets {config.updates.per_step} updates per step, but policy_loss {loss_name!r} does not "
            "correct for changes of the policy since sampling; use policy_loss: {type: ppo_clip}, or one update"
        )
    if config.off_policy_correction.is_token_level and config.policy_loss.is_sequence_level:
        name = OffPolicyCorrectionConfig.get_choice_name(type(config.off_policy_correction))
        raise ValueError(
            f"off_policy_correction {name!r} weights single tokens, but policy_loss {loss_name!r} has one ratio "
            "per rollout; use off_policy_correction: {type: mask}, which drops whole rollouts"
        )
    if config.advantage.is_token_level and config.policy_loss.is_sequence_level:
        raise ValueError(
            f"advantage {_advantage_name(config)!r} differs between the tokens of a rollout, but policy_loss "
            f"{loss_name!r} has one ratio per rollout and would average it; set policy_loss: {{type: ppo_clip}}"
        )


def _check_sizes(config: "TrainConfig") -> None:
    if config.updates.minibatches > config.rollouts.rollouts_per_step:
        raise ValueError(
            f"updates.minibatches is {config.updates.minibatches}, but a step has only "
            f"{config.rollouts.rollouts_per_step} rollouts; lower it or raise rollouts.prompts_per_step"
        )
    if config.overlong.buffer > config.sampling.max_new_tokens:
        raise ValueError(
            f"overlong.buffer is {config.overlong.buffer}, but an answer has at most sampling.max_new_tokens = "
            f"{config.sampling.max_new_tokens} tokens; lower overlong.buffer or raise sampling.max_new_tokens"
        )


def _advantage_name(config: "TrainConfig") -> str:
    return AdvantageConfig.get_choice_name(type(config.advantage))
