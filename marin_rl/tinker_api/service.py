# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The state of a Tinker server: sessions, models, operations, samplers and results.

Why a kill at any moment neither loses nor doubles a gradient:

- A request that changes state is a record of the journal, on the disk before its promise is answered and before the
  trainer runs it. What the client was not promised, it sends again, with the same `seq_id`; the journal has each
  `seq_id` of a model once.
- The state is a function of the records in their order: `_apply` makes the same changes when a request arrives and when
  the journal is read. Decisions that depend on the time, such as the end of a silent session, are records.
- A model's operations run one by one in the order of `seq_id`, so its weights are a function of the operations before.
  A recovery state is the weights after a number of operations. One rename replaces the journal by one whose head names
  the new state and this number, and which still has all later operations. Before the rename the old journal names the
  old state; a folder that the journal does not name is deleted at the start.
- At the start the trainer loads the state and runs the later operations once. Results in the journal are kept: an
  operation that failed is skipped, as it changed nothing; so is one that only wrote a checkpoint. Operations that read
  a checkpoint, which might change later, are followed by a recovery state at once.
"""

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from marin_rl.serving.bodies import ApiError
from marin_rl.tinker_api import checkpoints, requests
from marin_rl.tinker_api.checkpoints import Checkpoints, ServedModel
from marin_rl.tinker_api.journal import Journal, Record
from marin_rl.tinker_api.messages import read_forward_backward, write_outputs, write_samples
from marin_rl.tinker_api.records import ModelSpec, RequestError, SampleJob, SampleOutputs, Trainer
from marin_rl.utils.errors import UserError, describe

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

EPHEMERAL_SAMPLERS = 8
"""Number of samplers without a name whose weights are kept."""
MAX_AHEAD = 10_000
"""How far a `seq_id` may be ahead of the next operation."""
MAX_WAITING_SAMPLES = 8192
MAX_WAITING_BYTES = 512 * 2**20
MAX_RESULT_BYTES = 2**30
_FORGET_SECONDS = 24 * 3600.0
"""Seconds without a sign of its client after which a session ends, even if nobody else needs the server."""
_SWEEP_SECONDS = 30.0
_COMPACT_BYTES = 2**26
"""Growth after which a journal is rewritten without a new recovery state."""
_WRITES = ("save_weights", "save_weights_for_sampler")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Times of a service, in seconds."""

    session: float = 120.0
    """Silence of a session after which another one may train."""
    state: float = 60.0
    """Minimum time between two recovery states."""
    gap: float = 600.0
    """Time for which operations wait for an earlier one that has not arrived."""
    retained: float = 600.0
    """Time for which a result can be read again."""
    unread: float = 3600.0
    """Time for which a result is kept that nobody has read."""


@dataclasses.dataclass
class Session:
    """A client's session."""

    id: str
    key: str | None
    """The client's idempotency key."""
    metadata: Mapping[str, Any] | None
    display_name: str | None
    seen: float
    """Time of the last request."""
    is_ended: bool = False


@dataclasses.dataclass(eq=False)
class Promise:
    """An accepted request and its result."""

    id: str
    kind: str
    """Name of the operation, or `sample`."""
    digest: str
    """Hash of the body, which a repetition must have, too."""
    session: str
    body: bytes = b""
    """The request, until it is done."""
    created: float = dataclasses.field(default_factory=time.monotonic)
    position: int = 0
    """In the journal."""
    result: bytes | None = None
    form: str = ""
    """Of the result: `json`, `protobuf`, or `error`."""
    finished: float = 0.0
    delivered: float | None = None
    is_waiting: bool = False
    """Whether this is a sample that waits for the trainer, or is sampled."""
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


@dataclasses.dataclass
class Model:
    """A model that is trained."""

    id: str
    session: str
    base_model: str
    spec: ModelSpec | None
    """None until a checkpoint is loaded that has it."""
    metadata: Mapping[str, Any] | None
    next: int = 0
    """Number of the next operation; 0 creates the model."""
    queue: dict[int, Promise] = dataclasses.field(default_factory=dict)
    """Operations that have not run, by `seq_id`."""
    skipped: set[int] = dataclasses.field(default_factory=set)
    """Numbers of refused operations."""
    is_ending: bool = False
    """Whether it accepts no further operations."""
    is_loaded: bool = False
    """Whether the trainer has it."""
    unload: Promise | None = None
    advanced: float = dataclasses.field(default_factory=time.monotonic)
    """Time of the last operation."""

    def ready(self) -> Promise | None:
        """Return the operation that comes next, if it has arrived."""
        while self.next in self.skipped:
            self.skipped.remove(self.next)
            self.next += 1
        return self.queue.get(self.next)


@dataclasses.dataclass
class Sampler:
    """A sampling session."""

    id: str
    session: str
    base_model: str
    model_path: str | None
    folder: Path | None
    """The weights; None for the base."""
    is_ephemeral: bool
    used: float = 0.0


