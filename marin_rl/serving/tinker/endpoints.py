# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The HTTP application of the Tinker protocol, as the SDK from 0.25 to 0.38 speaks it."""

import asyncio
import zlib
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.serving.admission import Admission, check_host, check_key, health, limited_app, read_body
from marin_rl.serving.bodies import MAX_BODY_BYTES, ApiError, json_response, read_object
from marin_rl.serving.http_metrics import HttpMetrics
from marin_rl.serving.tinker import requests
from marin_rl.serving.tinker.checkpoint_endpoints import ARCHIVE, CheckpointEndpoints, Handler, lora_fields, not_found
from marin_rl.serving.tinker.checkpoints import ServedModel
from marin_rl.serving.tinker.messages import canonical_bytes, forward_backward_of, parse_forward_backward
from marin_rl.serving.tinker.records import ForwardBackward, RequestError
from marin_rl.serving.tinker.requests import BodyT, canonical_json, parse_body
from marin_rl.serving.tinker.service import Promise, Service

PREFIX = "/api/v1"
MAX_TRAINING_BYTES = 64 * 2**20
"""Maximum size of the body of `forward_backward`."""
POLL_SECONDS = 30.0
"""Time for which a request for a result waits; the SDK waits 45 seconds."""
_MAX_REQUESTS = 8192
_MAX_BYTES = 2**29
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_OPERATIONS: Mapping[str, type[requests.OperationBody]] = {
    "optim_step": requests.OptimStep,
    "save_weights": requests.SaveWeights,
    "save_weights_for_sampler": requests.SaveWeightsForSampler,
}
_ABSENT = {
    "save_weights_external": "checkpoints at other places",
    "copy_weights": "copies of checkpoints",
    "create_custom_loss": "custom losses; forward_backward_custom computes them in the client",
    "retrieve_futures": "retrieval of several results",
    "join_sampling_session": "joining a sampling session",
    "auth/token": "tokens; send an API key",
}
"""What the server does not have, by path."""


