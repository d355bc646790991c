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

from marin_rl.rewards.functions import RewardCallError, RewardFailure
from marin_rl.rewards.sandbox import pool
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.processes import list_descendants
from tests.rewards.sandbox.conftest import LENIENT, TIGHT, Attack, Attacks, descendants, require
from tests.rewards.sandbox.hostile_rewards import SPACE


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("the secret")
    path.chmod(0o600)
    return path


@pytest.mark.medium
@pytest.mark.parametrize("name", ["loops_for_ever", "ignores_signals_and_loops"])
def test_cpu_time(hasty: Attack, name: str):
    assert hasty.cause(name) is RewardFailure.CPU


@pytest.mark.medium
@pytest.mark.parametrize("name", ["sleeps_for_ever", "ignores_signals_and_sleeps"])
def test_wall_clock(impatient: Attack, name: str):
    assert impatient.cause(name) is RewardFailure.TIMEOUT


@pytest.mark.parametrize("name", ["allocates_ten_gigabytes", "allocates_step_by_step"])
def test_memory(attack: Attack, name: str):
    assert attack.cause(name) is RewardFailure.MEMORY


def test_threads_are_bounded_by_memory(attack: Attack):
    failure = attack.failure("bombs_with_threads")
    assert failure.cause in (RewardFailure.RAISED, RewardFailure.MEMORY)
    assert "can't start new thread" in failure.detail or failure.cause is RewardFailure.MEMORY


def test_too_many_threads(attack: Attack):
    failure = attack.failure("bombs_with_small_threads")
    # In namespaces the kernel enforces the limit, except for root; otherwise the worker counts.
    refused = failure.cause is RewardFailure.RAISED and "can't start new thread" in failure.detail
    assert failure.cause is RewardFailure.THREADS or (refused and attack.level is Isolation.FULL)


def test_threads_within_the_limit(lenient: Attack):
    assert lenient.call("starts_threads", count=64).score == 1.0


def test_threads_use_only_their_stack(attack: Attack):
    # 256 MiB hold 20 stacks of 8 MiB; with an arena of 64 MiB each they would hold 3.
    assert attack.call("starts_threads_that_allocate", count=20).score == 1.0


def test_fork_bomb(confined: Attack):
    failure = confined.failure("bombs_with_forks")
    assert failure.cause is RewardFailure.RAISED
    assert "PermissionError" in failure.detail


def test_too_many_processes(lenient: Attack):
    assert lenient.cause("starts_many") is RewardFailure.PROCESSES


def test_processes_with_limit_zero(attack: Attack):
    expected = RewardFailure.PROCESSES if attack.level is Isolation.NONE else RewardFailure.RAISED
    assert attack.cause("starts_many") is expected


def test_nothing_is_left_running(lenient: Attack):
    lenient.is_well()
    before = descendants(os.getpid())
    assert lenient.call("leaves_a_daemon").score == 1.0
    assert set(descendants(os.getpid())) <= set(before)


def test_forking_chain_is_killed(attacks: Attacks, confined: Attack):
    lenient = attacks.at(confined.level, **LENIENT)
    lenient.is_well()
    before = set(descendants(os.getpid()))
    for _ in range(20):
        # The number of times that it is counted meanwhile varies.
        with contextlib.suppress(RewardCallError):
            assert lenient.call("flees").score == 1.0
        assert set(descendants(os.getpid())) <= before


def test_unreaped_children_count_as_processes(lenient: Attack):
    assert lenient.cause("forgets_its_children") is RewardFailure.PROCESSES


def test_no_zombies_are_left(lenient: Attack):
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
            assert "PermissionError" in lenient.failure("clones_siblings", **options).detail
    # If the siblings still counted, no processes would be available here.
    assert lenient.call("leaves_a_daemon").score == 1.0
    assert set(list_descendants(os.getpid())) <= before


def test_no_programs(confined: Attack):
    failure = confined.failure("runs_a_program")
    assert failure.cause is RewardFailure.RAISED
    assert "PermissionError" in failure.detail


