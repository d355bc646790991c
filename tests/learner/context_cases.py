# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_context_attention.py on four fake CPU devices: prints differences to unsplit rows as a JSON object."""

import dataclasses
import json

from marin_rl.utils.levanter_line import seq_len

ROWS, POSITIONS, SPLASH_POSITIONS = 4, 32, 256


def main() -> None:
    import equinox as eqx
    import haliax as hax
    import jax
    import numpy as np
    from jaxtyping import PyTree
    from levanter.layers.attention import AttentionBackend
    from levanter.models.gemma import Gemma2Config

    from marin_rl.batching.rl_example import RlExample
    from marin_rl.learner.attention_layers import with_attention_kernel
    from marin_rl.learner.loss import RlLoss
    from marin_rl.learner.placement import place
    from marin_rl.objectives.kl import NoKlConfig
    from marin_rl.objectives.policy_loss import ReinforceLossConfig
    from marin_rl.sampling.config import SamplingConfig
    from marin_rl.sampling.group_sampler import GroupSampler
    from marin_rl.sampling.sampler import SampleRequest
    from marin_rl.utils.devices.setup import start_devices
    from marin_rl.utils.devices.trainer_config import TrainerConfig
    from tests import tiny_learner as tiny

    whole = tiny.make_trainer(ROWS)

    def split(shards: int, rows: int = ROWS) -> TrainerConfig:
        changes = {"model_axis_size": shards, "tensor_parallel_axes": ["position"], "per_device_parallelism": -1}
        return start_devices(dataclasses.replace(whole, **changes), rows_per_device=max(rows * shards // 4, 1))

    def difference(left: PyTree, right: PyTree) -> float:
        pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
        return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)

    loss = RlLoss(ReinforceLossConfig().per_token, NoKlConfig(), temperature=0.9, block_size=8)

    def gradients(trainer: TrainerConfig, model: PyTree, batch: RlExample) -> PyTree:
        def run(model: PyTree, batch: RlExample) -> PyTree:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                (total, _), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model, batch)
            return total, gradient

        with trainer.use_device_mesh():
            mesh = trainer.device_mesh
            model = place(model, mesh, trainer.parameter_axis_mapping)
            return eqx.filter_jit(run)(model, place(batch, mesh, trainer.compute_axis_mapping))

    facts = {}
    for name, config in {"llama": tiny.LLAMA, "qwen3": tiny.QWEN3}.items():
        model = jax.device_get(tiny.make_model(whole, dataclasses.replace(config, **seq_len(POSITIONS))))
        batch = tiny.make_example(ROWS, POSITIONS)
        expected = gradients(whole, model, batch)
        facts[name] = [difference(expected, gradients(split(shards), model, batch)) for shards in (4,)]
        facts[f"{name} scale"] = max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(expected))

    trainer = split(2, rows=2)
    batch = tiny.make_example(2, SPLASH_POSITIONS)

    def attend(backend: AttentionBackend) -> PyTree:
        """One of the two layers has a window."""
        config = Gemma2Config(
            **{**seq_len(SPLASH_POSITIONS), "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2},
            **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 50},
            attn_logit_softcapping=None,
            attn_backend=backend,
        )

        def run(model: PyTree, batch: RlExample) -> jax.Array:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                model = with_attention_kernel(model, batch, interpret=True)
                out = model.activations(batch.input_ids, batch.attention_mask, key=None, pos_ids=batch.position_ids)
                return hax.mean(hax.sin(out) * (batch.segment_ids > 0)).scalar()

        with trainer.use_device_mesh():
            model = place(tiny.make_model(trainer, config), trainer.device_mesh, trainer.parameter_axis_mapping)
            placed = place(batch, trainer.device_mesh, trainer.compute_axis_mapping)
            return eqx.filter_jit(eqx.filter_value_and_grad(run))(model, placed)

    facts["splash"] = difference(attend(AttentionBackend.JAX_FLASH), attend(AttentionBackend.SPLASH))

    def sample(trainer: TrainerConfig) -> list[tuple[int, ...]]:
        settings = SamplingConfig(max_new_tokens=4, max_seqs=8)
        sampler = GroupSampler(
            tiny.make_model(trainer), config=settings, stop_token_ids=[3], max_context=12, trainer=trainer
        )
        sampler.prepare()
        requests = [SampleRequest((5, 6, 7), seed, 4, 0.9) for seed in range(8)]
        return [generation.token_ids for generation in sampler.sample(requests)]

    facts["samples"] = sample(split(2)) == sample(whole)

    def step(trainer: TrainerConfig) -> tuple[dict[str, float], int]:
        learner = tiny.make_learner(trainer)
        state, metrics = learner.update(tiny.fresh_state(learner), [tiny.make_example(ROWS, 12)])
        weights = state.model.transformer.layers.stacked.mlp.gate_proj.weight.array
        held = weights.size // weights.addressable_shards[0].data.size
        return {name: float(metric) for name, metric in metrics.items()}, held

    (expected, _), (found, facts["shards"]) = step(whole), step(split(2))
    facts["step"] = max(abs(found[name] - value) / max(abs(value), 1e-3) for name, value in expected.items())
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
