# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Hostile reward functions are contained, and each failure is counted under its cause."""

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.sandbox import pool
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import RewardCallError
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.processes import list_descendants
from marin_rl.types import RewardFailure
from tests.rewards.sandbox.conftest import (
    HOSTILE,
    LENIENT,
    LEVELS,
    TIGHT,
    Attack,
    Attacks,
    descendants,
    require,
)
from tests.rewards.sandbox.hostile_rewards import SPACE

HASTY = {"wall_seconds": 600.0, "cpu_seconds": 1.0}
IMPATIENT = {"wall_seconds": 1.5, "cpu_seconds": 60.0}
ZEROS = "0" * 400
FORGED = [
    "nonsense",
    "[]",
    "{}",
    '{"results": []}',
    '{"results": [{"score": 1}, {"score": 1}]}',
    '{"results": [{"score": NaN}]}',
    '{"results": [{"score": 1e999}]}',
    '{"results": [{"score": 1e308}]}',
    '{"results": [{"score": 1, "step_outputs": [{"step_index": 1, "base_reward": -1e31}]}]}',
    f'{{"results": [{{"score": 1{ZEROS}}}]}}',
    f'{{"results": [{{"score": 1, "metrics": {{"large": 1{ZEROS}}}}}]}}',
    f'{{"results": [{{"score": 1, "step_outputs": [{{"step_index": 1, "base_reward": -1{ZEROS}}}]}}]}}',
    '{"results": [{"score": "1"}]}',
    '{"results": [{"score": 1, "weight": 100}]}',
    '{"results": [{"score": 1, "step_outputs": [{"step_index": -1, "base_reward": 1}]}]}',
    '{"results": [{"score": 1}]} {"results": [{"score": 1}]}',
    "[" * 30_000,
    '{"results": [{"score": 1, "reason": "\x00"}]}',
    '{"results": [{"score": 1, "metrics": {"a\\nb": 1}}]}',
    json.dumps({"results": [{"score": 1, "metrics": {str(index): 1 for index in range(65)}}]}),
]
RAISED, INVALID = RewardFailure.RAISED, RewardFailure.INVALID_ANSWER
# Settings, name and options of attacks that fail alike at every level, with the cause and a part of the description.
FAILURES: list[tuple[dict[str, Any], str, dict[str, Any], RewardFailure, str]] = [
    (HASTY, "loops_for_ever", {}, RewardFailure.CPU, "sandbox.cpu_seconds"),
    (HASTY, "ignores_signals", {"then": "loops_for_ever"}, RewardFailure.CPU, ""),
    (IMPATIENT, "sleeps_for_ever", {}, RewardFailure.TIMEOUT, "sandbox.wall_seconds"),
    (IMPATIENT, "ignores_signals", {"then": "sleeps_for_ever"}, RewardFailure.TIMEOUT, ""),
    (LENIENT, "starts_many", {}, RewardFailure.PROCESSES, "sandbox.processes"),
    (LENIENT, "forgets_its_children", {}, RewardFailure.PROCESSES, ""),
    (TIGHT, "allocates_ten_gigabytes", {}, RewardFailure.MEMORY, "sandbox.memory_mb"),
    (TIGHT, "allocates_step_by_step", {}, RewardFailure.MEMORY, ""),
    (TIGHT, "writes_a_gigabyte", {}, RewardFailure.FILE_SIZE, "sandbox.file_mb"),
    (TIGHT, "prints_for_ever", {}, RewardFailure.OUTPUT, "sandbox.output_kb"),
    (TIGHT, "warns_for_ever", {}, RewardFailure.OUTPUT, ""),
    (TIGHT, "answers_endlessly", {}, RewardFailure.OUTPUT, ""),
    *((TIGHT, "forges", {"text": text}, INVALID, "") for text in FORGED),
    (TIGHT, "answers_twice", {}, INVALID, ""),
    (TIGHT, "answers_infinity", {}, INVALID, ""),
    (TIGHT, "answers_text", {}, INVALID, ""),
    (TIGHT, "answers_a_huge_number", {}, INVALID, ""),
    *((TIGHT, "exits", {"code": code}, RewardFailure.EXITED, "") for code in (0, 1, 3, 117)),
    (TIGHT, "closes_descriptors", {}, RewardFailure.EXITED, ""),
    (TIGHT, "raises_system_exit", {}, RAISED, ""),
    (TIGHT, "raises_a_surrogate", {}, RAISED, r"raised ValueError: half a character: \\ud800"),
    (TIGHT, "raises_what_cannot_be_said", {}, RAISED, "raised Unspeakable: <its message cannot be read: SystemExit>\n"),
    (TIGHT, "overflows_the_stack", {}, RewardFailure.SIGNAL, "SIGSEGV"),
    (TIGHT, "crashes", {}, RewardFailure.SIGNAL, "SIGSEGV"),
]


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("settings", "name", "options", "cause", "detail"), FAILURES)
def test_failures_at_every_level(
    attacks: Attacks,
    level: Isolation,
    settings: dict[str, Any],
    name: str,
    options: dict[str, Any],
    cause: RewardFailure,
    detail: str,
):
    failure = attacks.at(level, **settings).failure(name, **options)
    assert failure.cause is cause
    assert re.search(detail, failure.detail)


