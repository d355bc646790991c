# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.code import CodeRewardConfig
from marin_rl.rewards.component import RewardConfigError
from marin_rl.rewards.sandbox.config import PACKAGE_ROOT, SandboxConfig
from marin_rl.rewards.sandbox.functions import RewardCallError
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import IsolationError, Sandbox, UserFunction
from marin_rl.rewards.sandbox.processes import list_descendants
from marin_rl.rewards.sandbox.worker_process import WorkerProcess
from marin_rl.types import RewardFailure
from marin_rl.utils.user_code import UserFileError
from tests.rewards.sandbox.conftest import (
    CONFINED_LEVELS,
    HOSTILE,
    LEVELS,
    REQUEST,
    TIGHT,
    Attacks,
    descendants,
    require,
)

SLOW = str(Path(__file__).with_name("slow_rewards.py"))
ROOT = Path(__file__).parents[3]
WAITS = UserFunction(SLOW, "waits")
HONEST = UserFunction(HOSTILE, "honest")


async def until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pids: set[int]) -> set[int]:
    """Return the processes that have not ended."""
    found = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.add(pid)
    return found


def running_calls(sandbox: Sandbox) -> int:
    """Count running calls: the worker has two descendants that lead a process group, the forkserver and the call.

    A worker that loads its file looks the same, so use `load` first.
    """
    deep = 3 if sandbox.isolation is Isolation.FULL else 2
    return sum(
        sum(process == group for process, group in descendants(pid).items()) >= deep for pid in sandbox.worker_pids
    )


