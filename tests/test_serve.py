# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import importlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import httpx
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.sampling.sampler import SampleRequest
from marin_rl.serve import main
from marin_rl.sessions.served_policy import load_served_policy
from marin_rl.utils.errors import UserError
from marin_rl.utils.user_code import PACKAGES
from tests.fork_server import first_line, popen
from tests.tiny_run import TinyRun

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either run"),
        (["--run", "a", "--model", "b"], "give either run"),
        (["--model", "b", "--step", "3"], "only a run has steps"),
        (["--run", "a", "--port", "70000"], "port is 70000; it must be from 0 to 65535"),
        (["--run", "a", "--top_p", "1"], "unknown key top_p"),
        (["--model", "gs://b/r"], "gs://b/r"),
        (["--model", "missing", "--port", "0"], "--model is 'missing', which is not a folder"),
        (["--run", "missing", "--port", "0"], "'missing' is not a run directory"),
        (["--run", "a", "--host", "0.0.0.0"], "but MARIN_RL_API_KEY is not set; set it to a secret key"),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MARIN_RL_API_KEY", raising=False)
    assert main(argv) == 1
    error = capfd.readouterr().err.removeprefix("loading the weights of missing\n")
    assert error.startswith("error: ")
    assert message in error


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with an export, and what else a user may have, in the working directory."""
    for folder in ("run/checkpoints/step-00000002", "run/hf", "run/rollouts", "model", "adapter", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("run/config.yaml", "run/metrics.jsonl", "run/hf/config.json", "model/config.json", "file"):
        (tmp_path / name).touch()
    (tmp_path / "adapter/adapter_config.json").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("run", "give it as --run"),
        ("run/checkpoints/step-00000002", "give --run 'run' --step 2"),
        ("run/checkpoints", "give --run 'run'"),
        ("run/rollouts", "give --run 'run'"),
        ("run/config.yaml", "give --run 'run'"),
        ("adapter", "an adapter"),
        ("empty", "has no config.json"),
        ("file", "is not a folder"),
        ("Qwen/Qwen3-0.6B", "is not a folder"),
        ("dangling", "'nowhere', which does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "tinker", "chat"])
@pytest.mark.usefixtures("paths")
def test_what_is_no_model_is_named_with_the_option_that_takes_it(
    command: str, given: str, message: str, capfd: Capture
):
    port = [] if command == "chat" else ["--port", "0"]
    assert importlib.import_module(f"marin_rl.{command}").main(["--model", given, *port]) == 1
    error = capfd.readouterr().err
    assert error.startswith(f"error: --model is {given!r}, ")
    assert message in error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model", "give it as --model"),
        ("link", "give it as --model"),
        ("run/hf", "give --run 'run'"),
        ("run/checkpoints/step-00000002", "give --run 'run' --step 2"),
        ("run/config.yaml", "give --run 'run'"),
        ("adapter", "an adapter"),
        ("empty", "it has no config.yaml"),
        ("file", "it has no config.yaml"),
        ("Qwen/Qwen3-0.6B", "it does not exist"),
        ("dangling", "'nowhere', which does not exist"),
    ],
)
@pytest.mark.parametrize(
    ("command", "first", "last"),
    [
        ("serve", ["--run"], ["--port", "0"]),
        ("tinker", ["--run"], ["--port", "0"]),
        ("chat", ["--run"], []),
        ("evaluate", ["--run"], []),
        ("export", ["--run"], ["--output", "new"]),
        ("replay", ["--run"], ["--step", "1"]),
        ("view", [], []),
    ],
)
@pytest.mark.usefixtures("paths")
def test_what_is_no_run_is_named_with_the_option_that_takes_it(
    command: str, first: list[str], last: list[str], given: str, message: str, capfd: Capture
):
    assert importlib.import_module(f"marin_rl.{command}").main([*first, given, *last]) == 1
    error = capfd.readouterr().err.removeprefix(f"loading the weights of {given}\n")
    if command == "view" and Path(given).is_file():
        # It also takes a file of rollouts.
        message = "neither a run directory nor a file of rollouts"
    assert error.startswith(f"error: {given!r} is ")
    assert message in error
    assert not Path("new").exists()


def test_an_address_in_use_is_named(capfd: Capture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--run", "missing", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err


def test_a_missing_extra_is_named(capfd: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PACKAGES, "serve", ("starlette", "no_such_package"))
    assert main(["--run", "a"]) == 1
    message = capfd.readouterr().err
    assert "marin_rl.serve needs packages that are not installed (no_such_package);" in message
    assert "pip install -e '.[serve]'" in message


@pytest.mark.medium
def test_a_run_and_its_export_are_the_same_policy(finished_run: TinyRun):
    run = load_served_policy(run=str(finished_run.path))
    folder = load_served_policy(folder=str(finished_run.path / "hf"), max_context=12, max_new_tokens=3)
    assert (run.max_context, run.sampling.max_new_tokens, run.sampling.max_seqs) == (12, 3, 16)
    assert folder.max_context == 12
    assert folder.tokenizer.stop_token_ids == run.tokenizer.stop_token_ids
    request = SampleRequest((50, 120, 51), 7, 3)
    [first], [second] = run.sampler.sample([request]), folder.sampler.sample([request])
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)
    assert run.score is None
    scored = load_served_policy(folder=str(finished_run.path / "hf"), max_context=12, score_prompts=True).score
    assert scored is not None
    # Prompt and reply: the last log-probs are those of the sampled tokens.
    [logprobs] = scored([request.prompt_tokens + first.token_ids])
    assert logprobs[2:] == pytest.approx(list(first.logprobs), abs=1e-5)
    assert (first.first_version, run.sampler.version) == (6, 6)


@pytest.mark.medium
def test_a_folder_is_served_with_its_stop_texts(finished_run: TinyRun, tmp_path: Path):
    folder = shutil.copytree(finished_run.path / "hf", tmp_path / "hf")
    request = SampleRequest((50, 120, 51), 7, 3)
    [free] = load_served_policy(folder=str(folder)).sampler.sample([request])
    file = folder / "generation_config.json"
    settings = json.loads(file.read_bytes())
    file.write_text(json.dumps({**settings, "stop_strings": [chr(free.token_ids[0])]}))
    policy = load_served_policy(folder=str(folder))
    [stopped] = policy.sampler.sample([request])
    assert (stopped.token_ids, stopped.logprobs) == (free.token_ids[:1], free.logprobs[:1])
    assert policy.sampling.stop == (chr(free.token_ids[0]),)
    file.write_text(json.dumps({**settings, "stop_strings": [""]}))
    with pytest.raises(UserError, match=r"stop_strings in .*generation_config\.json is \[''\]"):
        load_served_policy(folder=str(folder))
    file.write_text(json.dumps({**settings, "stop_strings": [3]}))
    with pytest.raises(UserError, match=r"stop_strings in .* is \[3\]; it must be a list of texts"):
        load_served_policy(folder=str(folder))


@pytest.mark.medium
def test_the_context_is_limited_by_the_model_only(finished_run: TinyRun):
    """Limits of training, such as rollouts.max_prompt_length, do not restrict the server's context."""
    for length in (3, 9, 16):
        policy = load_served_policy(run=str(finished_run.path), max_context=length)
        assert policy.max_context == length
        [generation] = policy.sampler.sample([SampleRequest((50,) * (length - 1), 7, 1)])
        assert len(generation.token_ids) == 1
    for source in ({"run": str(finished_run.path)}, {"folder": str(finished_run.path / "hf")}):
        with pytest.raises(UserError, match="max_context is 17, but the model has 16 positions"):
            load_served_policy(**source, max_context=17)


