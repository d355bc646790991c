# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the policy that a server samples from with the learner's.

After each reload the server continues a few fixed prompts, and the log-probs of the sampled tokens are compared with
the learner's in float32. At the start, and in a check that would fail otherwise, the learner also computes them in
bfloat16: the largest mean difference between its two is the rounding that bfloat16 makes in this model. A server may
differ by `_HALF_BOUND` times as much. If it differed by less than `_SINGLE_BOUND` times as much at the start, it
computes in float32 and must stay below that.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.sampler import SampleRequest, SamplerError
from marin_rl.types import Generation, WeightVersion

logger = logging.getLogger(__name__)

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 4
"""Number of prompts, tokens of each, and sampled tokens after each."""
MAX_TOKENS = PROMPTS * (PROMPT_TOKENS + NEW_TOKENS)
"""Maximum number of tokens of a check."""
_HALF_BOUND = 4.0
"""Two implementations that round to bfloat16 or float16 at other places differ by less; vLLM by 1.3 to 2.0."""
_SINGLE_BOUND = 2.0**-6
"""Rounding to float32 is 2^-16 of that to bfloat16."""
_LEAST = 1e-5
"""Nats; the bound of a model in which bfloat16 rounds nothing."""

LearnerLogprobs = Callable[[LmHeadModel, Sequence[tuple[int, ...]], float, str], list[list[float]]]
"""Log-probs of the tokens of each sequence after the first, at a temperature, computed in float32 or bfloat16."""


@dataclasses.dataclass
class PolicyCheck:
    """The check of a server; it keeps the type and the answers of the last check."""

    learner: LearnerLogprobs
    """Computes the learner's log-probs."""
    temperature: float
    """Temperature of training samples."""
    base_url: str
    """Address of the server, for messages."""
    _bound: float = _HALF_BOUND
    _rounding: float = _LEAST / _SINGLE_BOUND
    """The largest rounding of the checks: that of a few tokens may be small by chance."""
    _last: tuple[WeightVersion, Sequence[Generation]] | None = None

    def requests(self, vocab_size: int, max_context: int, max_new_tokens: int) -> list[SampleRequest]:
        """Return the fixed requests, within the limits of the run."""
        length, new = max(min(PROMPT_TOKENS, max_context - NEW_TOKENS), 1), min(NEW_TOKENS, max_new_tokens)
        prompts = np.random.default_rng(0).integers(0, vocab_size, (PROMPTS, length)).tolist()
        return [SampleRequest(tuple(prompt), seed, new, self.temperature) for seed, prompt in enumerate(prompts)]

    def compare(
        self, model: LmHeadModel, version: WeightVersion, requests: Sequence[SampleRequest], told: Sequence[Generation]
    ) -> None:
        """Compare the server's generations with the learner.

        Args:
            model: the learner's weights.
            version: number of training steps that produced them.
            requests: from `requests`.
            told: the server's answers.

        Raises:
            SamplerError: if the log-probs differ by more than rounding; names the likely cause.
        """
        served = np.concatenate([one.logprobs for one in told])
        exact = self._learner_values(model, requests, told, self.temperature)
        difference = _mean(served - exact)
        first = self._last is None
        if first or not difference <= self._bound * self._rounding:
            measured = _mean(exact - self._learner_values(model, requests, told, self.temperature, "bfloat16"))
            self._rounding = max(measured, self._rounding)
            # If bfloat16 rounds nothing, as with a policy without entropy, the type cannot be told.
            if first and difference < _SINGLE_BOUND * measured:
                self._bound = _SINGLE_BOUND
        bound = self._bound * self._rounding
        if not difference <= bound:
            cause = self._cause(model, requests, told, bound)
            kind = "float32" if self._bound == _SINGLE_BOUND else "bfloat16"
            raise SamplerError(
                f"the server at {self.base_url} does not sample from version {version} of the policy: the log-probs of "
                f"{len(served)} tokens differ from the learner's by {difference:.2g} in the mean, of which rounding to "
                f"{kind} explains at most {bound:.2g}; {cause}"
            )
        logger.info("version %d: log-probs of the server differ by %.2g, at most %.2g", version, difference, bound)
        self._last = version, told

    def _learner_values(
        self,
        model: LmHeadModel,
        requests: Sequence[SampleRequest],
        told: Sequence[Generation],
        temperature: float,
        dtype: str = "float32",
    ) -> np.ndarray:
        """Return the learner's log-probs of the sampled tokens."""
        sequences = [(*request.prompt_tokens, *one.token_ids) for request, one in zip(requests, told, strict=True)]
        values = self.learner(model, sequences, temperature, dtype)
        # Of an aborted generation there may be none.
        return np.concatenate(
            [of[len(request.prompt_tokens) - 1 :] for request, of in zip(requests, values, strict=True)]
        )

    def _cause(
        self, model: LmHeadModel, requests: Sequence[SampleRequest], told: Sequence[Generation], bound: float
    ) -> str:
        """Return the likely cause of a difference, and its remedy."""
        if self._last is not None and [*self._last[1]] == [
            dataclasses.replace(one, first_version=self._last[0], last_version=self._last[0]) for one in told
        ]:
            return (
                f"its answers are those of version {self._last[0]}, so the function of sampler.reload did not make it "
                "load the new weights, or not this server"
            )
        served = np.concatenate([one.logprobs for one in told])
        if self.temperature != 1.0 and _mean(served - self._learner_values(model, requests, told, 1.0)) <= bound:
            return (
                f"they are those at temperature 1, but sampling.temperature is {self.temperature}; start vLLM with "
                "--logprobs-mode processed_logprobs, or set sampling.temperature: 1.0"
            )
        exact = self._learner_values(model, requests, told, self.temperature)
        starts = np.cumsum([0, *(len(one.token_ids) for one in told)])[:-1]
        inner = np.setdiff1d(np.arange(len(served)), starts)
        if (
            len(inner)
            and min(_mean(served[inner] - exact[inner - 1]), _mean(served[inner - 1] - exact[inner])) <= bound
        ):
            return "they are those of the token before or after; token_logprobs must belong to token_ids"
        if self._last is not None:
            return (
                "it agreed at the last check, so it loaded a part of the weights: with tied embeddings, a head may "
                "keep the old one, and the served folder needs a head of its own, which experiments/reload_vllm.py adds"
            )
        return (
            "it serves another model (with lora, another base), other weights, or a part of them; check that the "
            "function of sampler.reload loads the folder that it gets, with a head of its own for tied embeddings"
        )


def _mean(differences: np.ndarray) -> float:
    return float(np.abs(differences).mean())
