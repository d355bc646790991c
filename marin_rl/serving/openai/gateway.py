# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Serves the policy of a run to its agents: one base URL and key for each episode, on loopback."""

import asyncio
import contextlib
import dataclasses
import secrets
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from http import HTTPStatus

import pydantic
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.environments.base import AgentConnection
from marin_rl.rollouts.agent_recorder import AgentLimitError, AgentRecorder, EpisodeEndedError, Served, notice_leaving
from marin_rl.rollouts.attempt import Limits
from marin_rl.serving.admission import MAX_BODIES, Admission, check_bearer, limited_app
from marin_rl.serving.bodies import MAX_BODY_BYTES, ApiError, json_response
from marin_rl.serving.http_server import HttpServer, listen, url_of
from marin_rl.serving.openai.endpoints import Endpoints
from marin_rl.serving.openai.engine import EngineRequest
from marin_rl.serving.openai.protocol import RequestLimits, read_message
from marin_rl.serving.text import TextPart, ToolReader
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, Message

_CLIENT_SECONDS = 60.0


class RewardBody(pydantic.BaseModel):
    """Body of `POST /episodes/ID/reward`."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    reward: float | dict[str, float]
    completion_id: str | None = None


@dataclasses.dataclass(frozen=True)
class _Episode:
    """The policy for one agent."""

    recorder: AgentRecorder
    tokenizer: ChatTokenizer
    key: str
    is_trained: bool = True
    """Whether replies are part of the rollout."""
    model: str = "policy"

    @property
    def temperature(self) -> float:
        """Temperature of the rollout."""
        return self.recorder.temperature

    def check_model(self, name: str | None) -> None:
        """Accept any name."""

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokenize a conversation; repeated replies keep the tokens that were sampled."""
        return self.recorder.chat_prompt(messages)

    async def admit(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Accept a request if the limits of the rollout allow it."""
        if self.is_trained:
            with _api_errors():
                await self.recorder.admit(num_sequences)

    async def refuse(self, error: ApiError) -> None:
        """Truncate the rollout if a conversation is too long, unless the agent has left."""
        if self.is_trained and error.code == "context_length_exceeded":
            await notice_leaving()
            self.recorder.mark_truncated()

    async def prompt_logprobs(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Refuse: the learner scores rollouts."""
        raise ApiError("echo: agents get no log-probs of prompts; omit it", param="echo", code="unsupported_parameter")

    def discard(self, response_id: str, num_sent: int) -> None:
        """Remove replies that the agent did not receive."""
        self.recorder.discard(response_id, num_sent)

    async def reply(self, request: EngineRequest, *, streamed: bool) -> AsyncGenerator[TextPart, None]:
        """Sample and record a whole reply. Temperature and seed are those of the rollout."""
        parts: list[TextPart] = []
        sample = request.sample

        def serve(generation: Generation) -> Served:
            reader = request.reader(self.tokenizer.decode_reply)
            versions = generation.first_version, generation.last_version
            part = reader.push(generation.token_ids, generation.logprobs, generation.stop_reason, versions)
            parts.append(part)
            with_calls = _with_calls(part.text, self.tokenizer.opens_thoughts(sample.prompt_tokens))
            return Served(len(part.token_ids), part.finish_reason == "stop", (part.text, with_calls))

        has_stop = request.stop or request.stop_token_ids
        following = request.reader(self.tokenizer.decode_reply) if has_stop else None
        ends = None if following is None else lambda new: following.push(new[0], new[1]).finish_reason is not None
        with _api_errors():
            await self.recorder.sample(
                sample.prompt_tokens, sample.max_new_tokens, serve, request.response_id, ends, self.is_trained
            )
        yield parts[0]


class Gateway:
    """Server of one process for all agents of a run; starts with the first one, and ends with its event loop."""

    def __init__(
        self, tokenizer: ChatTokenizer, limits: Limits, vocab_size: int, *, has_stop_texts: bool = False
    ) -> None:
        """Create a server, which does not listen yet.

        `vocab_size` may be larger than the tokenizer's. `has_stop_texts` says whether `sampling.stop` ends replies.
        """
        self._tokenizer = tokenizer
        request_limits = RequestLimits(
            max_context=limits.max_length,
            max_new_tokens=limits.max_new_tokens,
            max_choices=limits.max_turns,
            vocab_size=vocab_size,
            stop_token_ids=frozenset(tokenizer.stop_token_ids),
            longest_token=tokenizer.longest_token,
            has_stop_texts=has_stop_texts,
            reduces_max_tokens=True,
        )
        self._endpoints = Endpoints(tokenizer, request_limits, MAX_BODY_BYTES, _CLIENT_SECONDS)
        self._episodes: dict[str, _Episode] = {}
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    @contextlib.asynccontextmanager
    async def connect(self, recorder: AgentRecorder) -> AsyncIterator[AgentConnection]:
        """Serve the policy to one agent until the end of the block; `recorder` samples and records its requests."""
        self._start()
        name = urllib.parse.quote(recorder.rollout_id, safe="")
        key = secrets.token_urlsafe(24)
        self._episodes[recorder.rollout_id] = _Episode(recorder, self._tokenizer, key)
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
        def untrained(request: Request) -> _Episode:
            return dataclasses.replace(self._episode(request), is_trained=False)

        routes = [
            *self._endpoints.routes("/episodes/{id}", self._episode),
            *self._endpoints.routes("/episodes/{id}/untrained", untrained),
            Route("/episodes/{id}/reward", self._reward, methods=["POST"]),
        ]
        # The rollouts of a run have limits of their own.
        return limited_app(routes, Admission({"bytes of requests": MAX_BODIES * MAX_BODY_BYTES}))

    def _episode(self, request: Request) -> _Episode:
        episode = self._episodes.get(request.path_params["id"])
        if episode is None:
            raise ApiError("the episode has ended, or never began", status=HTTPStatus.NOT_FOUND)
        check_bearer(request.headers, episode.key)
        return episode

    async def _reward(self, request: Request) -> Response:
        episode = self._episode(request)
        try:
            body = await self._endpoints.parse(RewardBody, await self._endpoints.read(request))
        except ClientDisconnect:
            return Response()
        try:
            with _api_errors():
                episode.recorder.post_reward(body.reward, body.completion_id)
        except ValueError as error:
            raise ApiError(str(error), param="completion_id" if "completion_id" in str(error) else "reward") from error
        return json_response({"status": "ok"})


@contextlib.contextmanager
def _api_errors() -> Iterator[None]:
    """Convert errors of the recorder to those of the API."""
    try:
        yield
    except AgentLimitError as error:
        raise ApiError(str(error), code="rollout_limit_exceeded") from error
    except EpisodeEndedError as error:
        raise ApiError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE) from error


def _with_calls(text: str, opens_thoughts: bool) -> str:
    """Return the content of a reply that the agent repeats with its tool calls as such."""
    reader = ToolReader(opens_thoughts)
    content = reader.push(text)
    rest, calls = reader.finish()
    return read_message(0, {"role": "assistant", "content": content + rest, "tool_calls": calls})["content"]