OWN = {"path": HOSTILE}
NO_PERMISSION = "PermissionError"
KERNEL_MEMORY = (
    "memfd_create shmget msgget semget mq_open add_key io_setup io_uring_setup userfaultfd perf_event_open bpf "
    "vmsplice mount pivot_root unshare landlock_create_ruleset"
)
# Attacks that raise an error at the levels that restrict files, network and signals, with a part of the description.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bombs_with_forks", {}, NO_PERMISSION),
    ("runs_a_program", {}, NO_PERMISSION),
    *((name, OWN, "") for name in ("deletes", "overwrites", "truncates", "makes_readable")),
    *(
        (name, {"path": path}, "")
        for name in ("reads", "overwrites")
        for path in ("/etc/shadow", "/proc/1/environ", "/dev/mem", "/root/.bashrc", "/tmp/new")
    ),
    *(("changes_attributes", {**OWN, "kind": kind}, "") for kind in ("utime", "xattr", "link")),
    ("takes_a_lease", OWN, NO_PERMISSION),
    ("asks_for_notices", {"path": os.path.dirname(HOSTILE)}, NO_PERMISSION),
    ("watches", {"path": os.path.dirname(HOSTILE)}, NO_PERMISSION),
    ("changes_flags", OWN, f"{NO_PERMISSION}|Inappropriate ioctl"),  # Some file systems have no flags.
    *(
        ("reserves_space", {"control": control}, "Errno 95")
        for control in (None, 0x4030580A, 0x40305824, 0x40305828, 0x4030582A, 0x40305839)
    ),
    ("opens_without_a_name", {}, "Operation not supported"),
    ("sends_a_descriptor", {}, NO_PERMISSION),
    ("enlarges_a_queue", {"kind": "pipe"}, NO_PERMISSION),
    ("enlarges_a_queue", {"kind": "socket"}, NO_PERMISSION),
    ("changes_attributes", {"kind": "own xattr", "path": "."}, NO_PERMISSION),
    ("keeps_shared_pages", {"kind": "anonymous"}, NO_PERMISSION),
    ("keeps_shared_pages", {"kind": "zeros"}, NO_PERMISSION),
    ("makes_a_system_call", {"system": "close_range", "arguments": [60, 60, 2]}, NO_PERMISSION),
    *(
        ("makes_a_system_call", {"system": name, "arguments": [0, 0, 0, 0]}, NO_PERMISSION)
        for name in KERNEL_MEMORY.split()
    ),
    ("keeps_pages_in_a_pipe", {"kind": "splice"}, "Errno 38"),
    ("keeps_pages_in_a_pipe", {"kind": "sendfile"}, "Errno 38"),
    *(
        (name, {"process": os.getpid()}, NO_PERMISSION)
        for name in ("signals", "signals_through_a_file", "limits_the_trainer")
    ),
    ("raises_limits", {}, "not allowed|not permitted"),
    ("reads_its_parents_memory", {}, ""),
]


