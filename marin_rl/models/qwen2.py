# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Qwen2 and Qwen2.5: the Llama architecture with biases on queries, keys and values."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.layers.attention import AttentionConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from transformers import PretrainedConfig
from transformers import Qwen2Config as HfQwen2Config


@LmConfig.register_subclass("qwen2")
@dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Configuration of Qwen2 and Qwen2.5.

    Built on levanter's Llama model, which trains, samples and exports. Levanter's own `qwen` cannot read a Hugging
    Face config of transformers 4 and has no decoding step.
    """

    def attention_config(self) -> AttentionConfig:
        """Return Llama's configuration with biases on the query, key and value projections but not on the output."""
        return dataclasses.replace(LlamaConfig.attention_config(self), use_bias=True, use_output_bias=False)

    def hf_checkpoint_converter(self, ref_checkpoint: str | None = None) -> HFCheckpointConverter:
        """Return levanter's converter between this architecture and its Hugging Face format."""
        reference = self.reference_checkpoint if ref_checkpoint is None else ref_checkpoint
        return HFCheckpointConverter(
            type(self), reference_checkpoint=reference, tokenizer=self.tokenizer, HfConfigClass=HfQwen2Config
        )

    @classmethod
    def from_hf_config(cls, hf_config: PretrainedConfig) -> "Qwen2Config":
        """Build the configuration from a Hugging Face config."""
        llama = LlamaConfig.from_hf_config(hf_config)
        return cls(**{field.name: getattr(llama, field.name) for field in dataclasses.fields(llama)})

    def to_hf_config(  # pyrefly: ignore[bad-override]
        self, vocab_size: int, config_overrides: dict[str, Any] | None = None
    ) -> HfQwen2Config:
        """Return the Hugging Face config of this architecture.

        Raises:
            ValueError: if a setting has no Hugging Face form.
        """
        llama = LlamaConfig.to_hf_config(self, vocab_size)
        theta, scaling = self.rope.to_hf_config()
        names = (
            "max_position_embeddings hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads hidden_act initializer_range rms_norm_eps tie_word_embeddings"
        )
        values = {name: getattr(llama, name) for name in names.split()}
        values |= {"rope_theta": theta, "rope_scaling": scaling}
        return HfQwen2Config(vocab_size=vocab_size, use_sliding_window=False, **values, **(config_overrides or {}))