def test_programs_with_processes_allowed(lenient: Attack):
    assert lenient.call("runs_a_program").score == 0.0


@pytest.mark.parametrize("name", ["reads", "deletes", "overwrites", "truncates", "makes_readable"])
def test_files_outside(confined: Attack, secret: Path, name: str):
    failure = confined.failure(name, path=str(secret))
    assert failure.cause is RewardFailure.RAISED
    # In namespaces the file is missing or read-only; attribute changes are always blocked.
    invisible = confined.level is Isolation.FULL and name != "makes_readable"
    assert re.search(
        r"raised (FileNotFoundError|OSError: \[Errno 30\])" if invisible else "raised PermissionError", failure.detail
    )
    assert secret.read_text() == "the secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["deletes", "overwrites", "truncates", "makes_readable"])
def test_its_own_file(confined: Attack, name: str):
    own = Path(__file__).with_name("hostile_rewards.py")
    before = own.read_bytes(), own.stat().st_mode
    assert confined.cause(name, path=str(own)) is RewardFailure.RAISED
    assert (own.read_bytes(), own.stat().st_mode) == before


@pytest.mark.parametrize("name", ["reads", "overwrites"])
@pytest.mark.parametrize("path", ["/etc/shadow", "/proc/1/environ", "/dev/mem", "/root/.bashrc", "/tmp/new"])
def test_system_folders(confined: Attack, name: str, path: str):
    assert confined.cause(name, path=path) is RewardFailure.RAISED


@pytest.mark.medium
def test_environment_of_the_trainer(attack: Attack, monkeypatch: pytest.MonkeyPatch):
    # The pool's processes started earlier; the test checks inherited and readable variables.
    assert os.environ["PYTEST_CURRENT_TEST"]
    if attack.level is Isolation.NONE:
        reason = attack.call("looks_for_secrets", processes=0).reason
    else:
        reason = attack.call("looks_for_secrets").reason
        assert "/proc" not in (reason or "")
    assert reason is not None
    assert "PYTEST" not in reason
    assert "JAX_PLATFORMS" not in reason


def test_network(confined: Attack):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        failure = confined.failure("connects", port=server.getsockname()[1])
        assert failure.cause is RewardFailure.RAISED
        assert "PermissionError" in failure.detail
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
            assert confined.cause("sends", **options) is RewardFailure.RAISED
        with pytest.raises(BlockingIOError):
            listening.recv(1)


def test_flags_of_its_own_file(confined: Attack):
    failure = confined.failure("changes_flags", path=str(Path(__file__).with_name("hostile_rewards.py")))
    assert failure.cause is RewardFailure.RAISED
    if "Inappropriate ioctl" in failure.detail:
        pytest.skip("the file system here has no flags")
    assert "PermissionError" in failure.detail


@pytest.mark.parametrize("name", ["takes_a_lease", "asks_for_notices", "watches"])
def test_leases_and_watches_on_host_files(confined: Attack, name: str):
    own = Path(__file__).with_name("hostile_rewards.py")
    failure = confined.failure(name, path=str(own if name == "takes_a_lease" else own.parent))
    assert failure.cause is RewardFailure.RAISED
    assert "PermissionError" in failure.detail


@pytest.mark.parametrize("flags", [0x10, 0x20], ids=["immutable", "append-only"])
def test_files_with_flags_are_removed(attack: Attack, flags: int, caplog: pytest.LogCaptureFixture):
    attack.is_well()
    workers = attack.sandbox.worker_pids
    if attack.level is not Isolation.NONE:
        assert attack.cause("locks_files", flags=flags) is RewardFailure.RAISED
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
        assert str(Path(place).parent) in record.message
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_large_file(attack: Attack):
    assert attack.cause("writes_a_gigabyte") is RewardFailure.FILE_SIZE


