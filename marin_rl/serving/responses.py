# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Responses in OpenAI's format, whole or as the chunks of a stream."""

import abc
import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from marin_rl.serving.engine import EngineRequest
from marin_rl.serving.protocol import ChatRequest, CompletionRequest, TextParams
from marin_rl.serving.text import TextPart, ToolReader


class JsonResponse(Response):
    """A response with a JSON body. The encoder of pydantic takes a sixth of the time of Python's."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return to_json(content)


TokenPiece = Callable[[int], bytes]
"""Returns the bytes of a token."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of a response."""

    prompt: int
    """Tokens of the distinct prompts."""
    completion: int
    """Sampled tokens."""

    def body(self) -> dict[str, int]:
        """Return the counts in OpenAI's format."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


class Choice(abc.ABC):
    """Formats the parts of one choice, in order."""

    def __init__(self, index: int, prompt: Sequence[int], request: TextParams, piece: TokenPiece) -> None:
        """Start the choice.

        Args:
            index: index of the choice.
            prompt: tokens of its prompt, which completions return in the choice.
            request: selects the fields.
            piece: returns the bytes of a token.
        """
        self.index = index
        self._prompt = prompt
        self._request = request
        self._piece = piece
        self._is_first = True

    @abc.abstractmethod
    def chunk(self, part: TextPart) -> dict[str, Any]:
        """Return the choice of the next chunk of a stream."""

    @abc.abstractmethod
    def whole(self, part: TextPart) -> dict[str, Any]:
        """Return the choice of a response that is not streamed."""

    def _fields(self, part: TextPart) -> dict[str, Any]:
        """Return vLLM's extensions, and the versions of the weights."""
        fields: dict[str, Any] = {"stop_reason": part.stop_reason}
        if self._request.return_token_ids:
            fields["token_ids"] = list(part.token_ids)
        if part.finish_reason is not None:
            fields["weight_versions"] = list(part.weight_versions)
        self._is_first = False
        return fields

    def _token_texts(self, tokens: Sequence[int]) -> list[str]:
        if self._request.return_tokens_as_token_ids:
            return [f"token_id:{token}" for token in tokens]
        # Without a call for each token, which would take a fifth of the time of a response.
        piece = self._piece
        return [piece(token).decode("utf-8", "replace") for token in tokens]


class CompletionChoice(Choice):
    """A choice of `/v1/completions`."""

    _offset = 0

    def chunk(self, part: TextPart) -> dict[str, Any]:
        """Return the choice of the next chunk of a stream."""
        assert isinstance(self._request, CompletionRequest)
        logprobs = None if self._request.logprobs is None else self._logprobs(part)
        has_prompt = self._request.return_token_ids and self._is_first
        return {
            "index": self.index,
            "text": part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
            **self._fields(part),
            **({"prompt_token_ids": list(self._prompt)} if has_prompt else {}),
        }

    def whole(self, part: TextPart) -> dict[str, Any]:
        """Return the choice of a response that is not streamed."""
        return self.chunk(part)

    def _logprobs(self, part: TextPart) -> dict[str, Any]:
        """Return log-probabilities; the most likely tokens are only known for greedy samples."""
        assert isinstance(self._request, CompletionRequest)
        texts = self._token_texts(part.token_ids)
        top = None
        if self._request.logprobs and self._request.temperature == 0:
            top = [{text: value} for text, value in zip(texts, part.logprobs, strict=True)]
        offsets = list(itertools.accumulate(map(len, texts), initial=self._offset))
        self._offset = offsets.pop()
        return {"tokens": texts, "token_logprobs": list(part.logprobs), "top_logprobs": top, "text_offset": offsets}


class ChatChoice(Choice):
    """A choice of `/v1/chat/completions`."""

    def __init__(
        self, index: int, prompt: Sequence[int], request: ChatRequest, piece: TokenPiece, opens_thoughts: bool
    ) -> None:
        """Start the choice; see `Choice`, and `ToolReader` for `opens_thoughts`."""
        Choice.__init__(self, index, prompt, request, piece)
        self._chat = request
        self._tools = ToolReader(opens_thoughts) if request.calls_tools else None

    def chunk(self, part: TextPart) -> dict[str, Any]:
        """Return the choice of the next chunk of a stream."""
        delta: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        text, calls = self._read(part)
        if text or self._is_first:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        return {"delta": delta, **self._shared(part, bool(calls))}

    def whole(self, part: TextPart) -> dict[str, Any]:
        """Return the choice of a response that is not streamed."""
        text, calls = self._read(part)
        message = {"role": "assistant", "content": (text or None) if calls else text, "refusal": None}
        return {"message": message | ({"tool_calls": calls} if calls else {}), **self._shared(part, bool(calls))}

    def _read(self, part: TextPart) -> tuple[str, list[dict[str, Any]]]:
        if self._tools is None:
            return part.text, []
        text = self._tools.push(part.text)
        if part.finish_reason is None:
            return text, []
        rest, calls = self._tools.finish()
        return text + rest, calls

    def _shared(self, part: TextPart, has_calls: bool) -> dict[str, Any]:
        reason = "tool_calls" if has_calls and part.finish_reason == "stop" else part.finish_reason
        logprobs = {"content": self._logprobs(part), "refusal": None} if self._chat.logprobs else None
        return {"index": self.index, "logprobs": logprobs, "finish_reason": reason, **self._fields(part)}

    def _logprobs(self, part: TextPart) -> list[dict[str, Any]]:
        texts = self._token_texts(part.token_ids)
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(self._piece(token))}
            for text, logprob, token in zip(texts, part.logprobs, part.token_ids, strict=True)
        ]
        # A greedy sample is the most likely token.
        return [{**entry, "top_logprobs": [entry] if self._chat.top_logprobs else []} for entry in entries]


def make_choice(
    index: int, prompt: Sequence[int], request: TextParams, piece: TokenPiece, opens_thoughts: bool
) -> Choice:
    """Return the formatter of a choice; see `Choice` and `ChatChoice`."""
    if isinstance(request, ChatRequest):
        return ChatChoice(index, prompt, request, piece, opens_thoughts)
    return CompletionChoice(index, prompt, request, piece)


def response_head(request: TextParams) -> dict[str, Any]:
    """Return the fields that a response and all chunks of a stream share."""
    is_chat = isinstance(request, ChatRequest)
    kind = ("chat.completion.chunk" if request.stream else "chat.completion") if is_chat else "text_completion"
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def generate_body(
    id: str, requests: Sequence[EngineRequest], parts: Sequence[TextPart], has_logprobs: bool
) -> Mapping[str, Any]:
    """Return the response of vLLM's generate endpoint.

    Args:
        id: id of the response.
        requests: one for each choice.
        parts: their whole replies.
        has_logprobs: whether the response contains log-probabilities.
    """
    choices = []
    for index, part in enumerate(parts):
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(part.token_ids, part.logprobs, strict=True)
        ]
        choices.append(
            {
                "index": index,
                "token_ids": list(part.token_ids),
                "logprobs": {"content": content} if has_logprobs else None,
                "finish_reason": part.finish_reason,
                "stop_reason": part.stop_reason,
                "weight_versions": list(part.weight_versions),
            }
        )
    return {
        "request_id": id,
        "choices": choices,
        "prompt_token_ids": list(requests[0].sample.prompt_tokens),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }
