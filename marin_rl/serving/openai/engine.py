# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Serves a sampler to the coroutines of an event loop; concurrent requests share decode steps."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from http import HTTPStatus

from marin_rl.rollouts.request_batcher import OnTokens, RequestBatcher
from marin_rl.sampling.sampler import SampledTokens, Sampler, SampleRequest
from marin_rl.serving.bodies import ApiError
from marin_rl.serving.text import ReplyReader, TextPart
from marin_rl.types import Generation, StopReason
from marin_rl.utils.event_loop import call_in
from marin_rl.utils.timing import PhaseTimer

logger = logging.getLogger(__name__)

MAX_WAIT = 0.004
"""Seconds without a new request after which an idle sampler starts, so that simultaneous requests start together."""
_CLIENTS = 2**62
"""Number of clients that may send a request at any time, for the batcher: unlimited."""
_FOREVER = 3600.0


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A request to the sampler, and the options of its text."""

    sample: SampleRequest
    """The prompt and its sampling parameters."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply."""
    keeps_stop: bool = False
    """Whether the reply's text includes the text that ended it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the reply, in addition to the sampler's."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    response_id: str = ""
    """Id of the response."""

    def reader(self, decode: Callable[[Sequence[int], bool], str]) -> ReplyReader:
        """Return a reader of the reply. The second argument of `decode` is `skip_special_tokens`."""
        return ReplyReader(
            lambda tokens: decode(tokens, self.skip_special_tokens),
            self.stop,
            self.stop_token_ids,
            keeps_stop=self.keeps_stop,
        )


class Engine:
    """Samples in a separate thread, and returns the replies in the event loop that calls it."""

    def __init__(self, sampler: Sampler, decode: Callable[[Sequence[int], bool], str]) -> None:
        """Accept requests; `start` answers them.

        Only the engine's thread uses the sampler, from `start` to `close`. The second argument of `decode` is
        `skip_special_tokens`.
        """
        self.failure: Exception | None = None
        """The error that ended the engine."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the engine's thread when the sampler has failed."""
        self.on_sampled: Callable[[int], None] = lambda num_tokens: None
        """Called with the number of tokens of each part of a reply."""
        self._sampler = sampler
        self._decode = decode
        self._numbers = itertools.count()
        self._batcher = RequestBatcher(sampler.batch_size, _CLIENTS, MAX_WAIT)
        self._answers: set[asyncio.Future[Generation]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="sampler", daemon=True)

    @property
    def in_progress(self) -> int:
        """Number of requests that are sampled or wait for a slot."""
        return len(self._answers)

    @property
    def num_slots(self) -> int:
        """Number of requests that are decoded together."""
        return self._sampler.batch_size

    def start(self) -> None:
        """Start the thread that samples."""
        self._thread.start()

    def stop(self) -> None:
        """Fail the requests in progress, without waiting for it, and accept no others."""
        self._closed = True
        self._batcher.close()

    def close(self) -> None:
        """Stop, and wait for the end of the thread."""
        self.stop()
        self._thread.join()

    async def reply(self, request: EngineRequest, *, streamed: bool) -> AsyncGenerator[TextPart, None]:
        """Yield the parts of a reply. Closing the generator frees the request's slot.

        If the caller is slower than the sampler, the parts that have arrived are joined.

        Args:
            request: a valid request.
            streamed: whether parts are needed when they are sampled. Otherwise the request costs the event loop nothing
                until its end, unless it has stop texts or stop tokens of its own.

        Raises:
            ApiError: if the sampler failed, or the engine is closed.
        """
        reader = request.reader(self._decode)
        waiting: deque[SampledTokens] = deque()
        arrived = asyncio.Event()

        def add(part: SampledTokens) -> None:
            waiting.append(part)
            arrived.set()

        reads_parts = streamed or request.stop or request.stop_token_ids
        with self._sampling(request.sample, add if reads_parts else None) as answer:
            answer.add_done_callback(lambda _: arrived.set())
            count = 0
            while reader.finish_reason is None:
                while not (waiting or answer.done()):
                    await arrived.wait()
                    arrived.clear()
                new, end = (_take(waiting), None) if waiting else _rest(answer.result(), count)
                count += len(new.token_ids)
                part = reader.push(new.token_ids, new.logprobs, end, (new.first_version, new.last_version))
                self.on_sampled(len(part.token_ids))
                yield part

    @contextlib.contextmanager
    def _sampling(self, request: SampleRequest, on_tokens: OnTokens | None) -> Iterator["asyncio.Future[Generation]"]:
        """Sample a request until the end of the block."""
        if self.failure is not None or self._closed:
            raise self._error()
        self._loop = asyncio.get_running_loop()
        conversation = str(next(self._numbers))
        named = dataclasses.replace(request, conversation=conversation)
        answer = self._batcher.submit(named, on_tokens, is_last_turn=True)
        self._answers.add(answer)
        try:
            yield answer
        finally:
            self._answers.discard(answer)
            self._batcher.leave(conversation)
            answer.cancel()

    def _error(self) -> ApiError:
        message = f"the sampler has stopped: {self.failure or 'the server shuts down'}"
        return ApiError(message, status=HTTPStatus.SERVICE_UNAVAILABLE)

    def _serve(self) -> None:
        try:
            self._batcher.serve(self._sampler, PhaseTimer(), lambda: None, _FOREVER, lambda: None)
        except Exception as error:
            logger.exception("the sampler failed")
            self.failure = error
            self.on_failure()
        if self._loop is not None:
            call_in(self._loop, self._fail_all)

    def _fail_all(self) -> None:
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(self._error())


def _take(waiting: deque[SampledTokens]) -> SampledTokens:
    """Remove and join the first parts that were sampled with the same weights."""
    parts = [waiting.popleft()]
    while waiting and waiting[0].last_version == parts[0].last_version:
        parts.append(waiting.popleft())
    tokens = tuple(itertools.chain.from_iterable(part.token_ids for part in parts))
    return parts[0]._replace(
        token_ids=tokens, logprobs=tuple(itertools.chain.from_iterable(part.logprobs for part in parts))
    )


def _rest(generation: Generation, count: int) -> tuple[SampledTokens, StopReason]:
    """Return the tokens of a generation from index `count`, and the reason for its end."""
    tokens, logprobs = generation.token_ids[count:], generation.logprobs[count:]
    return SampledTokens(tokens, logprobs, generation.first_version, generation.last_version), generation.stop_reason