def test_many_files(attack: Attack):
    failure = attack.failure("writes_many_files")
    if attack.level is Isolation.FULL:
        assert failure.cause is RewardFailure.RAISED
        assert "No space left" in failure.detail
    else:
        assert failure.cause is RewardFailure.FILE_SIZE
        assert "raise sandbox.file_mb" in failure.detail


@pytest.mark.parametrize("kind", SPACE)
def test_space_of_files_without_a_name(kind: str, confined: Attack):
    failure = confined.failure("uses_space", kind=kind)
    if confined.level is Isolation.PARTIAL:
        assert failure.cause is RewardFailure.FILE_SIZE
        assert "raise sandbox.file_mb" in failure.detail
    else:
        assert "No space left" in failure.detail or "SIGBUS" in failure.detail


def test_many_deleted_files_one_after_another(confined: Attack):
    assert confined.call("deletes_many_files").score == 1.0


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["files", "folders", "links", "pipes"])
def test_number_of_files(kind: str, confined: Attack):
    assert confined.cause("creates", kind=kind) is RewardFailure.FILE_SIZE


@pytest.mark.parametrize("control", [None, 0x4030580A, 0x40305824, 0x40305828, 0x4030582A, 0x40305839])
def test_space_beyond_the_end_of_a_file(control: int | None, confined: Attack):
    failure = confined.failure("reserves_space", control=control)
    assert failure.cause is RewardFailure.RAISED
    assert "Errno 95" in failure.detail


def test_files_that_never_have_a_name(confined: Attack):
    assert "Operation not supported" in confined.failure("opens_without_a_name").detail


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sends_a_descriptor", {}),
        ("enlarges_a_queue", {"kind": "pipe"}),
        ("enlarges_a_queue", {"kind": "socket"}),
        ("changes_attributes", {"kind": "own xattr", "path": "."}),
        ("keeps_shared_pages", {"kind": "anonymous"}),
        ("keeps_shared_pages", {"kind": "zeros"}),
        ("makes_a_system_call", {"system": "close_range", "arguments": [60, 60, 2]}),
        *(
            ("makes_a_system_call", {"system": name, "arguments": [0, 0, 0, 0]})
            for name in (
                "memfd_create",
                "shmget",
                "msgget",
                "semget",
                "mq_open",
                "add_key",
                "io_setup",
                "io_uring_setup",
                "userfaultfd",
                "perf_event_open",
                "bpf",
                "vmsplice",
                "mount",
                "pivot_root",
                "unshare",
                "landlock_create_ruleset",
            )
        ),
    ],
)
def test_kernel_memory_without_a_limit(name: str, options: dict[str, Any], confined: Attack):
    failure = confined.failure(name, **options)
    assert failure.cause is RewardFailure.RAISED
    assert "PermissionError" in failure.detail


def test_shared_pages_without_landlock(monkeypatch: pytest.MonkeyPatch):
    require(Isolation.FULL)
    monkeypatch.setattr("marin_rl.rewards.sandbox.pool.landlock_version", lambda: 0)
    attack = Attack(Isolation.FULL, SandboxConfig(require=Isolation.FULL, workers=1, **TIGHT))
    try:
        assert "PermissionError" in attack.failure("keeps_shared_pages", kind="zeros").detail
    finally:
        attack.close()


@pytest.mark.parametrize("kind", ["splice", "sendfile"])
def test_pages_in_a_pipe(kind: str, confined: Attack):
    assert "Errno 38" in confined.failure("keeps_pages_in_a_pipe", kind=kind).detail


@pytest.mark.parametrize("kind", ["sockets", "pipes"])
def test_memory_of_queues(kind: str, confined: Attack):
    assert 0 < confined.call("fills_queues", kind=kind).score <= 16 * 2**20


@pytest.mark.parametrize("kind", ["timers", "files", "polls"])
def test_number_of_kernel_objects(kind: str, confined: Attack):
    assert confined.call("counts_what_it_opens", kind=kind).score <= 64


