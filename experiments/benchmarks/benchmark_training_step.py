# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An RLOO update against a plain language-model update of levanter, on the same model and tokens.

    python -m experiments.benchmarks.benchmark_training_step
    python -m experiments.benchmarks.benchmark_training_step --steps 20 --model.hidden_dim 256 --rollouts.max_length 64

Both are levanter `Trainer`s with the same optimizer, mesh and precision. They take turns, so that whatever
else the machine does falls on both, and each round gives one ratio.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.models.lm_model import LmExample, LmHeadModel, compute_next_token_loss
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.types import ComputeLossFunction

from experiments.benchmarks.measurement import (
    benchmark_parser,
    counted_compiles,
    device_peak_bytes,
    load_config,
    make_report,
    program_bytes,
    say,
    spread,
    timed,
    without_compilation_cache,
)
from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.capture import CapturingTrackerConfig
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.learner.train_step import Learner
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.devices import start_devices
from marin_rl.runtime.training_run import make_loss


class RlooStep:
    """The update of a run."""

    def __init__(self, config: TrainConfig, trainer: TrainerConfig, model: LmHeadModel, batch: RlExample) -> None:
        self._learner = Learner(trainer, config.optimizer, make_loss(config, trainer), num_steps=1_000_000)
        self.state = self._learner.initial_state(model, jax.random.PRNGKey(1))
        self.trainer: Trainer = self._learner.trainer
        self.batch = batch

    def step(self) -> float:
        """One update; returns its loss."""
        self.state, measured = self._learner.step(self.state, self.batch)
        return measured["loss/total"]


class LmStep:
    """The update that levanter makes when it trains a language model on the same loss tokens."""

    def __init__(self, config: TrainConfig, trainer: TrainerConfig, model: LmHeadModel, batch: RlExample) -> None:
        tokens = int(np.asarray(batch.loss_mask.array).sum())
        rows = config.rollouts.rollouts_per_step
        microbatches = rows // (trainer.microbatch_size or rows)

        def loss(model: LmHeadModel, example: LmExample, *, key: jax.Array | None = None) -> jax.Array:
            per_token = cast(hax.NamedArray, compute_next_token_loss(model, example, key=key, reduction=None))
            # Its default mean fails on a current jax. Microbatches are averaged, so their number makes a sum of it.
            return jnp.sum(per_token.array) * (microbatches / tokens)

        quiet = dataclasses.replace(
            trainer,
            tracker=CapturingTrackerConfig(),
            num_train_steps=1_000_000,
            load_checkpoint=False,
            crash_on_nan=False,
            crash_on_inf=False,
        )
        optimizer = config.optimizer.build(1_000_000)
        self.trainer = Trainer(quiet, optimizer, cast(ComputeLossFunction, loss), add_default_hooks=False)
        with self.trainer:
            self.state: TrainerState = self.trainer.initial_state(jax.random.PRNGKey(1), model=model)
        # The run's batch comes from the host; this one does too.
        self.batch = jax.tree.map(np.asarray, batch.to_lm_example())

    def step(self) -> float:
        """One update; returns its loss."""
        with self.trainer:
            info = self.trainer.train_step(self.state, self.batch)
        self.state = info.state
        return float(info.loss)


def random_batch(config: TrainConfig, vocab_size: int) -> RlExample:
    """A full batch of the run's shape: random tokens, the last `sampling.max_new_tokens` of each row with loss."""
    rows, positions = config.rollouts.rollouts_per_step, config.rollouts.max_length
    rng = np.random.default_rng(0)
    mask = np.zeros((rows, positions), bool)
    mask[:, -min(config.sampling.max_new_tokens, positions - 1) :] = True
    rollout_ids = np.where(mask, np.arange(rows, dtype=np.int32)[:, None], np.int32(-1))
    advantages = rng.normal(size=(rows, 1)).astype(np.float32)
    arrays = {
        "input_ids": rng.integers(vocab_size, size=(rows, positions), dtype=np.int32),
        "loss_mask": mask,
        "segment_ids": np.ones((rows, positions), np.int32),
        "loss_weights": config.aggregation.loss_weights(mask, rollout_ids),
        "advantages": np.where(mask, advantages, np.float32(0)),
        "policy_logprobs": np.where(mask, np.float32(-np.log(vocab_size)), np.float32(0)),
        "reference_logprobs": np.zeros((rows, positions), np.float32),
    }
    axes = (Axis("batch", rows), Axis("position", positions))
    return RlExample(**{name: hax.named(array, axes) for name, array in arrays.items()})


def measure_training_step(config: TrainConfig, steps: int) -> dict[str, Any]:
    """Time `steps` updates of each kind, in turns, after a first one that compiles.

    Args:
        config: model, batch shape, loss, optimizer and mesh.
        steps: timed updates of each kind.

    Returns:
        Figures as in docs/pages/benchmarks.md.
    """
    assert config.model is not None
    trainer = start_devices(config.trainer_config(), rows=config.rollouts.rollouts_per_step)
    tokenizer = config.tokenizer.build()
    batch = random_batch(config, tokenizer.vocab_size)
    kinds: dict[str, RlooStep | LmStep] = {}
    figures: dict[str, Any] = {}
    makers: dict[str, Callable[..., RlooStep | LmStep]] = {"rloo": RlooStep, "lm": LmStep}
    for name, make in makers.items():
        # Each takes its weights over, so each needs its own.
        model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
        start = time.perf_counter()
        kinds[name] = make(config, trainer, model, batch)
        state_seconds = time.perf_counter() - start
        figures[name] = {"initial_state_seconds": state_seconds, "first_step_seconds": timed(kinds[name].step)}
        say(f"{name}: first update after {state_seconds:.1f} + {figures[name]['first_step_seconds']:.1f} s")
    seconds = _take_turns(kinds, steps, figures)
    for name, kind in kinds.items():
        figures[name] |= {"step_seconds": spread(seconds[name]), "step_program_bytes": _step_bytes(kind)}
    ratios = [rloo / lm for rloo, lm in zip(seconds["rloo"], seconds["lm"], strict=True)]
    return {**figures, "rloo_over_lm": spread(ratios), "device_peak_bytes": device_peak_bytes()}


def _take_turns(kinds: dict[str, RlooStep | LmStep], steps: int, figures: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of every update after the first; who begins alternates from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for name in kinds:
        figures[name]["compiles_after_first_step"] = 0
    for turn in range(steps):
        for name in sorted(kinds, reverse=bool(turn % 2)):
            with counted_compiles() as compiles:
                seconds[name].append(timed(kinds[name].step))
            figures[name]["compiles_after_first_step"] += compiles.programs
    return seconds


def _step_bytes(kind: RlooStep | LmStep) -> dict[str, int | None]:
    with kind.trainer:
        # The trainer has no public handle on its jitted step.
        lowered = cast(Any, kind.trainer._jit_train_step_fn_no_hook).lower(kind.state, (kind.batch,), {})
    return program_bytes(lowered.compile())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("RLOO update against levanter's plain LM update; other flags are those of marin_rl.train")
    parser.add_argument("--steps", type=int, default=30, help="timed updates of each kind")
    arguments, rest = parser.parse_known_args(argv)
    config = load_config(rest)
    without_compilation_cache()
    figures = measure_training_step(config, arguments.steps)
    rows, positions = config.rollouts.rollouts_per_step, config.rollouts.max_length
    settings = {"rows": rows, "positions": positions, "loss_tokens_per_row": config.sampling.max_new_tokens}
    print(make_report("benchmark_training_step", argv, settings, figures))


if __name__ == "__main__":
    main()
