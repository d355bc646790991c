# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The state of a Tinker server, and the records that it is made of.

Why a kill at any moment neither loses nor doubles a gradient:

- A request that changes state is a record of the journal, on the disk before its promise is answered and before the
  trainer runs it. What the client was not promised, it sends again, with the same `seq_id`; the journal has each
  `seq_id` of a model once.
- The state is a function of the records in their order: `_apply` makes the same changes when a request arrives and when
  the journal is read. Decisions that depend on the time, such as the end of a silent session, are records.
- A model's operations run one by one in the order of `seq_id`, so its weights are a function of the operations before.
  A recovery state is the weights after a number of operations, in a folder that a record names when it is complete.
  The former folder and the records of these operations are deleted later. A folder that the newest such record does
  not name is deleted at the start.
- At the start the trainer loads the state and runs the later operations once. Results in the journal are kept: an
  operation that failed is skipped, as it changed nothing; so is one that only wrote a checkpoint. Operations that read
  a checkpoint, which might change later, are followed by a recovery state at once.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from marin_rl.serving.tinker import checkpoints
from marin_rl.serving.tinker.checkpoints import Checkpoints, ServedModel
from marin_rl.serving.tinker.journal import Journal, RecordedError
from marin_rl.serving.tinker.records import ForwardBackward, ModelSpec
from marin_rl.serving.tinker.requests import canonical_json
from marin_rl.utils.errors import UserError

logger = logging.getLogger(__name__)


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
    """The request, until it is done, or until `parsed` replaces it."""
    parsed: ForwardBackward | None = None
    """The request, if it was parsed since the start, until it has a result."""
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

    @property
    def size(self) -> int:
        """Bytes of the request in memory, about."""
        return len(self.body) if self.parsed is None else self.parsed.size


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


