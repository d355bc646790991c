# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A bounded search for the settings of a plan with the shortest step: one setting after another, from the config's."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marin_rl.chips import Topology
from marin_rl.config.train_config import TrainConfig
from marin_rl.planning.compiling import Failure
from marin_rl.planning.programs import LOWER
from marin_rl.planning.report import table
from marin_rl.planning.run_plan import Plan

Setting = tuple[str, Any]
"""Dotted name of a setting, and its value."""
MODEL_AXES = ["mlp", "heads", "kv_head"]
"""Axes of the model that a model axis of the mesh shards."""


class Candidate(NamedTuple):
    """A plan that was tried."""

    changes: tuple[Setting, ...]
    """Settings that differ from the config."""
    plan: Plan
    """The plan with them."""

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key: plans that fit first, then those with the shortest step of the trainer, then of a worker."""
        failed = any(isinstance(phase.result, Failure) for phase in self.plan.phases)
        return not self.plan.fits, self.plan.step_seconds + 1e9 * failed, self.plan.seconds("worker")


class Knob(NamedTuple):
    """A setting that the search varies."""

    settings: Callable[[TrainConfig, Plan], Sequence[Sequence[Setting]]]
    """Returns the alternatives to a config's settings, each a list of settings that change together."""
    programs: frozenset[str]
    """Programs that depend on it."""


_LEARNER = frozenset({"update", "score"})
_SAMPLER = frozenset({"sampler weights", "prefill", "short prefill", "decode"})
_ALL = frozenset(LOWER)


def _model_axis(config: TrainConfig, plan: Plan) -> Sequence[Sequence[Setting]]:
    heads = getattr(config.model, "num_kv_heads", 1)
    sizes = [size for size in (1, 2, 4, 8) if heads % size == 0 and plan.topology.chips_per_host % size == 0]
    return [
        [("trainer.model_axis_size", size), ("trainer.tensor_parallel_axes", MODEL_AXES if size > 1 else None)]
        for size in sizes
        if size != config.trainer.model_axis_size
    ]


def _rows(config: TrainConfig, plan: Plan) -> Sequence[Sequence[Setting]]:
    sizes = {plan.rows * 4, plan.rows * 2, max(plan.rows // 2, 1)} - {plan.rows}
    return [[("trainer.per_device_parallelism", size)] for size in sorted(sizes)]


def _recomputation(config: TrainConfig, plan: Plan) -> Sequence[Sequence[Setting]]:
    now = getattr(config.model, "gradient_checkpointing", True)
    return [[("model.gradient_checkpointing", not now)]]


def _head_block(config: TrainConfig, plan: Plan) -> Sequence[Sequence[Setting]]:
    return [[("logprob_block_size", size)] for size in (512, 2048, 4096) if size != config.logprob_block_size]


def _slots(config: TrainConfig, plan: Plan) -> Sequence[Sequence[Setting]]:
    most = config.rollouts.rollouts_per_step
    sizes = {size for factor in (4, 2, 0.5) if 1 <= (size := int(config.sampling.max_seqs * factor)) <= most}
    return [[("sampling.max_seqs", size)] for size in sorted(sizes)]


def _cache_dtype(config: TrainConfig, plan: Plan) -> Sequence[Sequence[Setting]]:
    now = config.sampling.cache_dtype(plan.chip.platform)
    return [[("sampling.kv_cache_dtype", dtype)] for dtype in ("bfloat16", "float32") if dtype != now]


KNOBS = (
    Knob(_model_axis, _ALL),
    Knob(_rows, _LEARNER),
    Knob(_recomputation, frozenset({"update"})),
    Knob(_head_block, _LEARNER),
    Knob(_slots, _SAMPLER),
    Knob(_cache_dtype, _SAMPLER),
)
"""Mesh, microbatch, recomputation of activations, block of the head, slots and type of the KV cache."""


def search(
    config: TrainConfig, first: Plan, make: Callable[[TrainConfig, Plan, frozenset[str]], Plan], *, most: int
) -> list[Candidate]:
    """Try other settings, one knob after another; each continues from the best plan so far.

    Args:
        config: training config.
        first: its plan.
        make: makes the plan of a config, given another plan and the programs that differ from it.
        most: maximum number of further plans.

    Returns:
        All plans, the best first.
    """
    tried = [Candidate((), first)]
    for knob in KNOBS:
        best = min(tried, key=lambda candidate: candidate.rank)
        base = with_settings(config, best.changes)
        for settings in knob.settings(base, best.plan):
            if len(tried) > most:
                break
            changes = {**dict(best.changes), **dict(settings)}
            try:
                plan = make(with_settings(config, tuple(changes.items())), best.plan, knob.programs)
            except ValueError:
                continue  # The settings contradict others of the config.
            tried.append(Candidate(tuple(changes.items()), plan))
    return sorted(tried, key=lambda candidate: candidate.rank)


def with_settings(config: TrainConfig, settings: Sequence[Setting]) -> TrainConfig:
    """Return a config with other settings.

    Raises:
        ValueError: if they contradict others.
    """
    changed: Any = config
    for name, value in settings:
        changed = _replace(changed, name.split("."), value)
    return changed


def _replace(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    return dataclasses.replace(section, **{name: _replace(getattr(section, name), rest, value) if rest else value})


def describe_search(candidates: Sequence[Candidate], topology: Topology, best: int = 5) -> str:
    """Return the best plans of a search as a table.

    Args:
        candidates: as returned by `search`.
        topology: chips of the trainer.
        best: number of plans.
    """
    rows = []
    for changes, plan in candidates[:best]:
        largest = max(phase.memory / phase.chip.memory for phase in plan.phases)
        seconds = f"{plan.step_seconds:.3g}" if plan.fits else ""
        worker = f"{plan.seconds('worker'):.3g}" if plan.fits and plan.worker_topology is not None else ""
        text = ", ".join(f"{name.rpartition('.')[2]} {_value(value)}" for name, value in changes) or "the config"
        rows.append((f"{largest:.0%}", seconds, worker, "yes" if plan.fits else "no", text))
    header = ("memory", "seconds", "of a worker", "fits", "settings")
    return f"the best of {len(candidates)} plans for {topology.name}\n{table(header, rows)}"


def _value(value: Any) -> str:
    return json.dumps(value).replace('"', "")
