# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Log-probabilities of given tokens on a server: prompts that OpenAI's completions protocol echoes."""

import asyncio
import re
from collections.abc import Sequence, Sized
from typing import Any, TypeVar

import httpx
from transformers import PreTrainedTokenizerBase

from marin_rl.sampling.client import CompletionsClient
from marin_rl.sampling.completions import echo_body, read_echo
from marin_rl.sampling.sampler import SamplerError
from marin_rl.utils.event_loop import gather_all

T = TypeVar("T", bound=Sized)

MAX_PROMPTS = 16
"""Maximum number of prompts in a request."""
MAX_TOKENS = 32_768
"""Maximum number of tokens of the prompts of a request, unless it has only one."""
_CONCURRENT = 8
"""Number of requests at a time."""
_PROBE = "The 3 quick foxes aren't 12.75% faster (x² ≤ 4);\n\tdéjà-vu → 東京 Привет 🙂 f(a_b) = {'k': a**2}\n\n #"
"""A text whose words few tokenizers divide in the same way."""
_PROBED_TOKENS = 64
"""Number of added tokens that are compared."""


class PromptScorer:
    """Scores the tokens of rollouts with a model on a server, at temperature 1."""

    def __init__(self, client: CompletionsClient, model: str) -> None:
        """Send no request yet. `model` is the name of the model on the server."""
        self._http, self._model = client, model

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        """Verify that the server divides words and added tokens as a tokenizer does.

        Words with more tokens than `max_length` are left out.

        Raises:
            SamplerError: if it does not, or returns no log-probs of prompts.
        """
        added = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
        texts = [*re.findall(r"\s*\S+", _PROBE), *added[:_PROBED_TOKENS]]
        expected = {text: tokenizer(text)["input_ids"] for text in texts}
        parts = divide([text for text in texts if len(expected[text]) <= max_length])
        for part, answer in zip(parts, self._ask(parts), strict=True):
            for text, (tokens, _) in zip(part, answer, strict=True):
                if tokens != expected[text]:
                    raise SamplerError(
                        f"the server of reference divides {text!r} into the tokens {tokens}, but the policy's "
                        f"tokenizer into {expected[text]}: a teacher scores the tokens of the policy, so serve a model "
                        "with the same tokenizer"
                    )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Compute the log-probs of all tokens of sequences, one after another; 0 for the first token of each.

        Raises:
            SamplerError: if the server rejects a request, returns an invalid response, or does not respond.
        """
        parts = divide(sequences)
        answers = self._ask(parts)
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

    def _ask(self, parts: Sequence[Sequence[Any]]) -> list[list[tuple[list[int], list[float]]]]:
        """Post a request for each part, some at a time, and return tokens and log-probs of its prompts."""

        async def ask(client: httpx.AsyncClient, free: asyncio.Semaphore, index: int) -> list[Any]:
            async with free:
                answer = await self._http.post(client, index, echo_body(self._model, parts[index]))
                return read_echo(answer, index, len(parts[index]))

        async def ask_all() -> list[list[Any]]:
            async with self._http.open() as client:
                free = asyncio.Semaphore(_CONCURRENT)
                return await gather_all([ask(client, free, index) for index in range(len(parts))])

        return asyncio.run(ask_all())


def divide(prompts: Sequence[T]) -> list[list[T]]:
    """Divide prompts, which are texts or tokens, into requests, in order.

    >>> [len(part) for part in divide([[1, 2]] * 20)]
    [16, 4]
    """
    parts: list[list[T]] = []
    size = 0
    for prompt in prompts:
        size += len(prompt)
        if not parts or len(parts[-1]) == MAX_PROMPTS or size > MAX_TOKENS:
            parts.append([])
            size = len(prompt)
        parts[-1].append(prompt)
    return parts
