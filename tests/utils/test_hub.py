# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import http.server
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import transformers.utils.hub

from marin_rl.tokenization.load import TokenizerConfig, byte_tokenizer
from marin_rl.utils import hub
from marin_rl.utils.hub import DATASET, HubError, check_source
from marin_rl.utils.levanter_line import reset_hub_sessions
from tests.free_port import free_port


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries are online, with an empty cache; their settings are restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    # Copies of the settings, which only transformers 4 has.
    monkeypatch.setattr(transformers.utils.hub, "_is_offline_mode", False, raising=False)
    monkeypatch.setattr(transformers.utils.hub, "TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr(hub, "_reason", hub._reason)
    set_endpoint(monkeypatch, f"http://127.0.0.1:{free_port()}")
    yield
    monkeypatch.undo()
    hub._problem.cache_clear()
    reset_hub_sessions()


def set_endpoint(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    hub._problem.cache_clear()
    reset_hub_sessions()


@contextlib.contextmanager
def answering(status: int, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A hub on this machine that answers every request alike; yields its address and the requested paths."""
    paths: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()
            thread.join()


def cache_tokenizer(tmp_path: Path) -> None:
    """Put the tokenizer `org/cached` into the cache."""
    folder = tmp_path / "cache" / "models--org--cached"
    byte_tokenizer().save_pretrained(folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, rf"x is '{text}', but there is no such folder")
            for text in ("a/b/c", "../foo", "org/a b", "/foo/bar")
        ),
        *((text, r"no such folder \(resolved to /.*foo\); correct the path, or name") for text in ("./a/foo", "~/foo")),
        ("file.txt", r"x is 'file.txt', which is a file; name the folder that contains it: '\.'"),
        ("", "x is empty; set it to a path"),
    ],
)
def test_a_path_is_not_a_hub_name(
    tmp_path: Path, asked: None, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "file.txt").touch()
    monkeypatch.setattr(hub, "_problem", lambda name, kind: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=message):
        check_source(text, "x")


def test_an_unreachable_hub_is_one_sentence_and_is_asked_once(asked: None, caplog: pytest.LogCaptureFixture) -> None:
    unreachable = (
        r"\(http://127.0.0.1:\d+ cannot be reached: \[Errno 111\] Connection refused\); check the name and the n"
    )
    with pytest.raises(HubError, match=rf"^x is 'foo/bar': .* is in the cache of the hub {unreachable}"):
        check_source("foo/bar", "x")
    with pytest.raises(HubError, match=r"y is 'gpt2': there is no such folder.*cannot be reached"):
        check_source("gpt2", "y")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_copies_in_the_cache_are_used_if_the_hub_cannot_be_reached(
    asked: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    cache_tokenizer(tmp_path)
    assert TokenizerConfig("org/cached").build().vocab_size == 264
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "files in the cache of the hub are used instead" in warnings[0]
    assert "Retrying" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (404, {"X_Error_Code": "RepoNotFound"}, "has no repository of that name, or it is private; correct the name"),
        (401, {}, "has no repository of that name, or it is private; correct the name, set HF_TOKEN"),
        (
            403,
            {"X_Error_Code": "GatedRepo"},
            r"access to the repository is restricted; ask for it at http://\S+/org/a,",
        ),
        (503, {}, r"no repository of that name is in the cache of the hub \(http://127.0.0.1:\d+ answers 503\)"),
        (404, {"X_Error_Code": "EntryNotFound"}, None),
        (200, {}, None),
    ],
)
def test_answers_of_the_hub(
    asked: None, monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], message: str | None
) -> None:
    with answering(status, **headers) as (address, paths):
        set_endpoint(monkeypatch, address)
        for _ in range(2):
            if message is None:
                assert check_source("org/a", "tokenizer.path") is None
            else:
                with pytest.raises(HubError, match=message):
                    check_source("org/a", "tokenizer.path")
        assert paths == ["/org/a/resolve/main/config.json"]


def test_a_hub_that_does_not_answer_is_given_up(asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.1)
    # It accepts connections, and no more.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        set_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(HubError, match=r"cannot be reached: .*timed out"):
            check_source("foo/bar", "x")


def test_datasets_are_other_repositories_and_a_renamed_one_is_accepted(
    asked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(200) as (address, paths), answering(307, Location=f"{address}/new/name") as (older, asked_first):
        set_endpoint(monkeypatch, older)
        assert check_source("org/old", "environment.path", DATASET) is None
        assert asked_first == ["/datasets/org/old/resolve/main/config.json"]
        assert set(paths) <= {"/new/name"}


def test_offline_mode_is_named(asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"in the cache of the hub \(HF_HUB_OFFLINE is set\)"):
        check_source("foo/bar", "x")
