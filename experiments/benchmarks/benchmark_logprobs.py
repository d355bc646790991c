# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Memory and time of blockwise log-probabilities at a large vocabulary, against full logits.

    python -m experiments.benchmarks.benchmark_logprobs
    python -m experiments.benchmarks.benchmark_logprobs --embed 256 --block_sizes 8 32 128

Measured is value and gradient of a weighted sum of log-probabilities, with the entropy beside it, for
activations `[batch, position, embed]` and a head `[embed, vocab]`. The full logits of the default sizes
are 1 GB, and their gradient needs several of that at a time.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.benchmarks.measurement import (
    benchmark_parser,
    make_report,
    program_bytes,
    say,
    spread,
    timed,
    without_compilation_cache,
)
from marin_rl.learner.logprobs import blockwise_logprobs

LogprobFunction = Callable[[Array, Array, Array], tuple[Array, Array]]


def materialised_logprobs(
    activations: Float[Array, "batch position embed"],
    lm_head: Float[Array, "embed vocab"],
    targets: Int[Array, "batch position"],
) -> tuple[Float[Array, "batch position"], Float[Array, "batch position"]]:
    """Log-probabilities of the targets and entropies, from all logits at once."""
    everything = jax.nn.log_softmax(jnp.einsum("bpe,ev->bpv", activations, lm_head), axis=-1)
    chosen = jnp.take_along_axis(everything, targets[..., None], axis=-1)[..., 0]
    frozen = jax.lax.stop_gradient(everything)
    return chosen, -jnp.sum(jnp.exp(frozen) * frozen, axis=-1)


def _value_and_gradient(logprobs: LogprobFunction) -> Callable[..., Any]:
    def objective(activations: Array, lm_head: Array, targets: Array, weights: Array) -> tuple[Array, Any]:
        values, entropies = logprobs(activations, lm_head, targets)
        return jnp.sum(weights * values), (values, entropies)

    return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)


def random_inputs(batch: int, position: int, embed: int, vocab: int) -> tuple[Array, Array, Array, Array]:
    """Activations, head, targets and weights; logits have a standard deviation of about 2."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(batch, position, embed)), jnp.float32),
        jnp.asarray(rng.normal(scale=2 / np.sqrt(embed), size=(embed, vocab)), jnp.float32),
        jnp.asarray(rng.integers(vocab, size=(batch, position)), jnp.int32),
        jnp.asarray(rng.normal(size=(batch, position)), jnp.float32),
    )


def measure_logprobs(inputs: tuple[Array, ...], block_sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Compare each block size with the materialised computation.

    Args:
        inputs: as of `random_inputs`.
        block_sizes: positions whose logits exist at the same time.
        repeats: timed calls of each, after one that is not timed.

    Returns:
        Figures as in docs/pages/benchmarks.md.
    """
    expected, figures = _measure_one(materialised_logprobs, inputs, repeats)
    say(f"materialised: {figures}")
    blockwise: dict[str, Any] = {}
    for size in block_sizes:
        function = functools.partial(blockwise_logprobs, temperature=1.0, block_size=size)
        found, measured = _measure_one(function, inputs, repeats)
        blockwise[str(size)] = {**measured, "max_difference": _differences(found, expected)}
        say(f"blocks of {size}: {blockwise[str(size)]}")
    return {"materialised": figures, "blockwise_by_block_size": blockwise}


def _measure_one(function: LogprobFunction, inputs: tuple[Array, ...], repeats: int) -> tuple[Any, dict[str, Any]]:
    compiled = jax.jit(_value_and_gradient(function)).lower(*inputs).compile()
    result = jax.block_until_ready(compiled(*inputs))
    seconds = [timed(lambda: jax.block_until_ready(compiled(*inputs))) for _ in range(repeats)]
    return result, {"temporary_bytes": program_bytes(compiled)["temporaries"], "seconds": spread(seconds)}


def _differences(found: Any, expected: Any) -> dict[str, float]:
    """Largest absolute difference of each result."""
    names = ("logprobs", "entropies", "gradient_of_activations", "gradient_of_head")

    def parts(result: Any) -> tuple[Array, ...]:
        (_, aux), gradients = result
        return (*aux, *gradients)

    pairs = zip(names, parts(found), parts(expected), strict=True)
    return {name: float(jnp.max(jnp.abs(ours - theirs))) for name, ours, theirs in pairs}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Blockwise log-probabilities against full logits")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=128_256, help="the default is that of Llama 3")
    parser.add_argument("--block_sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each")
    arguments = parser.parse_args(argv)
    without_compilation_cache()
    inputs = random_inputs(arguments.batch, arguments.position, arguments.embed, arguments.vocab)
    figures = measure_logprobs(inputs, arguments.block_sizes, arguments.repeats)
    logits = 4 * arguments.batch * arguments.position * arguments.vocab
    print(make_report("benchmark_logprobs", argv, vars(arguments), {"full_logits_bytes": logits, **figures}))


if __name__ == "__main__":
    main()