@pytest.mark.parametrize(("name", "options", "detail"), REFUSED)
def test_refusals_of_confined_levels(confined: Attack, name: str, options: dict[str, Any], detail: str):
    def own() -> tuple[Any, ...]:
        state = os.stat(HOSTILE)
        return Path(HOSTILE).read_bytes(), state.st_mode, state.st_nlink, state.st_mtime_ns, state.st_ctime_ns

    before = own()
    failure = confined.failure(name, **options)
    assert failure.cause is RAISED
    assert re.search(detail, failure.detail)
    assert own() == before


SUCCEEDS: list[tuple[dict[str, Any], str, dict[str, Any], float]] = [
    (LENIENT, "starts_threads", {"count": 64}, 1.0),
    (LENIENT, "runs_a_program", {}, 0.0),
    (LENIENT, "nests_folders", {}, 1.0),
    # 256 MiB hold 20 stacks of 8 MiB; with an arena of 64 MiB each they would hold 3.
    (TIGHT, "starts_threads_that_allocate", {"count": 20}, 1.0),
    (TIGHT, "leaves_an_output_that_cannot_be_flushed", {}, 1.0),
    (TIGHT, "hides_a_file", {}, 1.0),
    (TIGHT, "deletes_many_files", {}, 1.0),
    (TIGHT, "uses_files", {}, 1.0),
    *[(TIGHT, "remembers_files", {}, 0.0)] * 2,
]


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("settings", "name", "options", "score"), SUCCEEDS)
def test_calls_within_their_limits(
    attacks: Attacks, level: Isolation, settings: dict[str, Any], name: str, options: dict[str, Any], score: float
):
    attack = attacks.at(level, **settings)
    attack.is_well()
    workers = attack.sandbox.worker_pids
    assert attack.call(name, **options).score == score
    # Files that are hidden or nested deeply are removed without the end of the worker.
    attack.is_well()
    assert attack.sandbox.worker_pids == workers


@pytest.mark.parametrize("kind", ["flock", "lockf", "waits", "ofd"])
def test_locks_on_host_files_have_no_effect(kind: str, confined: Attack):
    assert confined.call("locks", path=HOSTILE, kind=kind).score == 1.0


@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    [
        ("fills_queues", "sockets", 16 * 2**20),
        ("fills_queues", "pipes", 16 * 2**20),
        *(("counts_what_it_opens", kind, 64) for kind in ("timers", "files", "polls")),
    ],
)
def test_amount_of_kernel_objects(name: str, kind: str, limit: int, confined: Attack):
    assert 0 < confined.call(name, kind=kind).score <= limit


def test_threads(attack: Attack):
    failure = attack.failure("bombs_with_threads")
    assert failure.cause is RewardFailure.MEMORY or (
        failure.cause is RAISED and "can't start new thread" in failure.detail
    )
    failure = attack.failure("bombs_with_small_threads")
    # In namespaces the kernel enforces the limit, except for root; otherwise the worker counts.
    refused = failure.cause is RAISED and "can't start new thread" in failure.detail
    assert failure.cause is RewardFailure.THREADS or (refused and attack.level is Isolation.FULL)


def test_processes_with_limit_zero(attack: Attack):
    expected = RewardFailure.PROCESSES if attack.level is Isolation.NONE else RAISED
    assert attack.cause("starts_many") is expected


def test_forking_chain_is_killed(attacks: Attacks, confined: Attack):
    lenient = attacks.at(confined.level, **LENIENT)
    lenient.is_well()
    before = set(descendants(os.getpid()))
    for _ in range(20):
        # The number of times that it is counted meanwhile varies.
        with contextlib.suppress(RewardCallError):
            assert lenient.call("flees").score == 1.0
        assert set(descendants(os.getpid())) <= before


def test_no_processes_and_zombies_are_left(lenient: Attack):
    lenient.is_well()
    before = set(list_descendants(os.getpid()))
    for _ in range(3):
        assert lenient.call("leaves_a_daemon").score == 1.0
    assert set(list_descendants(os.getpid())) <= before


