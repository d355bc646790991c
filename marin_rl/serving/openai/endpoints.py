# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The endpoints that sample: OpenAI's completions and chat, and vLLM's generate, whole or as server-sent events."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marin_rl.serving.admission import read_body
from marin_rl.serving.bodies import ApiError, json_response, read_object
from marin_rl.serving.openai.engine import EngineRequest
from marin_rl.serving.openai.protocol import (
    AnyRequest,
    BodyT,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    RequestLimits,
    TextParams,
    check_tokens,
    engine_requests,
    parse_body,
)
from marin_rl.serving.openai.responses import Choice, prompt_fields, response_head, usage
from marin_rl.serving.text import TextPart, join_parts
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces
from marin_rl.types import Message
from marin_rl.utils.event_loop import gather_all

Result = TypeVar("Result")
Emit = Callable[[int, TextPart], Awaitable[None]]
"""Called with the index of a choice and its next part."""
_SHORT_BYTES = 2**14
"""Size of a body up to which it is read in the event loop, which takes less time than a thread."""
_LONG_THREADS = 2
"""Number of longer bodies that are read at a time; the event loop needs Python's lock, too."""
_REQUESTS: Mapping[str, type[AnyRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/inference/v1/generate": GenerateRequest,
}


class AbstractPolicy(Protocol):
    """Answers requests: the server's engine, or an episode of an agent."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def temperature(self) -> float | None:
        """Temperature of all requests, which replaces their own; None: each has its own."""
        ...

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` if there is no model of this name."""
        ...

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokenize a conversation; may be called in another thread."""
        ...

    async def admit(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Accept a request, or raise `ApiError`."""
        ...

    async def refuse(self, error: ApiError) -> None:
        """Note the error of a request that is not accepted."""
        ...

    def reply(self, request: EngineRequest, *, streamed: bool) -> AsyncGenerator[TextPart, None]:
        """Sample a reply, as `Engine.reply` does."""
        ...

    async def prompt_logprobs(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return the log-probabilities of the tokens of prompts after the first, or raise `ApiError`."""
        ...

    def discard(self, response_id: str, num_sent: int) -> None:
        """Note that a response failed, or its client disconnected, after its first `num_sent` replies were sent."""
        ...


class Endpoints:
    """Reads requests and writes responses of one or several policies."""

    def __init__(
        self, tokenizer: ChatTokenizer, limits: RequestLimits, max_body_bytes: int, client_seconds: float
    ) -> None:
        """Start without requests.

        Args:
            tokenizer: tokenizes prompts.
            limits: limits of a request's tokens and sequences.
            max_body_bytes: maximum size of a request's body.
            client_seconds: maximum time in which a client sends the body of a request.
        """
        self._tokenizer = tokenizer
        self._piece = TokenPieces(tokenizer.tokenizer)
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._client_seconds = client_seconds
        self._created = int(time.time())
        self._threads = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="request")

    def routes(self, prefix: str, policy_of: Callable[[Request], AbstractPolicy]) -> list[Route]:
        """Return the routes of a policy.

        All paths begin with `prefix`. `policy_of` returns the policy of a request, or raises `ApiError`.
        """

        def card(policy: AbstractPolicy) -> dict[str, Any]:
            names = {"id": policy.model, "object": "model", "created": self._created, "owned_by": "marin_rl"}
            return {**names, "max_model_len": self._limits.max_context}

        async def models(request: Request) -> Response:
            return json_response({"object": "list", "data": [card(policy_of(request))]})

        async def model(request: Request) -> Response:
            policy = policy_of(request)
            policy.check_model(request.path_params["name"])
            return json_response(card(policy))

        async def sample(body_class: type[AnyRequest], request: Request) -> ASGIApp:
            policy = policy_of(request)

            async def respond(scope: Scope, receive: Receive, send: Send) -> None:
                with contextlib.suppress(ClientDisconnect):
                    await self._respond(policy, body_class, request, send)

            return respond

        return [
            Route(f"{prefix}/v1/models", models),
            Route(f"{prefix}/v1/models/{{name:path}}", model),
            *(
                Route(prefix + path, functools.partial(sample, kind), methods=["POST"])
                for path, kind in _REQUESTS.items()
            ),
        ]

    async def _respond(
        self, policy: AbstractPolicy, body_class: type[AnyRequest], request: Request, send: Send
    ) -> None:
        """Answer a request."""
        data = await self.read(request)

        async def sample() -> ASGIApp:
            try:
                body, prompts = await self._prepare(policy, body_class, data)
                head = response_head(body)
                if isinstance(body, CompletionRequest) and body.echo:
                    request.state.admit("sequences", len(prompts))
                    return await self._echo(policy, body, head, prompts)
                id = head.get("id") or head["request_id"]
                requests = engine_requests(prompts, body, self._limits, id)
                request.state.admit("sequences", len(requests))
                num_prompt, fields = sum(map(len, prompts)), prompt_fields(body, prompts[0])
                await policy.admit(len(requests), num_prompt)
            except ApiError as error:
                await policy.refuse(error)
                raise
            reply = _Reply(policy, body, head, fields, requests, self._choices(body, requests), num_prompt)
            return await (reply.stream(send) if body.stream else reply.whole())

        end = await while_connected(request.receive, sample())
        # Not before, because a complete response counts as a disconnection, too.
        await end(request.scope, request.receive, send)

    async def _echo(
        self,
        policy: AbstractPolicy,
        body: CompletionRequest,
        head: Mapping[str, Any],
        prompts: Sequence[tuple[int, ...]],
    ) -> ASGIApp:
        """Return the response with the log-probabilities of prompts."""
        for prompt in prompts:
            check_tokens(prompt, self._limits)
            self._limits.check_length("prompt", prompt)
        num_tokens = sum(map(len, prompts))
        await policy.admit(len(prompts), num_tokens)
        scores = await policy.prompt_logprobs(prompts)
        choices = [
            Choice(index, prompt, body, self._piece, False).echo(logprobs)
            for index, (prompt, logprobs) in enumerate(zip(prompts, scores, strict=True))
        ]
        return json_response({**head, "choices": choices, "usage": usage(num_tokens, 0)})

    def _choices(self, body: AnyRequest, requests: Sequence[EngineRequest]) -> list[Choice]:
        prompts = [one.sample.prompt_tokens for one in requests]
        opens_thoughts = isinstance(body, ChatRequest) and self._tokenizer.opens_thoughts(prompts[0])
        return [Choice(index, prompt, body, self._piece, opens_thoughts) for index, prompt in enumerate(prompts)]

    async def _prepare(
        self, policy: AbstractPolicy, body_class: type[AnyRequest], data: bytes
    ) -> tuple[AnyRequest, list[tuple[int, ...]]]:
        """Return the body of a request and the tokens of its prompts."""
        body = await self.parse(body_class, data, policy.temperature)
        policy.check_model(body.model)
        if isinstance(body, ChatRequest):
            messages = await self._call(functools.partial(body.conversation, self._limits), len(data))
            return body, [await self._call(functools.partial(policy.chat_prompt, messages), len(data), "messages")]
        # One by one, so that other requests are read in between, and no work is left when the client leaves.
        works = [functools.partial(self._prompt_tokens, prompt) for prompt in body.prompts(self._limits)]
        return body, [await self._call(work, len(data)) for work in works]

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a prompt, with special tokens if it is a text."""
        return tuple(self._tokenizer.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)

    async def parse(self, body_class: type[BodyT], data: bytes, temperature: float | None = None) -> BodyT:
        """Parse and validate the body of a request. `temperature` replaces that of the request, unless it is None.

        Raises:
            ApiError: if it is invalid.
        """

        def parsed() -> BodyT:
            values = read_object(data)
            if temperature is not None and issubclass(body_class, TextParams):
                values["temperature"] = temperature
            return parse_body(body_class, values)

        return await self._call(parsed, len(data))

    async def _call(self, function: Callable[[], Result], size: int, param: str = "prompt") -> Result:
        """Do a part of the work for a body of `size` bytes; errors of the tokenizer name `param`."""
        try:
            if size <= _SHORT_BYTES:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except (ValueError, RecursionError) as error:
            raise ApiError(str(error), param=param) from error

    async def read(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
            ApiError: if its type is not JSON, or it is too large or late.
        """
        return await read_body(request, "application/json", self._max_body_bytes, self._client_seconds)


@dataclasses.dataclass
class _Reply:
    """Samples and sends the response to an accepted request."""

    policy: AbstractPolicy
    body: AnyRequest
    head: Mapping[str, Any]
    """Fields of the response and of all its chunks."""
    prompt: Mapping[str, Any]
    """Fields of the response and of the first chunk of each choice."""
    requests: Sequence[EngineRequest]
    choices: Sequence[Choice]
    num_prompt: int
    """Number of prompt tokens."""
    num_sampled: int = 0
    num_sent: int = 0
    """Number of choices that were sent completely."""

    async def whole(self) -> ASGIApp:
        """Return the response after sampling it."""
        parts: list[list[TextPart]] = [[] for _ in self.requests]

        async def collect(index: int, part: TextPart) -> None:
            parts[index].append(part)

        await self._sample(collect)
        choices = [choice.add(join_parts(given)) for choice, given in zip(self.choices, parts, strict=True)]
        counts = {} if isinstance(self.body, GenerateRequest) else {"usage": self._usage()}
        return json_response({**self.head, **self.prompt, "choices": choices, **counts})

    async def stream(self, send: Send) -> ASGIApp:
        """Send the events of the response while it is sampled; return the last one."""
        assert isinstance(self.body, TextParams)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        has_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        is_first = [True] * len(self.requests)

        async def emit(index: int, part: TextPart) -> None:
            prompt, is_first[index] = self.prompt if is_first[index] else {}, False
            chunk = {**self.head, **prompt, "choices": [self.choices[index].add(part)]}
            await send(_event(to_json(chunk | ({"usage": None} if has_usage else {}))))
            self.num_sent += part.finish_reason is not None

        end = b"[DONE]"
        try:
            await self._sample(emit)
            if has_usage:
                await send(_event(to_json({**self.head, "choices": [], "usage": self._usage()})))
        except ApiError as error:
            end = to_json(error.body())

        async def finish(scope: Scope, receive: Receive, send: Send) -> None:
            await send(_event(end, is_last=True))

        return finish

    async def _sample(self, emit: Emit) -> None:
        """Sample all choices concurrently."""

        async def sample(index: int) -> None:
            # A generator that is left early is closed at once only with `aclosing`.
            reply = self.policy.reply(self.requests[index], streamed=self.body.stream)
            async with contextlib.aclosing(reply) as parts:
                async for part in parts:
                    self.num_sampled += len(part.token_ids)
                    await emit(index, part)

        works = [sample(index) for index in range(len(self.requests))]
        try:
            # A single one in this task, which is faster.
            await (works[0] if len(works) == 1 else gather_all(works))
        except BaseException as error:
            # A client that left has received some; one that is told of an error should not use any.
            num_sent = 0 if isinstance(error, ApiError) else self.num_sent
            self.policy.discard(self.requests[0].response_id, num_sent)
            raise

    def _usage(self) -> dict[str, int]:
        return usage(self.num_prompt, self.num_sampled)


def _event(data: bytes, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: %b\n\n" % data, "more_body": not is_last}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in this task, and cancel it when the client disconnects.

    Raises:
        ClientDisconnect: if the client disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        # The server may cancel the request, too.
        if has_left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
