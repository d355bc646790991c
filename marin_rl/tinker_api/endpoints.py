# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The HTTP application of the Tinker protocol, as the SDK from 0.25 to 0.38 speaks it."""

import asyncio
import contextlib
import email.utils
import hmac
import secrets
import tarfile
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.serving.admission import Admission, check_host, limited_app, read_body
from marin_rl.serving.bodies import MAX_BODY_BYTES, ApiError, json_response, read_object
from marin_rl.tinker_api import requests
from marin_rl.tinker_api.checkpoints import ServedModel, spec_of, texts
from marin_rl.tinker_api.messages import canonical_bytes, forward_backward_of, parse_forward_backward
from marin_rl.tinker_api.records import ModelSpec, RequestError
from marin_rl.tinker_api.requests import BodyT, canonical_json, parse_body
from marin_rl.tinker_api.service import Promise, Service

PREFIX = "/api/v1"
MAX_TRAINING_BYTES = 64 * 2**20
"""Maximum size of the body of `forward_backward`."""
POLL_SECONDS = 30.0
"""Time for which a request for a result waits; the SDK waits 45 seconds."""
_MAX_REQUESTS = 8192
_MAX_BYTES = 2**29
_LINK_SECONDS = 900
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
Handler = Callable[[Request], Awaitable[Response]]


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
        self._link_secret = secrets.token_bytes(32)
        self._registry = registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "marin_rl_requests", "HTTP requests.", ("path", "status"), registry=registry
        )
        self._seconds = prometheus.Histogram(
            "marin_rl_request_seconds", "Time of an HTTP request.", ("path",), registry=registry
        )
        service.on_sampled = prometheus.Counter("marin_rl_sampled_tokens", "Tokens of samples.", registry=registry).inc
        for name, text in (
            ("waiting_samples", "Requests that wait for samples."),
            ("waiting_operations", "Training operations that have not run."),
            ("result_bytes", "Bytes of results that are kept."),
            ("journal_bytes", "Bytes of the journal."),
            ("programs", "Compiled programs of training and scoring."),
        ):
            gauge = prometheus.Gauge(f"marin_rl_tinker_{name}", text, registry=registry)
            gauge.set_function(lambda name=name: service.counts()[name])
        self._paths = set[str]()

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
            "weights_info": self._weights_info,
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
            "sessions": self._list_sessions,
            "sessions/{session}": self._get_session,
            "training_runs": self._list_runs,
            "training_runs/{model}": self._get_run,
            "training_runs/{model}/checkpoints": self._list_checkpoints,
            "checkpoints": self._list_checkpoints,
        }
        checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
        routes = [
            Route("/metrics", self._keyed(self._metrics)),
            Route(f"{PREFIX}/{checkpoint}/archive", self._archive),
        ]
        for method, handlers in (
            ("POST", posts),
            ("GET", gets),
            ("DELETE", {checkpoint: self._delete}),
            ("PUT", {f"{checkpoint}/ttl": self._set_ttl}),
        ):
            for path, handler in handlers.items():
                routes.append(Route(f"{PREFIX}/{path}", self._keyed(handler), methods=[method]))
        self._paths = {route.path for route in routes if "{" not in route.path}
        admission = Admission({"requests": _MAX_REQUESTS, "bytes of requests": _MAX_BYTES})
        return limited_app(routes, admission, self._check_client, self._count)

    def _check_client(self, headers: Headers) -> None:
        if self._key is None:
            check_host(headers)

    def _keyed(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            self._check_key(request)
            return await handler(request)

        return handle

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("x-api-key", "").encode("latin-1")
        if self._key is not None and not hmac.compare_digest(given, self._key.encode()):
            raise ApiError(
                "the API key is missing or wrong; set TINKER_API_KEY to the server's key",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )

    def _count(self, path: str, status: int, seconds: float) -> None:
        # Few labels, whatever paths clients invent.
        path = path if path in self._paths else "other"
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

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
        if (failure := self._service.failure) is not None:
            raise ApiError(f"the trainer failed: {failure}", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(prometheus.generate_latest(self._registry), media_type=prometheus.CONTENT_TYPE_LATEST)

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
            with _refusals():
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
            with _refusals():
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
                **_lora(model.spec),
            }
        )

    async def _unload(self, request: Request) -> Response:
        model = (await self._body(request, requests.ModelBody)).model_id
        return await self._accepted(lambda: self._service.unload(model))

    async def _forward_backward(self, request: Request) -> Response:
        data = await read_body(request, _PROTOBUF, MAX_TRAINING_BYTES, self._client_seconds)

        def parse() -> tuple[Any, bytes, RequestError | None]:
            message, problem = parse_forward_backward(data), None
            try:
                forward_backward_of(message)
            except RequestError as error:
                problem = error
            return message, canonical_bytes(message), problem

        with _refusals():
            message, body, problem = await asyncio.to_thread(parse)
            if message.seq_id < 1:
                raise RequestError(f"seq_id is {message.seq_id}; it must be at least 1")
        kind = "forward" if message.forward_only else "forward_backward"
        model, seq = message.model_id, message.seq_id
        return await self._accepted(lambda: self._service.operate(model, seq, kind, body, problem), model_id=model)

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
        except (ApiError, RequestError) as error:
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

    # Checkpoints and runs.

    async def _weights_info(self, request: Request) -> Response:
        body, checkpoints = await self._body(request, requests.WeightsInfo), self._service.checkpoints
        with _refusals(HTTPStatus.NOT_FOUND):
            info = checkpoints.info(checkpoints.existing(body.tinker_path))
        spec = spec_of(info)
        trained = {name: getattr(spec, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return json_response({"base_model": info["base_model"], **_lora(spec), **trained})

    def _checkpoint(self, request: Request) -> Path:
        names = request.path_params
        return self._service.checkpoints.existing(f"tinker://{names['model']}/{names['kind']}/{names['name']}")

    async def _delete(self, request: Request) -> Response:
        with _refusals(HTTPStatus.NOT_FOUND):
            await self._service.call(lambda: self._service.checkpoints.delete(self._checkpoint(request)))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _set_ttl(self, request: Request) -> Response:
        ttl = (await self._body(request, requests.TtlBody)).ttl_seconds
        with _refusals(HTTPStatus.NOT_FOUND):
            await self._service.call(lambda: self._service.checkpoints.set_ttl(self._checkpoint(request), ttl))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _list_checkpoints(self, request: Request) -> Response:
        model = request.path_params.get("model")
        with _refusals():
            found = await asyncio.to_thread(self._service.checkpoints.list, model)
        if model is not None:
            return json_response({"checkpoints": found})
        page, cursor = _page(request, found, 100)
        return json_response({"checkpoints": page, "cursor": cursor})

    async def _list_runs(self, request: Request) -> Response:
        runs = await asyncio.to_thread(self._runs)
        page, cursor = _page(request, runs, 20)
        return json_response({"training_runs": page, "cursor": cursor})

    async def _get_run(self, request: Request) -> Response:
        id = request.path_params["model"]
        for run in await asyncio.to_thread(self._runs):
            if run["training_run_id"] == id:
                return json_response(run)
        raise ApiError(f"there is no training run {id!r:.200}", status=HTTPStatus.NOT_FOUND)

    def _runs(self) -> list[dict[str, Any]]:
        saved = self._service.checkpoints.list()

        def newest(model: str, kind: str) -> dict[str, Any] | None:
            prefix = f"tinker://{model}/{kind}/"
            return next((one for one in saved if one["tinker_path"].startswith(prefix)), None)

        return [
            {
                "training_run_id": id,
                "base_model": run["base_model"],
                "model_owner": "local",
                "corrupted": False,
                "last_request_time": run["time"],
                "last_checkpoint": newest(id, "weights"),
                "last_sampler_checkpoint": newest(id, "sampler_weights"),
                "user_metadata": texts(run["user_metadata"]),
                **_lora(ModelSpec(**run["spec"])),
            }
            for id, run in self._service.checkpoints.runs().items()
        ]

    async def _list_sessions(self, request: Request) -> Response:
        page, _ = _page(request, [session.id for session in self._service.sessions()], 20)
        return json_response({"sessions": page})

    async def _get_session(self, request: Request) -> Response:
        id = request.path_params["session"]
        session, samplers = self._service.describe_session(id)
        runs = await asyncio.to_thread(self._service.checkpoints.runs)
        return json_response(
            {
                "training_run_ids": [name for name, run in runs.items() if run["session"] == id],
                "sampler_ids": samplers,
                "user_metadata": texts(session.metadata),
                "display_name": session.display_name,
            }
        )

    # Archives.

    async def _archive(self, request: Request) -> Response:
        """Redirect to a link that needs no key for a while, as the SDK expects, or send the files."""
        path, query = request.url.path, request.query_params
        if "signature" not in query:
            self._check_key(request)
            with _refusals(HTTPStatus.NOT_FOUND):
                self._checkpoint(request)
            end = int(time.time()) + _LINK_SECONDS
            link = request.url.include_query_params(expires=end, signature=self._signature(path, str(end)))
            headers = {"Location": str(link), "Expires": email.utils.formatdate(end, usegmt=True)}
            return Response(status_code=HTTPStatus.FOUND, headers=headers)
        end, signature = query.get("expires", ""), query["signature"]
        if not hmac.compare_digest(signature.encode(), self._signature(path, end).encode()):
            raise ApiError("the signature of this link is wrong", status=HTTPStatus.FORBIDDEN)
        if int(end) < time.time():
            raise ApiError("this link has expired; ask for another one", status=HTTPStatus.FORBIDDEN)
        with _refusals(HTTPStatus.NOT_FOUND):
            folder = self._checkpoint(request)
        return StreamingResponse(_tar(folder), media_type="application/x-tar")

    def _signature(self, path: str, end: str) -> str:
        return hmac.digest(self._link_secret, f"{path} {end}".encode(), "sha256").hex()


@contextlib.contextmanager
def _refusals(status: int = HTTPStatus.BAD_REQUEST) -> Iterator[None]:
    """Answer a `RequestError` with a status."""
    try:
        yield
    except RequestError as error:
        raise ApiError(str(error), status=status) from error


def _lora(spec: ModelSpec | None) -> dict[str, Any]:
    if spec is None:
        return {}
    return {"is_lora": spec.lora_rank > 0, "lora_rank": spec.lora_rank or None}


def _page(request: Request, items: Sequence[Any], limit: int) -> tuple[Sequence[Any], dict[str, int]]:
    """Return the part of a list that the query asks for, and its place."""
    try:
        limit = int(request.query_params.get("limit", limit))
        offset = int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise ApiError(f"limit and offset must be numbers: {error}", param="limit") from error
    if limit < 0 or offset < 0:
        raise ApiError(f"limit and offset must not be negative, got {limit} and {offset}", param="limit")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _tar(folder: Path) -> Iterator[bytes]:
    """Yield the files of a folder as a tar archive."""
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        with file.open("rb") as opened:
            info = tarfile.TarInfo(str(file.relative_to(folder)))
            info.size = size = file.stat().st_size
            yield info.tobuf()
            while size and (part := opened.read(min(size, 2**20))):
                size -= len(part)
                yield part
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
