# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Serves the policy of a run to its agents: one base URL and key for each episode, on loopback."""

import asyncio
import contextlib
import secrets
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import NamedTuple

import pydantic
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.environments.base import AgentConnection
from marin_rl.rollouts.agent_recorder import AgentLimitError, AgentRecorder, EpisodeEndedError, Served, notice_leaving
from marin_rl.rollouts.attempt import Limits
from marin_rl.serving.app import EXCEPTION_HANDLERS, has_key, wrong_key
from marin_rl.serving.endpoints import Endpoints, EventStream, accept_all, reading_threads, while_connected
from marin_rl.serving.engine import EngineError, EngineRequest
from marin_rl.serving.http_server import HttpServer, listen, url_of
from marin_rl.serving.json_body import MAX_BODY_BYTES, ApiError
from marin_rl.serving.protocol import RequestLimits, read_message
from marin_rl.serving.text import TextPart, ToolReader
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces
from marin_rl.types import Generation

_MODEL = "policy"
_CLIENT_SECONDS = 60.0


class RewardBody(pydantic.BaseModel):
    """Body of `POST /episodes/ID/reward`."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    reward: float | dict[str, float]
    completion_id: str | None = None


class _Episode(NamedTuple):
    recorder: AgentRecorder
    key: str
    endpoints: Endpoints
    untrained: Endpoints
    """Replies that are no part of the rollout."""


Handler = Callable[[_Episode, Request], Awaitable["Response | EventStream"]]


class Gateway:
    """Server of one process for all agents of a run; starts with the first one, and ends with its event loop."""

    def __init__(
        self, tokenizer: ChatTokenizer, limits: Limits, vocab_size: int, *, has_stop_texts: bool = False
    ) -> None:
        """Create a server, which does not listen yet.

        Args:
            tokenizer: tokenizer of messages and replies.
            limits: limits of every rollout.
            vocab_size: vocabulary size of the policy, which may be larger than the tokenizer's.
            has_stop_texts: whether `sampling.stop` ends replies.
        """
        self._tokenizer = tokenizer
        self._piece = TokenPieces(tokenizer.tokenizer)
        self._threads = reading_threads()
        self._limits = RequestLimits(
            max_context=limits.max_length,
            max_new_tokens=limits.max_new_tokens,
            max_choices=limits.max_turns,
            vocab_size=vocab_size,
            stop_token_ids=frozenset(tokenizer.stop_token_ids),
            longest_token=tokenizer.longest_token,
            has_stop_texts=has_stop_texts,
            reduces_max_tokens=True,
        )
        self._episodes: dict[str, _Episode] = {}
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    @contextlib.asynccontextmanager
    async def connect(self, recorder: AgentRecorder) -> AsyncIterator[AgentConnection]:
        """Serve the policy to one agent until the end of the block.

        Args:
            recorder: samples and records its requests.
        """
        self._start()
        name = urllib.parse.quote(recorder.rollout_id, safe="")
        key = secrets.token_urlsafe(24)
        self._episodes[recorder.rollout_id] = _Episode(
            recorder, key, self._endpoints(recorder, is_trained=True), self._endpoints(recorder, is_trained=False)
        )
        url = f"{self._url}/episodes/{name}"
        try:
            yield AgentConnection(
                f"{url}/v1", key, f"{url}/untrained/v1", f"{url}/reward", recorder.rollout_id, recorder.mark_truncated
            )
        finally:
            del self._episodes[recorder.rollout_id]

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._serving is not None and not self._serving.done() and self._serving.get_loop() is loop:
            return
        listener = listen("127.0.0.1", 0, _CLIENT_SECONDS)
        self._url = url_of(listener)
        server = HttpServer(self._app(), _CLIENT_SECONDS)
        self._serving = loop.create_task(server.serve(listener), name="agent gateway")

    def _app(self) -> ASGIApp:
        def route(path: str, handler: Handler, method: str = "POST", is_trained: bool = True) -> Route:
            async def answer(request: Request) -> Response | EventStream:
                return await _answer(handler, self._episode(request), request, is_trained)

            return Route(f"/episodes/{{id}}{path}", answer, methods=[method])

        def sampling(prefix: str, is_trained: bool) -> list[Route]:
            def of(episode: _Episode) -> Endpoints:
                return episode.endpoints if is_trained else episode.untrained

            handlers: dict[str, Handler] = {
                "/v1/chat/completions": lambda episode, request: of(episode).chat(request),
                "/v1/completions": lambda episode, request: of(episode).completions(request),
                "/inference/v1/generate": lambda episode, request: of(episode).generate(request),
            }
            sampled = [route(prefix + path, handler, is_trained=is_trained) for path, handler in handlers.items()]
            return [route(f"{prefix}/v1/models", _models, "GET"), *sampled]

        return Starlette(
            routes=[
                *sampling("", is_trained=True),
                *sampling("/untrained", is_trained=False),
                route("/reward", _reward),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    def _episode(self, request: Request) -> _Episode:
        episode = self._episodes.get(request.path_params["id"])
        if episode is None:
            raise ApiError("the episode has ended, or never began", status=HTTPStatus.NOT_FOUND)
        if not has_key(request.headers, episode.key):
            raise wrong_key()
        return episode

    def _endpoints(self, recorder: AgentRecorder, is_trained: bool) -> Endpoints:
        async def reply(request: EngineRequest) -> TextPart:
            return await self._reply(recorder, request, is_trained)

        async def stream(request: EngineRequest) -> AsyncGenerator[TextPart, None]:
            yield await reply(request)

        return Endpoints(
            reply=reply,
            stream=stream,
            tokenizer=self._tokenizer,
            chat_prompt=recorder.chat_prompt,
            piece=self._piece,
            limits=self._limits,
            max_body_bytes=MAX_BODY_BYTES,
            body_seconds=_CLIENT_SECONDS,
            threads=self._threads,
            admit=recorder.admit if is_trained else accept_all,
            temperature=recorder.temperature,
            discard=recorder.discard,
        )

    async def _reply(self, recorder: AgentRecorder, request: EngineRequest, is_trained: bool) -> TextPart:
        """Sample and record a whole reply. Temperature and seed are those of the rollout."""
        parts: list[TextPart] = []

        def serve(generation: Generation) -> Served:
            reader = request.reader(self._tokenizer.decode_reply)
            part = reader.push(generation.token_ids, generation.logprobs, generation.stop_reason)
            parts.append(part._replace(weight_versions=(generation.first_version, generation.last_version)))
            with_calls = _with_calls(part.text, self._tokenizer.opens_thoughts(request.sample.prompt_tokens))
            return Served(len(part.token_ids), part.finish_reason == "stop", (part.text, with_calls))

        has_stop = request.stop or request.stop_token_ids
        following = request.reader(self._tokenizer.decode_reply) if has_stop else None
        ends = None if following is None else lambda new: following.push(new[0], new[1]).finish_reason is not None
        sample = request.sample
        with _api_errors():
            await recorder.sample(
                sample.prompt_tokens, sample.max_new_tokens, serve, request.response_id, ends, is_trained
            )
        return parts[0]


async def _answer(handler: Handler, episode: _Episode, request: Request, is_trained: bool) -> Response | EventStream:
    try:
        with _api_errors():
            return await handler(episode, request)
    except ApiError as error:
        if is_trained and error.code == "context_length_exceeded":
            await while_connected(request.receive, notice_leaving())
            episode.recorder.mark_truncated()
        raise


@contextlib.contextmanager
def _api_errors() -> Iterator[None]:
    """Convert errors of the recorder to those of the API."""
    try:
        yield
    except AgentLimitError as error:
        raise ApiError(str(error), code="rollout_limit_exceeded") from error
    except EpisodeEndedError as error:
        raise EngineError(str(error)) from error


async def _models(episode: _Episode, request: Request) -> Response:
    limits = episode.endpoints.limits
    card = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "marin_rl", "max_model_len": limits.max_context}
    return JSONResponse({"object": "list", "data": [card]})


async def _reward(episode: _Episode, request: Request) -> Response:
    body = await episode.endpoints.parse(RewardBody, await episode.endpoints.read(request))
    try:
        episode.recorder.post_reward(body.reward, body.completion_id)
    except ValueError as error:
        raise ApiError(str(error), param="completion_id" if "completion_id" in str(error) else "reward") from error
    return JSONResponse({"status": "ok"})


def _with_calls(text: str, opens_thoughts: bool) -> str:
    """Return the content of a reply that the agent repeats with its tool calls as such."""
    reader = ToolReader(opens_thoughts)
    content = reader.push(text)
    rest, calls = reader.finish()
    return read_message(0, {"role": "assistant", "content": content + rest, "tool_calls": calls})["content"]
