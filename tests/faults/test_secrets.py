# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Keys and passwords are in no file of a run, no output, and no process that a run starts."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from marin_rl.utils.settings.fields import check_address, local_path
from marin_rl.utils.storage import refuse_credentials, storage_path
from tests.tiny_run import TinyRun, contents

VARIABLES = (
    *("JUDGE_KEY", "ENGINE_KEY", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MARIN_RL_API_KEY", "RAY_AUTH_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "GITHUB_TOKEN", "PGPASSWORD"),
)
MARK = "hush-hush"

REWARDS = """
import json, os
from marin_rl.rewards.sandbox.functions import reward_function

@reward_function
def looks(messages, ground_truth, **kwargs):
    found = [json.dumps(dict(os.environ))]
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        for name in ("environ", "cmdline"):
            try:
                found.append(open(f"/proc/{pid}/{name}", errors="replace").read())
            except OSError:
                pass
    print(*found)
    raise ValueError("".join(found)) if len(messages[-1]["content"]) % 2 else SystemExit("".join(found))
"""


class EchoingJudge(BaseHTTPRequestHandler):
    """Answers every request with an error that repeats the key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Authorization"]
        body = json.dumps({"error": f"{'x' * 150}invalid key: {key}"}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def judge() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), EchoingJudge) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def watched_children() -> Iterator[dict[int, str]]:
    """Yield command line and environment of every descendant that is seen during the block, by process id."""
    seen: dict[int, str] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            parents: dict[int, int] = {}
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError, IndexError):
                    parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            below = {os.getpid()}
            while more := {pid for pid, parent in parents.items() if parent in below} - below:
                below |= more
            for pid in below - {os.getpid()}:
                for name in ("environ", "cmdline"):
                    with contextlib.suppress(OSError):
                        text = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
                        # A process has its parent's command line until it executes its program.
                        seen[pid] = seen.get(pid, "") + text

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@pytest.mark.medium
def test_secrets_are_in_no_file_output_or_process(
    new_run: Callable[..., TinyRun],
    judge: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, f"{MARK}-{name}")
    (tmp_path / "rewards.py").write_text(REWARDS)
    rewards = [
        {"type": "function", "path": str(tmp_path / "rewards.py"), "function": "looks"},
        {"type": "llm_judge", "base_url": judge, "model": "m", "prompt": "{conversation}", "api_key_env": "JUDGE_KEY"},
    ]
    run = new_run(
        environment__rewards=rewards,
        log_level="debug",
        num_steps=1,
        warm_start__max_steps=0,
        evaluation={"tasks": 2, "greedy": False},
    )
    with watched_children() as children:
        # Every rollout fails.
        assert run.train() == 1
    printed = "".join(capfd.readouterr())
    assert "rollouts failed" in printed
    assert "status 401" in printed + (run.path / "log.txt").read_text()
    written = contents(run.path)
    assert {"config.yaml", "log.txt"} <= written.keys()
    assert MARK not in printed
    assert [name for name, data in written.items() if MARK.encode() in data] == []
    assert len(children) > 0
    assert [text for text in children.values() if MARK in text] == []


ADDRESSES = [
    *(f"s3://key:{MARK}@bucket/run", f"s3://key:a/{MARK}@bucket/run", f"gs://u:{MARK}@b", f"xx://u:{MARK}@b"),
    *(f"https://b/run?X-Amz-Signature={MARK}", f"az://b/run?a=1&sig={MARK}", f"s3://b?secret_key={MARK}"),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_a_password_is_refused_without_it(address: str) -> None:
    for check in (storage_path, local_path):
        with pytest.raises(ValueError, match="run_dir holds a password or a key") as raised:
            check(address, "run_dir")
        assert MARK not in str(raised.value)


SERVERS = [
    f"http://u:{MARK}@h/v1",
    f"ftp://u:{MARK}@h",
    f"http://u:{MARK}@h:99999/",
    f"u:{MARK}@h",
    f"http://h?key={MARK}",
]


@pytest.mark.parametrize("address", SERVERS)
def test_an_address_of_a_server_with_a_password_is_refused_without_it(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape("rewards holds a user, a password")) as raised:
        check_address("rewards", address, "api_key_env")
    assert MARK not in str(raised.value)


@pytest.mark.parametrize("address", ["abfs://container@account.dfs.core.windows.net/run", "s3://b/a:b@c", "s3://b/a?b"])
def test_addresses_without_a_password_are_accepted(address: str) -> None:
    refuse_credentials(address, "run_dir")
