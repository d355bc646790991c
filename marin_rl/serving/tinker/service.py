# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Requests of the Tinker protocol: what the server accepts, and what it answers."""

import asyncio
import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future as ThreadFuture
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from marin_rl.serving.admission import busy
from marin_rl.serving.bodies import ApiError
from marin_rl.serving.tinker import requests
from marin_rl.serving.tinker.checkpoints import ServedModel
from marin_rl.serving.tinker.journal import RecordedError
from marin_rl.serving.tinker.records import ForwardBackward, ModelSpec, RequestError, Trainer
from marin_rl.serving.tinker.state import Model, Promise, Sampler, ServerState, Session
from marin_rl.serving.tinker.trainer_thread import EPHEMERAL_SAMPLERS, Limits, TrainerThread

Result = TypeVar("Result")

MAX_AHEAD = 10_000
"""How far a `seq_id` may be ahead of the next operation."""
MAX_WAITING_SAMPLES = 8192
MAX_WAITING_BYTES = 512 * 2**20
MAX_RESULT_BYTES = 2**30


class Service:
    """Accepts requests in an event loop; a thread runs them."""

    def __init__(self, trainer: Trainer, folder: Path, base: ServedModel, limits: Limits = Limits()) -> None:
        """Read the journal of an earlier process.

        `folder` has the checkpoints, the journal and the recovery state; `base` is the model that the trainer has.

        Raises:
            UserError: if another server uses the folder, or if the folder belongs to another base model.
        """
        self._state, self._limits, self._trainer = ServerState(folder, base), limits, trainer
        self.thread = TrainerThread(self._state, trainer, limits, self._fail)
        self._asked: dict[str, float] = {}
        """When models were asked for that wait for the end of another session, by their ids."""
        self.checkpoints = self._state.checkpoints
        self.failure: Exception | None = None
        """Error that ended the thread."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the thread when it fails."""

    def start(self) -> None:
        """Begin to run operations."""
        self.thread.start()

    def stop(self) -> None:
        """Run no further operations, and answer clients that wait."""
        with self._state.wake:
            self._state.is_closing = True
            self._state.wake.notify_all()
            for promise in self._state.promises.values():
                self._state.wake_clients(promise)

    def close(self) -> None:
        """Wait for the operation that runs, and close the journal."""
        self.stop()
        self.thread.join()
        self._state.journal.close()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.stop()
        self.on_failure()

    def create_session(self, key: str | None, metadata: Mapping[str, Any] | None, display_name: str | None) -> Session:
        """Begin a session, or return the one that the same request began. Wait with `sync` before the answer."""
        with self._state.lock:
            self._check_open()
            for session in self._state.sessions.values():
                if key is not None and session.key == key:
                    return session
            id = secrets.token_hex(8)
            names = {"key": key, "metadata": metadata, "display_name": display_name}
            self._state.record({"record": "session", "id": id, **names})
            return self._state.sessions[id]

    def session(self, id: str) -> Session:
        """Return a session, and note that its client is alive. Raise `ApiError` if there is none."""
        with self._state.lock:
            session = self._state.sessions.get(id)
            if session is None or session.is_ended:
                raise ApiError(
                    f"the session {id!r:.100} has ended or never existed; create another one", status=HTTPStatus.GONE
                )
            session.seen = time.monotonic()
            return session

    def describe_session(self, id: str) -> tuple[Session, list[str]]:
        """Return a session and the ids of its samplers. Raise `ApiError` if there is none."""
        with self._state.lock:
            if (session := self._state.sessions.get(id)) is None:
                raise ApiError(f"there is no session {id!r:.200}", status=HTTPStatus.NOT_FOUND)
            return session, [one.id for one in self._state.samplers.values() if one.session == id]

    def sessions(self) -> list[Session]:
        """Return the sessions that have not ended, the newest first."""
        return self._state.living_sessions()

    def end_session(self, id: str) -> None:
        """End a session: its model is unloaded after the operations that are ready, and its samples fail."""
        self._check_open()
        self._state.end_session(id)

    def create_model(
        self, session: str, number: int, kind: str, body: Mapping[str, Any], base_model: str, spec: ModelSpec | None
    ) -> Promise:
        """Begin a model. One of the same session ends; one of another session must have ended, or be silent.

        Until that session gives a sign of life or has been silent for long enough, the answer is 409, so that the SDK
        asks again: its client may be the former process of the one that asks.

        Args:
            session: id of the session.
            number: the session's number of the model.
            kind: `create_model` or `load_weights`.
            body: of the request.
            base_model: name of the base model; empty for that of the checkpoint.
            spec: the model; None for that of the checkpoint.

        Raises:
            ApiError: if another client trains.
        """
        with self._state.lock:
            self._check_open()
            id, data = f"{session}:train:{number}", requests.canonical_json(body)
            digest = _digest(kind, data)
            if (known := self._repeated(f"{id}:0", digest)) is not None:
                return known
            self.session(session)
            for other in self._state.models.values():
                owner = self._state.sessions.get(other.session)
                if other.is_ending or other.session == session or owner is None:
                    continue
                if time.monotonic() - owner.seen < self._limits.session:
                    is_alive = owner.seen > self._asked.setdefault(id, time.monotonic())
                    if is_alive:
                        del self._asked[id]
                    raise ApiError(
                        f"the server trains the model {other.id!r} of session {other.session!r}"
                        f"{f' ({owner.display_name})' if owner.display_name else ''}, and one model at a time; finish "
                        "that session, or wait until its client has been silent for "
                        f"{self._limits.session:g} seconds",
                        status=HTTPStatus.BAD_REQUEST if is_alive else HTTPStatus.CONFLICT,
                    )
                self._state.end_session(other.session)
            self._asked.pop(id, None)
            return self._accept(
                {
                    "record": "operation",
                    "id": f"{id}:0",
                    "kind": kind,
                    "digest": digest,
                    "session": session,
                    "model": id,
                    "seq": 0,
                    "base_model": base_model,
                    "spec": spec and dataclasses.asdict(spec),
                    "metadata": body.get("user_metadata"),
                },
                data,
            )

    def operate(
        self, model: str, seq: int, kind: str, body: bytes, parsed: ForwardBackward | ApiError | None = None
    ) -> Promise:
        """Accept an operation of a model, at its place in the order of `seq`.

        Args:
            model: id of the model.
            seq: number of the operation.
            kind: name of the operation.
            body: canonical bytes of the request.
            parsed: the request, which is not parsed again while there is memory for it; or why it is invalid, which
                uses up its number, because the client goes on with the next one.

        Raises:
            ApiError: if the request is refused.
        """
        with self._state.lock:
            self._check_open()
            id, digest = f"{model}:{seq}", _digest(kind, body)
            if (known := self._repeated(id, digest)) is not None:
                return known
            if (trained := self._state.models.get(model)) is None or trained.is_ending:
                raise _unknown_model(model)
            self.session(trained.session)
            if seq < trained.next or seq in trained.skipped:
                raise ApiError(f"the operation {seq} of {model!r} was done earlier, and its result is no longer kept")
            if seq > trained.next + MAX_AHEAD:
                raise ApiError(f"seq_id is {seq}, but the next operation of {model!r} is {trained.next}")
            header = {
                "id": id,
                "kind": kind,
                "digest": digest,
                "session": trained.session,
                "model": model,
                "seq": seq,
            }
            if isinstance(parsed, ApiError):
                self._state.record({"record": "refused", **header, "message": str(parsed)})
                raise parsed
            # Others may wait for the next operation, so it is always accepted.
            if seq != trained.next:
                self._check_capacity(len(body))
            promise = self._accept({"record": "operation", **header}, body)
            if parsed is not None and self._state.waiting_bytes + parsed.size <= MAX_WAITING_BYTES:
                self._state.waiting_bytes += parsed.size - promise.size
                promise.body, promise.parsed = b"", parsed
            return promise

    def unload(self, model: str) -> Promise:
        """Drop a model after the operations that are ready. Raise `ApiError` if there is none."""
        with self._state.lock:
            self._check_open()
            if (known := self._state.promises.get(f"{model}:unload")) is not None:
                return known
            if (trained := self._state.models.get(model)) is None:
                raise _unknown_model(model)
            names = {"id": f"{model}:unload", "kind": "unload_model", "digest": "", "session": trained.session}
            return self._accept({"record": "unload", **names, "model": model}, b"")

    def model(self, id: str) -> Model:
        """Return a model that is trained. Raise `ApiError` if there is none."""
        with self._state.lock:
            if (model := self._state.models.get(id)) is None:
                raise _unknown_model(id)
            return model

    def create_sampler(self, session: str, number: int, base_model: str | None, path: str | None) -> Sampler:
        """Begin a sampling session of the base model or of a checkpoint. Wait with `sync` before the answer.

        Raises:
            ApiError: if the session, the base model or the checkpoint does not exist.
        """
        with self._state.lock:
            self._check_open()
            self.session(session)
            id = f"{session}:sample:{number}"
            if (known := self._state.samplers.get(id)) is not None:
                if known.is_ephemeral or known.model_path != path:
                    raise ApiError(f"the sampling session {id!r} exists, and samples from other weights")
                return known
            if path is not None:
                info = self.checkpoints.info(self.checkpoints.existing(path))
                base_model = base_model or info["base_model"]
            elif base_model is not None:
                self._state.base.check_name(base_model)
            else:
                raise RequestError("give base_model or model_path")
            names = {"id": id, "session": session, "base_model": base_model, "model_path": path, "ephemeral": None}
            self._state.record({"record": "sampler", **names})
            return self._state.samplers[id]

    def sampler(self, id: str) -> Sampler:
        """Return a sampling session. Raise `ApiError` if there is none."""
        with self._state.lock:
            if (sampler := self._state.samplers.get(id)) is None:
                raise ApiError(
                    f"there is no sampling session {id!r:.200}: its session ended, or its weights were deleted, as "
                    f"only the {EPHEMERAL_SAMPLERS} most recently used weights without a name are kept; give a name to "
                    "weights that are used longer",
                    status=HTTPStatus.NOT_FOUND,
                )
            return sampler

    def sample(self, body: requests.SampleBody, data: bytes) -> Promise:
        """Accept a prompt to sample from; `data` are the canonical bytes of the request.

        Raises:
            ApiError: if it is refused.
        """
        with self._state.lock:
            self._check_open()
            id, digest = f"{body.sampling_session_id}:{body.seq_id}", _digest("sample", data)
            if (known := self._repeated(id, digest)) is not None:
                return known
            sampler = self.sampler(body.sampling_session_id)
            self.session(sampler.session)
            body.params(0)
            waiting = sum(map(len, self._state.waiting.values()))
            if waiting >= MAX_WAITING_SAMPLES:
                raise busy(f"{waiting} requests wait for samples")
            self._check_capacity(len(data))
            names = {"id": id, "kind": "sample", "digest": digest, "session": sampler.session}
            promise = self._accept({"record": "sample", **names}, data)
            self._state.enqueue(promise)
            return promise

    async def sync(self, promise: Promise | None = None) -> None:
        """Wait until a request, or all so far, are on the disk."""
        self._state.loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._state.journal.sync, None if promise is None else promise.position)

    async def retrieve(self, id: str, seconds: float) -> Promise | None:
        """Wait for a result, at most `seconds`; None if there is none yet. It is kept for a while after this.

        Raises:
            ApiError: if there is no such request.
        """
        self._state.loop = asyncio.get_running_loop()
        with self._state.lock:
            if (promise := self._state.promises.get(id)) is None:
                raise ApiError(
                    f"there is no request {id!r:.200}, or its result is no longer kept", status=HTTPStatus.NOT_FOUND
                )
            if (session := self._state.sessions.get(promise.session)) is not None:
                session.seen = time.monotonic()
            # After a restart, samples are repeated only for clients that ask for them.
            if promise.kind == "sample" and promise.result is None and not promise.is_waiting:
                self._state.enqueue(promise)
        if promise.result is None and not self._state.is_closing:
            try:
                await asyncio.wait_for(promise.done.wait(), seconds)
            except TimeoutError:
                return None
        if promise.result is None:
            return None
        promise.delivered = time.monotonic()
        return promise

    async def call(self, task: Callable[[], Result]) -> Result:
        """Run a function between two operations, so that it does not change files that the trainer reads."""
        future: ThreadFuture[Result] = ThreadFuture()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        with self._state.wake:
            self._check_open()
            self._state.tasks.append(run)
            self._state.wake.notify_all()
        return await asyncio.wrap_future(future)

    def counts(self) -> dict[str, int]:
        """Return numbers of what waits, by name."""
        with self._state.lock:
            return {
                "waiting_samples": sum(map(len, self._state.waiting.values())),
                "waiting_operations": sum(len(model.queue) for model in self._state.models.values()),
                "result_bytes": self._state.result_bytes,
                "journal_bytes": self._state.journal.size,
                "programs": self._trainer.num_programs,
            }

    def _check_open(self) -> None:
        if self.failure is not None or self._state.is_closing:
            reason = "the server shuts down" if self.failure is None else f"the trainer failed: {self.failure}"
            raise ApiError(reason, status=HTTPStatus.SERVICE_UNAVAILABLE)

    def _repeated(self, id: str, digest: str) -> Promise | None:
        """Return the request that was accepted with this id."""
        if (known := self._state.promises.get(id)) is None:
            return None
        if known.digest != digest:
            raise ApiError(f"the request {id!r} was accepted with another body; use the next seq_id")
        return known

    def _check_capacity(self, size: int) -> None:
        if self._state.waiting_bytes + size > MAX_WAITING_BYTES:
            raise busy(f"requests of {self._state.waiting_bytes} bytes wait")
        if self._state.result_bytes > MAX_RESULT_BYTES:
            self._state.forget_delivered(MAX_RESULT_BYTES // 2)
        if self._state.result_bytes > MAX_RESULT_BYTES:
            raise busy(f"results of {self._state.result_bytes} bytes are kept")

    def _accept(self, header: Mapping[str, Any], body: bytes) -> Promise:
        try:
            position = self._state.record(header, body)
        except RecordedError as error:
            raise ApiError(f"{header['id']!r} was done earlier, and its result is no longer kept") from error
        promise = self._state.promises[header["id"]]
        promise.position = position
        return promise


def _digest(kind: str, body: bytes) -> str:
    """Return a hash of what a repetition of a request has, too."""
    if kind == "save_weights_for_sampler":
        # The SDK numbers the sampling session of a repetition anew; the first number is in the result.
        values = json.loads(body)
        body = requests.canonical_json({**values, "sampling_session_seq_id": None})
    return hashlib.sha256(body).hexdigest()[:32]


def _unknown_model(id: str) -> ApiError:
    return ApiError(
        f"there is no model {id!r:.200}: it was unloaded, replaced, or never created", status=HTTPStatus.NOT_FOUND
    )
