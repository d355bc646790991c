# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokens per second of the sampler, in the shape of experiments/rloo.yaml and in a longer one.

    python -m experiments.lab.benchmarks.benchmark_sampling
    python -m experiments.lab.benchmarks.benchmark_sampling --calls 5 --sampling.max_seqs 512

Weights and prompts are random, which does not affect the time per token.
"""

import asyncio
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.lab.benchmarks.measurement import (
    benchmark_parser,
    counted_compiles,
    load_config,
    make_report,
    say,
    spread,
    timed,
    without_compilation_cache,
)
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.utils.devices.setup import device_peak_bytes, start_devices
from marin_rl.utils.event_loop import BackgroundLoop
from marin_rl.utils.timing import PhaseTimer


@dataclasses.dataclass(frozen=True)
class SamplingShape:
    """The requests of one call."""

    prompts: int
    """Different prompts."""
    group_size: int
    """Samples of each prompt."""
    prompt_tokens: int
    """Tokens of every prompt."""
    new_tokens: int
    """Maximum number of new tokens per request."""


def shape_of(config: TrainConfig) -> SamplingShape:
    """Return the requests of one update: all its rollouts, with the longest prompts that leave room for an answer."""
    new_tokens = config.sampling.max_new_tokens
    rollouts = config.rollouts
    return SamplingShape(rollouts.prompts_per_step, rollouts.group_size, rollouts.max_length - new_tokens, new_tokens)


def measure_sampling(config: TrainConfig, calls: int) -> dict[str, Any]:
    """Time `calls` calls of the run's sampler, after a warm-up call that compiles.

    Args:
        config: model, rollouts per update, lengths and the sampler's sizes.
        calls: timed calls, each with different seeds.

    Returns:
        Figures as in experiments/lab/results/benchmarks.md.
    """
    assert config.model is not None
    shape = shape_of(config)
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    sampler = RunParts(config, trainer).open_group_sampler(model, version=0)
    prompts = np.random.default_rng(0).integers(tokenizer.vocab_size, size=(shape.prompts, shape.prompt_tokens))
    sampled: list[int] = []

    def sample(call: int) -> None:
        seeds = itertools.count(call * shape.prompts * shape.group_size)
        requests = [
            SampleRequest(tuple(prompt), next(seeds), shape.new_tokens, temperature=config.sampling.temperature)
            for prompt in prompts.tolist()
            for _ in range(shape.group_size)
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
        "prompt_tokens_per_call": sampler.work.prefilled_tokens / (calls + 1),
        "positions_per_prompt_token": sampler.work.prefill_positions / sampler.work.prefilled_tokens,
        "slots_in_use": sampler.work.sampled_tokens / sampler.work.slot_steps,
        "compiles_after_first_call": compiles.programs,
    }


def measure_turns(config: TrainConfig, *, episodes: int, turns: int, longest: int, seconds: float) -> dict[str, Any]:
    """Run conversations of several turns with replies of random lengths, through the batcher of episodes.

    Args:
        config: model and the sampler's sizes; the context must have room for an episode.
        episodes: conversations, all of which wait for a slot at the start.
        turns: turns of each.
        longest: maximum number of new tokens of a reply; the minimum is a fifth of it.
        seconds: time that the environment takes for a turn.

    Returns:
        Figures as in experiments/lab/results/benchmarks.md.
    """
    assert config.model is not None
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    sampler = RunParts(config, trainer).open_group_sampler(model, version=0)
    batcher, loop = RequestBatcher(sampler.batch_size, episodes), BackgroundLoop()
    rng = np.random.default_rng(0)
    while_queued: dict[str, int] = {}
    ended = itertools.count(1)

    async def run(name: str) -> None:
        prompt: tuple[int, ...] = ()
        for turn in range(turns):
            prompt += tuple(rng.integers(tokenizer.vocab_size, size=10).tolist())
            reply = int(rng.integers(max(longest // 5, 1), longest + 1))
            prompt += (await batcher.submit(SampleRequest(prompt, turn, reply, conversation=name))).token_ids
            await asyncio.sleep(seconds)
        batcher.leave(name)
        if next(ended) == episodes - sampler.batch_size:
            while_queued.update(dataclasses.asdict(sampler.work))

    async def run_all() -> None:
        await asyncio.gather(*(run(str(index)) for index in range(episodes)))

    running = loop.submit(run_all())
    running.add_done_callback(lambda _: batcher.close())
    spent = timed(lambda: batcher.serve(sampler, PhaseTimer(), lambda: None, 60.0, lambda: None))
    running.result()
    loop.close()
    return {
        "shape": {"episodes": episodes, "turns": turns, "longest_reply": longest, "environment_seconds": seconds},
        "decoded_together": sampler.batch_size,
        "seconds_with_compilation": spent,
        "sampled_tokens": sampler.work.sampled_tokens,
        "prompt_tokens": sampler.work.prefilled_tokens,
        "positions_per_prompt_token": sampler.work.prefill_positions / sampler.work.prefilled_tokens,
        "slots_in_use_while_queued": while_queued["sampled_tokens"] / while_queued["slot_steps"],
        "slots_in_use": sampler.work.sampled_tokens / sampler.work.slot_steps,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Sampled tokens per second; other flags are those of marin_rl.train")
    parser.add_argument("--calls", type=int, default=10, help="timed calls of each shape")
    parser.add_argument("--longer_length", type=int, default=128, help="tokens of prompt and answer, longer shape")
    parser.add_argument("--longer_new_tokens", type=int, default=64, help="those of the answer")
    parser.add_argument("--longer_prompts", type=int, default=8, help="prompts, each in a group of rollouts.group_size")
    parser.add_argument("--turns_slots", type=int, default=64, help="slots of the shape with 5 turns per episode")
    arguments, rest = parser.parse_known_args(argv)
    longer = [
        f"--model.seq_len={arguments.longer_length}",
        f"--rollouts.max_length={arguments.longer_length}",
        f"--rollouts.prompts_per_step={arguments.longer_prompts}",
        f"--sampling.max_new_tokens={arguments.longer_new_tokens}",
    ]
    configs = {"config": load_config(rest), "longer": load_config([*rest, *longer])}
    with_turns = load_config([*rest, *longer, f"--sampling.max_seqs={arguments.turns_slots}"])
    without_compilation_cache()
    figures = {name: measure_sampling(config, arguments.calls) for name, config in configs.items()}
    longest = (arguments.longer_length - 5 * 10) // 5
    figures["turns"] = measure_turns(
        with_turns, episodes=4 * arguments.turns_slots, turns=5, longest=longest, seconds=0.001
    )
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
