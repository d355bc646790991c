# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Memory and time of blockwise log-probabilities at a large vocabulary, and the gain from skipping masked positions.

    python -m experiments.lab.benchmarks.benchmark_logprobs
    python -m experiments.lab.benchmarks.benchmark_logprobs --embed 256 --block_sizes 8 32 128

Measures value and gradient of a weighted sum of log-probabilities, with the entropy, for activations
`[batch, position, embed]` and a head `[embed, vocab]`. With loss on every position the baseline is full logits, which
take 1 GB at the default sizes, with a gradient of several times that. For several shares of positions with loss, the
baseline is blocks that cover every position.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.lab.benchmarks.measurement import (
    benchmark_parser,
    make_report,
    program_bytes,
    ratios,
    say,
    spread,
    take_turns,
    timed,
    without_compilation_cache,
)
from marin_rl.learner.blocks import SMALL_BLOCKS
from marin_rl.learner.logprobs import blockwise_logprobs

LogprobFunction = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def materialised_logprobs(
    activations: Float[Array, "batch position embed"],
    lm_head: Float[Array, "embed vocab"],
    targets: Int[Array, "batch position"],
    mask: Bool[Array, "batch position"],
) -> tuple[Float[Array, "batch position"], Float[Array, "batch position"]]:
    """Compute log-probabilities of the targets and entropies from all logits at once; 0 off the mask."""
    everything = jax.nn.log_softmax(jnp.einsum("bpe,ev->bpv", activations, lm_head), axis=-1)
    chosen = jnp.take_along_axis(everything, targets[..., None], axis=-1)[..., 0]
    frozen = jax.lax.stop_gradient(everything)
    return jnp.where(mask, chosen, 0), jnp.where(mask, -jnp.sum(jnp.exp(frozen) * frozen, axis=-1), 0)


def every_position_logprobs(
    activations: Float[Array, "batch position embed"],
    lm_head: Float[Array, "embed vocab"],
    targets: Int[Array, "batch position"],
    mask: Bool[Array, "batch position"],
    *,
    block_size: int,
) -> tuple[Float[Array, "batch position"], Float[Array, "batch position"]]:
    """Compute the same in blocks that cover every position, differentiated by jax (an earlier implementation).

    Args:
        activations: `[batch, position, embed]`.
        lm_head: `[embed, vocab]`.
        targets: `[batch, position]`.
        mask: `[batch, position]`, applied to the results of all positions.
        block_size: positions in a block; a divisor of `position`.
    """

    @jax.checkpoint
    def score(block: tuple[Array, Array]) -> tuple[Array, Array]:
        inputs, wanted = block
        logits = jnp.einsum("bpe,ev->bpv", inputs, lm_head)
        normalizers = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        frozen = jax.lax.stop_gradient(logits - normalizers[..., None])
        return chosen - normalizers, -jnp.sum(jnp.exp(frozen) * frozen, axis=-1)

    def split(array: Array) -> Array:
        return jnp.moveaxis(array.reshape(array.shape[0], -1, block_size, *array.shape[2:]), 1, 0)

    def join(array: Array) -> Array:
        return jnp.where(mask, jnp.moveaxis(array, 0, 1).reshape(mask.shape), 0)

    logprobs, entropies = jax.lax.map(score, (split(jnp.where(mask[..., None], activations, 0)), split(targets)))
    return join(logprobs), join(entropies)


def _value_and_gradient(logprobs: LogprobFunction) -> Callable[..., Any]:
    def objective(activations: Array, lm_head: Array, targets: Array, weights: Array, mask: Array) -> tuple[Array, Any]:
        values, entropies = logprobs(activations, lm_head, targets, mask)
        return jnp.sum(weights * values), (values, entropies)

    return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)


def random_inputs(batch: int, position: int, embed: int, vocab: int) -> tuple[Array, Array, Array, Array]:
    """Return activations, head, targets and weights; logits have a standard deviation of about 2."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(batch, position, embed)), jnp.float32),
        jnp.asarray(rng.normal(scale=2 / np.sqrt(embed), size=(embed, vocab)), jnp.float32),
        jnp.asarray(rng.integers(vocab, size=(batch, position)), jnp.int32),
        jnp.asarray(rng.normal(size=(batch, position)), jnp.float32),
    )


def random_mask(batch: int, position: int, share: float) -> Bool[np.ndarray, "batch position"]:
    """Return a mask that is True with probability `share`, so that rows have different counts."""
    return np.random.default_rng(1).random((batch, position)) < share


def measure_logprobs(inputs: tuple[Array, ...], block_sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Compare each block size with the materialised computation, with loss everywhere.

    Args:
        inputs: arrays from `random_inputs`.
        block_sizes: positions with logits in memory at the same time.
        repeats: timed calls of each variant, after a warm-up call.

    Returns:
        Figures as in experiments/lab/results/benchmarks.md.
    """
    inputs = (*inputs, jnp.ones(inputs[2].shape, bool))
    expected, figures = _measure_one(materialised_logprobs, inputs, repeats)
    say(f"materialised: {figures}")
    blockwise: dict[str, Any] = {}
    for size in block_sizes:
        function = functools.partial(blockwise_logprobs, temperature=1.0, block_size=size)
        found, measured = _measure_one(function, inputs, repeats)
        blockwise[str(size)] = {**measured, "max_difference": _differences(found, expected)}
        say(f"blocks of {size}: {blockwise[str(size)]}")
    return {"materialised": figures, "blockwise_by_block_size": blockwise}


