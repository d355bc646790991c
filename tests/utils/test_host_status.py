# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Threads in the roles of several processes; tests/training/test_several_processes.py uses real ones."""

import atexit
import contextlib
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import jax
import pytest

from marin_rl.utils import host_status, multihost
from marin_rl.utils.host_status import (
    OtherProcessError,
    StopRequestedError,
    exit_on_error,
    explain_errors,
    raise_error_of_others,
    require_same_software,
    separate_work,
)
from marin_rl.utils.multihost import ProcessesDifferError

COUNT = 3
NO_SUCH_FILE = '{"process": 1, "error": "ended with an error: ValueError: no such file"}'


class Service:
    """The part of jax's key-value store that is used."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.changed = threading.Condition()
        self.barrier = threading.Barrier(COUNT)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_increment(self, key: str, increment: int) -> int:
        with self.changed:
            self.counts[key] = self.counts.get(key, 0) + increment
            return self.counts[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        try:
            self.barrier.wait(timeout_in_ms / 1000)
        except threading.BrokenBarrierError as error:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {barrier_id}") from error

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            for names in (self.values, self.counts):
                for name in [name for name in names if name.startswith(key)]:
                    del names[name]


class Processes:
    """Threads that take the roles of processes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.own = threading.local()

    @property
    def index(self) -> int:
        return getattr(self.own, "index", 0)

    def run(self, *work: Callable[[], object]) -> list[BaseException | None]:
        """Run one function in each process; return their errors."""

        def run(index: int) -> BaseException | None:
            self.own.index = index
            try:
                work[index]()
            except BaseException as error:
                return error
            return None

        with ThreadPoolExecutor(len(work)) as pool:
            return list(pool.map(run, range(len(work))))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    processes = Processes(Service())
    monkeypatch.setattr(multihost, "coordination_client", lambda: processes.service)
    monkeypatch.setattr(host_status, "INTERVAL", 0.01)
    monkeypatch.setattr(host_status, "_rounds", type("Rounds", (), {"__next__": lambda self: processes.own.round})())
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: COUNT)
    monkeypatch.setattr(jax, "process_index", lambda: processes.index)
    monkeypatch.setattr("os._exit", lambda status: None)
    # As if every process ended at once.
    monkeypatch.setattr(atexit, "register", lambda end: end())
    return processes


@contextlib.contextmanager
def a_round(
    processes: Processes, number: int = 0, interrupt: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], None]]:
    processes.own.round = number
    with separate_work(interrupt) as check:
        yield check


def stopping() -> None:
    raise StopRequestedError("asked")


def test_processes_wait_for_the_last_one(processes: Processes) -> None:
    last, events = threading.Event(), []

    def finish(number: int) -> None:
        with a_round(processes, number):
            if processes.index == 1:
                assert last.wait(600)
            events.append("worked")
            if len(events) == COUNT - 1:
                last.set()
        events.append("left")

    for number in range(4):
        events.clear()
        last.clear()
        assert processes.run(*[lambda number=number: finish(number)] * COUNT) == [None] * COUNT
        assert events == ["worked"] * COUNT + ["left"] * COUNT
    # Old rounds are removed from the service.
    assert {key.split("/")[1] for key in processes.service.values} == {"round-2", "round-3"}


@pytest.mark.parametrize("finished", [0, 1, 2], ids=lambda count: f"{count} others have finished")
def test_a_stop_of_one_process_stops_all_before_the_last_has_finished(processes: Processes, finished: int) -> None:
    done = threading.Semaphore(0)

    def asked() -> None:
        for _ in range(finished):
            assert done.acquire(timeout=600)
        with a_round(processes, interrupt=stopping) as check:
            check()

    def other() -> None:
        with a_round(processes) as check:
            if processes.index <= finished:
                done.release()
                return
            while True:
                check()

    errors = processes.run(asked, other, other)
    assert [type(error) for error in errors] == [StopRequestedError] * COUNT


def test_a_stop_after_all_have_finished_does_not_end_the_round(processes: Processes) -> None:
    with a_round(processes, interrupt=stopping) as check:
        processes.service.key_value_set("marin_rl/round-0/outcome", "finished")
        check()


