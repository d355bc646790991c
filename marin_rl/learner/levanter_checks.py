# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of levanter's sections of a config, which need levanter; `section_problems` must find nothing first."""

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from marin_rl.batching.attention_kernel import PLATFORMS, attention_kernel
from marin_rl.models.conversion import check_model
from marin_rl.models.lora import check_targets
from marin_rl.models.mixture import mixture_shape
from marin_rl.models.model_settings import model_problems, window_problem
from marin_rl.utils.devices.sharding import POSITION
from marin_rl.utils.devices.trainer_config import BATCH
from marin_rl.utils.errors import nearest
from marin_rl.utils.levanter_line import UNUSABLE_OPTIMIZERS, field_of_key, max_positions
from marin_rl.utils.settings.checks import accepts, type_problems
from marin_rl.utils.settings.section_types import (
    choice_name,
    default_of,
    field_types,
    members,
    plain_type,
    section_of,
)

_SCHEDULE = (
    *("warmup", "decay", "rewarmup", "cooldown", "cycles", "cycle_length", "haps"),
    *("lr_schedule", "min_lr_ratio"),
)
"""Settings of the learning-rate schedule."""


def section_problems(config: Any) -> list[str]:
    """Problems of the classes of levanter's sections and their values, which a config built in Python may have."""
    own = {name: (field_types(type(config))[name], getattr(config, name)) for name in ("model", "optimizer")}
    own["trainer.tracker"] = field_types(type(config.trainer))["tracker"], config.trainer.tracker
    problems: list[str] = []
    for key, (kind, value) in own.items():
        problems += [] if accepts(kind, value) else type_problems(kind, value, key)
    if problems:
        return problems
    sections = [(key, value) for key, (_, value) in own.items() if value is not None and key != "trainer.tracker"]
    for key, value in sections:
        for name, kind in field_types(type(value)).items():
            item = getattr(value, field_of_key(type(value), name))
            if {plain_type(option) for option in members(kind)} <= {int, float, bool, str} and not accepts(kind, item):
                problems += type_problems(kind, item, f"{key}.{name}")
    return problems


def _check_architecture(config: Any) -> Iterator[str]:
    """Check that the project supports the model, also with these rows and this mesh."""
    if (model := config.model) is None:
        return
    sizes, trainer = config.rows.sizes, config.trainer
    problems = list(model_problems(model))
    yield from problems
    # An architecture that is not supported may have no seq_len.
    section, max_length = sizes.section, sizes.max_length
    if not problems and max_length > max_positions(model):
        yield (
            f"{section}.max_length is {max_length}, but the model's context has {max_positions(model)} tokens "
            f"(model.seq_len); lower {section}.max_length or raise model.seq_len"
        )
    name = choice_name(model)
    if name == "gpt2" and POSITION in (trainer.tensor_parallel_axes or ()):
        yield (
            "trainer.tensor_parallel_axes is ['position'], but the positions of a gpt2 model cannot be split over "
            "devices, because it has an attention module of its own; use another axis, such as mlp"
        )
    if name == "mixtral":
        problem = window_problem(model, max_length, section)
        yield from [] if problem is None else [problem]
    if config.replays_experts and not problems and mixture_shape(model) is None:
        yield (
            f"routing_replay is {config.routing_replay}, but a {name} model has no experts; set routing_replay: null"
        )
    if not problems and mixture_shape(model) is not None:
        yield from _mixture_mesh_problems(trainer.compute_axis_mapping)


def _mixture_mesh_problems(mapping: Mapping[str, Any]) -> Iterator[str]:
    """Check that no mesh axis splits two of the axes over which the outputs of experts are summed or split."""
    split = {name: mapping.get(name) or () for name in ("experts", "mlp", POSITION, BATCH)}
    over = {name: {axes} if isinstance(axes, str) else set(axes) for name, axes in split.items()}
    for first, second in itertools.combinations(over, 2):
        if both := sorted(over[first] & over[second]):
            yield (
                f"trainer splits {first} and {second} over the mesh axis {both[0]}, but of a mixture of experts it can "
                "split one of them; change trainer.tensor_parallel_axes or trainer.axis_resources"
            )


def _check_adapter(config: Any) -> Iterator[str]:
    """Check that the adapter fits the model."""
    model, lora = config.model, config.lora
    if model is None or lora is None or any(model_problems(model)):
        return
    check_targets(model, lora.targets)
    if lora.rank > (size := model.Embed.size):
        yield (
            f"lora.rank is {lora.rank}, but the model has a hidden size of {size}, so the adapter would be "
            "larger than the weights; lower lora.rank, or set lora: null to train all weights"
        )


