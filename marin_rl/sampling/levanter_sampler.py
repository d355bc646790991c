# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler on levanter's inference engine, in the learner's process and on the learner's arrays."""

import dataclasses
from collections.abc import Sequence

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest
from marin_rl.types import Generation, StopReason, WeightVersion


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    max_new_tokens: int = 64
    temperature: float = 1.0
    max_seqs: int = 128
    page_size: int = 16
    max_prefill_tokens: int = 4096
    kv_cache_dtype: str = "float32"


class LevanterSampler:
    def __init__(self, model, *, config, stop_token_ids, max_context, version=0):
        self._model = model
        self._version = version
        self._stop = frozenset(stop_token_ids)
        self.config = config
        self.max_context = max_context
        pages = -(-max_context // config.page_size)
        self.engine_config = InferenceEngineConfig(
            max_seq_len=max_context, page_size=config.page_size, max_rounds=max(config.max_new_tokens - 1, 1),
            max_stop_seqs=len(self._stop), max_stop_tokens=1, max_seqs=config.max_seqs,
            max_pages=pages * config.max_seqs, compute_dtype=jnp.dtype(config.kv_cache_dtype),
            max_queued_tokens=config.max_seqs, max_seqs_in_prefill=config.max_seqs,
            max_prefill_size=config.max_prefill_tokens, max_tokens_per_round=config.max_seqs)
        self.stops = NamedArray(np.asarray(sorted(self._stop), np.int32)[:, None], (hax.Axis("stop_seq", len(self._stop)), hax.Axis("position", 1)))
        self.engine = InferenceEngine.from_model_with_config(model, None, self.engine_config)

    def sample(self, requests):
        out = []
        B = self.config.max_seqs
        for s in range(0, len(requests), B):
            chunk = requests[s:s + B]
            self.engine.free_slots = sorted(self.engine.free_slots, reverse=True)
            reqs = [Request(list(r.prompt_tokens), i, SeqDecodingParams(np.int32(len(r.prompt_tokens) + r.max_new_tokens), self.stops, np.float32(r.temperature), np.array([r.seed >> 32, r.seed & 0xffffffff], np.uint32)), 1) for i, r in enumerate(chunk)]
            res = self.engine.generate(reqs)
            for t, l in zip(res.tokens, res.logprobs):
                out.append((tuple(t), tuple(l)))
        return out