@pytest.mark.slow
def test_the_command_serves_until_sigterm(finished_run: TinyRun):
    command = [sys.executable, "-m", "marin_rl.serve", "--run", str(finished_run.path), "--port", "0"]
    command += ["--score_prompts", "true"]
    environment = {**os.environ, "MARIN_RL_API_KEY": "k"}
    with (
        tempfile.NamedTemporaryFile("r") as output,
        tempfile.NamedTemporaryFile("r") as errors,
        contextlib.ExitStack() as stack,
    ):
        process = popen(command, stdout=output, stderr=errors, env=environment)
        stack.callback(process.kill)
        line = first_line(process, output)
        match = re.fullmatch(
            r"serving run at (http://127\.0\.0\.1:\d+/v1) \(12 tokens of context, 16 sequences together, "
            r"with API key\)\n",
            line,
        )
        assert match is not None, line
        body = {"model": "run", "prompt": "2x3", "max_tokens": 2}
        response = httpx.post(f"{match[1]}/completions", json=body, headers={"Authorization": "Bearer k"})
        assert response.json()["usage"]["prompt_tokens"] == 3
        echo = {**body, "max_tokens": 0, "echo": True, "logprobs": 0}
        response = httpx.post(f"{match[1]}/completions", json=echo, headers={"Authorization": "Bearer k"})
        [choice] = response.json()["choices"]
        first, *rest = choice["logprobs"]["token_logprobs"]
        assert (first, len(rest), choice["text"]) == (None, 2, "2x3")
        assert max(rest) < 0
        process.terminate()
        progress = f"loading the weights of {finished_run.path}\ncompiling the programs\n"
        assert (process.wait(timeout=600), output.read(), errors.read()) == (0, "", progress)
