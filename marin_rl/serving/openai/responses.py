# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Responses in OpenAI's and vLLM's formats, whole or as the chunks of a stream."""

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from marin_rl.serving.openai.protocol import AnyRequest, ChatRequest, CompletionRequest, GenerateRequest
from marin_rl.serving.text import TextPart, ToolReader


def usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """Return numbers of tokens in OpenAI's format."""
    total = num_prompt + num_sampled
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": total}


def response_head(body: AnyRequest) -> dict[str, Any]:
    """Return the fields that a response and all chunks of a stream share; they have the id of the response."""
    id = uuid.uuid4().hex
    if isinstance(body, GenerateRequest):
        return {"request_id": f"generate-{id}", "prompt_logprobs": None, "kv_transfer_params": None}
    if isinstance(body, ChatRequest):
        names = {"id": f"chatcmpl-{id}", "object": f"chat.completion{'.chunk' if body.stream else ''}"}
    else:
        names = {"id": f"cmpl-{id}", "object": "text_completion"}
    return {**names, "created": int(time.time()), "model": body.model}


def prompt_fields(body: AnyRequest, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the prompt for the first chunk of a response; as in vLLM, completions have it in their choices."""
    if isinstance(body, GenerateRequest) or (isinstance(body, ChatRequest) and body.return_token_ids):
        return {"prompt_token_ids": list(prompt)}
    return {}


class Choice:
    """Formats the parts of one choice, in order."""

    def __init__(
        self, index: int, prompt: Sequence[int], body: AnyRequest, piece: Callable[[int], bytes], opens_thoughts: bool
    ) -> None:
        """Start the choice, of which `body` selects the fields.

        `piece` returns the bytes of a token. `opens_thoughts` is as for `ToolReader`.
        """
        self._index, self._prompt, self._body, self._piece = index, prompt, body, piece
        self._tools = ToolReader(opens_thoughts) if isinstance(body, ChatRequest) and body.calls_tools else None
        self._is_first = True
        self._offset = 0
        """Number of characters of the tokens before."""

    def add(self, part: TextPart) -> dict[str, Any]:
        """Return the choice of the next chunk of a stream, or of a whole response."""
        choice: dict[str, Any] = {
            "index": self._index,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if isinstance(self._body, GenerateRequest) or self._body.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        if part.finish_reason is not None:
            choice["weight_versions"] = list(part.weight_versions)
        if isinstance(self._body, ChatRequest):
            choice |= self._chat(self._body, part)
        elif isinstance(self._body, CompletionRequest):
            choice |= self._completion(self._body, part)
        else:
            choice["logprobs"] = None if self._body.sampling_params.logprobs is None else _token_logprobs(part)
        self._is_first = False
        return choice

    def echo(self, logprobs: Sequence[float]) -> dict[str, Any]:
        """Return the choice of a prompt that is echoed with the log-probabilities of its tokens after the first."""
        part = TextPart(tuple(self._prompt), (0.0, *logprobs), "", "length")
        part = part._replace(text=b"".join(map(self._piece, part.token_ids)).decode("utf-8", "replace"))
        choice = self.add(part)
        # Nothing predicts the first token, and there are no new ones.
        choice["logprobs"] |= {"token_logprobs": [None, *logprobs], "top_logprobs": None}
        return choice | ({"token_ids": []} if "token_ids" in choice else {})

    def _completion(self, body: CompletionRequest, part: TextPart) -> dict[str, Any]:
        fields: dict[str, Any] = {"text": part.text, "logprobs": None}
        if body.return_token_ids and self._is_first:
            fields["prompt_token_ids"] = list(self._prompt)
        if body.logprobs is not None:
            texts = self._token_texts(body, part)
            # The most likely tokens are only known for greedy samples.
            has_top = body.logprobs > 0 and body.temperature == 0
            *offsets, self._offset = itertools.accumulate(map(len, texts), initial=self._offset)
            fields["logprobs"] = {
                "tokens": texts,
                "token_logprobs": list(part.logprobs),
                "top_logprobs": [{text: one} for text, one in zip(texts, part.logprobs, strict=True)]
                if has_top
                else None,
                "text_offset": offsets,
            }
        return fields

    def _chat(self, body: ChatRequest, part: TextPart) -> dict[str, Any]:
        text, calls = self._read(part)
        if body.stream:
            message: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
            if text or self._is_first:
                message["content"] = text
            calls = [{"index": index, **call} for index, call in enumerate(calls)]
        else:
            message = {"role": "assistant", "content": (text or None) if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        fields: dict[str, Any] = {"delta" if body.stream else "message": message, "logprobs": None}
        if calls and part.finish_reason == "stop":
            fields["finish_reason"] = "tool_calls"
        if body.logprobs:
            fields["logprobs"] = {"content": self._entries(body, part), "refusal": None}
        return fields

    def _read(self, part: TextPart) -> tuple[str, list[dict[str, Any]]]:
        """Return the next text that is not part of a tool call; at the end of the reply, its calls."""
        if self._tools is None:
            return part.text, []
        text = self._tools.push(part.text)
        if part.finish_reason is None:
            return text, []
        rest, calls = self._tools.finish()
        return text + rest, calls

    def _entries(self, body: ChatRequest, part: TextPart) -> list[dict[str, Any]]:
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(self._piece(token))}
            for text, logprob, token in zip(self._token_texts(body, part), part.logprobs, part.token_ids, strict=True)
        ]
        # A greedy sample is the most likely token.
        return [{**entry, "top_logprobs": [entry] if body.top_logprobs else []} for entry in entries]

    def _token_texts(self, body: ChatRequest | CompletionRequest, part: TextPart) -> list[str]:
        if body.return_tokens_as_token_ids:
            return [f"token_id:{token}" for token in part.token_ids]
        # Without a call for each token, which would take a fifth of the time of a response.
        piece = self._piece
        return [piece(token).decode("utf-8", "replace") for token in part.token_ids]


def _token_logprobs(part: TextPart) -> dict[str, Any]:
    """Return log-probabilities of tokens without their texts."""
    pairs = zip(part.token_ids, part.logprobs, strict=True)
    fields = {"bytes": None, "top_logprobs": []}
    return {"content": [{"token": f"token_id:{token}", "logprob": logprob, **fields} for token, logprob in pairs]}
