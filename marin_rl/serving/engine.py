# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Serves a sampler to the coroutines of an event loop; concurrent requests share decode steps."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.sampling.sampler import SampledTokens, Sampler, SampleRequest
from marin_rl.serving.text import ReplyReader, TextPart
from marin_rl.timing import PhaseTimer
from marin_rl.types import Generation, StopReason

logger = logging.getLogger(__name__)

MAX_WAIT = 0.004
"""Seconds without a new request after which an idle sampler starts, so that simultaneous requests start together."""
_CLIENTS = 2**62
"""Number of clients that may send a request at any time, for the batcher: unlimited."""
_FOREVER = 3600.0


class EngineError(RuntimeError):
    """The sampler failed, or the engine is closed; no request is answered any more."""


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A request to the sampler, and the options of its text."""

    sample: SampleRequest
    """The prompt and its sampling parameters."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the reply, in addition to the sampler's."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""


class Engine:
    """Samples in a thread of its own, and returns the replies in the event loop that calls it."""

    def __init__(
        self,
        sampler: Sampler,
        decode: Callable[[Sequence[int], bool], str],
    ) -> None:
        """Accept requests; `start` answers them.

        Args:
            sampler: used only by the engine's thread from `start` to `close`.
            decode: decodes the tokens of a reply; the second argument is `skip_special_tokens`.
        """
        self.in_progress = 0
        """Number of requests that are sampled or wait for a slot."""
        self.failure: Exception | None = None
        """The error that ended the engine."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the engine's thread when the sampler has failed."""
        self._sampler = sampler
        self._decode = decode
        self._numbers = itertools.count()
        self._batcher = RequestBatcher(sampler.batch_size, _CLIENTS, MAX_WAIT)
        self._tasks: set[asyncio.Task[Generation]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="sampler", daemon=True)

    @property
    def num_slots(self) -> int:
        """Number of requests that are decoded together."""
        return self._sampler.batch_size

    def start(self) -> None:
        """Start the thread that samples."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and fail the requests in progress."""
        self._closed = True
        self._batcher.close()
        self._thread.join()

    async def stream(self, request: EngineRequest, by_part: bool = True) -> AsyncGenerator[TextPart, None]:
        """Yield the parts of a reply. Closing the generator frees the request's slot.

        Args:
            request: a valid request.
            by_part: whether to yield parts as they are sampled instead of the whole reply.

        Raises:
            EngineError: if the sampler failed.
        """
        if self.failure is not None or self._closed:
            raise EngineError(f"the sampler has stopped: {self.failure or 'the server shuts down'}")
        # A reply that the request itself may end must be read while it is sampled.
        reads_parts = by_part or bool(request.stop or request.stop_token_ids)
        reader = ReplyReader(
            lambda tokens: self._decode(tokens, request.skip_special_tokens), request.stop, request.stop_token_ids
        )
        # A generator that is left early is closed at once only with `aclosing`.
        async with contextlib.aclosing(self._sample(request.sample, reads_parts)) as sampled:
            async for tokens, end in sampled:
                part = reader.push(tokens.token_ids, tokens.logprobs, end)
                yield part
                if part.finish_reason is not None:
                    return

    async def _sample(
        self, request: SampleRequest, reads_parts: bool
    ) -> AsyncGenerator[tuple[SampledTokens, StopReason | None], None]:
        """Yield the tokens of a generation, the last ones with the reason for its end."""
        self._loop = asyncio.get_running_loop()
        parts: asyncio.Queue[SampledTokens | None] = asyncio.Queue()
        conversation = str(next(self._numbers))
        self.in_progress += 1
        named = dataclasses.replace(request, conversation=conversation)
        sampling = asyncio.create_task(
            self._batcher.sample(named, parts.put_nowait if reads_parts else None, is_last_turn=True)
        )
        sampling.add_done_callback(lambda _: parts.put_nowait(None))
        self._tasks.add(sampling)
        try:
            count = 0
            while (part := await parts.get()) is not None:
                count += len(part.token_ids)
                yield part, None
            if sampling.cancelled():
                raise EngineError(f"the sampler has stopped: {self.failure or 'the server shuts down'}")
            generation = sampling.result()
            rest = SampledTokens(generation.token_ids[count:], generation.logprobs[count:])
            yield rest, generation.stop_reason
        finally:
            self._tasks.discard(sampling)
            self.in_progress -= 1
            self._batcher.leave(conversation)
            sampling.cancel()

    def _serve(self) -> None:
        try:
            self._batcher.serve(self._sampler, PhaseTimer(), lambda: None, _FOREVER, lambda: None)
        except Exception as error:
            logger.exception("the sampler failed")
            self.failure = error
            self.on_failure()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The event loop may be closed.
                self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