def measure_loss_shares(
    inputs: tuple[Array, ...], shares: Sequence[float], block_size: int, repeats: int
) -> dict[str, Any]:
    """Compare the head on the positions with loss with the head on every position.

    Args:
        inputs: arrays from `random_inputs`.
        shares: shares of positions with loss, each in (0, 1].
        block_size: block size of both; a divisor of `position`.
        repeats: timed rounds, after a warm-up round; each runs both in turn.

    Returns:
        Figures as in experiments/lab/results/benchmarks.md.
    """
    batch, position = inputs[2].shape
    functions = {
        "every_position": functools.partial(every_position_logprobs, block_size=block_size),
        "where_there_is_loss": functools.partial(blockwise_logprobs, temperature=1.0, block_size=block_size),
    }
    # One program each; a new mask does not trigger compilation.
    example = (*inputs, jnp.ones((batch, position), bool))
    programs = {name: _compile(function, example) for name, function in functions.items()}
    by_share: dict[str, Any] = {}
    say("share of loss | head runs on | every position, s | where there is loss, s | times faster")
    for share in shares:
        mask = random_mask(batch, position, share)
        runs_on = head_tokens(int(mask.sum()), block_size) / mask.size
        figures = _compare(programs, (*inputs, jnp.asarray(mask)), repeats)
        by_share[str(share)] = {"head_runs_on_share": runs_on, **figures}
        medians = [entry["median"] for entry in (*figures["seconds"].values(), figures["times_faster"])]
        say(" | ".join([str(share), f"{runs_on:.3f}", *(f"{median:.2f}" for median in medians)]))
    temporaries = {name: program_bytes(program)["temporaries"] for name, program in programs.items()}
    say(f"temporary bytes: {temporaries}")
    return {"block_size": block_size, "temporary_bytes": temporaries, "by_share": by_share}


def head_tokens(tokens: int, block_size: int) -> int:
    """Return the number of tokens for which the head computes logits: those of `tokens` in blocks, with padding."""
    whole, small = tokens // block_size, max(block_size // SMALL_BLOCKS, 1)
    return whole * block_size - (whole * block_size - tokens) // small * small


def _compare(programs: Mapping[str, jax.stages.Compiled], inputs: tuple[Array, ...], repeats: int) -> dict[str, Any]:
    """Time two programs in alternating rounds."""
    expected, found = (jax.block_until_ready(program(*inputs)) for program in programs.values())
    seconds = take_turns(
        {name: functools.partial(_run, program, inputs) for name, program in programs.items()}, repeats
    )
    former, new = seconds.values()
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "times_faster": ratios(former, new),
        "max_difference": _differences(found, expected),
    }


def _run(program: jax.stages.Compiled, inputs: tuple[Array, ...]) -> None:
    jax.block_until_ready(program(*inputs))


def _measure_one(function: LogprobFunction, inputs: tuple[Array, ...], repeats: int) -> tuple[Any, dict[str, Any]]:
    compiled = _compile(function, inputs)
    result = jax.block_until_ready(compiled(*inputs))
    seconds = [timed(functools.partial(_run, compiled, inputs)) for _ in range(repeats)]
    return result, {"temporary_bytes": program_bytes(compiled)["temporaries"], "seconds": spread(seconds)}


def _compile(function: LogprobFunction, inputs: tuple[Array, ...]) -> jax.stages.Compiled:
    return jax.jit(_value_and_gradient(function)).lower(*inputs).compile()


def _differences(found: Any, expected: Any) -> dict[str, float]:
    """Return the largest absolute difference of each result."""
    names = ("logprobs", "entropies", "gradient_of_activations", "gradient_of_head")

    def parts(result: Any) -> tuple[Array, ...]:
        (_, aux), gradients = result
        return (*aux, *gradients)

    pairs = zip(names, parts(found), parts(expected), strict=True)
    return {name: float(jnp.max(jnp.abs(ours - theirs))) for name, ours, theirs in pairs}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Blockwise log-probabilities against full logits, and by share of positions with loss")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=128_256, help="the default is that of Llama 3")
    parser.add_argument("--block_sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1], help="of positions with loss")
    parser.add_argument("--shares_block_size", type=int, default=32, help="a divisor of position")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each")
    arguments = parser.parse_args(argv)
    if arguments.position % arguments.shares_block_size:
        parser.error(f"--shares_block_size {arguments.shares_block_size} does not divide --position")
    without_compilation_cache()
    inputs = random_inputs(arguments.batch, arguments.position, arguments.embed, arguments.vocab)
    figures = {
        "full_logits_bytes": 4 * arguments.batch * arguments.position * arguments.vocab,
        **measure_logprobs(inputs, arguments.block_sizes, arguments.repeats),
        "loss_shares": measure_loss_shares(inputs, arguments.shares, arguments.shares_block_size, arguments.repeats),
    }
    print(make_report("benchmark_logprobs", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