def test_another_version_or_compiler_flag_is_an_error(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "libtpu":
            raise metadata.PackageNotFoundError(name)
        return "0.11" if name == "jax" and processes.index == 2 else "0.10"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setattr(socket, "gethostname", lambda: "host-b")
    assert processes.run(require_same_software, require_same_software)[:2] == [None, None]

    main, same, other = processes.run(require_same_software, require_same_software, require_same_software)
    assert main is None
    assert same is None
    assert type(other) is ProcessesDifferError
    assert str(other) == (
        "training process 2 on host host-b has jax 0.11 instead of 0.10 in the main process; install the same versions "
        "and set the same variables on all training hosts"
    )
    monkeypatch.delenv("XLA_FLAGS")
    (other,) = [error for error in processes.run(lambda: None, require_same_software) if error is not None]
    assert "has XLA_FLAGS none instead of --xla_a=1 in the main process" in str(other)


def fail() -> None:
    with exit_on_error():
        raise ValueError("no such file")


@pytest.mark.parametrize("has_finished", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_the_first_error_reaches_processes_that_work_or_wait(
    processes: Processes, has_finished: bool, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_status, "GRACE", 0.05)

    def other() -> None:
        with exit_on_error(), a_round(processes) as check:
            while not has_finished:
                check()

    if first == 1:
        processes.service.key_value_set("marin_rl/error", NO_SUCH_FILE)
    failed, of_first, error = processes.run(fail, raise_error_of_others if first == 1 else stopping, other)
    assert str(failed) == "no such file"
    # A process does not raise its own error a second time.
    assert of_first is None or first == 0
    assert type(error) is OtherProcessError
    assert str(error) == f"training process {first} ended with an error: ValueError: no such file"


def test_a_blocked_main_process_ends_after_the_others_with_the_error_of_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_status, "GRACE", 0.05)
    service, read, list_all = (
        processes.service,
        processes.service.key_value_try_get,
        processes.service.key_value_dir_get,
    )
    ended, failures, before = threading.Event(), [], []

    def fail_once(key: str) -> str:
        if not failures:
            failures.append(key)
            service.key_value_set("marin_rl/error", NO_SUCH_FILE)
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")
        return read(key)

    def list_after_others(key: str) -> list[tuple[str, str]]:
        # The others end when the main process looks for them.
        if key == "marin_rl/ended/":
            service.values |= {"marin_rl/ended/1": "", "marin_rl/ended/2": ""}
        return list_all(key)

    def leave(status: int) -> None:
        before.extend(list_all("marin_rl/ended/"))
        ended.set()

    monkeypatch.setattr(service, "key_value_try_get", fail_once)
    monkeypatch.setattr(service, "key_value_dir_get", list_after_others)
    monkeypatch.setattr("os._exit", leave)
    with exit_on_error():
        assert ended.wait(60)
    assert [key for key, _ in before] == ["marin_rl/ended/1", "marin_rl/ended/2"]
    assert "error: training process 1 ended with an error: ValueError: no such file\n" in capsys.readouterr().err


def test_every_process_raises_its_own_error_and_the_main_process_waits_for_no_dead_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_status, "GRACE", 0.05)
    for running in (1, COUNT):
        assert [str(error) for error in processes.run(*[fail] * running)] == ["no such file"] * running


def run_explained(error: Exception) -> None:
    with explain_errors():
        raise error


LOST = "This is training process 0 of 2. If a connection failed, another training process has ended or is unreachable"


@pytest.mark.parametrize(
    ("count", "error", "is_explained"),
    [
        (2, jax.errors.JaxRuntimeError("Connection reset by peer"), True),
        (1, jax.errors.JaxRuntimeError("Out of memory"), False),
        (2, OSError("pulled the plug"), False),
    ],
)
def test_jax_errors_with_several_processes_explain_a_lost_process(
    processes: Processes, count: int, error: Exception, is_explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with pytest.raises(type(error)) as raised:
        run_explained(error)
    assert (LOST in "".join(traceback.format_exception(raised.value))) == is_explained
    processes.service.key_value_set("marin_rl/error", NO_SUCH_FILE)
    with pytest.raises(OtherProcessError if is_explained else type(error)):
        run_explained(error)


@pytest.mark.parametrize("count", [1, 2])
def test_after_an_error_one_of_several_processes_exits_without_waiting(
    processes: Processes, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[[], object]] = []
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(atexit, "register", registered.append)
    with exit_on_error():
        pass
    assert registered == []
    with pytest.raises(ValueError, match="no such file"):
        fail()
    assert len(registered) == count - 1
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    for end in registered:
        end()
    assert ended == [1] * (count - 1)


def test_one_process_works_alone() -> None:
    assert not multihost.is_multihost()
    with separate_work(stopping) as check, pytest.raises(StopRequestedError):
        check()


@pytest.mark.parametrize(
    ("failing", "errors"),
    [
        ("", [None] * COUNT),
        ("2", ["training process 2 failed: ValueError: full"] * 2 + ["full"]),
        ("commit", ["full"] + ["training process 0 failed: ValueError: full"] * 2),
        ("lost", ["a training process did not answer within 0.05 s: DEADLINE_EXCEEDED"] * 2),
    ],
)
def test_the_main_process_commits_what_all_processes_have_written(
    processes: Processes, failing: str, errors: list[str | None]
) -> None:
    committed: list[list[str]] = []

    def work() -> str:
        if failing == str(processes.index):
            raise ValueError("full")
        return f"of {processes.index}"

    def commit(results: list[str]) -> None:
        if failing == "commit":
            raise ValueError("full")
        committed.append(results)

    def run() -> None:
        multihost.commit_in_background("save", work, commit, 0.05 if failing == "lost" else 600.0)

    found = processes.run(*[run] * len(errors))
    assert [error and str(error)[: len(text or "")] for error, text in zip(found, errors, strict=True)] == errors
    assert committed == ([["of 0", "of 1", "of 2"]] if failing == "" else [])
    if not failing:
        assert not [key for key in processes.service.values if "written" in key]
