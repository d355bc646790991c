# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An RLOO update compared with plain language-model updates of levanter, and the gain from packing.

    python -m experiments.lab.benchmarks.benchmark_training_step
    python -m experiments.lab.benchmarks.benchmark_training_step --steps 20 --long_length 1024 --long_rollouts 32

There are two batches of rollouts: one of the config's size with rollouts of maximal length, and one of longer rollouts
with log-normal lengths, with a mean of a quarter of the maximum. On each, four kinds of update of the same model, with
the same optimizer, mesh and precision, alternate, so that other load affects all of them equally, and each round gives
one ratio: RLOO on packed microbatches, as in a run, and with one row per rollout; levanter's update on both layouts.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jaxtyping import Int64
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.trainer import Trainer
from levanter.trainer import TrainerConfig as LevanterTrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.types import ComputeLossFunction

from experiments.lab.benchmarks.measurement import (
    benchmark_parser,
    counted_compiles,
    load_config,
    make_report,
    program_bytes,
    ratios,
    say,
    spread,
    take_turns,
    timed,
    without_compilation_cache,
)
from marin_rl.batching.rl_example import PackedBatch, RlExample, pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, make_batch
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.learner.train_step import Learner
from marin_rl.parts.rl import RunParts
from marin_rl.utils.devices.setup import device_peak_bytes, microbatch_rows, platform_of, start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import next_token_loss, seq_len

SIGMA = 0.8
"""Standard deviation of the logarithm of a rollout's length."""


class Update(Protocol):
    """One kind of update."""

    def step(self) -> float:
        """Run one update and return its loss."""
        ...

    def program_bytes(self) -> dict[str, int | None]:
        """Return the memory of the compiled update, from the compiler's memory analysis."""
        ...


class RlooStep:
    """The update of a run."""

    def __init__(self, config: TrainConfig, trainer: TrainerConfig, model: LmHeadModel, packed: PackedBatch) -> None:
        self._learner = Learner(trainer, config.optimizer, RunParts(config, trainer).loss, num_updates=1_000_000)
        self._state = self._learner.initial_state(model, jax.random.PRNGKey(1))
        self._microbatches = packed.microbatches

    def step(self) -> float:
        """Run one update and return its loss."""
        self._state, measured = self._learner.update(self._state, self._microbatches)
        # A run reads every metric.
        return {name: float(metric) for name, metric in measured.items()}["loss/total"]

    def program_bytes(self) -> dict[str, int | None]:
        """Return the memory of the update, which is one program."""
        return program_bytes(self._learner.lower(self._state, self._microbatches).compile())


class LmStep:
    """Levanter's language-model update on the same loss tokens.

    The microbatches of the RLOO update are its microbatches too.
    """

    def __init__(self, config: TrainConfig, trainer: TrainerConfig, model: LmHeadModel, packed: PackedBatch) -> None:
        microbatches, tokens = len(packed.microbatches), packed.num_loss_tokens

        def loss(model: LmHeadModel, example: LmExample, *, key: jax.Array | None = None) -> jax.Array:
            per_token = next_token_loss(model, example)
            # Levanter's default mean fails with current jax. It averages microbatches; multiplying by their number
            # gives the sum.
            return jnp.sum(per_token.array) * (microbatches / tokens)

        quiet = LevanterTrainerConfig(
            id=config.run_name,
            mp=trainer.mp,
            tracker=(),
            train_batch_size=microbatches * packed.layout.rows_per_microbatch,
            per_device_parallelism=packed.layout.rows_per_microbatch // trainer.data_axis_size,
            num_train_steps=1_000_000,
            load_checkpoint=False,
            crash_on_nan=False,
            crash_on_inf=False,
            # It would write them to logs/ in the working directory.
            log_jaxprs=False,
            log_xla_hlo=False,
        )
        optimizer = config.optimizer.build(1_000_000)
        self._trainer = Trainer(quiet, optimizer, cast(ComputeLossFunction, loss), add_default_hooks=False)
        with self._trainer:
            self._state: TrainerState = self._trainer.initial_state(jax.random.PRNGKey(1), model=model)
        # The batch is on the host, as in a run.
        self._batch = jax.tree.map(np.asarray, _join(packed.microbatches).to_lm_example())

    def step(self) -> float:
        """Run one update and return its loss."""
        with self._trainer:
            info = self._trainer.train_step(self._state, self._batch)
        self._state = info.state
        return float(info.loss)

    def program_bytes(self) -> dict[str, int | None]:
        """Return the memory of the update, which is one program."""
        with self._trainer:
            # The trainer has no public handle of its jitted step.
            lowered = cast(Any, self._trainer._jit_train_step_fn_no_hook).lower(self._state, (self._batch,), {})
        return program_bytes(lowered.compile())