class Service:
    """Accepts requests in an event loop, and runs them in one thread."""

    def __init__(self, trainer: Trainer, folder: Path, base: ServedModel, limits: Limits = Limits()) -> None:
        """Read the journal of an earlier process.

        Args:
            trainer: runs operations.
            folder: of the checkpoints, of the journal and of the recovery state.
            base: model that the trainer has.
            limits: times.

        Raises:
            UserError: if another server uses the folder, or if the folder belongs to another base model.
        """
        self._trainer, self._base, self._limits = trainer, base, limits
        self._hidden = folder / ".server"
        self._journal = Journal(self._hidden / "journal")
        self.checkpoints = Checkpoints(folder, base)
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        self._promises: dict[str, Promise] = {}
        self._waiting: dict[Path | None, dict[str, Promise]] = {}
        """Samples by their weights, in the order of arrival."""
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._state: dict[str, Any] | None = None
        """The recovery state: `folder`, `model`, and the model's `next`."""
        self._states = 0
        self._waiting_bytes = self._result_bytes = self._compacted = 0
        self._swept = time.monotonic()
        self._saved = time.monotonic()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self.failure: Exception | None = None
        """Error that ended the thread."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the thread when it fails."""
        self.on_sampled: Callable[[int], None] = lambda number: None
        """Called with the number of tokens of a result."""
        try:
            self._recover()
        except BaseException:
            self._journal.close()
            raise

    # The start and the end.

    def start(self) -> None:
        """Begin to run operations."""
        self._thread.start()

    def stop(self) -> None:
        """Run no further operations, and answer clients that wait."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
            for promise in self._promises.values():
                self._wake_clients(promise)

    def close(self) -> None:
        """Wait for the operation that runs, and close the journal."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._journal.close()

    def _recover(self) -> None:
        records = list(self._journal.recover())
        if not records:
            self._journal.rewrite(Record(self._head()), 0, lambda header: True)
            return
        head = records[0].header
        if head["fingerprint"] != self._base.fingerprint:
            raise UserError(
                f"{str(self._hidden.parent)!r} belongs to another base model, with fingerprint {head['fingerprint']}, "
                f"not {self._base.fingerprint}; start the server with that model, or choose another folder"
            )
        self._state, self._states = head["state"], head["states"]
        for values in head["sessions"]:
            self._sessions[values["id"]] = Session(**values, seen=time.monotonic())
        for values in head["samplers"]:
            self._add_sampler(values)
        for values in head["models"]:
            spec = values.pop("spec")
            self._models[values["id"]] = Model(**values, spec=spec and ModelSpec(**spec))
        for header, body in records[1:]:
            self._apply(header, body, 0)
        for sampler in list(self._samplers.values()):
            if sampler.folder is not None and not sampler.folder.exists():
                del self._samplers[sampler.id]
        named = None if self._state is None else self._state["folder"]
        for folder in self._hidden.glob("state-*"):
            if folder.name != named:
                shutil.rmtree(folder)

    def _head(self) -> dict[str, Any]:
        """Return the first record of a journal, which replaces the former ones that are not kept."""
        kept = {promise.session for promise in self._promises.values()}
        kept |= {model.session for model in self._models.values()}
        sessions = [one for one in self._sessions.values() if not one.is_ended or one.id in kept]
        state_model = None if self._state is None else self._models.get(self._state["model"])
        models = [] if state_model is None else [state_model]
        return {
            "fingerprint": self._base.fingerprint,
            "state": self._state,
            "states": self._states,
            "sessions": [
                {name: getattr(one, name) for name in ("id", "key", "metadata", "display_name", "is_ended")}
                for one in sessions
            ],
            "samplers": [self._sampler_record(one) for one in self._samplers.values()],
            "models": [
                {
                    "id": one.id,
                    "session": one.session,
                    "base_model": one.base_model,
                    "spec": one.spec and dataclasses.asdict(one.spec),
                    "metadata": one.metadata,
                    "next": self._state["next"] if self._state else 0,
                    "is_ending": one.is_ending,
                }
                for one in models
            ],
        }

    # Records: the changes that are repeated at the start.

    def _record(self, header: Mapping[str, Any], body: bytes = b"") -> int:
        position = self._journal.append(header, body)
        self._apply(header, body, position)
        self._wake.notify_all()
        return position

    def _apply(self, header: Mapping[str, Any], body: bytes, position: int) -> None:
        match header["record"]:
            case "session":
                fields = ("id", "key", "metadata", "display_name")
                session = Session(**{name: header[name] for name in fields}, seen=time.monotonic())
                self._sessions[session.id] = session
            case "end":
                self._end(header["session"])
            case "operation":
                self._add_operation(header, body, position)
            case "refused":
                self._refuse(header)
            case "unload":
                promise = self._promise(header, b"", position)
                if (model := self._models.get(header["model"])) is not None:
                    model.is_ending, model.unload = True, promise
            case "sampler":
                self._add_sampler(header)
            case "sample":
                self._promise(header, body, position)
            case "result":
                promise = self._promises.get(header["id"]) or self._promise(header, b"", 0)
                self._set_result(promise, header["form"], body)

    def _promise(self, header: Mapping[str, Any], body: bytes, position: int) -> Promise:
        id = header["id"]
        promise = Promise(id, header["kind"], header["digest"], header["session"], body, position=position)
        self._promises[id] = promise
        self._waiting_bytes += len(body)
        return promise

    def _add_operation(self, header: Mapping[str, Any], body: bytes, position: int) -> None:
        promise = self._promise(header, body, position)
        id, seq = header["model"], header["seq"]
        if seq == 0 and id not in self._models:
            for former in self._models.values():
                former.is_ending = True
            spec = header["spec"] and ModelSpec(**header["spec"])
            self._models[id] = Model(id, header["session"], header["base_model"], spec, header["metadata"])
        if (model := self._models.get(id)) is not None and seq >= model.next:
            model.queue[seq] = promise

    def _refuse(self, header: Mapping[str, Any]) -> None:
        promise = self._promises.get(header["id"]) or self._promise(header, b"", 0)
        if (model := self._models.get(header["model"])) is not None:
            model.queue.pop(header["seq"], None)
            if header["seq"] >= model.next:
                model.skipped.add(header["seq"])
        self._set_result(promise, "error", _error_body(header["message"], "user"))

    def _end(self, id: str) -> None:
        if id in self._sessions:
            self._sessions[id].is_ended = True
        for model in self._models.values():
            model.is_ending |= model.session == id
        self._samplers = {key: one for key, one in self._samplers.items() if one.session != id}

    def _add_sampler(self, values: Mapping[str, Any]) -> Sampler:
        path, ephemeral = values["model_path"], values["ephemeral"]
        if ephemeral is not None:
            folder = self.checkpoints.ephemeral(*ephemeral)
        else:
            folder = None if path is None else self.checkpoints.locate(path, tuple(checkpoints.KINDS))
        sampler = Sampler(
            values["id"], values["session"], values["base_model"], path, folder, ephemeral is not None, time.monotonic()
        )
        self._samplers[sampler.id] = sampler
        return sampler

    def _sampler_record(self, sampler: Sampler) -> dict[str, Any]:
        ephemeral = None
        if sampler.folder is not None and sampler.is_ephemeral:
            ephemeral = (sampler.folder.parent.parent.name, int(sampler.folder.name.rpartition("-")[2]))
        names = {name: getattr(sampler, name) for name in ("id", "session", "base_model", "model_path")}
        return {"record": "sampler", **names, "ephemeral": ephemeral}

    def _set_result(self, promise: Promise, form: str, result: bytes) -> None:
        if promise.result is None:
            self._waiting_bytes -= len(promise.body)
            self._result_bytes += len(result)
            promise.result, promise.form, promise.finished = result, form, time.monotonic()
        if promise.kind == "sample":
            promise.body = b""
        self._wake_clients(promise)

    def _wake_clients(self, promise: Promise) -> None:
        # The loop may be closed at the end.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(promise.done.set)

    def _finish(self, promise: Promise, form: str, result: bytes) -> None:
        """Answer a request, unless it was answered before."""
        with self._lock:
            if promise.result is not None:
                return
            try:
                self._journal.append(
                    {
                        "record": "result",
                        "id": promise.id,
                        "kind": promise.kind,
                        "digest": promise.digest,
                        "session": promise.session,
                        "form": form,
                    },
                    result,
                )
            except OSError as error:
                # After a restart it is computed again.
                logger.warning("the result of %s is not in the journal: %s", promise.id, error)
            self._set_result(promise, form, result)

    def _fail(self, promise: Promise, message: str, category: str = "user") -> None:
        self._finish(promise, "error", _error_body(message, category))

    # Requests, in the event loop.

    def create_session(self, key: str | None, metadata: Mapping[str, Any] | None, display_name: str | None) -> Session:
        """Begin a session, or return the one that the same request began. Wait with `sync` before the answer."""
        with self._lock:
            self._check_open()
            for session in self._sessions.values():
                if key is not None and session.key == key:
                    return session
            id = secrets.token_hex(8)
            names = {"key": key, "metadata": metadata, "display_name": display_name}
            self._record({"record": "session", "id": id, **names})
            return self._sessions[id]

    def session(self, id: str) -> Session:
        """Return a session, and note that its client is alive. Raise `ApiError` if there is none."""
        with self._lock:
            session = self._sessions.get(id)
            if session is None or session.is_ended:
                raise ApiError(
                    f"the session {id!r:.100} has ended or never existed; create another one", status=HTTPStatus.GONE
                )
            session.seen = time.monotonic()
            return session

    def describe_session(self, id: str) -> tuple[Session, list[str]]:
        """Return a session and the ids of its samplers. Raise `ApiError` if there is none."""
        with self._lock:
            if (session := self._sessions.get(id)) is None:
                raise ApiError(f"there is no session {id!r:.200}", status=HTTPStatus.NOT_FOUND)
            return session, [one.id for one in self._samplers.values() if one.session == id]

    def sessions(self) -> list[Session]:
        """Return the sessions that have not ended, the newest first."""
        with self._lock:
            return [one for one in reversed(self._sessions.values()) if not one.is_ended]

    def end_session(self, id: str) -> None:
        """End a session: its model is unloaded after the operations that are ready, and its samples fail."""
        with self._lock:
            self._check_open()
            if id not in self._sessions or self._sessions[id].is_ended:
                return
            self._record({"record": "end", "session": id})
            for promise in list(self._promises.values()):
                if promise.session == id and promise.kind == "sample":
                    self._fail(promise, "the session has ended")
            for waiting in self._waiting.values():
                for promise in [one for one in waiting.values() if one.session == id]:
                    del waiting[promise.id]
            self._tasks.append(self._sweep_samplers)

    def create_model(
        self, session: str, number: int, kind: str, body: Mapping[str, Any], base_model: str, spec: ModelSpec | None
    ) -> Promise:
        """Begin a model. One of the same session ends; one of another session must have ended, or be silent.

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
        with self._lock:
            self._check_open()
            id, data = f"{session}:train:{number}", requests.canonical_json(body)
            if (known := self._repeated(f"{id}:0", data)) is not None:
                return known
            self.session(session)
            for other in self._models.values():
                owner = self._sessions.get(other.session)
                if other.is_ending or other.session == session or owner is None:
                    continue
                if time.monotonic() - owner.seen < self._limits.session:
                    raise ApiError(
                        f"the server trains the model {other.id!r} of session {other.session!r}"
                        f"{f' ({owner.display_name})' if owner.display_name else ''}, and one model at a time; finish "
                        "that session, or wait until its client has been silent for "
                        f"{self._limits.session:g} seconds"
                    )
                self.end_session(other.session)
            return self._accept(
                {
                    "record": "operation",
                    "id": f"{id}:0",
                    "kind": kind,
                    "digest": _digest(data),
                    "session": session,
                    "model": id,
                    "seq": 0,
                    "base_model": base_model,
                    "spec": spec and dataclasses.asdict(spec),
                    "metadata": body.get("user_metadata"),
                },
                data,
            )

    def operate(self, model: str, seq: int, kind: str, body: bytes, problem: Exception | None = None) -> Promise:
        """Accept an operation of a model, at its place in the order of `seq`.

        Args:
            model: id of the model.
            seq: number of the operation.
            kind: name of the operation.
            body: canonical bytes of the request.
            problem: why the request is invalid; it uses up its number, because the client goes on with the next one.

        Raises:
            ApiError: if the request is refused.
        """
        with self._lock:
            self._check_open()
            id = f"{model}:{seq}"
            if (known := self._repeated(id, body)) is not None:
                return known
            if (trained := self._models.get(model)) is None or trained.is_ending:
                raise _unknown_model(model)
            self.session(trained.session)
            if seq < trained.next or seq in trained.skipped:
                raise ApiError(f"the operation {seq} of {model!r} was done earlier, and its result is no longer kept")
            if seq > trained.next + MAX_AHEAD:
                raise ApiError(f"seq_id is {seq}, but the next operation of {model!r} is {trained.next}")
            header = {
                "id": id,
                "kind": kind,
                "digest": _digest(body),
                "session": trained.session,
                "model": model,
                "seq": seq,
            }
            if problem is not None:
                self._record({"record": "refused", **header, "message": str(problem)})
                raise problem if isinstance(problem, ApiError) else ApiError(str(problem))
            # Others may wait for the next operation, so it is always accepted.
            if seq != trained.next:
                self._check_capacity(len(body))
            return self._accept({"record": "operation", **header}, body)

    def unload(self, model: str) -> Promise:
        """Drop a model after the operations that are ready. Raise `ApiError` if there is none."""
        with self._lock:
            self._check_open()
            if (known := self._promises.get(f"{model}:unload")) is not None:
                return known
            if (trained := self._models.get(model)) is None:
                raise _unknown_model(model)
            names = {"id": f"{model}:unload", "kind": "unload_model", "digest": "", "session": trained.session}
            return self._accept({"record": "unload", **names, "model": model}, b"")

    def model(self, id: str) -> Model:
        """Return a model that is trained. Raise `ApiError` if there is none."""
        with self._lock:
            if (model := self._models.get(id)) is None:
                raise _unknown_model(id)
            return model

    def create_sampler(self, session: str, number: int, base_model: str | None, path: str | None) -> Sampler:
        """Begin a sampling session of the base model or of a checkpoint. Wait with `sync` before the answer.

        Raises:
            ApiError: if the session or the checkpoint does not exist.
        """
        with self._lock:
            self._check_open()
            self.session(session)
            id = f"{session}:sample:{number}"
            if (known := self._samplers.get(id)) is not None:
                if known.is_ephemeral or known.model_path != path:
                    raise ApiError(f"the sampling session {id!r} exists, and samples from other weights")
                return known
            try:
                if path is not None:
                    base_model = base_model or self.checkpoints.info(self.checkpoints.existing(path))["base_model"]
                elif base_model is not None:
                    self._base.check_name(base_model)
                else:
                    raise RequestError("give base_model or model_path")
            except RequestError as error:
                raise ApiError(str(error), status=HTTPStatus.NOT_FOUND) from error
            names = {"id": id, "session": session, "base_model": base_model, "model_path": path, "ephemeral": None}
            self._record({"record": "sampler", **names})
            return self._samplers[id]

    def sampler(self, id: str) -> Sampler:
        """Return a sampling session. Raise `ApiError` if there is none."""
        with self._lock:
            if (sampler := self._samplers.get(id)) is None:
                raise ApiError(
                    f"there is no sampling session {id!r:.200}: its session ended, or its weights were deleted, as "
                    f"only the {EPHEMERAL_SAMPLERS} most recently used weights without a name are kept; give a name to "
                    "weights that are used longer",
                    status=HTTPStatus.NOT_FOUND,
                )
            return sampler

    def sample(self, body: requests.SampleBody, data: bytes) -> Promise:
        """Accept a prompt to sample from.

        Args:
            body: the request.
            data: its canonical bytes.

        Raises:
            ApiError: if it is refused.
        """
        with self._lock:
            self._check_open()
            id = f"{body.sampling_session_id}:{body.seq_id}"
            if (known := self._repeated(id, data)) is not None:
                return known
            sampler = self.sampler(body.sampling_session_id)
            self.session(sampler.session)
            try:
                body.params(0)
            except RequestError as error:
                raise ApiError(str(error)) from error
            waiting = sum(map(len, self._waiting.values()))
            if waiting >= MAX_WAITING_SAMPLES:
                raise _busy(f"{waiting} requests wait for samples")
            self._check_capacity(len(data))
            names = {"id": id, "kind": "sample", "digest": _digest(data), "session": sampler.session}
            promise = self._accept({"record": "sample", **names}, data)
            self._enqueue(promise)
            return promise

    async def sync(self, promise: Promise | None = None) -> None:
        """Wait until a request, or all so far, are on the disk."""
        self._loop = asyncio.get_running_loop()
        position = self._journal.position if promise is None else promise.position
        await asyncio.to_thread(self._journal.sync, position)

    async def retrieve(self, id: str, seconds: float) -> Promise | None:
        """Wait for a result. It is kept for a while after this.

        Args:
            id: of the request.
            seconds: maximum time.

        Returns:
            The request with its result; None if there is none yet.

        Raises:
            ApiError: if there is no such request.
        """
        self._loop = asyncio.get_running_loop()
        with self._lock:
            if (promise := self._promises.get(id)) is None:
                raise ApiError(
                    f"there is no request {id!r:.200}, or its result is no longer kept", status=HTTPStatus.NOT_FOUND
                )
            if (session := self._sessions.get(promise.session)) is not None:
                session.seen = time.monotonic()
            # After a restart, samples are repeated only for clients that ask for them.
            if promise.kind == "sample" and promise.result is None and not promise.is_waiting:
                self._enqueue(promise)
        if promise.result is None and not self._is_closing:
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

        with self._wake:
            self._check_open()
            self._tasks.append(run)
            self._wake.notify_all()
        return await asyncio.wrap_future(future)

    def counts(self) -> dict[str, int]:
        """Return numbers of what waits, by name."""
        with self._lock:
            return {
                "waiting_samples": sum(map(len, self._waiting.values())),
                "waiting_operations": sum(len(model.queue) for model in self._models.values()),
                "result_bytes": self._result_bytes,
                "journal_bytes": self._journal.size,
            }

    def _check_open(self) -> None:
        if self.failure is not None or self._is_closing:
            reason = "the server shuts down" if self.failure is None else f"the trainer failed: {self.failure}"
            raise ApiError(reason, status=HTTPStatus.SERVICE_UNAVAILABLE)

    def _repeated(self, id: str, body: bytes) -> Promise | None:
        """Return the request that was accepted with this id."""
        if (known := self._promises.get(id)) is None:
            return None
        if known.digest != _digest(body):
            raise ApiError(f"the request {id!r} was accepted with another body; use the next seq_id")
        return known

    def _check_capacity(self, size: int) -> None:
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise _busy(f"requests of {self._waiting_bytes} bytes wait")
        if self._result_bytes > MAX_RESULT_BYTES:
            raise _busy(f"results of {self._result_bytes} bytes are kept")

    def _accept(self, header: Mapping[str, Any], body: bytes) -> Promise:
        position = self._record(header, body)
        promise = self._promises[header["id"]]
        promise.position = position
        return promise

    def _enqueue(self, promise: Promise) -> None:
        sampler = self._samplers.get(promise.id.rpartition(":")[0])
        if sampler is None:
            self._fail(promise, "the weights of this sampling session were deleted")
            return
        sampler.used, promise.is_waiting = time.monotonic(), True
        self._waiting.setdefault(sampler.folder, {})[promise.id] = promise
        self._wake.notify_all()

    # The thread.

    def _run(self) -> None:
        try:
            self._restore()
            while not self._is_closing:
                self._step()
        except Exception as error:
            logger.exception("the trainer failed")
            self.failure = error
            self.stop()
            self.on_failure()

    def _restore(self) -> None:
        """Bring the trainer to the state after all operations that are ready, before anything else changes files."""
        if self._state is not None and (model := self._models.get(self._state["model"])) is not None:
            assert model.spec is not None
            self._trainer.create(model.spec)
            self._trainer.load(self._hidden / self._state["folder"], optimizer=True)
            model.is_loaded = True
        while not self._is_closing and self._train():
            pass
        self._sweep_samplers()

    def _step(self) -> None:
        """Run one operation, sample from one version of the weights, and do what was asked in between."""
        is_trained, is_sampled = self._train(), self._sample()
        while self._tasks:
            self._tasks.popleft()()
        self._sweep()
        with self._wake:
            is_idle = not (is_trained or is_sampled or self._is_closing or self._tasks)
            if is_idle and not (self._has_training() or any(self._waiting.values())):
                self._wake.wait(_SWEEP_SECONDS)

    def _current(self) -> Model | None:
        return next(iter(self._models.values()), None)

    def _has_training(self) -> bool:
        model = self._current()
        return model is not None and (model.is_ending or model.ready() is not None)

    def _train(self) -> bool:
        """Run the next operation, if it is there."""
        with self._lock:
            model = self._current()
            promise = None if model is None else model.ready()
        if model is None:
            return False
        if promise is None:
            if model.is_ending:
                self._drop(model)
            return model.is_ending
        self._journal.sync(promise.position)
        form, result = "json", b""
        is_done = promise.result is not None and (
            promise.form == "error" or promise.kind in _WRITES or promise.kind == "forward"
        )
        if not is_done:
            try:
                form, result = self._operate(model, promise)
            except RequestError as error:
                form, result = "error", _error_body(str(error), "user")
            except Exception as error:
                self._fail(promise, f"the server failed: {describe(error)}", "server")
                self._journal.sync(self._journal.position)
                if not (isinstance(error, OSError) and promise.kind in _WRITES):
                    raise
                logger.warning("%s: cannot write the checkpoint: %s", promise.id, error)
        with self._lock:
            del model.queue[model.next]
            model.next, model.advanced = model.next + 1, time.monotonic()
            self._finish(promise, form, result)
            promise.body = b""
            if model.next == 1 and promise.form == "error":
                model.is_ending = True
        is_due = promise.kind == "optim_step" and time.monotonic() - self._saved >= self._limits.state
        if promise.form != "error" and (is_due or promise.kind == "load_weights"):
            self._save_state(model)
        return True

    def _operate(self, model: Model, promise: Promise) -> tuple[str, bytes]:
        """Run an operation; return form and content of its result."""
        if promise.kind in ("forward_backward", "forward"):
            return "protobuf", write_outputs(self._trainer.forward_backward(read_forward_backward(promise.body)))
        values = json.loads(promise.body)
        match promise.kind:
            case "create_model":
                assert model.spec is not None
                self._trainer.create(model.spec)
                model.is_loaded = True
                self._begin(model)
                result = {"model_id": model.id}
            case "optim_step":
                result = {"metrics": self._trainer.optim_step(requests.OptimStep(**values).params())}
            case "load_weights":
                self._load(model, requests.LoadWeights(**values))
                result = {"model_id": model.id, "path": values["path"]}
            case "save_weights":
                body = requests.SaveWeights(**values)
                folder = self.checkpoints.named(model.id, "weights", body.path)
                self._write(model, promise, folder, body.ttl_seconds, body.user_metadata, body.overwrite)
                result = {"path": self.checkpoints.path_of(folder)}
            case _:
                result = self._save_sampler(model, promise, requests.SaveWeightsForSampler(**values))
        return "json", requests.canonical_json(result)

    def _begin(self, model: Model) -> None:
        assert model.spec is not None
        self._saved = time.monotonic()
        self.checkpoints.write_run(
            model.id,
            {
                "session": model.session,
                "base_model": model.base_model,
                "spec": dataclasses.asdict(model.spec),
                "user_metadata": model.metadata,
                "time": checkpoints.now_text(),
            },
        )

    def _load(self, model: Model, body: requests.LoadWeights) -> None:
        folder = self.checkpoints.existing(body.path, ("weights",))
        info = self.checkpoints.info(folder)
        spec = checkpoints.spec_of(info)
        if model.spec is None:
            model.spec, model.base_model = spec, model.base_model or info["base_model"]
            self._trainer.create(spec)
            model.is_loaded = True
            self._trainer.load(folder, optimizer=body.optimizer)
            self._begin(model)
            return
        if dataclasses.replace(spec, seed=model.spec.seed) != model.spec:
            raise RequestError(f"{body.path!r} is a checkpoint of {spec}, but the model is {model.spec}")
        self._trainer.load(folder, optimizer=body.optimizer)

    def _save_sampler(self, model: Model, promise: Promise, body: requests.SaveWeightsForSampler) -> dict[str, str]:
        if body.path is not None:
            folder = self.checkpoints.named(model.id, "sampler_weights", body.path)
            self._write(model, promise, folder, body.ttl_seconds, body.user_metadata)
            return {"path": self.checkpoints.path_of(folder)}
        number = body.sampling_session_seq_id
        assert number is not None
        self._write(model, promise, self.checkpoints.ephemeral(model.id, number), None, None)
        id = f"{model.session}:sample:{number}"
        names = {"id": id, "session": model.session, "base_model": model.base_model, "model_path": None}
        with self._lock:
            if not self._sessions[model.session].is_ended:
                self._record({"record": "sampler", **names, "ephemeral": (model.id, number)})
        self._sweep_samplers()
        return {"sampling_session_id": id}

    def _write(
        self,
        model: Model,
        promise: Promise,
        folder: Path,
        ttl: int | None,
        user_metadata: Mapping[str, Any] | None,
        overwrite: bool = False,
    ) -> None:
        assert model.spec is not None
        self.checkpoints.write(
            folder,
            promise.id,
            self._trainer.save if promise.kind == "save_weights" else self._trainer.save_sampler,
            model.spec,
            base_model=model.base_model,
            ttl=ttl,
            user_metadata=user_metadata,
            overwrite=overwrite,
        )

    def _drop(self, model: Model) -> None:
        """End a model that has no operation that is ready."""
        for promise in list(model.queue.values()):
            self._fail(promise, f"the model ended before the operation {model.next} arrived")
        if model.is_loaded:
            self._trainer.unload()
        with self._lock:
            del self._models[model.id]
        if model.unload is not None:
            self._finish(model.unload, "json", requests.canonical_json({"model_id": model.id}))
        former, self._state = self._state, None
        self._compact()
        if former is not None:
            shutil.rmtree(self._hidden / former["folder"], ignore_errors=True)

    def _save_state(self, model: Model) -> None:
        """Write a recovery state, and drop the records that it replaces."""
        self._states += 1
        folder = self._hidden / f"state-{self._states:08d}"
        former = self._state
        try:
            self._trainer.save(folder)
            checkpoints.sync_folder(folder)
            self._state = {"folder": folder.name, "model": model.id, "next": model.next}
            self._compact()
        except (OSError, RequestError) as error:
            # The former state and the longer journal remain valid.
            logger.warning("cannot write the recovery state: %s", error)
            self._state = former
            shutil.rmtree(folder, ignore_errors=True)
        else:
            if former is not None:
                shutil.rmtree(self._hidden / former["folder"], ignore_errors=True)
        self._saved = time.monotonic()

    def _compact(self) -> None:
        """Rewrite the journal without the records that nobody needs."""
        with self._lock:
            head, size = self._head(), self._journal.size
            sessions = {model.session for model in self._models.values()}
            first = dict.fromkeys(self._models, 0)
            if self._state is not None:
                first[self._state["model"]] = self._state["next"]
            unfinished = {id for id, one in self._promises.items() if one.result is None}
            kept = set(self._promises)

        def keep(header: Mapping[str, Any]) -> bool:
            kind, id = header.get("record"), header.get("id", "")
            model, _, seq = id.rpartition(":")
            is_later = seq.isdecimal() and model in first and int(seq) >= first[model]
            if kind == "end":
                return header["session"] in sessions
            if kind == "unload":
                return header["model"] in first
            if kind == "operation":
                return is_later
            if kind in ("result", "refused"):
                return is_later or id in kept
            return kind == "sample" and id in unfinished

        self._journal.rewrite(Record(head), size, keep)
        self._compacted = self._journal.size

    def _sample(self) -> bool:
        """Sample for the requests to the weights that waited longest."""
        with self._lock:
            waiting = [(next(iter(jobs.values())).created, folder) for folder, jobs in self._waiting.items() if jobs]
            self._waiting = {folder: jobs for folder, jobs in self._waiting.items() if jobs}
        if not waiting:
            return False
        folder = min(waiting, key=lambda one: one[0])[1]
        source = _Source(self, folder)
        if folder is not None and not folder.exists():
            source.take()
            source.fail("the weights of this sampling session were deleted", "user")
            return True
        try:
            self._trainer.sample(folder, source)
        except RequestError as error:
            source.fail(str(error), "user")
        except Exception as error:
            source.fail(f"the server failed: {describe(error)}", "server")
            raise
        source.fail("the trainer did not answer the request", "server")
        return True

    def _take(self, folder: Path | None, is_first: bool) -> list[Promise]:
        """Return the samples that wait for some weights; later ones have to wait if others wait, too."""
        with self._lock:
            others = any(jobs for other, jobs in self._waiting.items() if other != folder)
            is_due = time.monotonic() - self._swept > _SWEEP_SECONDS
            if not is_first and (others or is_due or self._tasks or self._is_closing or self._has_training()):
                return []
            return list(self._waiting.pop(folder, {}).values())

    def _sweep_samplers(self) -> None:
        """Delete weights without a name that are not among the most recently used ones."""
        with self._lock:
            ephemeral = sorted((one for one in self._samplers.values() if one.is_ephemeral), key=lambda one: one.used)
            for sampler in ephemeral[:-EPHEMERAL_SAMPLERS]:
                if not self._waiting.get(sampler.folder):
                    del self._samplers[sampler.id]
            used = {one.folder for one in self._samplers.values() if one.folder is not None and one.is_ephemeral}
        self.checkpoints.delete_ephemeral(used)

    def _sweep(self) -> None:
        """Drop what is no longer needed."""
        now = time.monotonic()
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        with self._lock:
            queued = {promise.id for model in self._models.values() for promise in model.queue.values()}
            living = {session.id for session in self.sessions()}
            for promise in list(self._promises.values()):
                if promise.result is None or promise.id in queued:
                    continue
                is_unread = promise.delivered is None and promise.session in living
                kept = self._limits.unread if is_unread else self._limits.retained
                if now - (promise.delivered or promise.finished) > kept:
                    del self._promises[promise.id]
                    self._result_bytes -= len(promise.result)
            for session in self.sessions():
                if now - session.seen > _FORGET_SECONDS:
                    self.end_session(session.id)
            if (model := self._current()) is not None:
                self._skip_gap(model, now)
        self.checkpoints.delete_expired()
        if self._journal.size > self._compacted + _COMPACT_BYTES:
            self._compact()

    def _skip_gap(self, model: Model, now: float) -> None:
        """Refuse operations that have waited too long for an earlier one, and the missing ones."""
        if model.ready() is not None or not model.queue:
            return
        if now - max(model.advanced, min(one.created for one in model.queue.values())) < self._limits.gap:
            return
        message = f"the operation {model.next} did not arrive within {self._limits.gap:g} seconds"
        for seq in range(model.next, max(model.queue) + 1):
            promise = model.queue.get(seq)
            names = {"id": f"{model.id}:{seq}", "kind": "refused", "digest": promise.digest if promise else ""}
            names |= {"session": model.session, "model": model.id}
            self._record({"record": "refused", **names, "seq": seq, "message": message})


class _Source:
    """Gives a trainer the samples that wait for some weights."""

    def __init__(self, service: Service, folder: Path | None) -> None:
        self._service, self._folder = service, folder
        self._taken: dict[str, Promise] = {}
        self._is_first = True

    def take(self) -> Sequence[SampleJob]:
        jobs = []
        for promise in self._service._take(self._folder, self._is_first):
            self._taken[promise.id] = promise
            body = requests.SampleBody(**json.loads(promise.body))
            jobs.append(SampleJob(promise.id, body.params(zlib.crc32(promise.id.encode()))))
        self._is_first = False
        return jobs

    def finish(self, key: str, result: SampleOutputs | RequestError) -> None:
        promise = self._taken.pop(key)
        if isinstance(result, RequestError):
            self._service._fail(promise, str(result))
            return
        self._service.on_sampled(sum(len(sample.tokens) for sample in result.samples))
        self._service._finish(promise, "protobuf", write_samples(result))

    def fail(self, message: str, category: str) -> None:
        """Answer the requests that have no result."""
        for promise in self._taken.values():
            self._service._fail(promise, message, category)
        self._taken.clear()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


def _error_body(message: str, category: str) -> bytes:
    return requests.canonical_json({"error": message, "category": category})


def _busy(what: str) -> ApiError:
    return ApiError(f"{what}; retry later", status=HTTPStatus.TOO_MANY_REQUESTS, code="rate_limit_exceeded")


def _unknown_model(id: str) -> ApiError:
    return ApiError(
        f"there is no model {id!r:.200}: it was unloaded, replaced, or never created", status=HTTPStatus.NOT_FOUND
    )