class TinkerApp:
    """Answers HTTP requests with a service."""

    def __init__(self, service: Service, base: ServedModel, *, key: str | None, client_seconds: float = 60.0) -> None:
        """Create the application.

        Args:
            service: started and closed by the caller.
            base: model that the service has.
            key: API key; None serves requests to a loopback address without a key.
            client_seconds: maximum time in which a client sends the body of a request.
        """
        self._service, self._base, self._key, self._client_seconds = service, base, key, client_seconds
        self._metrics = HttpMetrics()
        service.thread.on_sampled = self._metrics.counter("sampled_tokens", "Tokens of samples.")
        for name, text in (
            ("waiting_samples", "Requests that wait for samples."),
            ("waiting_operations", "Training operations that have not run."),
            ("result_bytes", "Bytes of results that are kept."),
            ("journal_bytes", "Bytes of the journal."),
            ("programs", "Compiled programs of training and scoring."),
        ):
            self._metrics.gauge(f"tinker_{name}", text, lambda name=name: service.counts()[name])

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        posts = {
            "client/config": self._config,
            "client/dynamic_config": self._config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "forward_backward": self._forward_backward,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            **{name: self._operation(name) for name in _OPERATIONS},
            **{name: self._absent(name, what) for name, what in _ABSENT.items()},
        }
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._get_sampler,
        }
        saved = CheckpointEndpoints(self._service, self._values, self._check_key)
        routes = [
            Route("/metrics", self._keyed(self._metrics.show)),
            Route(f"{PREFIX}/{ARCHIVE}", saved.archive),
        ]
        for method, handlers in (("POST", posts), ("GET", gets), *saved.handlers().items()):
            for path, handler in handlers.items():
                routes.append(Route(f"{PREFIX}/{path}", self._keyed(handler), methods=[method]))
        admission = Admission({"requests": _MAX_REQUESTS, "bytes of requests": _MAX_BYTES})
        return limited_app(routes, admission, self._check_client, self._metrics.count)

    def _check_client(self, headers: Headers) -> None:
        if self._key is None:
            check_host(headers)

    def _keyed(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            self._check_key(request)
            return await handler(request)

        return handle

    def _check_key(self, request: Request) -> None:
        if self._key is not None:
            remedy = "set TINKER_API_KEY to the server's key"
            check_key(request.headers.get("x-api-key", ""), self._key, remedy)

    # Reading and answering.

    async def _values(self, request: Request) -> dict[str, Any]:
        return read_object(await read_body(request, _JSON, MAX_BODY_BYTES, self._client_seconds))

    async def _body(self, request: Request, body_class: type[BodyT]) -> BodyT:
        return parse_body(body_class, await self._values(request))

    async def _accepted(self, accept: Callable[[], Promise], **fields: Any) -> Response:
        """Answer with a promise, when the journal is on the disk; a refusal may be a record, too."""
        promise = None
        try:
            promise = accept()
        finally:
            await self._service.sync(promise)
        return json_response({"request_id": promise.id, **fields})

    # The client and its session.

    async def _config(self, request: Request) -> Response:
        await self._values(request)
        return json_response({"proto_compress_fwdbwd": False, "refresh_interval_sec": 3600})

    async def _telemetry(self, request: Request) -> Response:
        await read_body(request, _JSON, MAX_BODY_BYTES, self._client_seconds)
        return json_response({"status": "accepted"})

    async def _health(self, request: Request) -> Response:
        return health("the trainer", self._service.failure)

    async def _capabilities(self, request: Request) -> Response:
        context = {} if self._base.max_context is None else {"max_context_length": self._base.max_context}
        models = [{"model_name": name, **context, "trainable": True, "sampleable": True} for name in self._base.names]
        return json_response({"supported_models": models})

    async def _create_session(self, request: Request) -> Response:
        body = await self._body(request, requests.CreateSession)
        key = request.headers.get("x-idempotency-key")
        session = self._service.create_session(key, body.user_metadata, body.display_name)
        await self._service.sync()
        return json_response({"type": "create_session", "session_id": session.id})

    async def _heartbeat(self, request: Request) -> Response:
        self._service.session((await self._body(request, requests.SessionBody)).session_id)
        return json_response({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        await self._values(request)
        self._service.end_session(request.path_params["session"])
        await self._service.sync()
        return json_response({})

    async def _retrieve(self, request: Request) -> Response:
        id = (await self._body(request, requests.RetrieveFuture)).request_id
        promise = await self._service.retrieve(id, POLL_SECONDS)
        if promise is None:
            pending = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return json_response(pending, HTTPStatus.REQUEST_TIMEOUT)
        return Response(promise.result, media_type=_PROTOBUF if promise.form == "protobuf" else _JSON)

    # Training.

    async def _create_model(self, request: Request) -> Response:
        values = await self._values(request)
        body = parse_body(requests.CreateModel, values)
        id = f"{body.session_id}:train:{body.model_seq_id}"

        def accept() -> Promise:
            self._base.check_name(body.base_model)
            spec = body.spec(seed=zlib.crc32(id.encode()))
            return self._service.create_model(
                body.session_id, body.model_seq_id, "create_model", values, body.base_model, spec
            )

        return await self._accepted(accept, model_id=id)

    async def _load_weights(self, request: Request) -> Response:
        values = await self._values(request)
        if values.get("model_id") is not None:
            return await self._operate(values, "load_weights", requests.LoadWeights, self._check_load)
        body = parse_body(requests.LoadWeights, values)
        assert body.session_id is not None
        assert body.model_seq_id is not None
        session, number = body.session_id, body.model_seq_id

        def accept() -> Promise:
            self._check_load(body)
            return self._service.create_model(session, number, "load_weights", values, body.base_model or "", None)

        return await self._accepted(accept, model_id=f"{session}:train:{number}")

    def _check_load(self, body: requests.LoadWeights) -> None:
        if body.optimizer_config is not None:
            body.optimizer_config.check()
        if body.base_model is not None:
            self._base.check_name(body.base_model)
        self._service.checkpoints.locate(body.path, ("weights",))

    async def _get_info(self, request: Request) -> Response:
        model = self._service.model((await self._body(request, requests.ModelBody)).model_id)
        tokenizer = {} if self._base.tokenizer is None else {"tokenizer_id": self._base.tokenizer}
        return json_response(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": {"model_name": model.base_model, **tokenizer},
                "model_name": model.base_model,
                **lora_fields(model.spec),
            }
        )

    async def _unload(self, request: Request) -> Response:
        model = (await self._body(request, requests.ModelBody)).model_id
        return await self._accepted(lambda: self._service.unload(model))

    async def _forward_backward(self, request: Request) -> Response:
        data = await read_body(request, _PROTOBUF, MAX_TRAINING_BYTES, self._client_seconds)

        def parse() -> tuple[Any, bytes, ForwardBackward | RequestError]:
            message = parse_forward_backward(data)
            try:
                parsed = forward_backward_of(message)
            except RequestError as error:
                parsed = error
            return message, canonical_bytes(message), parsed

        message, body, parsed = await asyncio.to_thread(parse)
        kind = "forward" if message.forward_only else "forward_backward"
        model, seq = message.model_id, message.seq_id
        return await self._accepted(lambda: self._service.operate(model, seq, kind, body, parsed), model_id=model)

    def _operation(self, name: str) -> Handler:
        async def handle(request: Request) -> Response:
            check = requests.OptimStep.params if name == "optim_step" else self._check_save
            return await self._operate(await self._values(request), name, _OPERATIONS[name], check)

        return handle

    def _check_save(self, body: Any) -> None:
        if body.path is not None:
            self._service.checkpoints.named(body.model_id, "weights", body.path)

    async def _operate(
        self, values: Mapping[str, Any], kind: str, body_class: type[BodyT], check: Callable[[Any], object]
    ) -> Response:
        """Accept an operation with a JSON body; an invalid one uses up its number."""
        place, problem = parse_body(requests.OperationBody, values), None
        try:
            check(parse_body(body_class, values))
        except ApiError as error:
            problem = error
        data = canonical_json(values)
        return await self._accepted(
            lambda: self._service.operate(place.model_id, place.seq_id, kind, data, problem), model_id=place.model_id
        )

    def _absent(self, name: str, what: str) -> Handler:
        async def handle(request: Request) -> Response:
            problem = ApiError(f"{name}: this server has no {what}", code="unsupported")
            if name == "save_weights_external":

                def refuse(body: object) -> None:
                    raise problem

                return await self._operate(await self._values(request), name, requests.OperationBody, refuse)
            raise problem

        return handle

    # Sampling.

    async def _create_sampler(self, request: Request) -> Response:
        body = await self._body(request, requests.CreateSamplingSession)
        with not_found():
            sampler = self._service.create_sampler(
                body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
            )
        await self._service.sync()
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def _get_sampler(self, request: Request) -> Response:
        sampler = self._service.sampler(request.path_params["sampler"])
        path = {} if sampler.model_path is None else {"model_path": sampler.model_path}
        return json_response({"sampler_id": sampler.id, "base_model": sampler.base_model, **path})

    async def _sample(self, request: Request) -> Response:
        values = await self._values(request)
        body = parse_body(requests.SampleBody, values)
        id = f"{body.sampling_session_id}:{body.seq_id}"
        sequences = [f"{id}:{index}" for index in range(body.num_samples)]
        return await self._accepted(
            lambda: self._service.sample(body, canonical_json(values)), sample_sequence_ids=sequences
        )