@pytest.mark.parametrize("kind", ["flock", "lockf", "waits", "ofd"])
def test_locks_on_host_files_have_no_effect(kind: str, confined: Attack):
    assert confined.call("locks", path=str(Path(__file__).with_name("hostile_rewards.py")), kind=kind).score == 1.0


@pytest.mark.parametrize("kind", ["utime", "xattr", "link"])
def test_attributes_of_host_files(kind: str, confined: Attack):
    own = Path(__file__).with_name("hostile_rewards.py")
    before = own.stat().st_mtime_ns, own.stat().st_ctime_ns, own.stat().st_nlink
    assert confined.cause("changes_attributes", path=str(own), kind=kind) is RewardFailure.RAISED
    assert (own.stat().st_mtime_ns, own.stat().st_ctime_ns, own.stat().st_nlink) == before


def test_honest_use_of_files(confined: Attack):
    assert confined.call("uses_files").score == 1.0


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


@pytest.mark.medium
def test_many_hidden_files(lenient: Attack):
    expected = RewardFailure.RAISED if lenient.level is Isolation.FULL else RewardFailure.FILE_SIZE
    assert lenient.cause("hides_many_files") is expected


@pytest.mark.medium
def test_folders_nested_deeply_are_removed(lenient: Attack):
    assert lenient.call("nests_folders").score == 1.0
    lenient.is_well()


def test_folders_that_cannot_be_read_are_removed(attack: Attack):
    workers = attack.sandbox.worker_pids
    assert attack.call("hides_a_file").score == 1.0
    attack.is_well()
    assert attack.sandbox.worker_pids == workers


@pytest.mark.parametrize("name", ["prints_for_ever", "warns_for_ever", "answers_endlessly"])
def test_output(attack: Attack, name: str):
    assert attack.cause(name) is RewardFailure.OUTPUT


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        "{}",
        '{"results": []}',
        '{"results": [{"score": 1}, {"score": 1}]}',
        '{"results": [{"score": NaN}]}',
        '{"results": [{"score": 1e999}]}',
        '{"results": [{"score": 1e308}]}',
        '{"results": [{"score": 1, "step_outputs": [{"step_index": 1, "base_reward": -1e31}]}]}',
        '{"results": [{"score": 1' + "0" * 400 + "}]}",
        '{"results": [{"score": 1, "metrics": {"large": 1' + "0" * 400 + "}}]}",
        '{"results": [{"score": 1, "step_outputs": [{"step_index": 1, "base_reward": -1' + "0" * 400 + "}]}]}",
        '{"results": [{"score": "1"}]}',
        '{"results": [{"score": 1, "weight": 100}]}',
        '{"results": [{"score": 1, "step_outputs": [{"step_index": -1, "base_reward": 1}]}]}',
        '{"results": [{"score": 1}]} {"results": [{"score": 1}]}',
        "[" * 30_000,
        '{"results": [{"score": 1, "reason": "\x00"}]}',
        '{"results": [{"score": 1, "metrics": {"a\\nb": 1}}]}',
        json.dumps({"results": [{"score": 1, "metrics": {str(index): 1 for index in range(65)}}]}),
    ],
)
def test_forged_answers(attack: Attack, text: str):
    assert attack.cause("forges", text=text) is RewardFailure.INVALID_ANSWER


def test_two_answers(attack: Attack):
    assert attack.cause("answers_twice") is RewardFailure.INVALID_ANSWER


@pytest.mark.parametrize("code", [0, 1, 3, 117])
def test_exits(attack: Attack, code: int):
    assert attack.cause("exits", code=code) is RewardFailure.EXITED


def test_raises(attack: Attack):
    assert attack.cause("raises_system_exit") is RewardFailure.RAISED


@pytest.mark.parametrize("name", ["answers_infinity", "answers_text", "answers_a_huge_number"])
def test_returned_values_that_are_no_results(attack: Attack, name: str):
    assert attack.cause(name) is RewardFailure.INVALID_ANSWER


