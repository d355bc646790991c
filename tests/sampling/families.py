# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A tiny model of each architecture, with random weights everywhere, biases and scales of norms included."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.models.gemma import Gemma2Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config

from marin_rl.models.olmo3 import Olmo3Config
from marin_rl.models.qwen2 import Qwen2Config
from marin_rl.models.rotary import YarnRotaryConfig
from marin_rl.utils.levanter_line import IS_NEW, seq_len

VOCAB = 64
CONTEXT = 40
SIZES: dict[str, Any] = {
    **seq_len(48),
    **{"hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
}


def mixtures() -> dict[str, LmConfig]:
    """Return the architectures that only one line of levanter has."""
    if not IS_NEW:
        return {}
    from marin_rl.models.qwen3_moe import Qwen3MoeConfig

    moe: dict[str, Any] = {"moe_intermediate_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    return {"qwen3_moe": Qwen3MoeConfig(**SIZES, **moe)}


def dense_layers() -> dict[str, LmConfig]:
    """Return mixtures with dense layers, which are not stacked."""
    options: dict[str, Any] = {"num_layers": 3, "decoder_sparse_step": 2, "tie_word_embeddings": True}
    return {f"{name}_dense": dataclasses.replace(cast(Any, config), **options) for name, config in mixtures().items()}


FAMILIES: dict[str, LmConfig] = {
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
        sliding_window=CONTEXT,
    ),
    "gpt2": Gpt2Config(**seq_len(48), hidden_dim=32, num_layers=2, num_heads=4, scale_attn_by_inverse_layer_idx=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=CONTEXT),
    "mixtral": MixtralConfig(**SIZES, n_routed_experts=4, num_experts_per_tok=2),
    "olmo2": Olmo2Config(**SIZES, attention_bias=True),
    "olmo3": Olmo3Config(**SIZES, sliding_window=CONTEXT),
    "qwen2": Qwen2Config(**SIZES, rope=YarnRotaryConfig(factor=4.0, original_max_position_embeddings=10)),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    **mixtures(),
}


def random_model(config: LmConfig, seed: int = 0, vocab: int = VOCAB) -> LmHeadModel:
    """Return a model with weights drawn by numpy, which avoids compiling its initializers."""
    rng = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(lambda: config.build(Axis("vocab", vocab), key=jax.random.PRNGKey(0)))

    def draw(leaf: Any) -> Any:
        # GPT-2 has flags of dropout layers among its leaves.
        return leaf if isinstance(leaf, bool) else jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, shapes)