MAKERS: dict[str, tuple[Callable[..., Update], bool]] = {
    # kind: its update, and whether rollouts share rows
    "rloo": (RlooStep, True),
    "rloo_unpacked": (RlooStep, False),
    "lm_packed": (LmStep, True),
    "lm_unpacked": (LmStep, False),
}
RATIOS = {
    # ratio of seconds: numerator and denominator
    "rloo_over_lm_unpacked": ("rloo", "lm_unpacked"),
    "rloo_over_lm_packed": ("rloo", "lm_packed"),
    "rloo_packing_gain": ("rloo_unpacked", "rloo"),
    "lm_packing_gain": ("lm_unpacked", "lm_packed"),
}


def log_normal_lengths(count: int, longest: int) -> Int64[np.ndarray, " rollouts"]:
    """Draw log-normal rollout lengths in tokens, from 2 to `longest`, with a mean of a quarter of `longest`."""
    drawn = np.random.default_rng(0).lognormal(0, SIGMA, count)

    def cut(scale: float) -> Int64[np.ndarray, " rollouts"]:
        return np.clip(np.round(scale * drawn), 2, longest).astype(np.int64)

    # Truncation lowers the mean; rescale until it is restored.
    scale = longest / 4 / drawn.mean()
    while cut(scale).mean() < longest / 4:
        scale *= 1.005
    return cut(scale)


def random_rollouts(
    lengths: Int64[np.ndarray, " rollouts"], vocab_size: int, loss_tokens: int, longest: int
) -> RolloutBatch:
    """Return rollouts of random tokens, with loss on the last `loss_tokens` of each but never on the first token."""
    # A rollout draws as many tokens as the longest, so that its tokens do not depend on the lengths before it.
    drawn = np.random.default_rng(0).integers(vocab_size, size=(len(lengths), longest))
    position = np.broadcast_to(np.arange(longest), drawn.shape)
    is_token = position < lengths[:, None]
    has_loss = (position >= np.maximum(lengths - loss_tokens, 1)[:, None])[is_token]
    return make_batch(
        [str(index) for index in range(len(lengths))],
        lengths[:, None].tolist(),
        input_ids=drawn[is_token].astype(np.int32),
        turn_ids=np.where(has_loss, 0, -1).astype(np.int32),
        policy_logprobs=np.where(has_loss, -np.log(vocab_size), 0).astype(np.float32),
    )


def pack(
    config: TrainConfig,
    trainer: TrainerConfig,
    rollouts: RolloutBatch,
    advantages: Sequence[float],
    *,
    packed: bool | None,
) -> PackedBatch:
    """Return the batch in a run's layout, with or without packing, or with the run's choice if `packed` is None."""
    sections = dataclasses.replace(config.rollouts, packing=packed)
    whole = dataclasses.replace(config, rollouts=sections)
    default = sections.sizes.rows_per_device(platform_of(trainer), trainer.data_axis_size)
    rows = microbatch_rows(config.trainer, default)
    layout = RunParts(whole, dataclasses.replace(trainer, per_device_parallelism=rows)).layout
    return pack_batch(rollouts.with_advantages(advantages), config.aggregation, layout, pad_token_id=0)


def _join(microbatches: Sequence[RlExample]) -> RlExample:
    """Join all microbatches into one batch."""
    rows = microbatches[0].input_ids.axes[0]
    joined = Axis(rows.name, rows.size * len(microbatches))
    arrays = {
        name: hax.named(
            np.concatenate([np.asarray(getattr(example, name).array) for example in microbatches]),
            (joined, *first.axes[1:]),
        )
        for name, first in microbatches[0].arrays().items()
    }
    return RlExample(**arrays, group=None)