def test_message_with_a_lone_surrogate(attack: Attack):
    failure = attack.failure("raises_a_surrogate")
    assert failure.cause is RewardFailure.RAISED
    assert "raised ValueError: half a character: \\ud800" in failure.detail


def test_error_with_a_failing_str(attack: Attack):
    failure = attack.failure("raises_what_cannot_be_said")
    assert failure.cause is RewardFailure.RAISED
    assert "raised Unspeakable: <its message cannot be read: SystemExit>\n" in failure.detail


def test_output_that_cannot_be_flushed(attack: Attack):
    assert attack.call("leaves_an_output_that_cannot_be_flushed").score == 1.0


def test_names_of_metrics(attacks: Attacks):
    attack = attacks.at(Isolation.NONE, **TIGHT)
    names = [f"part/{index}" for index in range(64)]
    assert list(attack.call("names_metrics", names=names).metrics) == names
    for wrong, message in (
        ([*names, "one_more"], "returned results with 65 metric names"),
        (["\x1b[31mred"], "it should match pattern"),
        (["x" * 101], "at most 100 characters"),
    ):
        failure = attack.failure("names_metrics", names=wrong)
        assert failure.cause is RewardFailure.INVALID_ANSWER
        assert message in failure.detail


def test_signal_to_its_parent(attack: Attack):
    expected = RewardFailure.WORKER if attack.level is Isolation.NONE else RewardFailure.RAISED
    assert attack.cause("signals") is expected


@pytest.mark.parametrize("name", ["signals", "signals_through_a_file", "limits_the_trainer"])
def test_attacks_on_the_trainer(confined: Attack, name: str):
    failure = confined.failure(name, process=os.getpid())
    assert "PermissionError" in failure.detail
    assert failure.cause is RewardFailure.RAISED


@pytest.mark.medium
def test_deep_recursion(attack: Attack):
    # CPython may detect the lack of memory and raise.
    assert attack.cause("recurses") in (RewardFailure.MEMORY, RewardFailure.SIGNAL, RewardFailure.RAISED)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["overflows_the_stack", "crashes"])
def test_crashes(attack: Attack, name: str):
    failure = attack.failure(name)
    assert failure.cause is RewardFailure.SIGNAL
    assert "SIGSEGV" in failure.detail


def test_monkey_patches_end_with_the_call(attack: Attack):
    before = attack.sandbox.failures.total()
    try:
        attack.call("patches_everything")
    except RuntimeError:
        assert attack.sandbox.failures.total() == before + 1
    attack.is_well()
    attack.is_well()


def test_closed_descriptors(attack: Attack):
    assert attack.cause("closes_descriptors") is RewardFailure.EXITED


def test_limits_cannot_be_raised(confined: Attack):
    failure = confined.failure("raises_limits")
    assert failure.cause is RewardFailure.RAISED
    assert "not allowed" in failure.detail or "not permitted" in failure.detail


def test_call_ends_with_its_parent(confined: Attack):
    assert confined.call("outlives_its_parent").score == -1.0


def test_memory_of_the_parent(confined: Attack):
    assert confined.cause("reads_its_parents_memory") is RewardFailure.RAISED


def test_files_end_with_the_call(attack: Attack):
    assert attack.call("remembers_files").score == 0.0
    assert attack.call("remembers_files").score == 0.0


@pytest.mark.parametrize("landlock", [True, False], ids=["Landlock", "no Landlock"])
def test_calls_cannot_leave_data_for_later_calls(landlock: bool, monkeypatch: pytest.MonkeyPatch):
    require(Isolation.FULL)
    if not landlock:
        monkeypatch.setattr(pool, "landlock_version", lambda: 0)
    attack = Attack(Isolation.FULL, SandboxConfig(require=Isolation.FULL, workers=1, **TIGHT))
    try:
        for _ in range(2):
            result = attack.call("leaves_notes")
            assert (result.score, result.reason) == (0.0, "")
        attack.is_well()
    finally:
        attack.close()
