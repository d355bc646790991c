# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A plain client of the Tinker protocol, and a server for it in a thread."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from marin_rl.serving.http_server import HttpServer, listen, url_of
from marin_rl.serving.tinker.endpoints import TinkerApp
from marin_rl.serving.tinker.messages import message_class
from marin_rl.serving.tinker.service import Service
from marin_rl.serving.tinker.trainer_thread import Limits
from tests.serving.tinker.fake_trainer import BASE, FakeTrainer

SECONDS = 30.0


@contextlib.contextmanager
def serving(
    folder: Path,
    trainer: FakeTrainer | None = None,
    limits: Limits = Limits(),
    key: str | None = None,
    fails: bool = False,
) -> Iterator[tuple[str, Service]]:
    """Serve a folder; yield the URL and the service. At the end, the trainer has failed or not."""
    service = Service(trainer or FakeTrainer(), folder, BASE, limits)
    server = HttpServer(TinkerApp(service, BASE, key=key).app(), 60.0)
    listener = listen("127.0.0.1", 0, 60.0)
    url = url_of(listener)

    def run() -> None:
        try:
            server.run(service, listener)
        except Exception as error:
            if error is not service.failure:
                raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield url, service
    finally:
        server.stop()
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert (service.failure is not None) == fails, service.failure


def body(
    model: str,
    seq: int,
    tokens: Sequence[Sequence[int]],
    loss: str = "cross_entropy",
    *,
    forward_only: bool = False,
    inputs: Mapping[str, float] | None = None,
    config: Mapping[str, float] | None = None,
) -> bytes:
    """Return the body of `forward_backward`: the targets equal the tokens, the other inputs are constants."""
    message = message_class("ForwardBackwardRequest")(
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only, loss_fn_config=config or {}
    )
    for sequence in tokens:
        datum = message.data.add()
        # Two chunks, as renderers send them.
        for part in (sequence[:1], sequence[1:]):
            datum.model_input.add().encoded_text.tokens = np.array(part, "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.array(sequence, "<i8").tobytes(), 2
        targets.shape.append(len(sequence))
        for name, value in ({"weights": 1.0} if inputs is None else inputs).items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = np.full(len(sequence), value, "<f4").tobytes(), 1
            tensor.shape.append(len(sequence))
    return message.SerializeToString()


class Wire:
    """Sends requests, and repeats them while the server is away."""

    def __init__(self, url: str, key: str = "tml-none") -> None:
        self.url, self.is_stopped = f"{url}/api/v1/", lambda: False
        self._client = httpx.Client(headers={"X-API-Key": key}, timeout=60)

    def __del__(self) -> None:
        self._client.close()

    def send(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Send a request once."""
        return self._client.request(method, self.url + path, **content)

    def ask(self, path: str, content: bytes | Mapping[str, Any]) -> httpx.Response:
        """Send a request until the server answers."""
        data = {"content": content, "headers": {"Content-Type": "application/x-protobuf"}}
        end = time.monotonic() + SECONDS
        while True:
            try:
                response = self.send("POST", path, **(data if isinstance(content, bytes) else {"json": content}))
                if response.status_code != 503:
                    return response
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.01)

    def post(self, path: str, /, **values: Any) -> dict[str, Any]:
        """Send JSON, and return the answer of a success."""
        response = self.ask(path, values)
        assert response.status_code == 200, response.text
        return response.json()

    def result(self, id: str) -> Any:
        """Wait for a result: JSON, or the bytes of a message."""
        end = time.monotonic() + SECONDS
        while (response := self.ask("retrieve_future", {"request_id": id})).status_code == 408:
            assert time.monotonic() < end, id
        assert response.status_code == 200, response.text
        return response.json() if response.headers["content-type"] == "application/json" else response.content

    def session(self, **values: Any) -> str:
        return self.post("create_session", **values)["session_id"]

    def model(self, session: str, number: int = 0, rank: int = 8) -> str:
        promise = self.post(
            "create_model", session_id=session, model_seq_id=number, base_model="base", lora_config={"rank": rank}
        )
        return self.result(promise["request_id"])["model_id"]

    def begin(self) -> str:
        """Return a new model of a new session."""
        return self.model(self.session())

    def forward_backward(self, model: str, seq: int, tokens: Sequence[Sequence[int]], **options: Any) -> httpx.Response:
        return self.ask("forward_backward", body(model, seq, tokens, **options))

    def operate(self, path: str, model: str, seq: int, /, **values: Any) -> str:
        return self.post(path, model_id=model, seq_id=seq, **values)["request_id"]

    def step(self, model: str, seq: int, rate: float = 0.5) -> dict[str, Any]:
        """Take an optimizer step, and return its metrics, which are the state of the trainer."""
        return self.result(self.operate("optim_step", model, seq, adam_params={"learning_rate": rate}))["metrics"]

    def sample(self, sampler: str, seq: int = 0, **values: Any) -> str:
        sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {}}
        return self.post("asample", sampling_session_id=sampler, seq_id=seq, **{**sample, **values})["request_id"]

    def weight(self, sampler: str, seq: int = 0) -> float:
        """Return the weight that a sampler answers with."""
        message = message_class("SampleResponse").FromString(self.result(self.sample(sampler, seq)))
        return float(np.frombuffer(message.sequences[0].logprobs, "<f4")[0])


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
