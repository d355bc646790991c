# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_group_sampler.py on 8 fake CPU devices in a separate process; prints one line of JSON."""

import dataclasses
import json
import sys

from marin_rl.utils.levanter_line import seq_len


def measure(model_axis_size: int) -> dict[str, float]:
    """Sample three times from a model with the learner's sharding, and compare with its full forward pass."""
    import haliax as hax
    import jax
    import numpy as np
    from haliax import Axis
    from jax import monitoring
    from levanter.models.llama import LlamaConfig

    from marin_rl.config.train_config import TrainerConfig
    from marin_rl.sampling.config import SamplingConfig
    from marin_rl.sampling.group_sampler import GroupSampler
    from marin_rl.sampling.sampler import SampleRequest

    compiles = []
    monitoring.register_event_duration_secs_listener(
        lambda name, _seconds, **_kwargs: compiles.append(name) if name.endswith("backend_compile_duration") else None
    )
    trainer = TrainerConfig(
        require_accelerator=False, model_axis_size=model_axis_size, tensor_parallel_axes=["mlp", "kv_head"]
    )
    config = LlamaConfig(
        **seq_len(32),
        hidden_dim=32,
        intermediate_dim=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        initializer_range=0.2,
    )
    rng = np.random.default_rng(0)
    lengths = [1, 3, 8, 9, 12, 17, 20, 23]
    requests = [
        SampleRequest(tuple(int(token) for token in rng.integers(0, 62, length)), seed, 6)
        for seed, length in enumerate(lengths)
    ]
    with trainer.use_device_mesh():
        parameters = trainer.parameter_axis_mapping
        with hax.axis_mapping(parameters):
            model = hax.named_jit(config.build, axis_resources=parameters, out_axis_resources=parameters)(
                Axis("vocab", 64), key=jax.random.PRNGKey(0)
            )
        with hax.axis_mapping(trainer.compute_axis_mapping):
            sampler = GroupSampler(
                model,
                config=SamplingConfig(max_new_tokens=6, max_seqs=8),
                stop_token_ids=[62, 63],
                max_context=32,
                trainer=trainer,
            )
            first = sampler.sample(requests)
            warm = len(compiles)
            again = sampler.sample(requests)
            sampler.update_weights(model, 1)
            third = sampler.sample(requests)
            recompiled = len(compiles) - warm
        shards = len(model.transformer.layers.stacked.mlp.up_proj.weight.array.sharding.device_set)
        replicated = model.transformer.layers.stacked.mlp.up_proj.weight.array.sharding.is_fully_replicated
        error = _largest_error(model, requests, first)
        converted, copied, expected = _convert(trainer, model)
    return {
        "converted_bytes": _first_bytes(converted) / _first_bytes(copied),
        "copies_equal": all(map(np.array_equal, jax.tree.leaves(copied), jax.tree.leaves(expected))),
        "devices": jax.device_count(),
        "parameter_devices": shards,
        "sharded": not replicated,
        "recompiled": recompiled,
        "repeats": first == again == [dataclasses.replace(g, first_version=0, last_version=0) for g in third],
        "error": error,
    }


def _convert(trainer, model):
    """Convert the weights for several hosts, and copy them to each; also return those of one host."""
    import equinox as eqx
    import jax

    from marin_rl.sampling.attention import DenseAttention
    from marin_rl.sampling.cached_model import with_cache
    from marin_rl.sampling.decoding import conversion_program
    from marin_rl.sampling.sizes import copy_to_each_process

    arrays, form = eqx.filter(model, eqx.is_array), DenseAttention()
    converted = conversion_program(trainer, form, 32)(arrays)
    copied = copy_to_each_process(converted, trainer.device_mesh, trainer.compute_axis_mapping)
    return converted, copied, jax.jit(lambda model: with_cache(model, form, 32))(arrays)


def _first_bytes(tree) -> int:
    """Return the bytes of a tree on the first device."""
    import jax

    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def _largest_error(model, requests, generations) -> float:
    import haliax as hax
    import jax
    import numpy as np
    from levanter.layers.attention import AttentionMask

    tokens = np.zeros((len(requests), 32), dtype=np.int32)
    for row, request, generation in zip(tokens, requests, generations, strict=True):
        sequence = request.prompt_tokens + generation.token_ids
        row[: len(sequence)] = sequence

    @hax.named_jit
    def forward(model, tokens):
        return model(tokens, attn_mask=AttentionMask.causal())

    logits = forward(model, hax.named(tokens, ("batch", "position"))).array
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    errors = [
        abs(value - expected[row, len(request.prompt_tokens) - 1 + offset, token])
        for row, (request, generation) in enumerate(zip(requests, generations, strict=True))
        for offset, (token, value) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True))
    ]
    return float(max(errors))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