def measure_training_step(
    config: TrainConfig, trainer: TrainerConfig, lengths: Int64[np.ndarray, " rollouts"], steps: int
) -> dict[str, Any]:
    """Time `steps` updates of each kind in alternation, after a warm-up update that compiles.

    Args:
        config: model, row length, loss, optimizer and mesh.
        trainer: trainer config from `start_devices`.
        lengths: tokens of each rollout, the last `sampling.max_new_tokens` of them with loss.
        steps: timed updates of each kind.

    Returns:
        Figures as in experiments/lab/results/benchmarks.md.
    """
    assert config.model is not None
    tokenizer = config.tokenizer.build()
    rollouts = random_rollouts(
        lengths, tokenizer.vocab_size, config.sampling.max_new_tokens, config.rollouts.max_length
    )
    advantages = np.random.default_rng(0).normal(size=len(lengths)).tolist()
    updates: dict[str, Update] = {}
    figures: dict[str, Any] = {}
    for name, (make, is_packed) in MAKERS.items():
        packed = pack(config, trainer, rollouts, advantages, packed=is_packed)
        # Each update donates its weights, so each kind needs a copy.
        model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
        start = time.perf_counter()
        updates[name] = make(config, trainer, model, packed)
        state_seconds = time.perf_counter() - start
        figures[name] = {
            "microbatches": len(packed.microbatches),
            "microbatch_shape": [packed.layout.rows_per_microbatch, packed.layout.row_length],
            "packing_efficiency": packed.num_tokens / packed.num_positions,
            "initial_state_seconds": state_seconds,
            "first_step_seconds": timed(updates[name].step),
            "compiles_after_first_step": 0,
        }
        say(f"{name}: first update after {state_seconds:.1f} + {figures[name]['first_step_seconds']:.1f} s")

    def step(name: str) -> None:
        with counted_compiles() as compiles:
            updates[name].step()
        figures[name]["compiles_after_first_step"] += compiles.programs

    seconds = take_turns({name: functools.partial(step, name) for name in updates}, steps)
    for name, update in updates.items():
        rates = [int(lengths.sum()) / taken for taken in seconds[name]]
        figures[name] |= {"step_seconds": spread(seconds[name]), "tokens_per_second": spread(rates)}
        if MAKERS[name][1]:
            figures[name]["program_bytes"] = update.program_bytes()
    for name, (numerator, denominator) in RATIOS.items():
        figures[name] = ratios(seconds[numerator], seconds[denominator])
        say(f"{name}: {figures[name]}")
    return {"tokens": int(lengths.sum()), "mean_length": float(lengths.mean()), **figures}


def lengthened(config: TrainConfig, longest: int) -> TrainConfig:
    """Return the run with rollouts of up to `longest` tokens, of which three quarters may have loss."""
    assert config.model is not None
    return dataclasses.replace(
        config,
        model=dataclasses.replace(cast(Any, config.model), **seq_len(longest)),
        rollouts=dataclasses.replace(config.rollouts, max_length=longest, row_length=None),
        sampling=dataclasses.replace(config.sampling, max_new_tokens=longest * 3 // 4),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("RLOO update against levanter's plain one; other flags are those of marin_rl.train")
    parser.add_argument("--steps", type=int, default=30, help="timed updates of each kind")
    parser.add_argument("--long_length", type=int, default=256, help="longest rollout of the log-normal batch")
    parser.add_argument("--long_rollouts", type=int, default=64, help="rollouts of the log-normal batch")
    arguments, rest = parser.parse_known_args(argv)
    config = load_config(rest)
    without_compilation_cache()
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
    full = np.full(config.rollouts.rollouts_per_step, config.rollouts.max_length)
    drawn = log_normal_lengths(arguments.long_rollouts, arguments.long_length)
    figures = {
        "config": measure_training_step(config, trainer, full, arguments.steps),
        "log_normal": measure_training_step(lengthened(config, arguments.long_length), trainer, drawn, arguments.steps),
        "device_peak_bytes": device_peak_bytes(),
    }
    settings = {
        "rollouts": full.size,
        "length": config.rollouts.max_length,
        "loss_tokens": config.sampling.max_new_tokens,
        "long_rollouts": arguments.long_rollouts,
        "long_length": arguments.long_length,
    }
    print(make_report("benchmark_training_step", argv, settings, figures))


if __name__ == "__main__":
    main()
