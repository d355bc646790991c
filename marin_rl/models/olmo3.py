# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""OLMo 3: OLMo 2 with attention windows in some layers, whose rotary embeddings are not scaled."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.olmo import Olmo2Config
from transformers import Olmo3Config as HfOlmo3Config
from transformers import PretrainedConfig

from marin_rl.utils.levanter_line import register_in_place


@register_in_place("olmo3")
@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """Configuration of OLMo 3.

    Built on levanter's OLMo 2, whose layers are stacked; sampler and learner apply the windows. Levanter's own `olmo3`,
    of the new line, has stacked layers only if all have the same window.
    """

    layer_norm_epsilon: float = 1e-5
    reference_checkpoint: str = "allenai/Olmo-3-1025-7B"
    sliding_window: int | None = 4096
    """Last positions that a layer with a window attends to, in tokens; null for all."""
    layer_types: tuple[str, ...] | None = None
    """`sliding_attention` or `full_attention` for each layer; by default every fourth layer is a full one."""

    @property
    def window_rope(self) -> DefaultRotaryEmbeddingsConfig | None:
        """Rotary embeddings of the layers with a window, which are not scaled; None if no layer has scaled ones."""
        rope: Any = self.rope
        # The class of linear scaling is a subclass.
        is_scaled = type(rope) is not DefaultRotaryEmbeddingsConfig
        return DefaultRotaryEmbeddingsConfig(rope.theta) if is_scaled else None

    def __post_init__(self) -> None:
        """Validate the window and the types of layers."""
        Olmo2Config.__post_init__(self)
        if self.sliding_window is None:
            raise ValueError("sliding_window is null; set layer_types to full_attention for layers without a window")
        types = self.layer_types or ()
        if self.layer_types is not None and len(types) != self.num_layers:
            raise ValueError(
                f"layer_types has {len(types)} entries, but there are {self.num_layers} layers (num_layers)"
            )
        if unknown := sorted({*types} - {"sliding_attention", "full_attention"}):
            raise ValueError(f"layer_types has {unknown}; use sliding_attention or full_attention")

    def hf_checkpoint_converter(self, ref_checkpoint: str | None = None) -> HFCheckpointConverter:
        """Return levanter's converter between this architecture and its Hugging Face format."""
        reference = self.reference_checkpoint if ref_checkpoint is None else ref_checkpoint
        return HFCheckpointConverter(
            type(self), reference_checkpoint=reference, tokenizer=self.tokenizer, HfConfigClass=HfOlmo3Config
        )

    @classmethod
    def from_hf_config(cls, hf_config: PretrainedConfig) -> "Olmo3Config":
        """Build the configuration from a Hugging Face config."""
        olmo2 = Olmo2Config.from_hf_config(hf_config)
        fields = {field.name: getattr(olmo2, field.name) for field in dataclasses.fields(olmo2)}
        return cls(**fields, sliding_window=hf_config.sliding_window, layer_types=tuple(hf_config.layer_types))

    def to_hf_config(  # pyrefly: ignore[bad-override]
        self, vocab_size: int, config_overrides: dict[str, Any] | None = None
    ) -> HfOlmo3Config:
        """Return the Hugging Face config of this architecture."""
        # Transformers' OLMo 2 takes fewer forms of scaled rotary embeddings.
        plain = dataclasses.replace(self, rope=DefaultRotaryEmbeddingsConfig())
        olmo2 = Olmo2Config.to_hf_config(plain, vocab_size)
        theta, scaling = self.rope.to_hf_config()
        if scaling is not None and "type" in scaling:
            # The class of transformers 4 does not read the older name.
            scaling = {"rope_type" if name == "type" else name: value for name, value in scaling.items()}
        names = (
            "max_position_embeddings hidden_size intermediate_size num_hidden_layers num_attention_heads pad_token_id "
            "num_key_value_heads hidden_act initializer_range rms_norm_eps tie_word_embeddings attention_bias "
            "attention_dropout"
        )
        values = {name: getattr(olmo2, name) for name in names.split()}
        values |= {"rope_theta": theta, "rope_scaling": scaling, "sliding_window": self.sliding_window}
        types = None if self.layer_types is None else list(self.layer_types)
        return HfOlmo3Config(vocab_size=vocab_size, layer_types=types, **values, **(config_overrides or {}))
