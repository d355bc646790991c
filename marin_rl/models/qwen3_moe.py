# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Qwen3 mixtures of experts, with dense layers where the config has them; on levanter's new line."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis
from haliax.nn.scan import BlockSeq, ScanCheckpointPolicy
from haliax.state_dict import ModuleWithStateDictSerialization
from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.models.llama import LlamaConfig, LlamaMlp
from levanter.models.qwen3_moe import (  # pyrefly: ignore[missing-import]
    Qwen3MoeConfig as LevanterConfig,
)
from levanter.models.qwen3_moe import (  # pyrefly: ignore[missing-import]
    Qwen3MoeDecoderLayer,
    Qwen3MoeLMHeadModel,
)
from transformers import PretrainedConfig
from transformers import Qwen3MoeConfig as HfQwen3MoeConfig

from marin_rl.utils.levanter_line import register_in_place


@register_in_place("qwen3_moe")
@dataclass(frozen=True)
class Qwen3MoeConfig(LevanterConfig):
    """Configuration of Qwen3's mixtures of experts.

    Levanter's, with dense layers and the z-loss. `marin_rl.models.mixture` computes the experts.
    """

    router_z_loss_coef: float | None = None
    """Weight of the mean squared log-sum-exp of the router's logits in the loss, for each layer; null: none."""

    def __post_init__(self) -> None:
        """Check the layers; levanter's class refuses dense ones."""
        LlamaConfig.__post_init__(self)
        if self.decoder_sparse_step < 1:
            raise ValueError(f"decoder_sparse_step is {self.decoder_sparse_step}; it must be at least 1")
        if outside := [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_layers]:
            raise ValueError(
                f"mlp_only_layers has {outside}, but the {self.num_layers} layers (num_layers) have the numbers 0 to "
                f"{self.num_layers - 1}"
            )
        if not any(self.layers_with_experts):
            raise ValueError(
                f"decoder_sparse_step ({self.decoder_sparse_step}) and mlp_only_layers leave no layer with experts; "
                "use type qwen3"
            )

    @property
    def layers_with_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts; the others have a dense MLP of `intermediate_dim`."""
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(self.num_layers))

    @property
    def model_type(self) -> type["Qwen3Moe"]:
        """The model's class."""
        return Qwen3Moe

    def hf_checkpoint_converter(self, ref_checkpoint: str | None = None) -> HFCheckpointConverter:
        """Return levanter's converter between this architecture and its Hugging Face format."""
        reference = self.reference_checkpoint if ref_checkpoint is None else ref_checkpoint
        return HFCheckpointConverter(
            type(self), reference_checkpoint=reference, tokenizer=self.tokenizer, HfConfigClass=HfQwen3MoeConfig
        )

    @classmethod
    def from_hf_config(cls, hf_config: PretrainedConfig) -> "Qwen3MoeConfig":
        """Build the configuration from a Hugging Face config."""
        # Levanter's refuses dense layers.
        plain: Any = type(hf_config).from_dict({**hf_config.to_dict(), "decoder_sparse_step": 1, "mlp_only_layers": []})
        base = LevanterConfig.from_hf_config(plain)
        fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        dense: Any = {
            "decoder_sparse_step": hf_config.decoder_sparse_step,
            "mlp_only_layers": tuple(hf_config.mlp_only_layers),
        }
        return cls(**(fields | dense))


class Qwen3Moe(Qwen3MoeLMHeadModel):
    """Qwen3's mixture of experts. Its layers are stacked if all have experts."""

    @classmethod
    def init(cls, Vocab: Axis, config: Qwen3MoeConfig, *, key: jax.Array) -> "Qwen3Moe":
        """Initialize random weights."""
        plain = Qwen3MoeLMHeadModel.init(Vocab, config, key=key)
        model = cls(plain.transformer, plain.embeddings, plain.lm_head)
        if all(config.layers_with_experts):
            return model
        stacked = model.transformer.layers
        layers = []
        for number, (layer, has_experts) in enumerate(
            zip(stacked.unstacked(), config.layers_with_experts, strict=True)
        ):
            if not has_experts:
                mlp = LlamaMlp.init(
                    config.Embed, config.Mlp, config.activation_function, key=jax.random.fold_in(key, number)
                )
                layer = eqx.tree_at(lambda node: node.mlp, layer, mlp)
            layers.append(_MaybeDenseLayer(**{name: getattr(layer, name) for name in layer.__dataclass_fields__}))
        blocks = BlockSeq(layers, stacked.Block, ScanCheckpointPolicy._mk(config.gradient_checkpointing))
        return eqx.tree_at(lambda node: node.transformer.layers, model, blocks)


class _MaybeDenseLayer(ModuleWithStateDictSerialization, Qwen3MoeDecoderLayer):
    """A layer with experts or a dense MLP."""

    def __call__(
        self, x: hax.NamedArray, mask: Any, *, key: None = None, pos_ids: hax.NamedArray | None = None
    ) -> tuple[hax.NamedArray, Any]:
        x = x + self.self_attn(x=self.input_layernorm(x), mask=mask, key=None, pos_ids=pos_ids)
        out = self.mlp(self.post_attention_layernorm(x), key=None)
        out, extras = (out, None) if isinstance(self.mlp, LlamaMlp) else out
        return x + out, extras