@pytest.mark.parametrize("stays", [False, True], ids=["zombies", "running"])
def test_siblings_of_a_call(lenient: Attack, stays: bool):
    lenient.is_well()
    before = set(list_descendants(os.getpid()))
    for exit_signal in (signal.SIGCHLD, 0):
        options = {"exit_signal": int(exit_signal), "stays": stays}
        if lenient.level is Isolation.NONE:
            assert lenient.call("clones_siblings", **options).score == 1.0
        else:
            assert NO_PERMISSION in lenient.failure("clones_siblings", **options).detail
    # If the siblings still counted, no processes would be available here.
    assert lenient.call("leaves_a_daemon").score == 1.0
    assert set(list_descendants(os.getpid())) <= before


@pytest.mark.parametrize("name", ["reads", "deletes", "overwrites", "truncates", "makes_readable"])
def test_files_outside(confined: Attack, tmp_path: Path, name: str):
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    secret.chmod(0o600)
    failure = confined.failure(name, path=str(secret))
    assert failure.cause is RAISED
    # In namespaces the file is missing or read-only; attribute changes are always blocked.
    invisible = confined.level is Isolation.FULL and name != "makes_readable"
    assert re.search(
        r"raised (FileNotFoundError|OSError: \[Errno 30\])" if invisible else f"raised {NO_PERMISSION}", failure.detail
    )
    assert secret.read_text() == "the secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.medium
def test_environment_of_the_trainer(attack: Attack):
    # The pool's processes started earlier; the test checks inherited and readable variables.
    assert os.environ["PYTEST_CURRENT_TEST"]
    options = {"processes": 0} if attack.level is Isolation.NONE else {}
    reason = attack.call("looks_for_secrets", **options).reason
    assert reason is not None
    assert attack.level is Isolation.NONE or "/proc" not in reason
    assert "PYTEST" not in reason
    assert "JAX_PLATFORMS" not in reason


def test_network(confined: Attack):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        failure = confined.failure("connects", port=server.getsockname()[1])
        assert failure.cause is RAISED
        assert NO_PERMISSION in failure.detail
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_visible_socket(confined: Attack, kind: socket.SocketKind):
    # In the folder of the function's file, so that it is visible at every isolation level.
    with (
        tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening,
    ):
        path = os.path.relpath(os.path.join(folder, "s"))
        listening.bind(path)
        listening.setblocking(False)
        options = {"path": os.path.abspath(path), "kind": int(kind)}
        if kind is socket.SOCK_SEQPACKET:
            # The socket accepts the address but sends to its own peer.
            assert confined.call("sends", **options).score == 1.0
        else:
            assert confined.cause("sends", **options) is RAISED
        with pytest.raises(BlockingIOError):
            listening.recv(1)


@pytest.mark.parametrize("flags", [0x10, 0x20], ids=["immutable", "append-only"])
def test_files_with_flags_are_removed(attack: Attack, flags: int, caplog: pytest.LogCaptureFixture):
    attack.is_well()
    workers = attack.sandbox.worker_pids
    if attack.level is not Isolation.NONE:
        assert attack.cause("locks_files", flags=flags) is RAISED
    else:
        try:
            attack.call("locks_files", flags=flags)
        except RewardCallError as error:
            pytest.skip(f"this user or file system has no such flags: {error}")
    attack.is_well()
    assert attack.sandbox.worker_pids == workers
    assert not caplog.records


def test_unremovable_files_are_reported_once(attacks: Attacks, caplog: pytest.LogCaptureFixture):
    attack = attacks.at(Isolation.NONE, **TIGHT)
    attack.is_well()
    workers = attack.sandbox.worker_pids
    try:
        place = attack.call("mounts").reason
    except RewardCallError as error:
        pytest.skip(f"this user cannot mount: {error}")
    try:
        attack.is_well()
        assert attack.sandbox.worker_pids == workers
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert "could not be removed; remove it yourself" in record.message
        assert str(Path(str(place)).parent) in record.message
    finally:
        subprocess.run(["umount", str(place)], check=True)


