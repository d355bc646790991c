# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler that uses an external server, such as vLLM, through OpenAI's completions protocol."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.client import CompletionsClient
from marin_rl.sampling.completions import completion_body, read_completion
from marin_rl.sampling.config import OpenAiSamplerConfig, SamplingConfig
from marin_rl.sampling.policy_check import LearnerLogprobs, PolicyCheck
from marin_rl.sampling.sampler import SampledTokens, Sampler, SampleRequest, check_requests
from marin_rl.sampling.stops import stop_table
from marin_rl.types import Generation, WeightVersion

_ADVANCE_SECONDS = 0.05
"""Longest wait for a generation before further requests can start."""


class OpenAiSampler(Sampler):
    """Continues prompts on a server, with many concurrent requests.

    Call it from a thread without a running event loop.
    """

    def __init__(
        self,
        server: OpenAiSamplerConfig,
        *,
        config: SamplingConfig,
        stop_token_ids: Sequence[int],
        max_context: int,
        vocab_size: int,
        token_bytes: Callable[[int], bytes] | None = None,
        version: WeightVersion = 0,
        load_weights: Callable[[LmHeadModel, WeightVersion], None] = lambda model, version: None,
        learner: LearnerLogprobs | None = None,
    ) -> None:
        """Read the API key, without sending a request.

        Args:
            server: address, model name and retries.
            config: limits, stop texts, and the number of concurrent requests (`max_seqs`).
            stop_token_ids: tokens that end a generation. May be empty.
            max_context: maximum number of prompt and new tokens of a sequence.
            vocab_size: vocabulary size of the model.
            token_bytes: returns the bytes that a token adds to the text; needed for stop texts.
            version: number of training steps that produced the server's weights.
            load_weights: makes the server load weights; the default is for a server with fixed weights.
            learner: computes log-probs with weights that the server has loaded, to compare them; None: no comparison.

        Raises:
            ValueError: if the environment variable for the API key is not set.
        """
        self.version = version
        """Number of training steps that produced the server's weights."""
        self._load_weights = load_weights
        self._check = None if learner is None else PolicyCheck(learner, config.temperature, server.base_url)
        self._server = server
        self._config = config
        self._stop_ids = frozenset(stop_token_ids)
        self._stops = stop_table(vocab_size, self._stop_ids, config.stop, token_bytes)
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._http = CompletionsClient(server)
        self._count = 0
        self._runner: asyncio.Runner | None = None
        self._tasks: dict[asyncio.Task[Generation], int] = {}
        """Requests in progress, by number; they proceed during `advance`."""

    @property
    def batch_size(self) -> int:
        """Number of concurrent requests."""
        return self._config.max_seqs

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests."""
        return not self._tasks

    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Accept requests, which `advance` sends; see `Sampler.start`."""
        allowed = check_requests(
            requests,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            max_new_tokens=self._config.max_new_tokens,
        )
        numbers = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        if self._runner is None and requests:
            self._runner = asyncio.Runner()
            self._client, self._free = self._http.open(), asyncio.Semaphore(self.batch_size)
            self._ended: asyncio.Queue[asyncio.Task[Generation]] = asyncio.Queue()
        for number, request, limit in zip(numbers, requests, allowed, strict=True):
            assert self._runner is not None
            task = self._runner.get_loop().create_task(self._continue(number, request, limit, self.version))
            task.add_done_callback(self._ended.put_nowait)
            self._tasks[task] = number
        return numbers

    async def _continue(self, number: int, request: SampleRequest, allowed: int, version: WeightVersion) -> Generation:
        async with self._free:
            body = completion_body(self._server.model, request, allowed, self._stop_ids, self._config.stop)
            response = await self._http.post(self._client, number, body)
        return read_completion(
            response,
            number,
            request,
            allowed=allowed,
            stop_token_ids=self._stop_ids,
            stops=self._stops,
            version=version,
        )

    def advance(self) -> list[tuple[int, Generation]]:
        """Wait for generations, at most 50 ms, so that further requests can start; see `Sampler.advance`.

        Raises:
            SamplerError: if the server rejects a request, returns an invalid response, or does not respond within the
                limits of `retry`. All other requests are cancelled.
        """
        if self._runner is None or not self._tasks:
            return []
        try:
            ended = self._runner.run(self._wait())
            return [(self._tasks.pop(task), task.result()) for task in sorted(ended, key=self._tasks.__getitem__)]
        except BaseException:
            self.reset()
            raise

    async def _wait(self) -> list[asyncio.Task[Generation]]:
        """Wait for the next request that ends, and return all that have; the others cost nothing."""
        ended: list[asyncio.Task[Generation]] = []
        with contextlib.suppress(TimeoutError):
            ended.append(await asyncio.wait_for(self._ended.get(), _ADVANCE_SECONDS))
        while not self._ended.empty():
            ended.append(self._ended.get_nowait())
        return ended

    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        """Return nothing: the server sends complete generations."""
        return {}

    def prepare(self) -> None:
        """Do nothing: the server has the weights."""

    def end_conversation(self, conversation: str) -> None:
        """Do nothing: the server has its own cache."""

    def reset(self) -> None:
        """Cancel all requests, and close the connections."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        tasks, self._tasks = list(self._tasks), {}
        for task in tasks:
            task.cancel()
        with runner:
            runner.run(self._close(tasks))

    async def _close(self, tasks: Sequence[asyncio.Task[Generation]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def update_weights(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Make the server load weights; returns when they are loaded, and the server samples from them.

        Raises:
            SamplerError: if the server does not answer, or its log-probs are not those of the weights.
        """
        self._load_weights(model, version)
        self.version = version
        if self._check is not None:
            requests = self._check.requests(self._vocab_size, self._max_context, self._config.max_new_tokens)
            self._check.compare(model, version, requests, self.sample(requests))
