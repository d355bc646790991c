# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Log-probabilities of given tokens on a server: prompts that OpenAI's completions protocol echoes."""

import asyncio
from collections.abc import Sequence

import httpx
from transformers import PreTrainedTokenizerBase

from marin_rl.sampling.client import CompletionsClient
from marin_rl.sampling.completions import echo_body, read_echo
from marin_rl.sampling.sampler import SamplerError
from marin_rl.utils.event_loop import gather_all

MAX_PROMPTS = 16
"""Maximum number of prompts in a request."""
MAX_TOKENS = 32_768
"""Maximum number of tokens of the prompts of a request, unless it has only one."""
_CONCURRENT = 8
"""Number of requests at a time."""
_PROBE = (
    "The 3 quick foxes aren't 12.75% faster (x² ≤ 4);\n\tdéjà-vu → 東京 Привет 🙂 def f(a_b): return {'k': a_b**2}\n\n"
)
"""A text that few tokenizers divide in the same way."""
_PROBED_TOKENS = 64
"""Number of added tokens that are compared."""


class PromptScorer:
    """Scores the tokens of rollouts with a model on a server, at temperature 1."""

    def __init__(self, client: CompletionsClient, model: str) -> None:
        """Send no request yet.

        Args:
            client: posts the requests.
            model: name of the model on the server.
        """
        self._http, self._model = client, model

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Verify that the server divides a text with added tokens as a tokenizer does.

        Raises:
            SamplerError: if it does not, or returns no log-probs of prompts.
        """
        added = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
        text = _PROBE + "".join(added[:_PROBED_TOKENS])
        [(tokens, _)] = asyncio.run(self._ask([echo_body(self._model, text)], [1]))[0]
        if tokens != (expected := tokenizer(text)["input_ids"]):
            first = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), -1)
            raise SamplerError(
                f"the server of reference divides a text into other tokens than the policy's tokenizer (from token "
                f"{first} on): a teacher scores the tokens of the policy, so serve a model with the same tokenizer"
            )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Compute the log-probs of all tokens of sequences, one after another; 0 for the first token of each.

        Raises:
            SamplerError: if the server rejects a request, returns an invalid response, or does not respond.
        """
        parts = divide(sequences)
        answers = asyncio.run(self._ask([echo_body(self._model, part) for part in parts], [*map(len, parts)]))
        logprobs: list[float] = []
        for index, (part, answer) in enumerate(zip(parts, answers, strict=True)):
            for sequence, (tokens, values) in zip(part, answer, strict=True):
                if tokens != list(sequence):
                    raise SamplerError(
                        f"request {index}: the server of reference returned log-probs of other tokens than those of "
                        "the request; it must use token ids unchanged"
                    )
                logprobs += values
        return logprobs

    async def _ask(self, bodies: Sequence[dict], counts: Sequence[int]) -> list[list[tuple[list[int], list[float]]]]:
        """Post requests, some at a time, and return tokens and log-probs of the prompts of each."""
        free = asyncio.Semaphore(_CONCURRENT)

        async def ask(client: httpx.AsyncClient, index: int) -> list[tuple[list[int], list[float]]]:
            async with free:
                return read_echo(await self._http.post(client, index, bodies[index]), index, counts[index])

        async with self._http.open() as client:
            return await gather_all([ask(client, index) for index in range(len(bodies))])


def divide(prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Divide prompts into requests, in order.

    >>> [len(part) for part in divide([[1, 2]] * 20)]
    [16, 4]
    """
    parts: list[list[Sequence[int]]] = []
    size = 0
    for prompt in prompts:
        size += len(prompt)
        if not parts or len(parts[-1]) == MAX_PROMPTS or size > MAX_TOKENS:
            parts.append([])
            size = len(prompt)
        parts[-1].append(prompt)
    return parts