def use(level: Isolation, scenario: Callable[[Sandbox], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a scenario with a started sandbox of one level."""
    require(level)

    async def run() -> None:
        config = SandboxConfig(require=level, **{"workers": 1, "wall_seconds": 600.0, **settings})
        async with Sandbox(config, strongest=level) as sandbox:
            await scenario(sandbox)

    asyncio.run(run())


async def score(sandbox: Sandbox, function: UserFunction = HONEST, **options: Any) -> float | None:
    [result] = await sandbox.call(function, [REQUEST], options)
    return result.score


async def load(sandbox: Sandbox) -> None:
    """Load the file of `WAITS` in every worker with concurrent calls, which each use a separate worker."""
    calls = (sandbox.call(WAITS, [REQUEST], {"seconds": 0.0}) for _ in range(sandbox.config.workers))
    await asyncio.gather(*calls)


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_all_workers_killed_during_a_batch(level: Isolation):
    async def scenario(sandbox: Sandbox) -> None:
        await load(sandbox)
        calls = [
            asyncio.create_task(score(sandbox, WAITS, seconds=1000.0 if index < 2 else 0.01)) for index in range(8)
        ]
        await until(lambda: running_calls(sandbox) == 2)
        killed = sandbox.worker_pids
        below = {pid for worker in killed for pid in descendants(worker)}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in outcomes] == [RewardCallError] * 2 + [float] * 6
        assert sandbox.failures == {RewardFailure.WORKER: 2}
        assert not set(killed) & set(sandbox.worker_pids)
        await until(lambda: not alive(below))

    use(level, scenario, workers=2, wall_seconds=2000.0)


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_killed_idle_worker_causes_no_failure(level: Isolation):
    async def scenario(sandbox: Sandbox) -> None:
        for _ in range(3):
            await score(sandbox)
            killed = set(sandbox.worker_pids)
            below = {pid for worker in killed for pid in descendants(worker)}
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            # In namespaces the worker ends shortly after the killed process.
            while alive(killed | below):
                time.sleep(0.001)
            assert await score(sandbox) == 1.0
        assert not sandbox.failures

    use(level, scenario)


def test_failed_worker_start_fails_only_its_call(monkeypatch: pytest.MonkeyPatch):
    start = WorkerProcess.start
    starts = 0

    async def refuse_the_second(*arguments: Any) -> WorkerProcess:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*arguments)

    monkeypatch.setattr(WorkerProcess, "start", refuse_the_second)

    async def scenario(sandbox: Sandbox) -> None:
        outcomes = await asyncio.gather(*(score(sandbox) for _ in range(4)), return_exceptions=True)
        assert [str(one) for one in outcomes if isinstance(one, BaseException)] == [
            f"worker: {HONEST} failed: cannot start a worker: [Errno 11] Resource temporarily unavailable"
        ]
        assert sandbox.failures == {RewardFailure.WORKER: 1}
        assert outcomes.count(1.0) == 3

    use(Isolation.NONE, scenario, workers=2)


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_close_leaves_no_processes_or_files(level: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    require(level)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def run() -> None:
        before = set(descendants(os.getpid()))
        sandbox = Sandbox(SandboxConfig(require=level, workers=3, wall_seconds=600.0), strongest=level)
        await sandbox.start()
        await asyncio.gather(*(sandbox.call(HONEST, [REQUEST], {}) for _ in range(6)))
        running = asyncio.create_task(sandbox.call(WAITS, [REQUEST], {"seconds": 1000.0}))
        await until(lambda: running_calls(sandbox) >= 1)
        assert set(descendants(os.getpid())) > before
        await sandbox.close()
        with pytest.raises(RewardCallError):
            await running
        await sandbox.close()
        assert set(descendants(os.getpid())) <= before

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_close_ends_calls_that_wait_or_start_a_worker():
    async def run() -> None:
        before = set(descendants(os.getpid()))
        for turns in range(12):
            sandbox = Sandbox(SandboxConfig(require=Isolation.NONE, workers=1), strongest=Isolation.NONE)
            await sandbox.start()
            calls = [asyncio.create_task(sandbox.run_python("print(1)")) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await sandbox.close()
            late = asyncio.create_task(sandbox.run_python("print(1)"))
            outcomes = await asyncio.gather(*calls, late, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [RewardCallError] * 4
            assert sandbox.failures == {RewardFailure.WORKER: 4}
            assert set(descendants(os.getpid())) <= before

    asyncio.run(run())


def stop(pid: int) -> set[int]:
    """Stop a worker and its processes, and return their ids."""
    stopped = {pid, *descendants(pid)}
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    return stopped


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_hanging_worker_is_replaced(level: Isolation, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marin_rl.rewards.sandbox.pool.GRACE_SECONDS", 0.5)
    monkeypatch.setattr("marin_rl.rewards.sandbox.worker_process.END_SECONDS", 0.5)

    async def scenario(sandbox: Sandbox) -> None:
        await score(sandbox)
        [pid] = sandbox.worker_pids
        stopped = stop(pid)
        # The worker had not started the call, so another worker runs it.
        assert await score(sandbox) == 1.0
        await until(lambda: not alive(stopped))
        assert sandbox.worker_pids != [pid]
        await load(sandbox)
        call = asyncio.create_task(score(sandbox, WAITS, seconds=1000.0))
        await until(lambda: running_calls(sandbox) == 1)
        stopped = stop(*sandbox.worker_pids)
        with pytest.raises(RewardCallError, match=r"did not answer within \d+\.5 s"):
            await call
        await until(lambda: not alive(stopped))
        assert await score(sandbox) == 1.0
        assert sandbox.failures == {RewardFailure.WORKER: 1}

    use(level, scenario, wall_seconds=2.0, start_seconds=600.0)


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_cancelled_call_ends(level: Isolation):
    async def scenario(sandbox: Sandbox) -> None:
        await load(sandbox)
        call = asyncio.create_task(score(sandbox, WAITS, seconds=1000.0))
        await until(lambda: running_calls(sandbox) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # The answer must not be that of the cancelled call.
        assert (await sandbox.call(HONEST, [REQUEST], {}))[0].metrics == {"calls": 1.0}

    use(level, scenario)


TRAINER = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from tests.rewards.sandbox.conftest import REQUEST
from tests.rewards.sandbox.test_pool import WAITS, load, running_calls, until

async def main():
    level = Isolation({level!r})
    sandbox = Sandbox(SandboxConfig(require=level, workers=2, wall_seconds=1000.0), strongest=level)
    await sandbox.start()
    await load(sandbox)
    calls = [asyncio.create_task(sandbox.call(WAITS, [REQUEST], {{"seconds": 1000.0}})) for _ in range(2)]
    await until(lambda: running_calls(sandbox) == 2)
    print("running", flush=True)
    await asyncio.gather(*calls)

asyncio.run(main())
"""


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_killed_trainer_leaves_no_process_and_no_file(level: Isolation, tmp_path: Path):
    require(level)
    code = TRAINER.format(root=str(ROOT), level=level.value)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "running\n"
            found = set(descendants(trainer.pid))
        finally:
            trainer.kill()
    assert len(found) >= 6
    deadline = time.monotonic() + 600
    while alive(found) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(found)
    assert list(tmp_path.glob("marin_rl_calls_*")) == []


@pytest.mark.medium
def test_workers_are_shared_between_files():
    async def scenario(sandbox: Sandbox) -> None:
        for _ in range(3):
            await asyncio.gather(score(sandbox), score(sandbox, WAITS, seconds=0.0), sandbox.run_python("print(1)"))
            assert len(sandbox.worker_pids) <= 2

    use(Isolation.NONE, scenario, workers=2)


IMPORT = "from marin_rl.rewards import reward_function\n"


SAY = """
import json, os, threading, time
def say(message):
    text = json.dumps(message).encode()
    os.write(3, len(text).to_bytes(4, "big") + text)
"""


@pytest.mark.medium
@pytest.mark.parametrize("level", CONFINED_LEVELS)
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 +", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "the process that imported it ended"),
        ("import time; time.sleep(1e6)", "took longer than 4 s"),
        ("bytearray(10 * 2**30)", "MemoryError"),
        ("import os, time\nfor _ in range(9): os.fork() or time.sleep(1e6)\ntime.sleep(1e6)", "limit on processes"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.write(3, b'\\x00\\x00\\x00\\x02[]'); os._exit(0)", "invalid message"),
        ("import os\nwhile True: os.write(3, b'\\x7f' * 1000)", "limit on output"),
        (SAY + 'say({"functions": {"forged": {"mode": "pointwise", "required": []}}})\n'
         "while True: pass",
         "invalid message"),
        (SAY + 'say({"forkserver": 1, "functions": {}})\nwhile True: pass', "a forkserver that is not its child"),
        (SAY + "threading.Thread(target=time.sleep, args=(1e6,)).start()\n"
         'say({"forkserver": os.getpid(), "functions": {}})',
         "started threads or processes"),
        (SAY + 'say({"forkserver": os.getpid(), "functions": {"f": {"mode": "pointwise"}}})\ntime.sleep(1e6)',
         r"sent an invalid .*Field required"),
        (SAY + 'threading.stack_size(32768)\n'
         'while True: threading.Thread(target=time.sleep, args=(1e6,)).start()', "limit on threads"),
        ("open('large', 'wb').write(bytes(2**21))", "File too large"),
        ("import tempfile, time\nfiles = [tempfile.TemporaryFile() for _ in range(8)]\n"
         "for file in files: file.write(bytes(2**20))\ntime.sleep(1e6)", "limit on file_size|No space left"),
        (IMPORT + "reward_function('batch')", "is applied to 'batch'"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_loaded(level: Isolation, code: str, message: str, tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text(code)

    async def scenario(sandbox: Sandbox) -> None:
        with pytest.raises(UserFileError, match=message) as raised:
            await sandbox.load(str(file))
        assert str(file) in str(raised.value)
        # The worker that failed to load this file can run other calls.
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"

    use(level, scenario, start_seconds=4.0 if message == "took longer than 4 s" else 600.0, memory_mb=512, file_mb=1)


SCORES = """
@reward_function
def judges(messages, ground_truth, **kwargs): return 1.0
"""
THREAD = """
import gc, os, threading, time
frozen = gc.get_freeze_count()
def attack():
    # The forkserver freezes its objects shortly before the first call. Python 3.12 freezes some when it starts.
    while gc.get_freeze_count() == frozen:
        time.sleep(0.001)
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(1e6)
    while True:
        os.write(3, b"e" * 13)
        time.sleep(0.001)
threading.Thread(target=attack, daemon=True).start()
"""


def state(pid: int) -> str:
    """Return the kernel's state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_threads_of_a_file_end_when_it_is_loaded(level: Isolation, attacks: Attacks, tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text(IMPORT + SCORES + THREAD)
    attack = attacks.at(level, **TIGHT)
    before = attack.sandbox.failures.copy()
    assert set(attack.wait(attack.sandbox.load(str(file)))) == {"judges"}
    for _ in range(5):
        assert attack.call("judges", file=str(file)).score == 1.0
    assert attack.sandbox.failures == before
    [worker] = attack.sandbox.worker_pids
    found = list_descendants(worker)
    # The forkserver, and in namespaces the worker below bubblewrap. No user code runs between calls.
    assert len(found) == (2 if level is Isolation.FULL else 1)
    assert {process.threads for process in found.values()} == {1}
    # Process ids can wrap around, so they do not indicate age.
    [forkserver] = [number for number, process in found.items() if process.parent in found or len(found) == 1]
    assert state(forkserver) == "T"


LEAVES_A_THREAD = """
import os, threading, time
forks = os.fork
def fork():
    child = forks()
    if child and os.path.exists(FLAG):
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
    return child
os.fork = fork
"""


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_forkserver_with_threads_is_replaced(
    level: Isolation, attacks: Attacks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "rewards.py"
    flag = tmp_path / "flag"
    file.write_text(IMPORT + SCORES + LEAVES_A_THREAD.replace("FLAG", repr(str(flag))))
    attack = attacks.at(level, **TIGHT)
    attack.wait(attack.sandbox.load(str(file)))
    assert attack.call("judges", file=str(file)).score == 1.0
    caplog.clear()
    workers = attack.sandbox.worker_pids
    flag.touch()
    assert attack.call("judges", file=str(file)).score == 1.0
    flag.unlink()
    [record] = caplog.records
    assert f"the forkserver of {file} had threads" in record.message
    assert attack.call("judges", file=str(file)).score == 1.0
    assert attack.sandbox.worker_pids == workers
    assert {process.threads for process in list_descendants(workers[0]).values()} == {1}


DESCRIBED = '{"f": {"mode": "pointwise", "required": [], "stateless": False, "problem": None}}'


@pytest.mark.medium
@pytest.mark.parametrize("level", CONFINED_LEVELS)
def test_a_forged_forkserver_fails_its_own_calls(level: Isolation, tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text(SAY + f'say({{"forkserver": os.getpid(), "functions": {DESCRIBED}}})\ntime.sleep(1e6)')

    async def scenario(sandbox: Sandbox) -> None:
        assert set(await sandbox.load(str(file))) == {"f"}
        with pytest.raises(RewardCallError) as raised:
            await score(sandbox, UserFunction(str(file), "f"))
        assert raised.value.cause is RewardFailure.TIMEOUT
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"

    use(level, scenario, wall_seconds=5.0, start_seconds=600.0)


def test_invalid_exit_status_is_a_worker_failure(attacks: Attacks, tmp_path: Path):
    file = tmp_path / "rewards.py"
    # User code replaces a function in the forkserver, which then returns the status of a stopped process.
    forges = "import struct\npack = struct.pack\nstruct.pack = lambda kind, *values: pack(kind, 0x137f, 0.0)\n"
    file.write_text(IMPORT + SCORES + forges)
    attack = attacks.at(Isolation.NONE, **TIGHT)
    with pytest.raises(RewardCallError, match="the forkserver of the loaded file died") as raised:
        attack.call("judges", file=str(file))
    assert raised.value.cause is RewardFailure.WORKER
    attack.is_well()


@pytest.mark.parametrize("change", ["rewritten", "removed"])
def test_a_run_uses_one_version_of_a_file(change: str, tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text(IMPORT + SCORES)
    judges = UserFunction(str(file), "judges")

    async def scenario(sandbox: Sandbox) -> None:
        assert await score(sandbox, judges) == 1.0
        file.write_text(IMPORT + SCORES.replace("1.0", "2.0"))
        if change == "removed":
            file.unlink()
        # The only worker loads another file, so that the first one is loaded again later.
        await score(sandbox)
        assert await score(sandbox, judges) == 1.0

    use(Isolation.NONE, scenario)


def test_missing_function(attacks: Attacks):
    attack = attacks.at(Isolation.NONE, **TIGHT)
    with pytest.raises(RewardCallError, match=r"'missing' of .* is not a reward function of the loaded file"):
        attack.call("missing", file=SLOW)


@pytest.mark.parametrize("level", CONFINED_LEVELS)
def test_imports_from_own_folder_and_read_paths(level: Isolation, tmp_path: Path):
    ours, shared = tmp_path / "ours", tmp_path / "shared"
    for folder in (ours, shared):
        folder.mkdir()
    (shared / "shared_scores.py").write_text("SCORE = 3.0")
    (ours / "own_scores.py").write_text("SCORE = 4.0")
    (ours / "random.py").write_text("raise RuntimeError('hides the standard library')")
    file = ours / "rewards.py"
    file.write_text(
        IMPORT + "import random\nfrom own_scores import SCORE as own\nfrom shared_scores import SCORE as shared\n"
        "@reward_function\ndef f(messages, ground_truth, **kwargs): return own + shared"
    )

    async def scenario(sandbox: Sandbox) -> None:
        assert await score(sandbox, UserFunction(str(file), "f")) == 7.0

    use(level, scenario, read_paths=(str(shared),))


def test_less_isolation_than_required_is_an_error(monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        sandbox = Sandbox(SandboxConfig(require=Isolation.FULL), strongest=Isolation.PARTIAL)
        with pytest.raises(IsolationError, match=r"sandbox.require is full, but this machine offers (partial|none)"):
            await sandbox.start()
        assert sandbox.worker_pids == []
        monkeypatch.setattr("shutil.which", lambda name: None)
        bare = Sandbox(SandboxConfig(require=Isolation.FULL))
        with pytest.raises(IsolationError, match="bubblewrap \\(bwrap\\) is not installed"):
            await bare.start()

    asyncio.run(run())


def test_broken_bubblewrap_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(broken))

    async def run() -> None:
        async with Sandbox(SandboxConfig(require=Isolation.NONE, wall_seconds=600.0)) as sandbox:
            assert sandbox.isolation is not Isolation.FULL
            assert "No permissions to create a new namespace" in sandbox.describe()

    asyncio.run(run())


def test_bubblewrap_without_isolation_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pretending = tmp_path / "bwrap"
    pretending.write_text('#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"\n')
    pretending.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(pretending))
    for module in ("config", "worker_process"):
        monkeypatch.setattr(f"marin_rl.rewards.sandbox.{module}.SCRATCH", str(tmp_path))
    # The call's own Landlock rules would hide that nothing else is in force.
    monkeypatch.setattr("marin_rl.rewards.sandbox.pool.landlock_version", lambda: 0)

    async def run() -> None:
        async with Sandbox(SandboxConfig(require=Isolation.NONE, wall_seconds=600.0)) as sandbox:
            assert sandbox.isolation is Isolation.NONE
            assert "reads a file outside" in sandbox.describe()

    asyncio.run(run())


def test_unknown_machine_has_no_isolation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marin_rl.rewards.sandbox.pool.seccomp_is_supported", lambda: False)
    with pytest.raises(IsolationError, match=r"machine offers none\. full isolation: seccomp is not supported for "):
        asyncio.run(Sandbox(SandboxConfig()).start())


def test_full_isolation_does_not_need_landlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marin_rl.rewards.sandbox.pool.landlock_version", lambda: 0)
    (tmp_path / "secret").write_text("the secret")

    async def scenario(sandbox: Sandbox) -> None:
        assert "Landlock" not in sandbox.describe()
        read = (str(tmp_path / "secret"), "/etc/passwd", str(Path.home() / ".profile"))
        written = ("/dev/shm/new", "/dev/new", "/new", "/usr/new", HOSTILE, str(tmp_path / "new"))
        for name, path in (*(("reads", path) for path in read), *(("overwrites", path) for path in written)):
            with pytest.raises(RewardCallError) as raised:
                await score(sandbox, UserFunction(HOSTILE, "attack"), name=name, options={"path": path})
            assert raised.value.cause is RewardFailure.RAISED, path

    use(Isolation.FULL, scenario)


def test_sandbox_must_be_started():
    with pytest.raises(IsolationError, match="await its start"):
        asyncio.run(score(Sandbox(SandboxConfig())))


@pytest.mark.parametrize("level", LEVELS)
def test_describe(level: Isolation, caplog: pytest.LogCaptureFixture):
    require(level)

    async def run() -> None:
        async with Sandbox(SandboxConfig(require=level), strongest=level):
            pass

    with caplog.at_level("INFO", logger="marin_rl.rewards.sandbox.pool"):
        asyncio.run(run())
    [record] = [record for record in caplog.records if record.name == "marin_rl.rewards.sandbox.pool"]
    assert f"isolation {level.value}" in record.message
    assert record.levelname == ("WARNING" if level is Isolation.NONE else "INFO")


PROGRAMS = {
    "input and output": ("import sys\nprint(input()[::-1])\nprint(len(sys.stdin.read()))", "cba\n5\n", "", None),
    "output at exit": (
        "import atexit, io, sys\nprint('first')\nsys.stdout = io.StringIO()\nprint('last')\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nsys.exit(3)",
        "first\nlast\n",
        "",
        "status 3",
    ),
    "it is the main module": (
        "import sys, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int'\nassert __name__ == '__main__'\n"
        "assert sys.modules['__main__'].A is A and sys.argv == ['main.py']\nprint(A(1))",
        "A(x=1)\n",
        "",
        None,
    ),
    "its status": ("import sys; sys.exit(3)", "", "", "status 3"),
    "a message": ("exit('bad')", "", "bad", "status 1"),
    "an error": ("1/0", "", "ZeroDivisionError: division by zero", "status 1"),
    "no Python": ("1 +", "", "SyntaxError", "status 1"),
    "no answer pipe": ("import os; os.write(3, b'{}')", "", "Bad file descriptor", "status 1"),
    "constant input": ("import os; os.write(0, b'x')", "", "OSError", "status 1"),
    "no package": (
        f"import sys; print({PACKAGE_ROOT!r} in sys.path, any(name.startswith('marin_rl') for name in sys.modules))",
        f"{PACKAGE_ROOT.endswith('site-packages')} False\n",
        "",
        None,
    ),
    "leaves state": ("import json, builtins; builtins.left = json.left = 1; open('left', 'w').close()", "", "", None),
    "finds no state": (
        "import json, builtins, os; print(hasattr(builtins, 'left'), hasattr(json, 'left'), os.listdir())",
        "False False []\n",
        "",
        None,
    ),
}


@pytest.mark.parametrize("level", LEVELS)
def test_programs(attacks: Attacks, level: Isolation):
    attack = attacks.at(level, **TIGHT)
    for name, (code, stdout, stderr, status) in PROGRAMS.items():
        result = attack.wait(attack.sandbox.run_python(code, "abc\nmöre\n"))
        assert result.stdout == stdout, name
        assert stderr in result.stderr, name
        assert bool(stderr) is bool(result.stderr), name
        if status is None:
            assert result.failure is None, name
        else:
            assert result.failure.cause is RewardFailure.EXITED, name
            assert status in result.failure.detail, name


@pytest.mark.parametrize("level", LEVELS)
def test_own_time_limit_of_a_program(attacks: Attacks, level: Isolation):
    attack = attacks.at(level, wall_seconds=600.0, cpu_seconds=600.0)
    result = attack.wait(attack.sandbox.run_python("while True: pass", seconds=0.1))
    assert result.failure.cause is RewardFailure.TIMEOUT
    assert "no answer within 0.1 s" in result.failure.detail


def test_programs_that_cannot_be_started():
    async def scenario(sandbox: Sandbox) -> None:
        with pytest.raises(RewardCallError, match="programs cannot be started: its import took longer") as raised:
            await sandbox.run_python("print(1)")
        assert raised.value.cause is RewardFailure.WORKER
        assert sandbox.failures == {RewardFailure.WORKER: 1}
        with pytest.raises(RewardConfigError, match="the sandbox cannot run programs: worker: programs cannot be"):
            await CodeRewardConfig().build(sandbox).check()

    use(Isolation.NONE, scenario, start_seconds=1e-9)