def exceeds_space(attack: Attack, name: str, **options: Any) -> None:
    failure = attack.failure(name, **options)
    if attack.level is Isolation.FULL:
        assert "No space left" in failure.detail or "SIGBUS" in failure.detail
    else:
        assert failure.cause is RewardFailure.FILE_SIZE
        assert "raise sandbox.file_mb" in failure.detail


def test_space_of_files(attack: Attack):
    exceeds_space(attack, "writes_many_files")


@pytest.mark.parametrize("kind", SPACE)
def test_space_of_files_without_a_name(kind: str, confined: Attack):
    exceeds_space(confined, "uses_space", kind=kind)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["files", "folders", "links", "pipes"])
def test_number_of_files(kind: str, confined: Attack):
    assert confined.cause("creates", kind=kind) is RewardFailure.FILE_SIZE


@pytest.mark.medium
def test_many_hidden_files(lenient: Attack):
    expected = RAISED if lenient.level is Isolation.FULL else RewardFailure.FILE_SIZE
    assert lenient.cause("hides_many_files") is expected


@pytest.mark.parametrize("name", ["keeps_shared_pages", "leaves_notes"])
@pytest.mark.parametrize("landlock", [True, False], ids=["Landlock", "no Landlock"])
def test_namespaces_suffice(name: str, landlock: bool, monkeypatch: pytest.MonkeyPatch):
    require(Isolation.FULL)
    if not landlock:
        monkeypatch.setattr(pool, "landlock_version", lambda: 0)
    attack = Attack(Isolation.FULL, SandboxConfig(require=Isolation.FULL, workers=1, **TIGHT))
    try:
        for _ in range(2):
            if name == "keeps_shared_pages":
                assert NO_PERMISSION in attack.failure(name, kind="zeros").detail
            else:
                result = attack.call(name)
                assert (result.score, result.reason) == (0.0, "")
        attack.is_well()
    finally:
        attack.close()


WITHOUT_CAPABILITIES = """
from marin_rl.rewards.sandbox.isolation import Isolation, drop_capabilities
from tests.rewards.sandbox.conftest import TIGHT, Attacks

drop_capabilities()
attacks = Attacks()
print(attacks.at(Isolation.PARTIAL, **TIGHT).cause("uses_space", kind="deletes_an_open_file"))
attacks.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop the capability to see the files of other processes")
def test_deleted_files_are_counted_without_capabilities():
    require(Isolation.PARTIAL)
    done = subprocess.run([sys.executable, "-c", WITHOUT_CAPABILITIES], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "file_size"


def test_names_of_metrics(attacks: Attacks):
    attack = attacks.at(Isolation.NONE, **TIGHT)
    names = [f"part/{index}" for index in range(64)]
    assert list(attack.call("names_metrics", names=names).metrics) == names
    for wrong, message in (
        ([*names, "one_more"], "returned results with 65 metric names"),
        (["\x1b[31mred"], "String should match pattern"),
        (["x" * 101], "at most 100 characters"),
    ):
        failure = attack.failure("names_metrics", names=wrong)
        assert failure.cause is INVALID
        assert message in failure.detail


def test_signal_to_its_parent(attack: Attack):
    expected = RewardFailure.WORKER if attack.level is Isolation.NONE else RAISED
    assert attack.cause("signals") is expected


@pytest.mark.medium
def test_deep_recursion(attack: Attack):
    # CPython may detect the lack of memory and raise.
    assert attack.cause("recurses") in (RewardFailure.MEMORY, RewardFailure.SIGNAL, RAISED)


def test_monkey_patches_end_with_the_call(attack: Attack):
    before = attack.sandbox.failures.total()
    try:
        attack.call("patches_everything")
    except RuntimeError:
        assert attack.sandbox.failures.total() == before + 1
    attack.is_well()
    attack.is_well()


def test_call_ends_with_its_parent(confined: Attack):
    assert confined.call("outlives_its_parent").score == -1.0
