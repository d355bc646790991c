# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The endpoints of the Tinker protocol that list and change what was saved: checkpoints, training runs, sessions."""

import asyncio
import contextlib
import email.utils
import hmac
import secrets
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from marin_rl.serving.bodies import ApiError, json_response
from marin_rl.serving.tinker import requests
from marin_rl.serving.tinker.checkpoints import spec_of, texts
from marin_rl.serving.tinker.records import ModelSpec, RequestError
from marin_rl.serving.tinker.requests import parse_body
from marin_rl.serving.tinker.service import Service

_CHECKPOINT = "training_runs/{model}/checkpoints/{kind}/{name}"
ARCHIVE = f"{_CHECKPOINT}/archive"
"""Path of the files of a checkpoint."""
_LINK_SECONDS = 900
Handler = Callable[[Request], Awaitable[Response]]


class CheckpointEndpoints:
    """Answers requests about what a service has saved."""

    def __init__(
        self,
        service: Service,
        read_values: Callable[[Request], Awaitable[dict[str, Any]]],
        check_key: Callable[[Request], None],
    ) -> None:
        """Use a service.

        `read_values` reads the JSON body of a request; `check_key` raises `ApiError` unless a request has the API key.
        """
        self._service, self._read_values, self._check_key = service, read_values, check_key
        self._link_secret = secrets.token_bytes(32)

    def handlers(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers of requests with the API key, by method and path; `archive` has its own check."""
        return {
            "POST": {"weights_info": self._weights_info},
            "GET": {
                "sessions": self._list_sessions,
                "sessions/{session}": self._get_session,
                "training_runs": self._list_runs,
                "training_runs/{model}": self._get_run,
                "training_runs/{model}/checkpoints": self._list_checkpoints,
                "checkpoints": self._list_checkpoints,
            },
            "DELETE": {_CHECKPOINT: self._delete},
            "PUT": {f"{_CHECKPOINT}/ttl": self._set_ttl},
        }

    async def _weights_info(self, request: Request) -> Response:
        body = parse_body(requests.WeightsInfo, await self._read_values(request))
        checkpoints = self._service.checkpoints
        with not_found():
            info = checkpoints.info(checkpoints.existing(body.tinker_path))
        spec = spec_of(info)
        trained = {name: getattr(spec, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return json_response({"base_model": info["base_model"], **lora_fields(spec), **trained})

    def _checkpoint(self, request: Request) -> Path:
        names = request.path_params
        return self._service.checkpoints.existing(f"tinker://{names['model']}/{names['kind']}/{names['name']}")

    async def _delete(self, request: Request) -> Response:
        with not_found():
            await self._service.call(lambda: self._service.checkpoints.delete(self._checkpoint(request)))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _set_ttl(self, request: Request) -> Response:
        ttl = parse_body(requests.TtlBody, await self._read_values(request)).ttl_seconds
        with not_found():
            await self._service.call(lambda: self._service.checkpoints.set_ttl(self._checkpoint(request), ttl))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _list_checkpoints(self, request: Request) -> Response:
        model = request.path_params.get("model")
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
                **lora_fields(ModelSpec(**run["spec"])),
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

    async def archive(self, request: Request) -> Response:
        """Redirect to a link that needs no key for a while, as the SDK expects, or send the files."""
        path, query = request.url.path, request.query_params
        if "signature" not in query:
            self._check_key(request)
            with not_found():
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
        with not_found():
            folder = self._checkpoint(request)
        return StreamingResponse(_tar(folder), media_type="application/x-tar")

    def _signature(self, path: str, end: str) -> str:
        return hmac.digest(self._link_secret, f"{path} {end}".encode(), "sha256").hex()


@contextlib.contextmanager
def not_found() -> Iterator[None]:
    """Answer a `RequestError` with status 404."""
    try:
        yield
    except RequestError as error:
        raise ApiError(str(error), status=HTTPStatus.NOT_FOUND) from error


def lora_fields(spec: ModelSpec | None) -> dict[str, Any]:
    """Return the fields of an answer that describe an adapter; none without a specification."""
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