def _check_optimizer(config: Any) -> Iterator[str]:
    """Check that the update of the optimizer can be compiled, and that its learning rate is finite."""
    optimizer = config.optimizer
    name = choice_name(optimizer)
    yield from _optimizer_ranges(optimizer)
    schedules = section_of(field_types(type(optimizer))["lr_schedule"]).get_known_choices()
    if isinstance(optimizer.lr_schedule, str) and optimizer.lr_schedule not in schedules:
        yield f"optimizer.lr_schedule is {optimizer.lr_schedule!r}; {nearest(optimizer.lr_schedule, sorted(schedules))}"
    if name in UNUSABLE_OPTIMIZERS:
        usable = sorted(type(optimizer).get_known_choices().keys() - set(UNUSABLE_OPTIMIZERS))
        yield (
            f"optimizer.type is {name!r}, whose update in levanter cannot be compiled; use one of {', '.join(usable)}"
        )
    if name == "mars" and optimizer.max_grad_norm:
        yield (
            f"optimizer.max_grad_norm is {optimizer.max_grad_norm}, but levanter's clipping in mars cannot be "
            "compiled; set optimizer.max_grad_norm: null, or use optimizer: {type: adam}"
        )


def _optimizer_ranges(optimizer: Any) -> Iterator[str]:
    for key in ("warmup", "decay", "rewarmup", "cooldown"):
        value = getattr(optimizer, key)
        if value is not None and not (0 <= value <= 1 or (1 < value < math.inf and value == int(value))):
            yield (
                f"optimizer.{key} is {value}; it must be a fraction of the updates from 0 to 1, or a whole number of "
                "updates"
            )
    for key in ("learning_rate", "weight_decay", "min_lr_ratio", "max_grad_norm"):
        value = getattr(optimizer, key, None)
        if value is not None and not 0 <= value < math.inf:
            yield f"optimizer.{key} is {value}; it must be a finite number of at least 0"
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, key, 0) < 1:
            yield f"optimizer.{key} is {getattr(optimizer, key)}; it must be at least 0 and below 1"


def _check_row_length(config: Any) -> Iterator[str]:
    """Check that a platform supports the row length; the run's platform is checked after jax has started."""
    errors = []
    for platform in PLATFORMS:
        try:
            config.rows.sizes.positions(attention_kernel(config.model, platform, config.context_shards))
        except ValueError as error:
            errors.append(str(error))
    if len(errors) == len(PLATFORMS):
        yield errors[0]


def _check_export(config: Any) -> Iterable[str]:
    """Check that the model can be exported."""
    if config.model is not None:
        check_model(config.model, max_length=config.rows.sizes.max_length, section=config.rows.sizes.section)
    return ()


def _check_schedule(config: Any) -> Iterator[str]:
    """Check that levanter can build the learning-rate schedule, whose phases must fit into the run."""
    # The updates of whole epochs are counted when the data is read.
    optimizer, num_updates = config.optimizer, config.num_updates
    if not num_updates or any(_check_optimizer(config)):
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            # Traced, because a computation would start the devices, which only a run may do.
            jax.eval_shape(lambda: optimizer.lr_scheduler(num_updates)(0))
    except (ValueError, ArithmeticError) as error:
        keys = [key for key in _SCHEDULE if getattr(optimizer, key) != default_of(type(optimizer), key)]
        given = ", ".join(f"optimizer.{key} is {getattr(optimizer, key)!r}" for key in keys)
        yield (
            f"{given}, but the run has {num_updates} updates (num_steps x updates), for which levanter cannot "
            f"build the learning-rate schedule ({str(error).rstrip('.')}); set numbers of updates that fit into the "
            "run, or shares of it, such as 0.1"
        )


def _check_teacher_context(config: Any) -> Iterator[str]:
    """Check that rollouts with the tokens of a teacher's context fit into the model."""
    model, more, max_length = config.model, config.teacher_context_tokens, config.rows.sizes.max_length
    if model is not None and more and not any(model_problems(model)) and max_length + more > max_positions(model):
        yield (
            f"reference.context.max_tokens is {more} and rollouts.max_length {max_length}, but the model's context "
            f"has {max_positions(model)} tokens (model.seq_len); lower one of them or raise model.seq_len"
        )


CHECKS = (
    _check_architecture,
    _check_adapter,
    _check_optimizer,
    _check_row_length,
    _check_export,
    _check_schedule,
    _check_teacher_context,
)
"""Checks of configs of all training commands; each yields problems or raises a `ValueError`."""
