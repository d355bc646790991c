# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The thread of a Tinker server that runs training operations in their order, and samples in between."""

import dataclasses
import json
import logging
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.serving.bodies import full_disk
from marin_rl.serving.tinker import requests
from marin_rl.serving.tinker.checkpoints import now_text, spec_of, sync_folder
from marin_rl.serving.tinker.messages import read_forward_backward, write_outputs, write_samples
from marin_rl.serving.tinker.records import RequestError, SampleJob, SampleOutputs, Trainer
from marin_rl.serving.tinker.state import Model, Promise, ServerState, error_body
from marin_rl.utils.errors import UserError, describe
from marin_rl.utils.storage import sync

logger = logging.getLogger(__name__)

EPHEMERAL_SAMPLERS = 8
"""Number of samplers without a name whose weights are kept."""
_FORGET_SECONDS = 24 * 3600.0
"""Seconds without a sign of its client after which a session ends, even if nobody else needs the server."""
_SWEEP_SECONDS = 30.0
_WRITES = ("save_weights", "save_weights_for_sampler")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Times of a server, in seconds."""

    session: float = 45.0
    """Silence of a session after which another one may train; the SDK sends a heartbeat every ten seconds."""
    state: float = 60.0
    """Time of training operations between two recovery states, which a restart repeats."""
    gap: float = 600.0
    """Time for which operations wait for an earlier one that has not arrived."""
    retained: float = 600.0
    """Time for which a result can be read again."""
    unread: float = 3600.0
    """Time for which a result is kept that nobody has read."""


class TrainerThread:
    """Runs the operations of the state."""

    def __init__(
        self, state: ServerState, trainer: Trainer, limits: Limits, on_failed: Callable[[Exception], None]
    ) -> None:
        """Create the thread.

        Args:
            state: of the server.
            trainer: used by this thread only.
            limits: times.
            on_failed: called in the thread with the error that ends it.
        """
        self.state, self._trainer, self._limits, self._on_failed = state, trainer, limits, on_failed
        self.on_sampled: Callable[[int], None] = lambda number: None
        """Called with the number of tokens of a result."""
        self.on_step: Callable[[str], None] = lambda line: None
        """Called with a line about an optimizer step."""
        self._swept, self._unsaved = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the operation that runs, after `state.is_closing` was set."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._restore()
            while not self.state.is_closing:
                self._step()
        except Exception as error:
            if message := full_disk(error):
                logger.error("the trainer failed: %s", message)
            else:
                logger.exception("the trainer failed")
            self._on_failed(error)

    def _restore(self) -> None:
        """Bring the trainer to the state after all operations that are ready, before anything else changes files."""
        recovery = self.state.recovery
        if recovery is not None and (model := self.state.models.get(recovery["model"])) is not None:
            assert model.spec is not None
            self._trainer.create(model.spec)
            self._trainer.load(self.state.hidden / recovery["id"], optimizer=True)
            model.is_loaded = True
        while not self.state.is_closing and self._train():
            pass
        self._sweep_samplers()

    def _step(self) -> None:
        """Run one operation, sample from one version of the weights, and do what was asked in between."""
        is_trained, is_sampled = self._train(), self._sample()
        while self.state.tasks:
            self.state.tasks.popleft()()
        try:
            self._sweep()
        except OSError as error:
            # Such as a full disk. Nothing depends on it, and the next sweep tries again.
            logger.warning("cannot delete what is no longer needed: %s", error)
        with self.state.wake:
            is_idle = not (is_trained or is_sampled or self.state.is_closing or self.state.tasks)
            if is_idle and not (self._has_training() or any(self.state.waiting.values())):
                self.state.wake.wait(_SWEEP_SECONDS)

    def _has_training(self) -> bool:
        model = self.state.current()
        return model is not None and (model.is_ending or model.ready() is not None)

    def _train(self) -> bool:
        """Run the next operation, if it is there."""
        with self.state.lock:
            model = self.state.current()
            promise = None if model is None else model.ready()
        if model is None:
            return False
        if promise is None:
            if model.is_ending:
                self._drop(model)
            return model.is_ending
        self.state.journal.sync(promise.position)
        form, result = "json", b""
        started = time.monotonic()
        if not _is_done(promise):
            try:
                form, result = self._operate(model, promise)
            except RequestError as error:
                if promise.result is not None and promise.form != "error":
                    # The client knows its result, and later operations need its effect.
                    raise UserError(
                        f"the operation {promise.id} succeeded before this start, and cannot be repeated: {error}; "
                        "start the server with its former settings and checkpoints, or choose another folder"
                    ) from error
                form, result = "error", error_body(str(error), "user")
            except Exception as error:
                message = full_disk(error) or describe(error)
                self.state.fail(promise, f"the server failed: {message}", "server")
                self.state.journal.sync()
                if not (isinstance(error, OSError) and (promise.kind in _WRITES or model.next == 0)):
                    raise
                logger.warning("%s: cannot write its files: %s", promise.id, message)
        with self.state.lock:
            del model.queue[model.next]
            model.next, model.advanced = model.next + 1, time.monotonic()
            self.state.finish(promise, form, result)
            promise.body = b""
            if model.next == 1 and promise.form == "error":
                model.is_ending = True
        self._unsaved += time.monotonic() - started
        is_due = promise.kind == "optim_step" and self._unsaved >= self._limits.state
        if promise.form != "error" and (is_due or promise.kind == "load_weights"):
            self._save_state(model)
        return True

    def _operate(self, model: Model, promise: Promise) -> tuple[str, bytes]:
        """Run an operation; return form and content of its result."""
        if promise.kind in ("forward_backward", "forward"):
            request = promise.parsed or read_forward_backward(promise.body)
            return "protobuf", write_outputs(self._trainer.forward_backward(request))
        values = json.loads(promise.body)
        match promise.kind:
            case "create_model":
                assert model.spec is not None
                self._trainer.create(model.spec)
                model.is_loaded = True
                self._begin(model)
                result = {"model_id": model.id}
            case "optim_step":
                metrics = self._trainer.optim_step(requests.OptimStep(**values).params())
                figures = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                self.on_step(f"{time.strftime('%H:%M:%S')} {promise.id}: optim_step, {figures}")
                result = {"metrics": metrics}
            case "load_weights":
                self._load(model, requests.LoadWeights(**values))
                result = {"model_id": model.id, "path": values["path"]}
            case "save_weights":
                body = requests.SaveWeights(**values)
                folder = self.state.checkpoints.named(model.id, "weights", body.path)
                self._write(model, promise, folder, body.ttl_seconds, body.user_metadata, body.overwrite)
                result = {"path": self.state.checkpoints.path_of(folder)}
            case _:
                result = self._save_sampler(model, promise, requests.SaveWeightsForSampler(**values))
        return "json", requests.canonical_json(result)

    def _begin(self, model: Model) -> None:
        assert model.spec is not None
        self._unsaved = 0.0
        self.state.checkpoints.write_run(
            model.id,
            {
                "session": model.session,
                "base_model": model.base_model,
                "spec": dataclasses.asdict(model.spec),
                "user_metadata": model.metadata,
                "time": now_text(),
            },
        )

    def _load(self, model: Model, body: requests.LoadWeights) -> None:
        folder = self.state.checkpoints.existing(body.path, ("weights",))
        info = self.state.checkpoints.info(folder)
        spec = spec_of(info)
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
            folder = self.state.checkpoints.named(model.id, "sampler_weights", body.path)
            self._write(model, promise, folder, body.ttl_seconds, body.user_metadata)
            return {"path": self.state.checkpoints.path_of(folder)}
        number = body.sampling_session_seq_id
        assert number is not None
        self._write(model, promise, self.state.checkpoints.ephemeral(model.id, number), None, None)
        id = f"{model.session}:sample:{number}"
        names = {"id": id, "session": model.session, "base_model": model.base_model, "model_path": None}
        with self.state.lock:
            if not self.state.sessions[model.session].is_ended:
                self.state.record({"record": "sampler", **names, "ephemeral": (model.id, number)})
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
        self.state.checkpoints.write(
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
            self.state.fail(promise, f"the model ended before the operation {model.next} arrived")
        if model.is_loaded:
            self._trainer.unload()
        with self.state.lock:
            del self.state.models[model.id]
            former, self.state.recovery = self.state.recovery, None
        if model.unload is not None:
            self.state.finish(model.unload, "json", requests.canonical_json({"model_id": model.id}))
        self._forget(former)

    def _save_state(self, model: Model) -> None:
        """Write a recovery state, and drop what it replaces."""
        assert model.spec is not None
        former = self.state.recovery
        folder = self.state.hidden / f"state-{secrets.token_hex(4)}"
        record = {"record": "recovery", "id": folder.name, "model": model.id, "next": model.next}
        try:
            self._trainer.save(folder)
            sync_folder(folder)
            sync(folder.parent)
            with self.state.lock:
                spec = dataclasses.asdict(model.spec)
                position = self.state.record({**record, "spec": spec, "base_model": model.base_model})
        except (OSError, RequestError) as error:
            # The former state and the records since remain valid.
            logger.warning("cannot write the recovery state: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self.state.journal.sync(position)
            self._forget(former)
        self._unsaved = 0.0

    def _forget(self, recovery: Mapping[str, Any] | None) -> None:
        """Delete a recovery state that was replaced, and all records that nobody needs."""
        try:
            with self.state.lock:
                self.state.forget()
            self.state.journal.sync()
        except OSError as error:
            # The records remain valid, and may name the recovery state.
            logger.warning("cannot shorten the journal: %s", error)
            return
        if recovery is not None:
            shutil.rmtree(self.state.hidden / recovery["id"], ignore_errors=True)

    def _sample(self) -> bool:
        """Sample for the requests to the weights that waited longest."""
        with self.state.lock:
            self.state.waiting = {folder: jobs for folder, jobs in self.state.waiting.items() if jobs}
            waiting = [(next(iter(jobs.values())).created, folder) for folder, jobs in self.state.waiting.items()]
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

    def take(self, folder: Path | None, is_first: bool) -> list[Promise]:
        """Return the samples that wait for some weights; later ones have to wait if others wait, too."""
        with self.state.lock:
            others = any(jobs for other, jobs in self.state.waiting.items() if other != folder)
            is_due = time.monotonic() - self._swept > _SWEEP_SECONDS
            if not is_first and (others or is_due or self.state.tasks or self.state.is_closing or self._has_training()):
                return []
            return list(self.state.waiting.pop(folder, {}).values())

    def _sweep_samplers(self) -> None:
        """Delete weights without a name that are not among the most recently used ones."""
        with self.state.lock:
            ephemeral = [one for one in self.state.samplers.values() if one.is_ephemeral]
            for sampler in sorted(ephemeral, key=lambda one: one.used)[:-EPHEMERAL_SAMPLERS]:
                if not self.state.waiting.get(sampler.folder):
                    del self.state.samplers[sampler.id]
            used = {one.folder for one in self.state.samplers.values() if one.folder is not None and one.is_ephemeral}
        self.state.checkpoints.delete_ephemeral(used)

    def _sweep(self) -> None:
        """Drop what is no longer needed."""
        now = time.monotonic()
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        with self.state.lock:
            for session in self.state.living_sessions():
                if now - session.seen > _FORGET_SECONDS:
                    self.state.end_session(session.id)
            if (model := self.state.current()) is not None:
                self._skip_gap(model, now)
        self._sweep_samplers()
        self.state.checkpoints.delete_expired()
        with self.state.lock:
            self.state.forget(self._old_promises(now))

    def _old_promises(self, now: float) -> list[Promise]:
        """Return the promises whose results nobody reads any more."""
        queued = {promise.id for model in self.state.models.values() for promise in model.queue.values()}
        living = {session.id for session in self.state.living_sessions()}
        found = []
        for promise in self.state.promises.values():
            # After a restart, nobody may ask for a sample again.
            is_forgotten = promise.kind == "sample" and not promise.is_waiting and promise.session not in living
            if promise.id in queued or (promise.result is None and not is_forgotten):
                continue
            is_unread = promise.delivered is None and promise.session in living
            kept = self._limits.unread if is_unread else self._limits.retained
            if now - (promise.delivered or promise.finished or promise.created) > kept:
                found.append(promise)
        return found

    def _skip_gap(self, model: Model, now: float) -> None:
        """Refuse operations that have waited too long for an earlier one, and the missing ones."""
        if model.ready() is not None or not model.queue:
            return
        if now - max(model.advanced, min(one.created for one in model.queue.values())) < self._limits.gap:
            return
        message = f"the operation {model.next} did not arrive within {self._limits.gap:g} seconds"
        for seq in sorted({*range(model.next, max(model.queue) + 1)} - model.skipped):
            promise = model.queue.get(seq)
            names = {"id": f"{model.id}:{seq}", "kind": "refused", "digest": promise.digest if promise else ""}
            names |= {"session": model.session, "model": model.id}
            self.state.record({"record": "refused", **names, "seq": seq, "message": message})


def _is_done(promise: Promise) -> bool:
    """Return whether an operation has its result, and changed nothing but files."""
    if promise.result is None:
        return False
    if promise.kind == "optim_step":
        # One that is refused may drop the sum of the gradients.
        return promise.form == "error" and json.loads(promise.result)["category"] == "server"
    return promise.form == "error" or promise.kind in _WRITES or promise.kind == "forward"


class _Source:
    """Gives a trainer the samples that wait for some weights."""

    def __init__(self, thread: TrainerThread, folder: Path | None) -> None:
        self._thread, self._folder = thread, folder
        self._taken: dict[str, Promise] = {}
        self._is_first = True

    def take(self) -> Sequence[SampleJob]:
        jobs = []
        for promise in self._thread.take(self._folder, self._is_first):
            self._taken[promise.id] = promise
            body = requests.SampleBody(**json.loads(promise.body))
            jobs.append(SampleJob(promise.id, body.params(zlib.crc32(promise.id.encode()))))
        self._is_first = False
        return jobs

    def finish(self, key: str, result: SampleOutputs | RequestError) -> None:
        promise = self._taken.pop(key)
        if isinstance(result, RequestError):
            self._thread.state.fail(promise, str(result))
            return
        self._thread.on_sampled(sum(len(sample.tokens) for sample in result.samples))
        self._thread.state.finish(promise, "protobuf", write_samples(result))

    def fail(self, message: str, category: str) -> None:
        """Answer the requests that have no result."""
        if self._is_first:
            # The trainer could not read the weights; requests that remain would be tried again, forever.
            self.take()
        for promise in self._taken.values():
            self._thread.state.fail(promise, message, category)
        self._taken.clear()
