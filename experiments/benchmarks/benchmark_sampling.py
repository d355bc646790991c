# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokens per second of the sampler, in the shape of experiments/rloo.yaml and in a longer one.

    python -m experiments.benchmarks.benchmark_sampling
    python -m experiments.benchmarks.benchmark_sampling --calls 5 --sampling.max_seqs 512

Weights and prompts are random, which does not affect the time per token.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.measurement import (
    benchmark_parser,
    counted_compiles,
    device_peak_bytes,
    load_config,
    make_report,
    say,
    spread,
    timed,
    without_compilation_cache,
)
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.samplers import open_group_sampler
from marin_rl.learner.devices import start_devices
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.sampling.sampler import SampleRequest


@dataclasses.dataclass(frozen=True)
class SamplingShape:
    """The requests of one call."""

    requests: int
    """Prompts, each continued once."""
    prompt_tokens: int
    """Tokens of every prompt."""
    new_tokens: int
    """Maximum number of new tokens per request."""


def shape_of(config: TrainConfig) -> SamplingShape:
    """Return the requests of one update: all its rollouts, with the longest prompts that leave room for an answer."""
    new_tokens = config.sampling.max_new_tokens
    return SamplingShape(config.rollouts.rollouts_per_step, config.rollouts.max_length - new_tokens, new_tokens)


def measure_sampling(config: TrainConfig, calls: int) -> dict[str, Any]:
    """Time `calls` calls of the run's sampler, after a warm-up call that compiles.

    Args:
        config: model, rollouts per update, lengths and the sampler's sizes.
        calls: timed calls, each with different seeds.

    Returns:
        Figures as in docs/pages/benchmarks.md.
    """
    assert config.model is not None
    shape = shape_of(config)
    trainer = start_devices(config.trainer_config(), rows_per_device=shape.requests)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    sampler = open_group_sampler(config, model, tokenizer, trainer, version=0)
    prompts = np.random.default_rng(0).integers(tokenizer.vocab_size, size=(shape.requests, shape.prompt_tokens))
    sampled: list[int] = []

    def sample(call: int) -> None:
        requests = [
            SampleRequest(
                tuple(prompt), call * shape.requests + index, shape.new_tokens, temperature=config.sampling.temperature
            )
            for index, prompt in enumerate(prompts.tolist())
        ]
        sampled.append(sum(len(generation.token_ids) for generation in sampler.sample(requests)))

    first = timed(lambda: sample(0))
    say(f"{shape}: first call {first:.1f} s")
    with counted_compiles() as compiles:
        seconds = [timed(lambda call=call: sample(call)) for call in range(1, calls + 1)]
    return {
        "shape": dataclasses.asdict(shape),
        "decoded_together": config.sampling.max_seqs,
        "first_call_seconds": first,
        "call_seconds": spread(seconds),
        "tokens_per_second": spread([tokens / spent for tokens, spent in zip(sampled[1:], seconds, strict=True)]),
        "tokens_per_call": spread(sampled[1:]),
        "compiles_after_first_call": compiles.programs,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Sampled tokens per second; other flags are those of marin_rl.train")
    parser.add_argument("--calls", type=int, default=10, help="timed calls of each shape")
    parser.add_argument("--longer_length", type=int, default=128, help="tokens of prompt and answer, longer shape")
    parser.add_argument("--longer_new_tokens", type=int, default=64, help="those of the answer")
    parser.add_argument("--longer_prompts", type=int, default=8, help="prompts, each in a group of rollouts.group_size")
    arguments, rest = parser.parse_known_args(argv)
    longer = [
        f"--model.seq_len={arguments.longer_length}",
        f"--rollouts.max_length={arguments.longer_length}",
        f"--rollouts.prompts_per_step={arguments.longer_prompts}",
        f"--sampling.max_new_tokens={arguments.longer_new_tokens}",
    ]
    configs = {"config": load_config(rest), "longer": load_config([*rest, *longer])}
    without_compilation_cache()
    figures = {name: measure_sampling(config, arguments.calls) for name, config in configs.items()}
    print(
        make_report(
            "benchmark_sampling",
            argv,
            {"calls": arguments.calls},
            {**figures, "device_peak_bytes": device_peak_bytes()},
        )
    )


if __name__ == "__main__":
    main()
