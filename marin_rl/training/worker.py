# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout worker: fetches weights, runs groups and returns them to the coordinator."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from levanter.models.lm_model import LmHeadModel

from marin_rl.config.input_files import Inputs, digest_inputs, input_changes
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import Refresh
from marin_rl.distributed.coordinator import Announcement, Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient, CoordinatorLostError
from marin_rl.distributed.rollout_source import group_inputs
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.distributed.weight_receiver import TRANSIENT_ERRORS, WeightReceiver, open_receiver
from marin_rl.learner.base_weights import check_base, fingerprint
from marin_rl.learner.critic import assemble
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.group_codec import encode_group
from marin_rl.rollouts.run_rollouts import stream_groups
from marin_rl.sampling.sampler import Sampler, WeightPoll
from marin_rl.types import RolloutGroup, WeightVersion
from marin_rl.utils.devices.setup import exempt_from_collection
from marin_rl.utils.errors import Closing
from marin_rl.utils.multihost import ProcessesDifferError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds between attempts of a worker that cannot fetch weights."""

NextRequests = Callable[[RolloutGroup], Sequence[GroupRequest]]
"""Called from any thread with each finished group; returns the requests to start in its place."""


def run_worker(
    config: TrainConfig, inputs: Inputs, vocab_size: int, base: str, secret: str, client: CoordinatorClient, name: str
) -> None:
    """Run a worker until the run ends. An error that ends it is logged and reported to the trainer.

    `inputs` are checksums of the trainer's input files. `base` is the fingerprint of the base of the trainer's adapter,
    empty without an adapter. The worker's name is unique in the run.
    """
    try:
        _require_same_inputs(inputs, digest_inputs(config))
        policy = WorkerPolicy(config, vocab_size, base, secret, lambda: client.call(Coordinator.announced))
        with Closing(policy.close), exempt_from_collection():
            RolloutWorker(client, name, policy).run(config.workers.heartbeat_timeout)
    except BaseException as error:
        logger.exception("worker %s ends with an error", name)
        # A coordinator that has not answered would be waited for again.
        if isinstance(error, Exception) and not isinstance(error, CoordinatorLostError):
            client.call(Coordinator.fail, name, f"{type(error).__name__}: {error}")
        raise


def _require_same_inputs(of_trainer: Inputs, own: Inputs) -> None:
    if changes := input_changes(of_trainer, own):
        raise ProcessesDifferError(
            f"host {socket.gethostname()} has other input files than the trainer had when it started:\n"
            + "\n".join(f"  {line}" for line in changes)
            + "\ncopy the trainer's files to all hosts of workers, and resume the run"
        )


class RolloutWorker:
    """One start of a worker: requests groups, runs them with a policy, and requests further ones as they finish."""

    def __init__(self, client: CoordinatorClient, name: str, policy: "WorkerPolicy", *, poll: float = 5.0) -> None:
        """Start without groups.

        One call to the coordinator may wait for `poll` seconds. Names of workers are unique in the run.
        """
        self._client = client
        self._name = name
        self._policy = policy
        self._poll = poll
        self._incarnation = uuid.uuid4().hex
        self._running: dict[str, RequestNumber] = {}
        """Running groups by id."""
        self._lock = threading.Lock()

    def run(self, heartbeat_timeout: float) -> None:
        """Run groups until the run ends.

        The coordinator drops a worker after `heartbeat_timeout` seconds without a call. Heartbeats are sent four times
        as often.
        """
        self._client.call(Coordinator.join, self._name, self._incarnation)
        with self._heartbeats(heartbeat_timeout / 4):
            self._run()
        self._client.call(Coordinator.leave, self._name, self._incarnation)

    def _run(self) -> None:
        policy, weights_unavailable = self._policy, False
        while True:
            room = 0 if weights_unavailable else policy.room
            assignment = self._client.call(
                Coordinator.next_assignment, self._name, self._incarnation, policy.version, room, (), self._poll
            )
            if assignment is None:
                logger.warning("worker %s was dropped; joining again", self._name)
                self._client.call(Coordinator.join, self._name, self._incarnation)
                continue
            if assignment.stop:
                return
            newest = assignment.newest
            weights_unavailable = newest.is_newer_than(policy.version) and not policy.fetch(newest.addresses)
            if weights_unavailable:
                # The next call lists no running groups, so the coordinator reassigns the requests of this worker.
                time.sleep(min(self._poll, RETRY_SECONDS))
            elif assignment.requests:
                self._running = {request.number.group_id: request.number for request in assignment.requests}
                policy.run(assignment.requests, self._on_group_done)

    def _on_group_done(self, group: RolloutGroup) -> list[GroupRequest]:
        """Return a group to the coordinator and request as many groups as there is room for."""
        number, data = self._running[group.id], encode_group(group)
        self._client.call(Coordinator.finish, self._name, self._incarnation, number, data)
        with self._lock:
            del self._running[group.id]
            requests = self._next_requests()
            self._running |= {request.number.group_id: request.number for request in requests}
            return requests

    def _next_requests(self) -> list[GroupRequest]:
        version = self._policy.version
        # With `between_groups`, start no further groups until all have finished and the weights are updated.
        if not self._policy.is_in_flight and self._client.call(Coordinator.announced).is_newer_than(version):
            return []
        room, running = self._policy.room - len(self._running), sorted(self._running.values())
        assignment = self._client.call(
            Coordinator.next_assignment, self._name, self._incarnation, version, room, running
        )
        return [] if assignment is None or assignment.stop else assignment.requests

    @contextlib.contextmanager
    def _heartbeats(self, seconds: float) -> Iterator[None]:
        """Send heartbeats from a background thread during the block."""
        end = threading.Event()

        def send() -> None:
            while not end.wait(seconds):
                try:
                    self._client.call(Coordinator.heartbeat, self._name, self._incarnation)
                except Exception:
                    # The next call of the main thread handles the error.
                    logger.warning("the coordinator does not respond", exc_info=True)

        thread = threading.Thread(target=send, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


class WorkerPolicy:
    """Sampler and environment of a worker: runs groups with the newest weights that it has fetched."""

    def __init__(
        self, config: TrainConfig, vocab_size: int, base: str, secret: str, announced: Callable[[], Announcement]
    ) -> None:
        """Start devices, environment and reward functions, and load the base of an adapter.

        The first `fetch` loads the weights, or those of the adapter. `vocab_size` is that of the model, which may be
        larger than the tokenizer's. `base` is the fingerprint of the base of the trainer's adapter, empty without an
        adapter. `announced` returns the newest weights; it is called while groups run with `workers.refresh:
        in_flight`.

        Raises:
            OtherBaseError: if `initialize_from` has other weights here than in the trainer.
        """
        assert config.model is not None
        self.version: WeightVersion | None = None
        """Version of the weights; None before the first fetch."""
        self.room = max(config.sampling.max_seqs // config.rollouts.group_size, 1)
        """Number of groups that fill the sampler; at least 1."""
        self.is_in_flight = config.workers.refresh is Refresh.IN_FLIGHT
        """Whether weights are updated while groups run."""
        self._vocab_size = vocab_size
        self._secret = secret
        self._announced = announced
        with contextlib.ExitStack() as opened:
            section = config.workers.trainer_config(config.trainer)
            self._parts = parts = RunParts.start(config, section, alone=True, resources=opened)
            # Without the learner's attention kernel, which does not sample.
            spec = PolicySpec(config.model, vocab_size, parts.trainer, lora=config.lora)
            self._like = spec.place(spec.trained_policy)
            self._base = None if config.lora is None else parts.load_base(config.model)
            if self._base is not None:
                check_base(base, fingerprint(self._base, parts.trainer), str(config.initialize_from))
            self._receiver: WeightReceiver | None = None
            self._addresses: tuple[str, ...] = ()
            self._sampler: Sampler | None = None
            self._prefetcher = WeightPrefetcher(self._fetch_newer)
            # Errors of these are found before weights are fetched.
            _ = parts.tokenizer, parts.reward_functions
            opened.enter_context(Closing(self._prefetcher.close))
            self._opened = opened.pop_all()

    def fetch(self, addresses: Sequence[str]) -> bool:
        """Fetch the newest weights at these addresses, or use newer ones that are already being fetched.

        If they did not arrive (False), they may be available to other workers, and the caller retries.

        Raises:
            ServerLostError: if the first fetch fails, which indicates a configuration error; likewise the other errors
                of a weight transfer.
        """
        try:
            received = self._prefetcher.complete() or self._receive(addresses)
        except TRANSIENT_ERRORS as error:
            if self.version is None:
                raise
            logger.warning("newer weights did not arrive (%s); retrying", error)
            return False
        self._use(received)
        return True

    def run(self, requests: Sequence[GroupRequest], on_group_done: NextRequests) -> None:
        """Run groups concurrently, return each when it is finished, and start the next ones in its place.

        `on_group_done` is called in a separate thread with each finished group; it returns the requests to start next.
        """
        config = self._parts.config
        assert self._sampler is not None, "call fetch first"
        runner = self._parts.make_runner(self._sampler, self._vocab_size)
        stream_groups(
            runner,
            group_inputs(requests, config.seed),
            group_size=config.rollouts.group_size,
            temperature=config.sampling.temperature,
            on_group_done=lambda group: asyncio.to_thread(lambda: group_inputs(on_group_done(group), config.seed)),
        )

    def close(self) -> None:
        """Stop weight prefetching, reward workers and the event loop."""
        self._opened.close()

    def _use(self, weights: "Weights") -> None:
        model, version = weights
        if self._sampler is None:
            steps = self._parts.config.workers.decode_steps_per_weight_poll
            weight_poll = WeightPoll(self._poll_weights, steps) if self.is_in_flight else None
            self._sampler = self._parts.open_sampler(model, version, weight_poll)
        else:
            self._sampler.update_weights(model, version)
        self.version = version

    def _poll_weights(self) -> None:
        received = self._prefetcher.poll(self.version)
        if received is not None:
            logger.info("updating weights in flight from version %s to %s", self.version, received.version)
            self._use(received)

    def _fetch_newer(self, version: WeightVersion | None) -> "Weights | None":
        announced = self._announced()
        return self._receive(announced.addresses) if announced.is_newer_than(version) else None

    def _receive(self, addresses: Sequence[str]) -> "Weights":
        if tuple(addresses) != self._addresses or self._receiver is None:
            self._receiver = open_receiver(self._parts.config.weights, addresses, self._secret)
            self._addresses = tuple(addresses)
        received, version = self._receiver.receive(self._like)
        return Weights(assemble(received, self._base), version)


class Weights(NamedTuple):
    """Received weights."""

    model: LmHeadModel
    """The policy; its base is that of the worker if an adapter was received."""
    version: WeightVersion
    """Number of training steps."""


class WeightPrefetcher:
    """Fetches newer weights in a background thread, so that sampling continues during the transfer.

    At most one fetch is pending and its result is kept until the next poll, so there is at most one copy of the weights
    in addition to the one in use.
    """

    def __init__(self, fetch: Callable[[WeightVersion | None], Weights | None]) -> None:
        """Start without a fetch. `fetch` returns newer weights than the given version, or None."""
        self._fetch = fetch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="newer-weights")
        self._pending: Future[Weights | None] | None = None

    def poll(self, version: WeightVersion | None) -> Weights | None:
        """Return the result of the last fetch if it is done, and start the next one. Does not block.

        `version` is that of the weights in use. The result is None if no newer weights arrived, and the next poll
        retries.

        Raises:
            Exception: an error that a retry cannot resolve.
        """
        if self._pending is not None and not self._pending.done():
            return None
        received = self.complete()
        self._pending = self._thread.submit(self._fetch, version if received is None else received.version)
        return received

    def complete(self) -> Weights | None:
        """Wait for the pending fetch, if any, and return its result as `poll` does."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            return pending.result()
        except TRANSIENT_ERRORS as error:
            logger.warning("newer weights did not arrive (%s); continuing with the current weights and retrying", error)
            return None

    def close(self) -> None:
        """Wait for the pending fetch, ignore its result, and end the thread."""
        self._thread.shutdown()
