# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_logprobs.py on 8 fake CPU devices: `python -m tests.learner.logprobs_on_meshes FOLDER`.

Reads `FOLDER/inputs.npz`; writes the results of each mesh to `FOLDER/CASE.npz`, and the sizes of exchanges between
devices within the loops over blocks to `FOLDER/facts.json`.
"""

import functools
import json
import re
import sys
from pathlib import Path

BLOCK_SIZE, TEMPERATURE = 4, 0.7
CASES = {
    # name: size of the model axis, which shards the vocabulary
    "data8": 1,
    "data4-model2": 2,
}
COLLECTIVE = re.compile(r" = (.*?) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


GATHER = re.compile(r" all-gather(?:-start)?\(")


def lines_of_loops(program: str) -> list[str]:
    """Return the instructions within loops of a compiled program."""
    computations: dict[str, list[str]] = {}
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = computations.setdefault(opened.group(1), [])
        elif line.startswith(" "):
            lines.append(line)
    waiting = re.findall(r"(?:body|condition)=%?([\w.\-]+)", program)
    assert waiting, "the program has no loop"
    found, seen = [], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in computations[name]:
            waiting.extend(re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", line))
        found += computations[name]
    return found


def collectives_in_loops(program: str) -> list[int]:
    """Return the sizes of the largest array of every exchange between devices within a loop of a compiled program."""
    sizes = []
    for exchange in filter(None, map(COLLECTIVE.search, lines_of_loops(program))):
        shapes = re.findall(r"\w\[([\d,]*)\]", exchange.group(1))
        sizes.append(max(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes))
    return sizes


def gathers_outside_loops(program: str) -> int:
    """Return the number of all-gathers outside all loops of a compiled program."""
    return len(GATHER.findall(program)) - sum(map(bool, map(GATHER.search, lines_of_loops(program))))


def repeat(measure, activations, lm_head, batch, pull):
    """Sum the gradients of the head over two microbatches."""

    def add(index, total):
        _, (_, gradient) = measure(activations * index, lm_head, batch, pull)
        return total + gradient

    return jax.lax.fori_loop(0, 2, add, hax.zeros_like(lm_head))


def main(folder: Path) -> None:
    inputs = np.load(folder / "inputs.npz")
    rows, positions, embed = inputs["activations"].shape
    axes = (Axis("batch", rows), Axis("position", positions))
    Embed, Vocab = Axis("embed", embed), Axis("vocab", inputs["lm_head"].shape[1])
    per_token = {name: inputs[name] if name in inputs else np.zeros((rows, positions)) for name in PER_TOKEN_DTYPES}
    batch = RlExample(
        **{name: hax.named(array.astype(PER_TOKEN_DTYPES[name]), axes) for name, array in per_token.items()}
    )
    facts = {"devices": jax.device_count()}
    for name, model_axis in CASES.items():
        mesh = Mesh(np.array(jax.devices()).reshape(1, -1, model_axis), ("replica", "data", "model"))
        compute = {"batch": ("replica", "data"), "vocab": "model"}
        parameter = {"embed": "data", "vocab": "model"}

        def measure(activations, lm_head, batch, pull, compute=compute, parameter=parameter):
            with hax.axis_mapping(compute):

                def pulled(both):
                    found = token_logprobs(*both, batch, temperature=TEMPERATURE, block_size=BLOCK_SIZE)
                    return hax.sum(pull * found[0]).scalar(), found

                differentiate = eqx.filter_value_and_grad(pulled, has_aux=True)
                (_, found), (of_activations, of_head) = differentiate((activations, lm_head))
            return found, (hax.shard(of_activations, compute), hax.shard(of_head, parameter))

        with hax.partitioning.set_mesh(mesh):
            arguments = (
                hax.shard(hax.named(inputs["activations"], (*axes, Embed)), compute),
                hax.shard(hax.named(inputs["lm_head"], (Embed, Vocab)), parameter),
                hax.shard(batch, compute),
                hax.shard(hax.named(inputs["pull"], axes), compute),
            )
            assert len({str(shard.index) for shard in arguments[1].array.addressable_shards}) == 8
            compiled = eqx.filter_jit(measure).lower(*arguments).compile()
            looped = eqx.filter_jit(functools.partial(repeat, measure)).lower(*arguments).compile()
            found, gradients = compiled(*arguments)
        np.savez(
            folder / f"{name}.npz",
            logprobs=found[0].array,
            entropies=found[1].array,
            of_activations=gradients[0].array,
            of_head=gradients[1].array,
        )
        program = compiled.compiled.as_text()
        facts[name] = {
            "in_loops": collectives_in_loops(program),
            "gathers": len(re.findall(r" all-gather\(", program)),
            "gathers_before_loop": gathers_outside_loops(looped.compiled.as_text()),
        }
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    import equinox as eqx
    import haliax as hax
    import jax
    import numpy as np
    from haliax import Axis
    from jax.sharding import Mesh

    from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample
    from marin_rl.learner.logprobs import token_logprobs

    main(Path(sys.argv[1]))
