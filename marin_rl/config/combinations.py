# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of the settings of a run, most of them of sections that restrict one another.

Each check yields its problems, or raises a `ValueError`; a message names the keys and the remedy.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from marin_rl.config.levanter_sections import check_optimizer, check_trainer
from marin_rl.config.sections import Mode
from marin_rl.config.weights_config import TransferDtype
from marin_rl.config.workers_config import Refresh
from marin_rl.models.model_settings import model_problems, window_problem
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.importance import OffPolicyCorrectionConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig
from marin_rl.rollouts.config import FilterConfig
from marin_rl.sampling.config import OpenAiSamplerConfig
from marin_rl.utils.devices.sharding import POSITION
from marin_rl.utils.levanter_line import max_positions
from marin_rl.utils.logs import module_levels
from marin_rl.utils.settings.fields import check_paths, is_loopback, nested_sections
from marin_rl.utils.settings.section_types import InvalidFieldError, choice_name

if TYPE_CHECKING:
    from marin_rl.config.base_config import AbstractTrainConfig


def _check_logging(config: "AbstractTrainConfig") -> Iterator[str]:
    module_levels(config.logging)
    yield from ()


def _check_model(config: "AbstractTrainConfig") -> Iterator[str]:
    if config.model is None and config.initialize_from is None:
        yield (
            "neither model nor initialize_from is set: name an architecture to start from scratch "
            "(model: {type: llama, ...}) or weights to start from (initialize_from: FOLDER)"
        )
    if config.model is None:
        return
    problems = list(model_problems(config.model))
    yield from problems
    # An architecture that is not supported may have no seq_len.
    if not problems and config.rollouts.max_length > max_positions(config.model):
        yield (
            f"rollouts.max_length is {config.rollouts.max_length}, but the model's context has "
            f"{max_positions(config.model)} tokens (model.seq_len); lower rollouts.max_length or raise model.seq_len"
        )
    if choice_name(config.model) == "mixtral":
        problem = window_problem(config.model, config.rollouts.max_length)
        yield from [] if problem is None else [problem]
        yield from _check_mixtral(config)


def _check_mixtral(config: "AbstractTrainConfig") -> Iterator[str]:
    for key in ("tensor_parallel_axes", "axis_resources"):
        if "experts" in (getattr(config.trainer, key) or ()):
            yield (
                f"trainer.{key} has 'experts', but levanter cannot shard the experts of a mixtral model over "
                "devices; shard their hidden layers with trainer.tensor_parallel_axes: [mlp] instead"
            )


def _check_context(config: "AbstractTrainConfig") -> Iterator[str]:
    axes = config.trainer.tensor_parallel_axes or ()
    if POSITION in config.trainer.axis_resources or (POSITION in axes and len(axes) > 1):
        yield (
            f"trainer.tensor_parallel_axes is {list(axes)} and trainer.axis_resources is "
            f"{dict(config.trainer.axis_resources)}, but {POSITION!r} can be split over devices only alone: set "
            f"trainer.tensor_parallel_axes: [{POSITION}]"
        )
    if POSITION in axes and config.model is not None and choice_name(config.model) == "gpt2":
        yield (
            "trainer.tensor_parallel_axes is ['position'], but the positions of a gpt2 model cannot be split over "
            "devices, because it has an attention module of its own; use another axis, such as mlp"
        )


def _check_replay(config: "AbstractTrainConfig") -> Iterator[str]:
    if config.replay.keep_sampling_weights and not config.off_policy_correction.needs_sampling_logprobs:
        yield (
            "replay.keep_sampling_weights is true, but off_policy_correction: {type: none} does not use them; "
            "set off_policy_correction: {type: tis}, or keep_sampling_weights: false"
        )
    if config.replay.keep_sampling_weights and config.workers.refresh is Refresh.IN_FLIGHT:
        yield (
            "replay.keep_sampling_weights is true and workers.refresh is in_flight, but an answer sampled with "
            "several versions of the weights cannot be scored with one; set workers.refresh: between_groups, or "
            "keep_sampling_weights: false"
        )


def _check_workers(config: "AbstractTrainConfig") -> Iterator[str]:
    if config.ray_address is not None and not re.fullmatch(r"auto|[^/]+:\d{1,5}", config.ray_address):
        yield (
            f"ray_address is {config.ray_address!r}; it must be `auto`, or `host:port` of a cluster's head node, "
            "such as 10.0.0.1:6379. Ray's client protocol (ray://) is not supported: start the run on a machine of "
            "the cluster"
        )
    if config.mode is Mode.ASYNC:
        yield from _check_async(config)


def _check_async(config: "AbstractTrainConfig") -> Iterator[str]:
    if batch_scoped := config.batch_scoped_rewards():
        yield (
            f"{batch_scoped[0]} has scope: batch, which needs all rollouts of a step together; with mode: async "
            "they run at different times in different workers, so use scope: group, or mode: sync"
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


def _check_openai_sampler(config: "AbstractTrainConfig", base_url: str) -> Iterator[str]:
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


def _check_agents(config: "AbstractTrainConfig") -> Iterator[str]:
    if not config.advantage.is_token_level:
        return
    for key, section in nested_sections(config.environment, "environment"):
        if getattr(section, "runs_agents", False):
            yield (
                f"advantage {_advantage_name(config)!r} credits the turns of a rollout in the order of time, but {key} "
                "runs agents, whose conversations may overlap; use advantage: {type: rloo}, or another that compares "
                "rollouts (reinforce without gamma)"
            )


def _check_groups(config: "AbstractTrainConfig") -> Iterator[str]:
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


def _check_critic_and_turns(config: "AbstractTrainConfig") -> Iterator[str]:
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


def _check_policy_loss(config: "AbstractTrainConfig") -> Iterator[str]:
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


def _check_sizes(config: "AbstractTrainConfig") -> Iterator[str]:
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


def _advantage_name(config: "AbstractTrainConfig") -> str:
    return AdvantageConfig.get_choice_name(type(config.advantage))


def _check_paths(config: "AbstractTrainConfig") -> Iterator[str]:
    check_paths(config)
    yield from ()


Check = Callable[[Any], Iterable[str]]

CHECKS: tuple[Check, ...] = (
    _check_paths,
    _check_logging,
    check_optimizer,
    check_trainer,
    _check_model,
    _check_context,
    _check_replay,
    _check_workers,
    _check_agents,
    _check_groups,
    _check_critic_and_turns,
    _check_policy_loss,
    _check_sizes,
)
"""Checks that work without levanter's classes."""


def run_checks(checks: Iterable[Check], config: "AbstractTrainConfig") -> list[str]:
    """Problems that checks find, each once. A check that reads an invalid setting ends without its other problems.

    Args:
        checks: the checks.
        config: the config; it may lack settings, see `decode.CheckedConfig`.
    """
    problems: list[str] = []
    for check in checks:
        with contextlib.suppress(InvalidFieldError):
            try:
                for problem in check(config):
                    problems.append(problem)
            except ValueError as error:
                problems += str(error).splitlines()
    return list(dict.fromkeys(problems))
