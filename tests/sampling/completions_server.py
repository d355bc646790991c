# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A local server with vLLM's completions protocol over HTTP, and its calls to reload weights."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from marin_rl.sampling.sampler import Sampler, SampleRequest


@dataclasses.dataclass(frozen=True)
class Continued:
    """An engine's answer to a request."""

    token_ids: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]
    """The sampled and the most likely token of each position, with their log-probs."""


class Engine(Protocol):
    """An engine behind the protocol."""

    vocab_size: int
    max_model_len: int

    def complete(self, body: Mapping[str, Any]) -> Continued: ...


class SamplerEngine:
    """A sampler with one request at a time: answers do not depend on other requests."""

    def __init__(self, sampler: Sampler, vocab_size: int, max_model_len: int, stop_token_ids: list[int]) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._sampler = sampler
        self._stop_token_ids = sorted(stop_token_ids)
        self._lock = threading.Lock()

    def complete(self, body: Mapping[str, Any]) -> Continued:
        assert body["stop_token_ids"] == self._stop_token_ids
        request = SampleRequest(tuple(body["prompt"]), body["seed"], body["max_tokens"], body["temperature"])
        with self._lock:
            [generation] = self._sampler.sample([request])
        top = [{token: value} for token, value in zip(generation.token_ids, generation.logprobs, strict=True)]
        return Continued(list(generation.token_ids), list(generation.logprobs), top)


class TableEngine:
    """The same distribution for every token, determined by seed and prompt."""

    def __init__(self, logits: list[float], *, raw: bool = False, eos: int | None = None, max_model_len: int = 64):
        self.vocab_size = len(logits)
        self.max_model_len = max_model_len
        self._logits = np.array(logits)
        self._raw = raw
        self._eos = eos

    def logprobs(self, temperature: float) -> np.ndarray:
        logits = self._logits / (temperature or 1.0)
        return logits - np.log(np.exp(logits).sum())

    def complete(self, body: Mapping[str, Any]) -> Continued:
        temperature = body["temperature"]
        sampled_from = self.logprobs(temperature)
        told = self.logprobs(1.0) if self._raw else sampled_from
        rng = np.random.default_rng([body["seed"], *body["prompt"]])
        ends = set(body["stop_token_ids"]) | ({self._eos} if not body["ignore_eos"] else set())
        tokens: list[int] = []
        while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in ends):
            drawn = rng.choice(self.vocab_size, p=np.exp(sampled_from)) if temperature else np.argmax(sampled_from)
            tokens.append(int(drawn))
        best = int(np.argmax(told))
        top = [{token: float(told[token]), best: float(told[best])} for token in tokens]
        return Continued(tokens, [float(told[token]) for token in tokens], top)


@dataclasses.dataclass(frozen=True)
class Raw:
    """A raw HTTP response."""

    status: int
    body: bytes
    length: int | None = None
    """The declared length; None for the true length."""
    encoding: str | None = None
    """The declared encoding."""


def error(status: int, message: str) -> Raw:
    """Return an error in vLLM's format."""
    told = {"error": {"message": message, "type": "Error", "param": None, "code": status}}
    return Raw(status, json.dumps(told).encode())


class CompletionsServer(ThreadingHTTPServer):
    """Returns the engine's answers, or the responses that a test configures."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: Engine | None = None, *, model: str = "policy", key: str | None = None) -> None:
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), Handler)
        self.engine = engine
        """None until weights are loaded."""
        self.model = model
        self.key = key
        self.load: Callable[[], Engine] | None = None
        """Loads the weights in the served folder, for `reload_weights`."""
        self.fault: Callable[[int, dict[str, Any]], Raw | None] = lambda count, body: None
        """Replaces the response to a request, by request number from 1."""
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        """Changes a correct response."""
        self.received: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.most_at_once = 0
        self.hold: threading.Barrier | None = None
        self.lock = threading.Lock()
        self._at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnecting clients."""

    def reply(self, path: str, key: str | None, body: dict[str, Any]) -> Raw:
        if path == "/collective_rpc":
            assert self.load is not None
            assert body == {"method": "reload_weights"}
            self.engine = self.load()
            self.calls.append("reload_weights")
            return Raw(200, b'{"results": [null]}')
        if path == "/v1/load_lora_adapter":
            assert set(body) == {"lora_name", "lora_path", "load_inplace"}
            self.calls.append(f"load {body['lora_name']} from {Path(body['lora_path']).name}")
            return Raw(200, b"Success")
        if path == "/reset_prefix_cache":
            self.calls.append("reset_prefix_cache")
            return Raw(200, b"")
        if path != "/v1/completions":
            return Raw(404, b'{"detail":"Not Found"}')
        if self.key is not None and key != f"Bearer {self.key}":
            return Raw(401, json.dumps({"error": f"Unauthorized: {key}"}).encode())
        with self.lock:
            self.received.append(body)
            count = len(self.received)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        if self.hold is not None:
            self.hold.wait()
        try:
            return self.fault(count, body) or self._complete(body)
        finally:
            with self.lock:
                self._at_once -= 1

    def _complete(self, body: dict[str, Any]) -> Raw:
        if body["model"] != self.model:
            return error(404, f"The model `{body['model']}` does not exist.")
        if self.engine is None:
            return error(503, "weights are not loaded yet")
        if len(body["prompt"]) + body["max_tokens"] > self.engine.max_model_len:
            return error(400, f"This model's maximum context length is {self.engine.max_model_len} tokens.")
        if max(body["prompt"]) >= self.engine.vocab_size:
            return error(400, f"Token id {max(body['prompt'])} is out of vocabulary")
        said = self.engine.complete(body)
        return Raw(200, json.dumps(self.change(_answer(body, said))).encode())


class Handler(BaseHTTPRequestHandler):
    server: CompletionsServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        reply = self.server.reply(self.path, self.headers.get("Authorization"), body)
        if not reply.status:
            self.close_connection = True
            return
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
        if reply.encoding is not None:
            self.send_header("Content-Encoding", reply.encoding)
        self.end_headers()
        self.wfile.write(reply.body)
        self.close_connection = reply.length is not None

    def log_message(self, format: str, *args: Any) -> None: ...


def _answer(body: Mapping[str, Any], said: Continued) -> dict[str, Any]:
    stopped = bool(said.token_ids) and said.token_ids[-1] in body["stop_token_ids"]
    texts = [f"<{token}>" for token in said.token_ids]
    choice = {
        "index": 0,
        "text": "".join(texts[:-1] if stopped else texts),
        "logprobs": {
            "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
            "token_logprobs": said.logprobs,
            "tokens": texts,
            "top_logprobs": [{f"<{token}>": value for token, value in top.items()} for top in said.top],
        },
        "finish_reason": "stop" if stopped else "length",
        "stop_reason": said.token_ids[-1] if stopped else None,
        "token_ids": said.token_ids if body.get("return_token_ids") else None,
        "prompt_logprobs": None,
        "prompt_token_ids": body["prompt"] if body.get("return_token_ids") else None,
    }
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(texts)}
    return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}


@contextlib.contextmanager
def serving(server: CompletionsServer) -> Iterator[CompletionsServer]:
    """A running server."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
