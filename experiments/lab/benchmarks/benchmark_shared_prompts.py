# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The gain from shared prompts in training, by the lengths of prompts and answers and by group size.

    python -m experiments.lab.benchmarks.benchmark_shared_prompts
    python -m experiments.lab.benchmarks.benchmark_shared_prompts --prompts 512 --answers 64 --model.hidden_dim 512

The same update runs in three layouts, in alternation: one sequence per row; packed rows; and rows of a prompt and
several answers. Answers have between half of the maximal length and all of it; `--equal` gives all of them the maximal
length.
"""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from experiments.lab.benchmarks.benchmark_training_step import RlooStep, pack
from experiments.lab.benchmarks.measurement import (
    benchmark_parser,
    load_config,
    make_report,
    ratios,
    say,
    spread,
    take_turns,
    without_compilation_cache,
)
from marin_rl.batching.rollout_batch import RolloutBatch, make_batch
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.parts.rl import RunParts
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len

LAYOUTS = {
    # layout: packing, shared prompts
    "unpacked": (False, False),
    "packed": (True, False),
    "shared": (True, True),
}


def random_groups(
    prompt: int, answer: int, groups: int, group_size: int, vocab_size: int, *, shortest: int
) -> tuple[RolloutBatch, list[float]]:
    """Return groups of rollouts of random tokens that share their prompts, and an advantage of each rollout.

    Answers have between `shortest` and `answer` tokens.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(vocab_size, size=(groups, prompt))
    count = groups * group_size
    lengths, input_ids, turn_ids = [], [], []
    for index in range(count):
        length = int(rng.integers(shortest, answer + 1))
        input_ids += [*prompts[index // group_size], *rng.integers(vocab_size, size=answer)[:length]]
        turn_ids += [-1] * prompt + [0] * length
        lengths.append([prompt + length])
    batch = make_batch(
        [str(index) for index in range(count)],
        lengths,
        input_ids=np.array(input_ids, np.int32),
        turn_ids=np.array(turn_ids, np.int32),
        policy_logprobs=np.where(np.array(turn_ids) == 0, -np.log(vocab_size), 0).astype(np.float32),
    )
    return batch, rng.normal(size=count).tolist()


def measure_shape(
    config: TrainConfig,
    trainer: TrainerConfig,
    prompt: int,
    answer: int,
    group_size: int,
    groups: int,
    rounds: int,
    *,
    equal: bool,
) -> dict[str, Any]:
    """Time updates of one shape in every layout, after a first update that compiles.

    Args:
        config: model and optimizer.
        trainer: trainer config from `start_devices`.
        prompt: tokens of a prompt.
        answer: maximal tokens of an answer.
        group_size: answers per prompt.
        groups: prompts.
        rounds: timed updates in each layout.
        equal: whether all answers have the maximal length.

    Returns:
        Figures as in experiments/lab/results/benchmarks.md.
    """
    tokenizer = config.tokenizer.build()
    shortest = answer if equal else answer - answer // 2
    rollouts, advantages = random_groups(prompt, answer, groups, group_size, tokenizer.vocab_size, shortest=shortest)
    updates: dict[str, RlooStep] = {}
    figures: dict[str, Any] = {}
    losses = {}
    for name, (packed, shared) in LAYOUTS.items():
        sections = dataclasses.replace(
            config.rollouts,
            max_length=prompt + answer,
            group_size=group_size,
            packing=packed,
            share_prompts=shared,
            row_length=None,
        )
        sampling = dataclasses.replace(config.sampling, max_new_tokens=answer)
        model_config = dataclasses.replace(cast(Any, config.model), **seq_len(prompt + answer))
        shaped = dataclasses.replace(config, rollouts=sections, sampling=sampling, model=model_config)
        batch = pack(shaped, trainer, rollouts, advantages, packed=packed)
        model = initialize_policy(RunParts(shaped, trainer).model, tokenizer, trainer, key=jax.random.PRNGKey(0))
        updates[name] = RlooStep(shaped, trainer, model, batch)
        losses[name] = updates[name].step()
        figures[name] = {
            "microbatches": len(batch.microbatches),
            "microbatch_shape": [batch.layout.rows_per_microbatch, batch.layout.row_length],
            "tokens": batch.num_tokens,
            "shares": any(slot.prompt_length for slots in batch.slots for slot in slots),
        }
    cpu_seconds: dict[str, list[float]] = {name: [] for name in updates}

    def step(name: str) -> None:
        start = time.process_time()
        updates[name].step()
        cpu_seconds[name].append(time.process_time() - start)

    take_turns({name: functools.partial(step, name) for name in updates}, rounds)
    for name, seconds in cpu_seconds.items():
        figures[name]["cpu_seconds"] = spread(seconds)
        figures[name]["times_faster_than_packed"] = ratios(cpu_seconds["packed"], seconds)
        figures[name]["times_faster_than_unpacked"] = ratios(cpu_seconds["unpacked"], seconds)
    figures["largest_difference_of_loss"] = max(abs(loss - losses["unpacked"]) for loss in losses.values())
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Updates with and without shared prompts; other flags are those of marin_rl.train")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 128, 512, 1024], help="tokens of a prompt")
    parser.add_argument("--answers", type=int, nargs="+", default=[16, 64, 256], help="maximal tokens of an answer")
    parser.add_argument("--group_sizes", type=int, nargs="+", default=[4, 16], help="answers per prompt")
    parser.add_argument("--groups", type=int, default=4, help="prompts in a batch")
    parser.add_argument("--rounds", type=int, default=5, help="timed updates in each layout")
    parser.add_argument("--equal", action="store_true", help="give all answers the maximal length")
    arguments, rest = parser.parse_known_args(argv)
    config = load_config(rest)
    without_compilation_cache()
    trainer = start_devices(config.trainer, rows_per_device=1)
    figures = {}
    for prompt, answer, group_size in itertools.product(arguments.prompts, arguments.answers, arguments.group_sizes):
        shape = f"{prompt} + {answer} x {group_size}"
        figures[shape] = measure_shape(
            config,
            trainer,
            prompt,
            answer,
            group_size,
            arguments.groups,
            arguments.rounds,
            equal=arguments.equal,
        )
        faster = {name: figures[shape][name]["times_faster_than_packed"]["median"] for name in LAYOUTS}
        say(f"{shape}: " + ", ".join(f"{name} {value:.2f}" for name, value in faster.items()))
        jax.clear_caches()
    print(make_report("benchmark_shared_prompts", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