class ServerState:
    """Sessions, models, samplers and promises, as the records of the journal make them.

    All attributes are read and changed under `lock`.
    """

    def __init__(self, folder: Path, base: ServedModel) -> None:
        """Read the journal of an earlier process.

        `folder` has the checkpoints, the journal and the recovery state; `base` is the model that the trainer has.

        Raises:
            UserError: if another server uses the folder, it belongs to another base model, or its journal is damaged.
        """
        self.base, self.hidden = base, folder / ".server"
        self.journal = Journal(self.hidden / "journal")
        self.checkpoints = Checkpoints(folder, base)
        self.lock = threading.RLock()
        self.wake = threading.Condition(self.lock)
        """Notified when there is work for the trainer."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        """In the order of training: the first one is trained."""
        self.samplers: dict[str, Sampler] = {}
        self.promises: dict[str, Promise] = {}
        self.waiting: dict[Path | None, dict[str, Promise]] = {}
        """Samples by their weights, in the order of arrival."""
        self.tasks: collections.deque[Callable[[], None]] = collections.deque()
        """Run by the trainer's thread between operations."""
        self.recovery: Mapping[str, Any] | None = None
        """The record of the recovery state: its folder is the `id`; `model`, and the model's `next`."""
        self.waiting_bytes = self.result_bytes = 0
        self.is_closing = False
        try:
            self._recover()
        except BaseException:
            self.journal.close()
            raise

    def _recover(self) -> None:
        with contextlib.suppress(RecordedError):
            self.journal.append({"record": "base", "id": "", "fingerprint": self.base.fingerprint})
        for header, body in self.journal.records():
            self._apply(header, body, 0)
        for sampler in list(self.samplers.values()):
            if sampler.folder is not None and not sampler.folder.exists():
                del self.samplers[sampler.id]
        named = None if self.recovery is None else self.recovery["id"]
        for folder in self.hidden.glob("state-*"):
            if folder.name != named:
                shutil.rmtree(folder)

    def record(self, header: Mapping[str, Any], body: bytes = b"") -> int:
        """Write a record and make its changes; return its position in the journal."""
        # The SDK may use the id of a sampler again, for other weights.
        position = self.journal.append(header, body, replace=header["record"] == "sampler")
        self._apply(header, body, position)
        self.wake.notify_all()
        return position

    def _apply(self, header: Mapping[str, Any], body: bytes, position: int) -> None:
        match header["record"]:
            case "base":
                if (found := header["fingerprint"]) != self.base.fingerprint:
                    raise UserError(
                        f"{str(self.hidden.parent)!r} belongs to another base model, with fingerprint {found}, not "
                        f"{self.base.fingerprint}; start the server with that model, or choose another folder"
                    )
            case "session":
                fields = ("id", "key", "metadata", "display_name")
                session = Session(**{name: header[name] for name in fields}, seen=time.monotonic())
                self.sessions[session.id] = session
            case "end":
                self._end(header["id"])
            case "operation":
                self._add_operation(header, body, position)
            case "refused":
                self._refuse(header)
            case "unload":
                promise = self._promise(header, b"", position)
                if (model := self.models.get(header["model"])) is not None:
                    model.is_ending, model.unload = True, promise
            case "sampler":
                self._add_sampler(header)
            case "sample":
                self._promise(header, body, position)
            case "result":
                promise = self.promises.get(header["id"]) or self._promise(header, b"", 0)
                self._set_result(promise, header["form"], body)
            case "recovery":
                self._set_recovery(header)

    def _set_recovery(self, header: Mapping[str, Any]) -> None:
        self.recovery, model = header, self.models[header["model"]]
        model.base_model, model.spec, model.next = header["base_model"], ModelSpec(**header["spec"]), header["next"]
        model.skipped = {seq for seq in model.skipped if seq >= model.next}
        for seq in [seq for seq in model.queue if seq < model.next]:
            promise = model.queue.pop(seq)
            if promise.result is None:
                # Dropped, or never recorded.
                self._drop_promise(promise)
            promise.body = b""

    def _promise(self, header: Mapping[str, Any], body: bytes, position: int) -> Promise:
        id = header["id"]
        promise = Promise(id, header["kind"], header["digest"], header["session"], body, position=position)
        self.promises[id] = promise
        self.waiting_bytes += len(body)
        return promise

    def _add_operation(self, header: Mapping[str, Any], body: bytes, position: int) -> None:
        promise = self._promise(header, body, position)
        id, seq = header["model"], header["seq"]
        if seq == 0 and id not in self.models:
            for former in self.models.values():
                former.is_ending = True
            spec = header["spec"] and ModelSpec(**header["spec"])
            self.models[id] = Model(id, header["session"], header["base_model"], spec, header["metadata"])
        if (model := self.models.get(id)) is not None and seq >= model.next:
            model.queue[seq] = promise

    def _refuse(self, header: Mapping[str, Any]) -> None:
        promise = self.promises.get(header["id"]) or self._promise(header, b"", 0)
        if (model := self.models.get(header["model"])) is not None:
            model.queue.pop(header["seq"], None)
            if header["seq"] >= model.next:
                model.skipped.add(header["seq"])
        self._set_result(promise, "error", error_body(header["message"], "user"))

    def _end(self, id: str) -> None:
        if id in self.sessions:
            self.sessions[id].is_ended = True
        for model in self.models.values():
            model.is_ending |= model.session == id
        self.samplers = {key: one for key, one in self.samplers.items() if one.session != id}

    def _add_sampler(self, values: Mapping[str, Any]) -> Sampler:
        path, ephemeral = values["model_path"], values["ephemeral"]
        if ephemeral is not None:
            folder = self.checkpoints.ephemeral(*ephemeral)
        else:
            folder = None if path is None else self.checkpoints.locate(path, tuple(checkpoints.KINDS))
        sampler = Sampler(
            values["id"], values["session"], values["base_model"], path, folder, ephemeral is not None, time.monotonic()
        )
        self.samplers[sampler.id] = sampler
        return sampler

    def _set_result(self, promise: Promise, form: str, result: bytes) -> None:
        if promise.result is None:
            self.waiting_bytes -= promise.size
            promise.parsed = None
            self.result_bytes += len(result)
            promise.result, promise.form, promise.finished = result, form, time.monotonic()
        if promise.kind == "sample":
            promise.body = b""
        self.wake_clients(promise)

    def wake_clients(self, promise: Promise) -> None:
        """Wake the clients that wait for a result."""
        # The loop may be closed at the end.
        with contextlib.suppress(RuntimeError):
            if self.loop is not None:
                self.loop.call_soon_threadsafe(promise.done.set)

    def finish(self, promise: Promise, form: str, result: bytes) -> None:
        """Answer a request, unless it was answered before."""
        with self.lock:
            if promise.result is not None:
                return
            try:
                self.journal.append(
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

    def fail(self, promise: Promise, message: str, category: str = "user") -> None:
        """Answer a request with an error, unless it was answered before."""
        self.finish(promise, "error", error_body(message, category))

    def end_session(self, id: str) -> None:
        """End a session: its model is unloaded after the operations that are ready, and its samples fail."""
        with self.lock:
            if id not in self.sessions or self.sessions[id].is_ended:
                return
            self.record({"record": "end", "id": id})
            for promise in list(self.promises.values()):
                if promise.session == id and promise.kind == "sample":
                    self.fail(promise, "the session has ended")
            for waiting in self.waiting.values():
                for promise in [one for one in waiting.values() if one.session == id]:
                    del waiting[promise.id]

    def forget_delivered(self, most: int) -> None:
        """Drop results that clients have read, the oldest first, until all results have at most `most` bytes."""
        queued = {promise.id for model in self.models.values() for promise in model.queue.values()}
        read = [one for one in self.promises.values() if one.delivered is not None and one.id not in queued]
        forgotten, left = [], self.result_bytes
        for promise in sorted(read, key=lambda one: one.delivered or 0.0):
            if left <= most:
                break
            forgotten.append(promise)
            left -= len(promise.result or b"")
        self.forget(forgotten)

    def living_sessions(self) -> list[Session]:
        """Return the sessions that have not ended, the newest first."""
        with self.lock:
            return [one for one in reversed(self.sessions.values()) if not one.is_ended]

    def enqueue(self, promise: Promise) -> None:
        """Let a sample wait for the trainer."""
        sampler = self.samplers.get(promise.id.rpartition(":")[0])
        if sampler is None:
            self.fail(promise, "the weights of this sampling session were deleted")
            return
        sampler.used, promise.is_waiting = time.monotonic(), True
        self.waiting.setdefault(sampler.folder, {})[promise.id] = promise
        self.wake.notify_all()

    def current(self) -> Model | None:
        """Return the model that is trained."""
        return next(iter(self.models.values()), None)

    def forget(self, promises: Collection[Promise] = ()) -> None:
        """Drop promises, and delete all records that nobody needs. Call it under `lock`.

        Raises:
            OSError: if they cannot be deleted; no promise is dropped.
        """
        kept = self.promises.keys() - {promise.id for promise in promises}
        unfinished = {id for id in kept if self.promises[id].result is None}
        sessions = {session.id for session in self.living_sessions()}
        sessions |= {self.promises[id].session for id in kept} | {model.session for model in self.models.values()}
        first = dict.fromkeys(self.models, 0)
        if self.recovery is not None:
            first[self.recovery["model"]] = self.recovery["next"]

        def keep(kind: str, id: str) -> bool:
            model, _, seq = id.rpartition(":")
            is_later = model in first and seq.isdecimal() and int(seq) >= first[model]
            return {
                "base": True,
                "session": id in sessions,
                "end": id in sessions,
                "sampler": id in self.samplers,
                "recovery": self.recovery is not None and id == self.recovery["id"],
                # The first one creates the model.
                "operation": is_later or (model in first and seq == "0"),
                "unload": model in first,
                "sample": id in unfinished,
                "result": is_later or id in kept,
                "refused": is_later or id in kept,
            }[kind]

        self.journal.prune(keep)
        for promise in promises:
            self._drop_promise(promise)

    def _drop_promise(self, promise: Promise) -> None:
        del self.promises[promise.id]
        self.result_bytes -= len(promise.result or b"")
        self.waiting_bytes -= promise.size if promise.result is None else 0


def error_body(message: str, category: str) -> bytes:
    """Return the result of a request that failed, by the fault of the `user` or of the `server`."""
    return canonical_json({"error": message, "category": category})
